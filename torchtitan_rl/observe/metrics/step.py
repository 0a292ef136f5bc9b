"""Records the metrics and sample tables of a step or an evaluation.

Every rank holds the same groups. Metrics are equal on every rank; all ranks record them and the lowest rank's value is
used. Rows and distributions are divided: each rank records those of its own share of the groups.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from torchtitan_rl.events import record_metric, record_metrics
from torchtitan_rl.observe.machine import measured_speeds, peak_flops_per_s, peak_memory_bytes
from torchtitan_rl.observe.metrics import completions as of_completions
from torchtitan_rl.observe.metrics import efficiency, reward_stats
from torchtitan_rl.observe.metrics.evaluation_stats import evaluation_metrics
from torchtitan_rl.observe.metrics.reward_stats import Groups, finite_rewards, groups_by_task
from torchtitan_rl.observe.reduce import Reduce
from torchtitan_rl.observe.sample_rows import episode_rows
from torchtitan_rl.types import EvaluationPass, Metric, flat

if TYPE_CHECKING:
    from torchtitan_rl.algorithm import Algorithm
    from torchtitan_rl.state import RunState
    from torchtitan_rl.trainer.trainer import UpdateReport


def record_step(
    groups: Groups,
    update: "UpdateReport",
    *,
    state: "RunState",
    algorithm: "Algorithm",
    footprint: efficiency.Footprint,
    data: dict[str, Metric],
    elapsed: Callable[[str], float],
) -> None:
    """Records a step's metrics and samples. Called on every rank.

    Args:
        groups: all groups of the step, equal on every rank.
        state: the state after the step; the weights of step `state.step - 1` sampled the completions.
        data: metrics of the prompts.
        elapsed: this rank's seconds in a timed phase of the step.
    """
    for metrics in (*update.metrics, data):
        record_metrics(metrics)
    rank, world_size = rank_and_size()
    record_metrics(
        reward_stats.reward_metrics(groups) | reward_stats.group_metrics(groups, algorithm)
    )
    record_metrics(
        reward_stats.advantage_metrics(groups) | reward_stats.participation_metrics(groups)
    )
    for task, its_groups in groups_by_task(groups).items():
        record_metrics(reward_stats.task_metrics(its_groups, f"train/{task}", algorithm))
    completions = of_completions.completion_metrics(groups)
    record_metrics(
        completions
        | of_completions.diversity_metrics(groups)
        | efficiency.optimizer_metrics(update, state)
        | of_completions.staleness_metrics(groups)
    )
    conversations = of_completions.conversation_metrics(groups)
    if conversations and (seconds := elapsed("step")):
        waited = elapsed("generate/environments") / seconds
        conversations["conversations/environment_share"] = Metric(waited, "max")
    record_metrics(conversations)
    seconds = {name: elapsed(name) for name in ("generate", "gather", "train", "sync", "step")}
    speeds = measured_speeds(footprint.train_dtype, footprint.engine_dtype)
    record_metrics(
        efficiency.efficiency_metrics(
            groups, update, seconds=seconds, speeds=speeds, footprint=footprint
        )
    )
    record_metrics(efficiency.lost_metrics(update, seconds=seconds))
    peak = peak_flops_per_s()
    record_metrics(
        efficiency.perf_metrics(
            update,
            generated_tokens=completions["completions/tokens"].value if completions else 0,
            sampled=any(episode.completion.sampler_logprobs.any() for episode in flat(groups)),
            seconds=seconds,
            token_flops=footprint.flops,
            peak_flops=peak and peak * world_size,
            peak_memory_bytes=peak_memory_bytes(),
        )
    )
    mine = groups[rank::world_size]
    episodes = flat(mine)
    if reward_stats.has_quantiles(
        finite_rewards(flat(groups))
    ):  # of all groups: each rank decides alike
        record_metric("reward", finite_rewards(episodes), Reduce.DISTRIBUTION)
    record_metric(
        "completions/length", [e.completion.num_sampled for e in episodes], Reduce.DISTRIBUTION
    )
    rows = episode_rows(mine, step=state.step, split="train", policy_step=state.step - 1)
    record_metric("rollout/samples", rows, Reduce.TABLE)


def record_evaluation(
    groups: Groups, evaluation_pass: EvaluationPass, *, step: int
) -> dict[str, float]:
    """Records the metrics and samples of one pass over the held-out prompts, after `step`. Called on every rank.

    Returns: the metrics, over all tasks and of each task.
    """
    rank, world_size = rank_and_size()
    metrics = evaluation_metrics(groups, evaluation_pass.prefix)
    for task, its_groups in groups_by_task(groups).items():
        metrics |= evaluation_metrics(its_groups, f"{evaluation_pass.prefix}/{task}")
    record_metrics(metrics)
    rows = episode_rows(
        groups[rank::world_size], step=step, split=evaluation_pass.split, policy_step=step
    )
    record_metric(f"{evaluation_pass.prefix}/samples", rows, Reduce.TABLE)
    return {name: float(metric.value) for name, metric in metrics.items()}


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
