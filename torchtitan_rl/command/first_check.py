"""Checks a config before any rank is started or anything heavy is imported."""

import copy
import io
import os
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from torchtitan_rl.fields.references import load_reward
from torchtitan_rl.observe.sinks import chosen_sinks
from torchtitan_rl.run.auto_dtype import set_dtypes
from torchtitan_rl.run.start_checkpoint import check_start
from torchtitan_rl.validation import validate

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig


def check_at_once(config: "RunConfig") -> None:
    """Check fields and their combinations, the start's folder, sinks, reward functions, and small files of rows.

    Raises UserError, naming the field, the value, what was expected and the remedy.
    """
    config = copy.deepcopy(config)
    set_dtypes(config)
    validate(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    check_start(config)
    if os.environ.get("NODE_RANK", "0") in ("", "0"):  # its rank 0 has the sinks
        for sink in chosen_sinks(config.metrics.sinks).values():
            sink.check()
    for reference in config.grader.rewards:
        load_reward(reference)
    with redirect_stdout(io.StringIO()):  # it is said again when the rows are read
        config.task.check_files()
