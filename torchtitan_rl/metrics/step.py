"""What a step and an evaluation leave behind in metrics and sample tables."""

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.device import peak_flops_per_s, peak_memory_bytes
from torchtitan_rl.evaluation import EvaluationPass
from torchtitan_rl.observability import (
    Reduce,
    completion_metrics,
    diversity_metrics,
    episode_rows,
    evaluation_metrics,
    optimizer_metrics,
    perf_metrics,
    record_metric,
    record_metrics,
)
from torchtitan_rl.run.state import RunState
from torchtitan_rl.trainer.trainer import UpdateReport
from torchtitan_rl.types import Episode


def record_step(
    episodes: Sequence[Episode],
    update: UpdateReport,
    *,
    state: RunState,
    algorithm: Algorithm,
    seconds: Mapping[str, float],
) -> None:
    """Record the step's metrics and samples. What is equal on every rank is recorded by rank 0 alone.

    Args:
        seconds: of "rollout" (sampling and grading), "train" and the whole "step".
    """
    record_metric("perf/peak_memory_gib", peak_memory_bytes() / 2**30, Reduce.MAX)
    total = update.trained_tokens + update.padding_tokens
    record_metric("perf/padding_fraction", update.padding_tokens / max(total, 1), weight=total)
    if dist.get_rank() != 0:
        return
    record_metrics(algorithm.episode_metrics(list(episodes)))
    record_metrics(completion_metrics(episodes))
    record_metrics(diversity_metrics(episodes))
    record_metrics(
        optimizer_metrics(
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            optimizer_step=state.optimizer_steps,
            prompts_seen=state.prompts_seen,
            tokens_seen=state.tokens_seen,
        )
    )
    peak = peak_flops_per_s()
    record_metrics(
        perf_metrics(
            generated_tokens=sum(len(e.token_ids) for e in episodes),
            trained_tokens=sum(len(e.prompt_token_ids) + len(e.token_ids) for e in episodes if e.in_loss),
            generate_seconds=seconds["rollout"],
            update_seconds=seconds["train"],
            step_seconds=seconds["step"],
            rank_tokens=update.rank_tokens,
            flops_per_token=update.flops_per_token,
            peak_flops=peak and peak * dist.get_world_size(),
        )
    )
    record_metric("rollout/samples", episode_rows(episodes, step=state.step, split="train"), Reduce.TABLE)


def record_evaluation(
    episodes: Sequence[Episode], one: EvaluationPass, *, is_correct: Callable[[Episode], bool], step: int
) -> None:
    """Record the metrics and samples of one pass over the held-out prompts, from rank 0."""
    if dist.get_rank() != 0:
        return
    record_metrics(evaluation_metrics(episodes, prefix=one.prefix, correct=is_correct))
    record_metric(f"{one.prefix}/samples", episode_rows(episodes, step=step, split=one.split), Reduce.TABLE)
