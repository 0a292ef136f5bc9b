"""`RunObserver`: turns a run's steps and evaluations into metrics, sample tables and files.

Every rank holds the same groups. Metrics are equal on every rank; all ranks record them and the lowest rank's value is
used. Rows and distributions are divided: each rank records those of its own share of the groups.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchtitan_rl import comm
from torchtitan_rl.events import record_metric, record_metrics
from torchtitan_rl.observe.evaluation_results import failures_of, write_results
from torchtitan_rl.observe.metrics.completions import (
    completion_metrics,
    conversation_metrics,
    diversity_metrics,
    staleness_metrics,
)
from torchtitan_rl.observe.metrics.evaluation_stats import evaluation_metrics
from torchtitan_rl.observe.metrics.idle import IdleNotice
from torchtitan_rl.observe.metrics.reward_stats import (
    advantage_metrics,
    finite_rewards,
    group_metrics,
    groups_by_task,
    participation_metrics,
    reward_metrics,
    task_metrics,
)
from torchtitan_rl.observe.metrics.throughput import (
    SplitNotice,
    TokenFlops,
    optimizer_metrics,
    peak_flops_per_s,
    perf_metrics,
    time_shares,
)
from torchtitan_rl.observe.recorder import Recorder
from torchtitan_rl.observe.reduce import Reduce
from torchtitan_rl.observe.sample_rows import TRAINED_SPLIT, episode_rows
from torchtitan_rl.observe.unfinished import UnfinishedStep
from torchtitan_rl.summary import same_everywhere
from torchtitan_rl.types import Episode, EvaluationPass, Group, Metric, Sample, flat

if TYPE_CHECKING:
    from torchtitan_rl.algorithm import Algorithm
    from torchtitan_rl.data.stream import PromptStream
    from torchtitan_rl.state import RunState
    from torchtitan_rl.trainer.optimizer import UpdateReport


class RankObserver:
    """Keeps samples until their step is whole, for the case that it fails."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self._unfinished = recorder, UnfinishedStep()

    def keep(self, groups: Sequence[Group[Sample]], *, step: int, split: str) -> None:
        """Called as soon as groups are sampled, graded and credited. `close` writes those of a step that is never whole."""
        self._unfinished.keep(groups, step=step, split=split)

    def hand_over(self) -> dict[str, Any]:
        """Returns what was recorded since the last call, for `Collector.add` on another rank. That rank has the samples too."""
        self._unfinished = UnfinishedStep()
        return self.recorder.drain().state_dict()

    def close(self) -> None:
        self.recorder.write_unfinished(self._unfinished)
        self.recorder.close()


class RunObserver(RankObserver):
    """Turns the facts of a training run into metrics, tables and files."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        algorithm: "Algorithm",
        prompts: "PromptStream",
        token_flops: TokenFlops,
        results_folder: Path,
        split_notice: SplitNotice | None = None,
    ) -> None:
        super().__init__(recorder)
        self._algorithm = algorithm
        self._prompts = prompts
        self._token_flops = token_flops
        self._results_folder = results_folder
        self._idle_notice, self._split_notice = IdleNotice(), split_notice

    def step(
        self, groups: Sequence[Group[Episode]], update: "UpdateReport", state: "RunState"
    ) -> None:
        """Records a step's metrics and samples. Called on every rank, with all groups.

        `state` counts the step already; the weights of step `state.step - 1` sampled the completions.
        """
        elapsed = self.recorder.collector.elapsed
        rank, world_size = rank_and_size()
        completions = completion_metrics(groups)
        conversations = conversation_metrics(groups)
        if conversations and elapsed("step"):
            waited = elapsed("generate/environments") / elapsed("step")
            conversations["conversations/environment_share"] = Metric(waited, "max")
        peak_flops = peak_flops_per_s()
        perf = perf_metrics(
            update,
            generated_tokens=completions["completions/tokens"].value if completions else 0,
            sampled=any(episode.completion.sampler_logprobs.any() for episode in flat(groups)),
            seconds={name: elapsed(name) for name in ("generate", "train", "step")},
            token_flops=self._token_flops,
            peak_flops=peak_flops and peak_flops * world_size,
        )
        if self._split_notice:
            self._split_notice.see(elapsed)
        judged = groups if self._algorithm.policy_loss.from_engine else ()  # no demonstrations
        for metrics in (
            *update.metrics,
            self._prompts.metrics(state.prompts_seen),
            reward_metrics(judged),
            group_metrics(judged, self._algorithm),
            advantage_metrics(judged),
            participation_metrics(groups),
            *(
                task_metrics(its_groups, f"train/{task}", self._algorithm)
                for task, its_groups in groups_by_task(groups).items()
            ),
            completions,
            diversity_metrics(groups),
            optimizer_metrics(update, state),
            staleness_metrics(groups),
            conversations,
            time_shares(elapsed),
            perf,
        ):
            record_metrics(metrics)
        mine = groups[rank::world_size]
        episodes = flat(mine)
        if len(set(finite_rewards(flat(judged)))) > 2:  # of all groups: each rank decides alike
            record_metric("reward", finite_rewards(episodes), Reduce.DISTRIBUTION)
        lengths = [episode.completion.num_sampled for episode in episodes]
        record_metric("completions/length", lengths, Reduce.DISTRIBUTION)
        rows = episode_rows(mine, step=state.step, split=TRAINED_SPLIT)
        record_metric("rollout/samples", rows, Reduce.TABLE)
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
        """Returns the evaluation's metrics by name: those of each pass's held-out groups, and those `measured`. Rank 0 writes them to
        step-N.json in the results' folder."""
        metrics: dict[str, float] = {}
        failures: dict[str, list[dict[str, Any]]] = {}
        for evaluation_pass, groups in passes.items():
            metrics |= record_evaluation(groups, evaluation_pass, step=state.step)
            failures[evaluation_pass.prefix] = failures_of(groups)
            self._unfinished.forget(evaluation_pass.split)
        record_metrics({name: same_everywhere(value) for name, value in measured.items()})
        metrics |= measured
        if comm.is_rank_0():
            results = {"metrics": metrics, "failures": failures}
            write_results(self._results_folder, state.step, results)
        return metrics

    def flush(self, step: int) -> None:
        """Merge and write the metrics of all ranks. Collective; called once a step."""
        self.recorder.flush(step)


def record_evaluation(
    groups: Sequence[Group[Episode]], evaluation_pass: EvaluationPass, *, step: int
) -> dict[str, float]:
    """Records the metrics and samples of one pass over the held-out prompts, after `step`. Called on every rank.

    Returns: the metrics, over all tasks and of each task.
    """
    rank, world_size = rank_and_size()
    metrics = evaluation_metrics(groups, evaluation_pass.prefix)
    for task, its_groups in groups_by_task(groups).items():
        metrics |= evaluation_metrics(its_groups, f"{evaluation_pass.prefix}/{task}")
    record_metrics(metrics)
    rows = episode_rows(groups[rank::world_size], step=step, split=evaluation_pass.split)
    record_metric(f"{evaluation_pass.prefix}/samples", rows, Reduce.TABLE)
    return {name: float(metric.value) for name, metric in metrics.items()}


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
