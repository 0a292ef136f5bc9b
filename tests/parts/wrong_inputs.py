"""Wrong inputs and their messages: the source of docs/errors.md, and of the test that runs all of them.

python -m tests.parts.wrong_inputs      writes docs/errors.md anew
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.parts import wrong_files
from tests.parts.faults import section
from torchtitan_rl.command.registry import parse_args
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.build_task import build_task
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.data.tasks import Example
from torchtitan_rl.environments.vllm_parsers import call_parser
from torchtitan_rl.models import small_qwen3
from torchtitan_rl.validation import check_model, validate

TP, GENERATOR_TP = "trainer.parallelism.tensor-parallel-degree", "generator.tensor-parallel-degree"


@dataclass(frozen=True)
class WrongInput:
    """One row: an input and its message."""

    given: str
    """The options after `./run_train.sh --config debug`, or a description."""
    says: str
    """A part of the message."""
    cause: Callable[[Path], object] | None = None
    """Causes the error, given an empty folder. None: the options in `given` cause it."""
    ranks: int = 1

    def run(self, folder: Path) -> None:
        """Raise the UserError."""
        if self.cause is not None:
            self.cause(folder)
        else:
            options = [part.replace("''", "") for part in self.given.split()]
            _, config = parse_args(["--config", "debug", *options])
            config.model_spec = small_qwen3(vocab_size=320)
            validate(config, world_size=self.ranks)
            check_model(config, world_size=self.ranks)


def _own_task(given: str, says: str, **methods: Callable) -> WrongInput:
    """A user's task with these methods, and the stream of its prompts."""
    methods["__module__"] = __name__

    def cause(_: Path) -> None:
        task = build_task(type("Mine", (SumDigits,), methods).Config())
        tokenizer = make_small_tokenizer(["1 + 1"], vocab_size=258)
        PromptStream.Config(max_prompt_tokens=512).build(task=task, tokenizer=tokenizer, seed=0)

    return WrongInput(given, says, cause)


def _option(name: str, value: str, says: str, ranks: int = 1) -> WrongInput:
    """A command-line option whose message begins with the field and the value."""
    return WrongInput(f"--{name} {value}", f"{name.replace('-', '_')} = {says}", ranks=ranks)


SECTIONS: dict[str, list[WrongInput]] = {
    "Sizes and counts": [
        _option("num-steps", "0", "0: expected at least 1 and at most 1000000000. Use 50 or more."),
        _option("sampling.n", "1", "1: expected at least 2"),
        _option("in-flight.prompts", "23", "23: expected a multiple of the 2 generator replicas", ranks=2),
        WrongInput(
            "--in-flight.prompts 24", "algorithm.mismatch = 'none': expected a correction with in_flight.prompts"
        ),
        WrongInput(
            "--in-flight.prompts 24 --algorithm.old-logprobs sampler --algorithm.zero-variance refill",
            'algorithm.zero_variance = \'refill\': expected "keep" or "drop" with in_flight.prompts',
        ),
        WrongInput(
            "--in-flight.prompts 24 --algorithm.old-logprobs sampler --sampling.stop x",
            "sampling.stop = ['x']: expected none with in_flight.prompts",
        ),
        WrongInput(
            "--num-prompts-per-step 3",
            "one for each generator replica (4 ranks / generator.tensor_parallel_degree 1). Raise it, or start fewer",
            ranks=4,
        ),
        _option(
            "sampling.max-tokens",
            "64",
            "64: expected with prompts.max_prompt_tokens 32 at most generator.max_model_len 64",
        ),
        _option("generator.max-model-len", "4096", "4096: expected at most the model's 512 positions. Use --"),
        _option("trainer.max-tokens-per-microbatch", "10", "10: expected at least 64, the longest sequence"),
        _option(
            "trainer.num-minibatches", "17", "17: expected at most num_prompts_per_step 16, as a mini-batch holds whole"
        ),
    ],
    "Folders and checkpoints": [
        _option("dump-folder", "/", "'/': expected a folder that is new, empty or a run's own, but it has"),
        _option("resume", "step-4", "'step-4': expected auto, never, a step such as 40, or the folder of another run"),
    ],
    "Sampling and evaluation": [
        _option("sampling.temperature", "0", "0.0: expected more than 0 in training. 1.0 is usual."),
        _option(
            "sampling.temperature", "0.001", "0.001: expected at least 0.01: vLLM would sample at that, and the trainer"
        ),
        WrongInput("--prompts.demonstrate math:sin", "algorithm.loss = 'Clip.Config': expected one that learns from"),
        WrongInput(
            "--sampling.top-p 0.9 --generator.router-replay",
            "generator.router_replay = True: expected False with sampling.top_p, top_k or min_p: the engine records either",
        ),
        WrongInput(
            "--conversations.tool-call-parser hermess",
            "'hermess': expected auto or one of vLLM's parsers: apertus, ",
            lambda _: call_parser("hermess", None, []),
        ),
        WrongInput(
            "--evaluation.stop-after 2", "evaluation.best_by = '': expected a metric, as evaluation.stop_after asks"
        ),
        WrongInput(
            "--eval-only --evaluation.sampling.n 0",
            "evaluation.sampling.n = 0: expected 1 or more, here or in evaluation.sampled, for",
        ),
        _option("evaluation.sampling.n", "4", "4: expected 1 with temperature 0"),
    ],
    "Optimizer and schedule": [
        _option(
            "trainer.optimizer.lr",
            "-1",
            "-1.0: expected at least 0 and at most 1. Full fine-tuning usually takes 1e-6.",
        ),
        WrongInput(
            "--trainer.lora.alpha 64", "trainer.lora.rank = 0: expected 1 or more with trainer.lora.alpha or targets"
        ),
        WrongInput(
            "--algorithm.truncation.mode penalty --algorithm.truncation.cache-tokens 99",
            "algorithm.truncation.cache_tokens = 99: expected at most the longest completion",
        ),
    ],
    "Layout": [
        WrongInput(
            f"--{TP} 2", "trainer.parallelism on 1 ranks (NGPU x NNODES): tensor_parallel_degree 2 x data_parallel"
        ),
        WrongInput(
            f"--{TP} 4",
            "tensor_parallel_degree = 4: expected a divisor of the model's heads, key-value heads and",
            ranks=4,
        ),
        WrongInput(
            f"--{GENERATOR_TP} 2", "generator.tensor_parallel_degree = 2: expected a divisor of the 3 ranks", ranks=3
        ),
        _option("trainer.parallelism.pipeline-parallel-degree", "2", "2: expected 1, as it is not supported", ranks=2),
    ],
    "Metrics": [
        WrongInput("--metrics.sinks consol", "metrics.sinks = 'consol': expected one of console, jsonl"),
        WrongInput("--metrics.select tpo:1", "metrics.select = 'tpo:1': expected one of top"),
    ],
    "Own tasks": [
        _own_task(
            "a task whose train_example is another at each call",
            "expected the same example at every call with one index and seed. Draw chance from random.Random",
            train_example=lambda self, index, *, seed: Example(text=str(time.perf_counter_ns()), expected_answer="1"),
        ),
        _own_task(
            "a task whose train_example takes no seed",
            "Mine.train_example(0): expected a method that returns, but it raises TypeError: ",
            train_example=lambda self, index: None,
        ),
        _own_task(
            "a task whose leave_out raises",
            "Mine.leave_out: expected a method that returns, but it raises ZeroDivisionError: division by zero (",
            leave_out=lambda self, faults: 1 / 0,
        ),
        _own_task(
            "a task without held-out examples",
            "Mine.held_out_examples(1) = []: expected a list with an Example",
            held_out_examples=lambda self, num: [],
        ),
    ],
    "Configs and files": wrong_files.ROWS(WrongInput),
}


def page() -> str:
    """docs/errors.md."""
    lines = [
        "# Wrong inputs and their messages",
        "",
        "Wrong input is found before the engine starts, and mostly before the run folder is created. The exit code is 2. Each message",
        "names the field, the value, the expected values and the remedy. The table has a part of one message of each kind;",
        "[tests/parts/wrong_inputs.py](../tests/parts/wrong_inputs.py) has all, and a test runs them.",
        "",
        "| kind, and how many there are | such as | message |",
        "|---|---|---|",
    ]
    for title, rows in SECTIONS.items():
        lines.append(f"| {title.lower()}: {len(rows)} | `{_cell(rows[0].given)}` | {_cell(rows[0].says)} |")
    lines.append("")
    return "\n".join([*lines, *section()])


def _cell(text: str) -> str:
    """A text as the cell of a table, without the rest of a character that is repeated often."""
    return re.sub(r"(.)\1{9,}(\.\.\.)?", r"\1\1\1...", text.replace("|", "\\|"))


if __name__ == "__main__":
    Path("docs/errors.md").write_text(page())
