"""Small real values for the tests of this room: scored completions, and a packer of a few lines for TrainBatch.

The packer is deliberately not the trainer's: these tests must not pass because two places share a mistake.
"""

import math

import torch
from torch import Tensor

from torchtitan_rl.algorithm import Algorithm, LossInputs, Sequences
from torchtitan_rl.types import Completion, Episode, Metric, Normalizers, Prompt, ScoredCompletion, TrainBatch

MAX_TOKENS = 16


def prompt(index: int) -> Prompt:
    return Prompt(prompt_idx=index, text=f"prompt {index}", token_ids=[1, 2], expected_answer="4")


def scored(
    prompt_idx: int,
    sample_idx: int,
    reward: float | None,
    *,
    logprobs: tuple[float, ...] = (-1.0, -1.0),
    finish_reason: str = "stop",
    answer: str | None = None,
    breakdown: dict | None = None,
) -> ScoredCompletion:
    completion = Completion(
        policy_version=0,
        prompt_idx=prompt_idx,
        sample_idx=sample_idx,
        prompt_token_ids=[1, 2],
        text="text",
        token_ids=list(range(3, 3 + len(logprobs))),
        token_logprobs=list(logprobs),
        finish_reason=finish_reason,
    )
    return ScoredCompletion(completion=completion, reward=reward, reward_breakdown=breakdown or {}, answer=answer)


def group(prompt_idx: int, rewards, **columns) -> list[ScoredCompletion]:
    """One completion for each reward; a keyword gives one value for each."""
    return [
        scored(prompt_idx, i, reward, **{name: values[i] for name, values in columns.items()})
        for i, reward in enumerate(rewards)
    ]


def episodes_of(algorithm: Algorithm, *groups: list[ScoredCompletion], **kwargs) -> list[Episode]:
    completions = [one for each in groups for one in each]
    indices = sorted({one.completion.prompt_idx for one in completions})
    kwargs = {"max_completion_tokens": MAX_TOKENS} | kwargs
    return algorithm.make_episodes([prompt(i) for i in indices], completions, **kwargs)


def pack(
    episodes: list[Episode],
    normalizers: Normalizers,
    *,
    order: list[int] | None = None,
    padding: int = 0,
    pad_each: bool = False,
    dtype: torch.dtype = torch.float64,
    old: list[list[float]] | None = None,
    reference: list[list[float]] | None = None,
) -> TrainBatch:
    """The episodes at `order` as one row, with `padding` pad tokens at its end, or after each sequence (`pad_each`)."""
    order = list(range(len(episodes))) if order is None else order
    columns: dict[str, list] = {
        name: [] for name in ("token_ids", "labels", "positions", "mask", "mu", "advantage", "sequence", "old", "ref")
    }

    def pad(count: int) -> None:
        for name in columns:
            columns[name] += [len(order) if name == "sequence" else 0] * count

    for place, index in enumerate(order):
        episode = episodes[index]
        tokens = episode.prompt_token_ids + episode.token_ids
        lead, tail = (
            len(episode.prompt_token_ids) - 1,
            1,
        )  # positions before and after those that predict the completion
        length = len(episode.token_ids)

        def spread(values: list[float], lead: int = lead) -> list[float]:
            return [0.0] * lead + list(values) + [0.0]

        columns["token_ids"] += tokens
        columns["labels"] += tokens[1:] + [0]
        columns["positions"] += list(range(len(tokens)))
        columns["mask"] += spread([float(episode.in_loss)] * length)
        columns["mu"] += spread(episode.sampler_logprobs)
        columns["advantage"] += [episode.advantage] * (lead + length + tail)
        columns["sequence"] += [place] * (lead + length + tail)
        columns["old"] += spread(old[index] if old else [0.0] * length)
        columns["ref"] += spread(reference[index] if reference else [0.0] * length)
        pad(padding if pad_each else 0)
    pad(padding)
    real = {name: torch.tensor(columns[name], dtype=dtype) for name in ("mask", "mu", "advantage", "old", "ref")}
    whole = {
        name: torch.tensor(columns[name], dtype=torch.int64)
        for name in ("token_ids", "labels", "positions", "sequence")
    }
    return TrainBatch(
        token_ids=whole["token_ids"],
        labels=whole["labels"],
        positions=whole["positions"],
        loss_mask=real["mask"],
        sampler_logprobs=real["mu"],
        advantages=real["advantage"],
        sequence_ids=whole["sequence"],
        group_ids=torch.tensor([episodes[i].prompt_idx for i in order], dtype=torch.int64),
        weights=torch.tensor([episodes[i].weight for i in order], dtype=dtype),
        episode_indices=order,
        sample_ids=[episodes[i].sample_idx for i in order],
        normalizers=normalizers,
        old_logprobs=real["old"] if old else None,
        reference_logprobs=real["ref"] if reference else None,
    )


def spread_logprobs(batch: TrainBatch, episodes: list[Episode], values: list[Tensor]) -> Tensor:
    """[T]: each episode's [Lc] tensor of log-probabilities on the positions that predict its completion.

    Everything else is a constant a correct loss never looks at.
    """
    out = (
        torch.full(batch.loss_mask.shape, -3.25, dtype=values[0].dtype) + 0 * values[0].sum()
    )  # even if no row is used
    for place, index in enumerate(batch.episode_indices):
        positions = (batch.sequence_ids == place).nonzero().squeeze(1)
        first = len(episodes[index].prompt_token_ids) - 1
        where = positions[first : first + len(episodes[index].token_ids)]
        out = out.index_put((where,), values[index])
    return out


def policy_like(episodes: list[Episode], offset: float = 0.0) -> list[Tensor]:
    """Leaf tensors [Lc], each episode's sampler log-probabilities plus `offset` and a wiggle that differs by token."""
    return [
        torch.tensor(
            [lp + offset * math.sin(1 + 7 * i + t) for t, lp in enumerate(episode.sampler_logprobs)],
            dtype=torch.float64,
        ).requires_grad_()
        for i, episode in enumerate(episodes)
    ]


def merge(parts: list[dict[str, Metric]]) -> dict[str, float]:
    """Metrics of micro-batches merged as the recorder does: weighted mean, max, min, sum, last."""
    merged: dict[str, float] = {}
    for key in {key for part in parts for key in part}:
        metrics = [part[key] for part in parts if key in part]
        values = [float(metric.value) for metric in metrics]
        weights = [metric.weight for metric in metrics]
        merged[key] = {
            "mean": lambda v, w: sum(x * y for x, y in zip(v, w)) / sum(w),
            "sum": lambda v, w: sum(v),
            "max": lambda v, w: max(v),
            "min": lambda v, w: min(v),
            "last": lambda v, w: v[-1],
        }[metrics[0].reduction](values, weights)
    return merged


def run_loss(
    algorithm: Algorithm, episodes: list[Episode], values: list[Tensor], batch: TrainBatch, entropy: float = 0.7
):
    """`Algorithm.loss` with the given log-probabilities and a constant entropy."""
    logprobs = spread_logprobs(batch, episodes, values)
    return algorithm.loss(batch, logprobs, torch.full_like(logprobs, entropy))


def loss_inputs(
    logprobs: Tensor,
    *,
    old: Tensor | None = None,
    advantages: list[float],
    sequence_ids: list[int] | None = None,
    weights: list[float] | None = None,
    group_ids: list[int] | None = None,
) -> LossInputs:
    """Every token in the loss; one sequence unless `sequence_ids` [T] says otherwise. No correction."""
    ids = torch.tensor(sequence_ids or [0] * len(advantages))
    num = int(ids.max()) + 1
    mask = torch.ones(len(advantages), dtype=logprobs.dtype)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if old is None else old,
        advantages=torch.tensor(advantages, dtype=logprobs.dtype),
        mask=mask,
        correction=torch.ones_like(mask),
        sequences=Sequences(ids, mask, num),
        group_ids=torch.tensor(group_ids or [0] * num),
        weights=torch.tensor(weights or [1.0] * num, dtype=logprobs.dtype),
        normalizers=Normalizers(
            num_tokens=len(advantages),
            num_sequences=num,
            num_groups=len(set(group_ids or [0])),
            max_completion_tokens=MAX_TOKENS,
        ),
    )
