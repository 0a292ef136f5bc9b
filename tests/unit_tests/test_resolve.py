"""What a config leaves open is decided in a copy."""

from copy import deepcopy
from datetime import datetime

from tests.parts.mixture import two_tasks
from tests.parts.tiny import save_tiny_start
from torchtitan_rl.build import resolve
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.run.identity import described
from torchtitan_rl.run.resume import config_fields


def test_a_resolved_config_leaves_nothing_open_and_the_given_one_stays(tmp_path):
    config = load_config("debug")
    save_tiny_start(tmp_path)
    config.hf_assets_path = str(tmp_path)
    config.generator.dtype = config.trainer.mixed_precision_param = "auto"
    before = described(deepcopy(config))
    resolved = resolve(config, world_size=1)
    assert described(config) == before
    assert config.model_spec is None
    assert resolved.config.model_spec.model.vocab_size == 128
    assert resolved.config.generator.max_model_len == 64
    assert resolved.config.evaluation.sampling.max_tokens == config.sampling.max_tokens
    assert resolved.config.generator.dtype in ("bfloat16", "float32")
    assert resolved.config.prompts.date == str(datetime.now().date())
    assert resolved.dtype_choice.startswith(f"dtype auto: {resolved.config.generator.dtype}")


def test_the_answer_kind_that_rows_show_is_in_the_config_that_a_resume_compares(tmp_path):
    config = two_tasks()
    save_tiny_start(tmp_path)
    config.hf_assets_path = str(tmp_path)
    resolved = resolve(config, world_size=1)
    assert config.task.tasks["rows"].task.answer_kind == "auto"
    assert config_fields(resolved.config, resolved.algorithm)["task.tasks.rows.task.answer_kind"] == "number"
