"""A first run for any machine, which downloads nothing.

With or without a GPU. The first run trains a 2.4M-parameter Qwen3 as its start.
"""

from torchtitan_rl.algorithm import Algorithm, GroupMean
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.evaluation import Evaluation
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.observe import Recorder
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.trainer.optimizer import AdamW
from torchtitan_rl.trainer.trainer_config import LogprobGateConfig, LRSchedule, TrainerConfig


def debug() -> RunConfig:
    """A small model learns to add two integers, in 2 minutes.

    The starting policy has a habit, forgetting the carry, which RL removes. Everything is float32, also on a GPU, and
    the run stops if trainer and sampler differ by 1e-3 in the log-probability of any token.
    """
    config = RunConfig(
        num_steps=50,
        num_prompts_per_step=16,
        task=SumDigits.Config(max_integers=2, instruction=""),
        prompts=PromptStream.Config(max_prompt_tokens=32),
        sampling=SamplingConfig(n=8, max_tokens=32),
        generator=Generator.Config(dtype="float32"),
        algorithm=Algorithm.Config(advantage=GroupMean.Config()),
        trainer=TrainerConfig(
            optimizer=AdamW.Config(lr=1e-4),
            lr_scheduler=LRSchedule(warmup_steps=5, decay_ratio=0.9),
            mixed_precision_param="float32",
            max_tokens_per_microbatch=8192,
            # In float32 they agree to 1e-5 on almost all tokens; the maximum over 6,400 completions was 1.4e-4.
            logprob_gate=LogprobGateConfig(max_diff=1e-3),
        ),
        evaluation=Evaluation.Config(every=10, num_prompts=256),
        metrics=Recorder.Config(console_every=20),
    )
    config.checkpoint.interval = 20
    return config


def debug_moe() -> RunConfig:
    """debug with a mixture of experts.

    Each layer has 8, of which a token uses 2; docs/models.md has the details.
    """
    config = debug()
    config.task.warm_start = "torchtitan_rl.configs.toys.answer_recipes:expert_sums"
    return config
