"""A config for the integration tests: the rows of a file and debug's sums in one run."""

import json
import tempfile
from pathlib import Path

from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.debug import debug
from torchtitan_rl.data.tasks import Rows
from torchtitan_rl.data.tasks.mixture import Mixture, Share
from torchtitan_rl.sampling import SamplingConfig


def two_tasks() -> RunConfig:
    """Sums of two integers from a file, sampled 4 times, and made without end, sampled 8 times."""
    rows = [{"prompt": f"What is {a} + {b}?\n", "answer": a + b} for a in range(10, 20) for b in range(20, 30)]
    path = Path(tempfile.gettempdir()) / "torchtitan_rl_mixture.jsonl"
    if not path.exists():  # every rank of every run of the test is here
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = debug()
    shares = {
        "sums": Share(task=config.task),
        "rows": Share(task=Rows.Config(path=str(path)), sampling=SamplingConfig(n=4, max_tokens=24)),
    }
    config.task = Mixture.Config(tasks=shares)
    return config
