"""Evaluation on held-out prompts: the same ones every time, judged like those of training (`ScoredCompletion.correct`)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.config import Configurable

from torchtitan_rl.generator import SamplingConfig
from torchtitan_rl.metrics.evaluation import evaluation_metrics
from torchtitan_rl.metrics.rewards import groups_by_task
from torchtitan_rl.run.errors import expect
from torchtitan_rl.types import Episode, Group

NUM_FAILURES = 20
"""Wrong answers of a pass that its results show."""


class EvaluationPass(NamedTuple):
    """One way of sampling the held-out prompts, and the names its results go by."""

    sampling: SamplingConfig
    prefix: str
    """Of its metrics and its sample table, such as "evaluation"."""
    split: str
    """Of its rows: eval_greedy or eval_sampled."""


class Evaluation(Configurable):
    """When to evaluate, on how many prompts, sampled how; and what the results decide."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        every: int = 10
        """Steps between evaluations, besides one before the first step and one after the last; 0 never evaluates."""

        num_prompts: int = 256
        """How many held-out prompts: always the task's first."""

        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(n=1, temperature=0.0))
        """Greedy by default."""

        sampled: SamplingConfig = field(default_factory=lambda: SamplingConfig(n=0))
        """A second pass, with temperature and n > 1, for mean@n and pass@k; its metrics are evaluation/sampled/...
        n 0: no second pass."""

        best_by: str = ""
        """A metric of the evaluation, such as evaluation/accuracy: the checkpoint of the step where it is highest is kept
        beside the newest ones. With a minus sign in front the lowest is best. Empty: none is."""

        stop_after: int = 0
        """End the run after so many evaluations in a row that are not better than the best by `best_by`; 0: never."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.passes = [_named(config.sampling, "evaluation")]
        if config.sampled.n:
            self.passes.append(_named(config.sampled, "evaluation/sampled"))
        self.is_best = False
        """Whether the last results are the best so far."""
        self._best: float | None = None
        self._worse = 0
        expect(config.stop_after >= 0, "evaluation.stop_after", config.stop_after, "0 or more", "0 never stops.")
        named = bool(config.best_by) or not config.stop_after
        expect(named, "evaluation.best_by", "", "a metric, as evaluation.stop_after asks", "Use evaluation/accuracy.")
        known = config.best_by.removeprefix("-").startswith("evaluation/") or not config.best_by
        expect(known, "evaluation.best_by", config.best_by, "a metric of the evaluation", "Use evaluation/accuracy.")
        on = bool(config.every) or not config.best_by
        expect(on, "evaluation.every", 0, "1 or more, as evaluation.best_by asks", "Use 10.")

    def due(self, step: int, num_steps: int) -> bool:
        """Whether the policy is evaluated after `step` (0: before the first)."""
        every = self.config.every
        return bool(every) and (step % every == 0 or step == num_steps)

    @property
    def gives_up(self) -> bool:
        """Whether the results have not become better for long enough to end the run."""
        return bool(self.config.stop_after) and self._worse >= self.config.stop_after

    def conclude(self, metrics: Mapping[str, float]) -> None:
        """Decide whether these results are the best so far. Raises UserError where `best_by` is none of them."""
        if not (name := self.config.best_by.removeprefix("-")):
            return
        expect(name in metrics, "evaluation.best_by", name, f"one of {sorted(metrics)}", "Correct the name.")
        value = -metrics[name] if self.config.best_by.startswith("-") else metrics[name]
        self.is_best = self._best is None or value > self._best
        self._best = value if self.is_best else self._best
        self._worse = 0 if self.is_best else self._worse + 1

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know to decide alike."""
        return {"best": self._best, "worse": self._worse}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self._worse = state_dict["best"], state_dict["worse"]


def _named(sampling: SamplingConfig, prefix: str) -> EvaluationPass:
    return EvaluationPass(sampling, prefix, "eval_greedy" if sampling.temperature == 0 else "eval_sampled")


def results_of(passes: Mapping[str, Sequence[Group[Episode]]]) -> dict[str, Any]:
    """All that is to be said of an evaluation, by each pass's prefix: its metrics, over all and for each task, and failures."""
    results: dict[str, Any] = {"metrics": {}, "failures": {}}
    for prefix, groups in passes.items():
        tasks = {f"{prefix}/{name}": asked for name, asked in groups_by_task(groups).items()}
        for name, asked in {prefix: groups, **tasks}.items():
            results["metrics"] |= {key: float(m.value) for key, m in evaluation_metrics(asked, name).items()}
        wrong = [(g.prompt, e) for g in groups for e in g.samples if e.scored.correct is False]
        results["failures"][prefix] = [
            {
                "prompt": prompt.text,
                "expected_answer": prompt.expected_answer,
                "answer": episode.scored.answer,
                "completion": episode.completion.text,
                "finish_reason": episode.completion.finish_reason,
            }
            for prompt, episode in wrong[:NUM_FAILURES]
        ]
    return results


def write_results(folder: Path, step: int, results: Mapping[str, Any]) -> Path:
    """The same results give the same file, whoever evaluates."""
    file = folder / f"step-{step}.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return file


def print_results(results: Mapping[str, Any]) -> None:
    """The metrics as a table, with the 95 % intervals of those that have one, and a few of the wrong answers."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    metrics, console = results["metrics"], Console(highlight=False)
    table = Table("metric", "value", "95 % interval")
    for name, value in metrics.items():
        if name.endswith(("_low", "_high")):
            continue
        low, high = metrics.get(f"{name}_low", math.nan), metrics.get(f"{name}_high", math.nan)
        table.add_row(escape(name), f"{value:.4f}", "" if math.isnan(low) else f"{low:.4f} to {high:.4f}")
    console.print(table)
    failures = Table("wrong: the prompt ends", "expected", "answer", "the completion ends", title="some wrong answers")
    for failure in next(iter(results["failures"].values()))[:5]:
        cells = (
            failure["prompt"][-60:],
            failure["expected_answer"],
            str(failure["answer"]),
            failure["completion"][-60:],
        )
        failures.add_row(*map(escape, cells))
    if failures.row_count:
        console.print(failures)
