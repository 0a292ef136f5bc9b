"""Other tasks, a file of rows, demonstrations and a teacher, for any machine.

Each trains a small starting policy with a habit to unlearn.
"""

from torchtitan_rl.algorithm import Algorithm, TokenTruncate
from torchtitan_rl.algorithm.losses.distillation import ExactDistill
from torchtitan_rl.algorithm.losses.sft import Nll
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.debug import debug
from torchtitan_rl.configs.toys.counting import Counting
from torchtitan_rl.data.tasks import Rows, Task


def _debug_on(task: Task.Config, *, max_prompt_tokens: int, max_tokens: int) -> RunConfig:
    config = debug()
    config.task = task
    config.prompts.max_prompt_tokens = max_prompt_tokens
    config.sampling.max_tokens = max_tokens
    return config


def debug_in_flight() -> RunConfig:
    """Counting, with groups whose sampling goes on over an update.

    Half as many prompts again are in flight, as a few answers are long. The starting policy often answers with the last number instead of the next one. docs/performance.md has the details.
    """
    task = Counting.Config(warm_start="torchtitan_rl.configs.toys.answer_recipes:counting")
    config = _debug_on(task, max_prompt_tokens=32, max_tokens=160)
    config.algorithm.mismatch = TokenTruncate.Config()
    config.in_flight.prompts = config.num_prompts_per_step * 3 // 2
    return config


def debug_rows() -> RunConfig:
    """Times of day, from a file of scripts/make_arrivals.py.

    The starting policy does not carry a full hour. This is the smallest example of a run on your own file.
    """
    return _debug_on(
        Rows.Config(
            path="outputs/data/arrivals.jsonl",
            answer_kind="tag",
            warm_start="torchtitan_rl.configs.toys.answer_recipes:arrivals",
        ),
        max_prompt_tokens=96,
        max_tokens=48,
    )


def debug_sft() -> RunConfig:
    """debug without rewards: it learns from right answers (SFT).

    debug's start, task and evaluation, with Nll for the loss. The held-out prompts are sampled as in debug; --evaluation.sampling.n 0 leaves only their loss, and starts no engine.
    """
    config = debug()
    config.algorithm = Algorithm.Config(loss=Nll.Config())
    config.sampling.n = 1
    config.prompts.demonstrate = "torchtitan_rl.configs.toys.answer_recipes:right_sum"
    config.num_prompts_per_step = 64
    return config


def debug_distill() -> RunConfig:
    """debug without rewards: it learns from a teacher.

    The teacher makes right sums alone, and the loss is the divergence from it over the whole vocabulary: docs/imitation.md.
    The first run makes the teacher, as it makes the policy's start.
    """
    config = debug()
    config.algorithm = Algorithm.Config(loss=ExactDistill.Config())
    config.teacher = "torchtitan_rl.configs.toys.answer_recipes:right_sums"
    config.num_prompts_per_step = 128
    config.sampling.n = 1  # nothing is compared within a group: as many samples of more prompts teach more
    config.num_steps = 8
    config.trainer.optimizer.lr = 3e-4
    config.trainer.lr_scheduler.warmup_steps = 1
    config.evaluation.every = 2
    return config
