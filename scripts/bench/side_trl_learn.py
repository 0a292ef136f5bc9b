"""TRL's side of learn_vs_trl.py, run in an environment of its own: a whole run, with evaluations outside its clock.

It knows nothing of torchtitan_rl, and writes metrics.jsonl and end.json as our runs do, with "time/step" and "evaluation/accuracy".
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from side_trl import trainer_config
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer
from trl_rewards import EXTRACT, correct, well_formed


class SameRates(GRPOTrainer):
    """TRL's own trainer, with our learning rate of each step: transformers' warm-up begins a step later, at 0."""

    learning_rates: list[float]

    def create_scheduler(self, num_training_steps: int, optimizer=None) -> LambdaLR:
        rates, peak = self.learning_rates, self.args.learning_rate
        factors = [rate / peak for rate in [*rates, rates[-1]]]  # the last one follows the last step
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factors.__getitem__)
        return self.lr_scheduler


class Curve(TrainerCallback):
    """Writes each step's seconds, from the end of the step before, and the held-out accuracy when it is due."""

    def __init__(self, job: dict, metrics: Path) -> None:
        self._job = job
        self._metrics = metrics
        self._begin = 0.0

    def on_train_begin(self, args, state, control, *, model, processing_class, **_) -> None:
        self._metrics.write_text("")
        self._write({"step": 0, "evaluation/accuracy": self._accuracy(model, processing_class)})

    def on_step_end(self, args, state, control, *, model, processing_class, **_) -> None:
        line = {"step": state.global_step, "time/step": time.perf_counter() - self._begin}
        if line["step"] % self._job["evaluate_every"] == 0 or line["step"] == args.max_steps:
            line["evaluation/accuracy"] = self._accuracy(model, processing_class)
        self._write(line)

    def _write(self, line: dict[str, float]) -> None:
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._begin = time.perf_counter()

    @torch.no_grad()
    def _accuracy(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        """Of greedy answers, as our evaluation samples them."""
        held_out = self._job["held_out"]
        prompts = tokenizer([row["prompt"] for row in held_out], return_tensors="pt", padding=True, padding_side="left")
        prompts = prompts.to(model.device)
        model.eval()
        tokens = model.generate(**prompts, do_sample=False, max_new_tokens=self._job["new_tokens"])  # [B, L]
        model.train()
        texts = tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        answers = map(EXTRACT[self._job["task"]], texts)
        right = [answer == int(row["expected_answer"]) for answer, row in zip(answers, held_out, strict=True)]
        return sum(right) / len(right)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])
    trainer = SameRates(
        model=job["model"],
        reward_funcs=[correct(job["task"])] + [well_formed] * (job["task"] == "Counting"),
        args=trainer_config(job, **job["hyperparameters"]),
        train_dataset=Dataset.from_list(job["prompts"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Curve(job, folder / "metrics.jsonl")],
    )
    trainer.learning_rates = job["learning_rates"]
    trainer.train()
    trainer.save_model(str(folder / "model"))
    (folder / "end.json").write_text(json.dumps({"outcome": "done"}))


if __name__ == "__main__":
    main()
