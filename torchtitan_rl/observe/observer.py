"""`RunObserver`: turns a run's steps and evaluations into metrics, sample tables and files."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl import comm
from torchtitan_rl.events import record_metrics
from torchtitan_rl.observe.evaluation_results import failures_of, write_results
from torchtitan_rl.observe.metrics.efficiency import Footprint
from torchtitan_rl.observe.metrics.idle import IdleNotice
from torchtitan_rl.observe.metrics.step import record_evaluation, record_step
from torchtitan_rl.observe.recorder import Mask, Recorder
from torchtitan_rl.observe.sample_rows import TRAINED_SPLIT
from torchtitan_rl.observe.unfinished import UnfinishedStep
from torchtitan_rl.summary import same_everywhere
from torchtitan_rl.types import Completion, Episode, EvaluationPass, Group, ScoredCompletion

if TYPE_CHECKING:
    from torchtitan_rl.algorithm import Algorithm
    from torchtitan_rl.data.stream import PromptStream
    from torchtitan_rl.state import RunState
    from torchtitan_rl.trainer.optimizer import UpdateReport

logger = logging.getLogger(__name__)


class RunObserver:
    """The `Observer` of a training run."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        algorithm: "Algorithm",
        prompts: "PromptStream",
        footprint: Footprint,
        run_folder: Path,
        mask: Mask = lambda value: value,
    ) -> None:
        self.recorder = recorder
        self._algorithm = algorithm
        self._prompts = prompts
        self._mask = mask
        self._footprint = footprint
        self._folder = run_folder / "evaluation"
        self._idle_notice = IdleNotice()
        self._unfinished = UnfinishedStep()

    def keep(
        self,
        groups: Sequence[Group[Completion] | Group[ScoredCompletion] | Group[Episode]],
        *,
        step: int,
        split: str,
    ) -> None:
        self._unfinished.keep(groups, step=step, split=split)

    def step(
        self, groups: Sequence[Group[Episode]], update: "UpdateReport", state: "RunState"
    ) -> None:
        data = self._prompts.metrics(state.prompts_seen)
        record_step(
            groups,
            update,
            state=state,
            algorithm=self._algorithm,
            footprint=self._footprint,
            data=data,
            elapsed=self.recorder.collector.elapsed,
        )
        if self._algorithm.policy_loss.uses_rewards:
            self._idle_notice.see(groups)
        self._unfinished.forget(TRAINED_SPLIT)

    def check_rewarded(self) -> None:
        """Raise TrainingStopped if no completion of this process's steps had a reward. Call it after the last step."""
        self._idle_notice.check_rewarded()

    def evaluation(
        self,
        passes: Mapping[EvaluationPass, Sequence[Group[Episode]]],
        state: "RunState",
        measured: Mapping[str, float],
    ) -> dict[str, float]:
        """See Observer. Rank 0 writes the results to evaluation/step-N.json in the run's folder."""
        metrics: dict[str, float] = {}
        failures: dict[str, list[dict[str, Any]]] = {}
        for evaluation_pass, groups in passes.items():
            metrics |= record_evaluation(groups, evaluation_pass, step=state.step)
            failures[evaluation_pass.prefix] = failures_of(groups)
            self._unfinished.forget(evaluation_pass.split)
        record_metrics({name: same_everywhere(value) for name, value in measured.items()})
        metrics |= measured
        if comm.is_rank_0():
            self.write_evaluation(
                state.step, self._mask({"metrics": metrics, "failures": failures})
            )
        return metrics

    def write_evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """Write the results' file. A disk that is full does not end the run: the metrics are also in the step's record."""
        try:
            write_results(self._folder, step, results)
        except OSError as error:
            logger.warning(
                f"evaluation/step-{step}.json is not written: {error}; the run continues without it"
            )

    def flush(self, step: int) -> None:
        self.recorder.flush(step)

    def close(self) -> None:
        self.recorder.write_unfinished(self._unfinished)
        self.recorder.close()
