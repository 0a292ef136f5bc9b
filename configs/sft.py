"""Supervised fine-tuning: the policy learns from completions in the data. docs/imitation.md has the details."""

from configs.debug import debug
from configs.qwen3 import qwen3
from torchtitan_rl.core.algorithm import Algorithm
from torchtitan_rl.library.demonstrations import Nll
from torchtitan_rl.library.tasks import Rows
from torchtitan_rl.setup.run_config import RunConfig


def _from_demonstrations(config: RunConfig) -> RunConfig:
    config.algorithm = Algorithm.Config(loss=Nll.Config())
    config.sampling.n = 1
    return config


def sft() -> RunConfig:
    """Any folder on your own rows with completions: --hf-assets-path FOLDER --task.path data.jsonl. No engine is started.

    Rows have a prompt and a completion, or messages, of which the last assistant turn is learned. No GPU has run this config.
    """
    config = _from_demonstrations(qwen3())
    config.task = Rows.Config(demonstrations="last")
    config.prompts.max_prompt_tokens = 1024
    config.sampling.max_tokens = 1024
    config.generator.max_model_len = 2048
    config.trainer.optimizer.lr = 1e-5
    config.evaluation.sampling.n = 0  # only the held-out loss; 1 samples, too
    config.evaluation.sampling.max_tokens = config.evaluation.sampled.max_tokens = 1024
    return config


def debug_sft() -> RunConfig:
    """Learns two-digit sums from right answers, on one CPU process: debug's start, task and evaluation, with Nll for the loss.

    The held-out prompts are sampled as in debug; --evaluation.sampling.n 0 leaves only their loss, and starts no engine.
    """
    config = _from_demonstrations(debug())
    config.prompts.demonstrate = "torchtitan_rl.library.starts.answer_recipes:right_sum"
    config.num_prompts_per_step = 64
    return config
