"""Qwen3 on well-known tasks, up to 1.7B on one 80 GB GPU, or 8B on eight (docs/recipes.md). None of these has been run on a GPU yet.

The data comes from the Hugging Face hub, or from a local copy: --task.path FOLDER, with files such as train.jsonl and
test.jsonl. --hf-assets-path names the model.
"""

from configs.qwen3 import qwen3
from torchtitan_rl.library.tasks import Rows, Task
from torchtitan_rl.library.tasks.countdown import Countdown
from torchtitan_rl.library.tasks.gsm8k import Gsm8k
from torchtitan_rl.library.tasks.math_problems import Math
from torchtitan_rl.library.tasks.reasoning_gym import ReasoningGym
from torchtitan_rl.setup.run_config import RunConfig


def _on(task: Task.Config, *, max_tokens: int) -> RunConfig:
    config = qwen3()
    config.task = task
    config.prompts.max_prompt_tokens = 512
    for sampling in (config.sampling, config.evaluation.sampling, config.evaluation.sampled):
        sampling.max_tokens = max_tokens
    config.generator.max_model_len = 512 + max_tokens
    return config


def qwen3_rows() -> RunConfig:
    """A Qwen3 of up to 1.7B on your own rows, on one 80 GB GPU. --task.path data.jsonl; see docs/data.md."""
    return _on(Rows.Config(answer_kind="tag"), max_tokens=1024)


def qwen3_gsm8k() -> RunConfig:
    """A Qwen3 of up to 1.7B on gsm8k, on one 80 GB GPU."""
    return _on(Gsm8k.Config(), max_tokens=1024)


def qwen3_math() -> RunConfig:
    """A Qwen3 of up to 1.7B on competition mathematics, judged by math-verify, on one 80 GB GPU."""
    return _on(Math.Config(), max_tokens=2048)


def qwen3_countdown() -> RunConfig:
    """A Qwen3 of up to 1.7B on countdown: reach a number with the four operations; on one 80 GB GPU."""
    return _on(Countdown.Config(), max_tokens=1024)


def qwen3_reasoning_gym() -> RunConfig:
    """A Qwen3 of up to 1.7B on five reasoning_gym tasks (--task.tasks NAME WEIGHT ...), on one 80 GB GPU."""
    names = ("chain_sum", "spell_backward", "number_sorting", "knights_knaves", "mini_sudoku")
    return _on(ReasoningGym.Config(tasks=[(name, 1.0) for name in names]), max_tokens=1024)
