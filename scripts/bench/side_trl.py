"""TRL's side of step_vs_trl.py, run in an environment of its own: one optimizer step for each line on standard input.

It knows nothing of torchtitan_rl. Answers are JSON lines: {"seconds": ..., "cpu": ..., "phases": {...}, "lengths": [shortest, mean, longest]}.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from made_up_reward import made_up
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
    """TRL's own trainer, with timers around the parts of a step."""

    seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin

    def _generate_single_turn(self, *args, **kwargs):
        with self._clock("generate"):
            return super()._generate_single_turn(*args, **kwargs)

    def _prepare_inputs(self, *args, **kwargs):
        with self._clock("rollout"):
            return super()._prepare_inputs(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        with self._clock("training_step"):
            return super().training_step(*args, **kwargs)


class OneAtATime(TrainerCallback):
    """A step's time is everything from the line that asks for it to its end."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self.trainer: Timed | None = None
        self._begin = self._processor = 0.0

    def _wait(self, control) -> None:
        control.should_training_stop = not sys.stdin.readline()
        self.trainer.seconds.clear()
        self._begin, self._processor = time.perf_counter(), time.process_time()

    def on_train_begin(self, args, state, control, **_) -> None:
        print("{}", file=self._answers)  # ready
        self._wait(control)

    def on_step_end(self, args, state, control, **_) -> None:
        took, parts = time.perf_counter() - self._begin, self.trainer.seconds
        metrics = self.trainer._metrics["train"]
        answer = {
            "seconds": took,
            "cpu": time.process_time() - self._processor,
            "phases": {
                "generate": parts["generate"],
                "rewards and advantages": parts["rollout"] - parts["generate"],
                "forward and backward": parts["training_step"] - parts["rollout"],
                "optimizer and rest": took - parts["training_step"],
            },
            "lengths": [metrics[f"completions/{end}_length"][-1] for end in ("min", "mean", "max")],
        }
        print(json.dumps(answer), file=self._answers)
        self._wait(control)


def trainer_config(job: dict, **more: Any) -> GRPOConfig:
    """TRL's settings for a job of step_vs_trl.py or learn_vs_trl.py. `more`: further ones of GRPOConfig."""
    settings = job["trl"]
    if torch.cuda.is_available():
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": settings["share"],
            "vllm_enable_sleep_mode": bool(settings["sleep"]),
        }
        full_length = {"ignore_eos": True}
    else:
        engine = {"use_cpu": True, "cache_implementation": settings["cache"]}
        full_length = {"min_new_tokens": job["new_tokens"]}
    return GRPOConfig(
        **engine,
        generation_kwargs={} if job["ends"] else full_length,
        output_dir=job["folder"] + "/trl",
        bf16=settings["compute"] == "bfloat16",
        model_init_kwargs={"dtype": settings["weights"], "attn_implementation": settings["attention"]},
        per_device_train_batch_size=settings["sequences_at_once"],
        gradient_accumulation_steps=job["prompts_per_step"] * job["n"] // settings["sequences_at_once"],
        gradient_checkpointing=bool(settings["checkpointing"]),
        num_generations=job["n"],
        max_completion_length=job["new_tokens"],
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    callback = OneAtATime(answers)
    callback.trainer = Timed(
        model=job["model"],
        reward_funcs=made_up,
        args=trainer_config(job, max_steps=100_000),
        train_dataset=Dataset.from_list([{"prompt": text} for text in job["prompts"]]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[callback],
    )
    callback.trainer.train()


if __name__ == "__main__":
    main()
