"""Small real values for the tests of this room: scored groups, and a packer of a few lines for TrainBatch.

The packer is deliberately not the trainer's: these tests must not pass because two places share a mistake.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_rl.algorithm import Algorithm, LossInputs, Sequences
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.config import RunConfig
from torchtitan_rl.types import (
    Completion,
    Episode,
    Group,
    Member,
    Metric,
    Normalizers,
    Prompt,
    ScoredCompletion,
    SegmentLayout,
    TrainBatch,
    flat,
)

MAX_TOKENS = 16


def algorithm_of(config: RunConfig) -> Algorithm:
    """The objective of a run, as `validate` builds it."""
    return config.algorithm.build(max_completion_tokens=config.sampling.max_tokens)


def built(**fields) -> Algorithm:
    """An objective with these fields."""
    return Algorithm.Config(**fields).build(max_completion_tokens=MAX_TOKENS)


def prompt(index: int) -> Prompt:
    return Prompt(prompt_idx=index, text=f"prompt {index}", token_ids=[1, 2], expected_answer="4")


def scored(
    sample_idx: int,
    reward: float | None,
    *,
    logprobs: tuple[float, ...] = (-1.0, -1.0),
    loss_mask: tuple[bool, ...] | None = None,
    finish_reason: str = "stop",
    answer: str | None = None,
    breakdown: dict | None = None,
    correct: bool | None = None,
) -> ScoredCompletion:
    completion = Completion(
        policy_version=0,
        sample_idx=sample_idx,
        text="text",
        token_ids=list(range(3, 3 + len(logprobs))),
        sampler_logprobs=list(logprobs),
        loss_mask=loss_mask,
        finish_reason=finish_reason,
    )
    return ScoredCompletion(
        completion=completion, reward=reward, reward_breakdown=breakdown or {}, answer=answer, correct=correct
    )


def group_of(prompt_idx: int, *samples: ScoredCompletion) -> Group[ScoredCompletion]:
    return Group(prompt=prompt(prompt_idx), samples=list(samples))


def group(prompt_idx: int, rewards, **columns) -> Group[ScoredCompletion]:
    """One completion for each reward; a keyword gives one value for each."""
    each = ({name: values[i] for name, values in columns.items()} for i in range(len(rewards)))
    return group_of(prompt_idx, *(scored(i, reward, **of) for i, (reward, of) in enumerate(zip(rewards, each))))


class Step(list[Episode]):
    """The episodes of a step, flat, with the groups that hold them."""

    def __init__(self, groups: list[Group[Episode]]) -> None:
        super().__init__(flat(groups))
        self.groups = groups
        self.members = [Member(group.prompt, episode) for group in groups for episode in group.samples]


def episodes_of(
    algorithm: Algorithm, *groups: Group[ScoredCompletion], reference: list[list[float]] | None = None
) -> Step:
    """Credited episodes; `reference` holds the reference's log-probabilities of each, in order."""
    step = Step(draft_episodes(list(groups)))
    for episode, logprobs in zip(step, reference or []):
        episode.reference_logprobs = torch.tensor(logprobs).numpy()
    algorithm.credit.assign(step.groups)
    return step


def normalizers_of(algorithm: Algorithm, step: Step) -> Normalizers:
    return algorithm.normalizers(step.groups)


def pack(
    step: Step,
    normalizers: Normalizers,
    *,
    order: list[int] | None = None,
    padding: int = 0,
    old: list[list[float]] | None = None,
    reference: list[list[float]] | None = None,
) -> TrainBatch:
    """The episodes at `order` as one row, with `padding` pad tokens at its end."""
    order = list(range(len(step))) if order is None else order

    def spread(values) -> list[float]:  # the two prompt tokens predict one position before the completion
        return [0.0, *map(float, values), 0.0]

    rows: list[dict[str, list]] = []
    for place, index in enumerate(order):
        episode, completion = step[index], step[index].completion
        tokens, nothing = [1, 2, *completion.token_ids.tolist()], [0.0] * len(completion.token_ids)
        rows.append(
            {
                "token_ids": tokens,
                "labels": tokens[1:] + [0],
                "mask": spread(completion.loss_mask & episode.in_loss),
                "mu": spread(completion.sampler_logprobs),
                "advantage": [episode.credit.advantage] * len(tokens),
                "sequence": [place] * len(tokens),
                "old": spread(old[index] if old else nothing),
                "ref": spread(reference[index] if reference else nothing),
            }
        )
    if padding:
        names = ("token_ids", "labels", "mask", "mu", "advantage", "old", "ref")
        rows.append(dict.fromkeys(names, [0] * padding) | {"sequence": [len(order)] * padding})
    column = {
        name: torch.tensor([value for row in rows for value in row[name]], dtype=torch.float64) for name in rows[0]
    }
    return TrainBatch(
        token_ids=column["token_ids"].long(),
        labels=column["labels"].long(),
        layout=SegmentLayout.of([len(row["mask"]) for row in rows], device="cpu"),
        loss_mask=column["mask"],
        loss_positions=column["mask"].nonzero()[:, 0],
        sampler_logprobs=column["mu"],
        advantages=column["advantage"],
        sequence_ids=column["sequence"].long(),
        group_ids=torch.tensor([step.members[i].prompt.prompt_idx for i in order], dtype=torch.int64),
        members=[step.members[i] for i in order],
        normalizers=normalizers,
        pi_old_logprobs=column["old"] if old else None,
        reference_logprobs=column["ref"] if reference else None,
        columns={
            name: torch.tensor([step[i].credit.columns[name] for i in order], dtype=torch.float64)
            for name in (step[0].credit.columns if step else ())
        },
    )


def spread_logprobs(batch: TrainBatch, step: Step, values: list[Tensor]) -> Tensor:
    """[T]: each episode's [L] tensor of log-probabilities on the positions that predict its completion.

    Everything else is a constant a correct loss never looks at.
    """
    out = torch.full(batch.loss_mask.shape, -3.25, dtype=values[0].dtype)
    out = out + 0 * values[0].sum()  # connected even if no row is used
    for place, member in enumerate(batch.members):
        positions = (batch.sequence_ids == place).nonzero().squeeze(1)
        where = positions[1 : 1 + len(member.episode.completion.token_ids)]
        index = next(i for i, episode in enumerate(step) if episode is member.episode)
        out = out.index_put((where,), values[index])
    return out


def policy_like(step: Step, offset: float = 0.0) -> list[Tensor]:
    """Leaf tensors [L], each episode's sampler log-probabilities plus `offset` times a wiggle that differs by token."""
    return [
        torch.tensor(
            [
                lp + offset * math.sin(1 + 7 * i + t)
                for t, lp in enumerate(episode.completion.sampler_logprobs.tolist())
            ],
            dtype=torch.float64,
        ).requires_grad_()
        for i, episode in enumerate(step)
    ]


def merge(parts: list[dict[str, Metric]]) -> dict[str, float]:
    """Metrics of micro-batches merged as the recorder does: weighted mean, max, min, sum, last.

    Distributions are left out, and so is the effective sample size, whose merge is a mean over micro-batches.
    """
    merged: dict[str, float] = {}
    for key in {key for part in parts for key in part} - {"sampler/effective_sample_size"}:
        metrics = [part[key] for part in parts if key in part]
        if metrics[0].reduction == "distribution":
            continue
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


def numbers(metrics: dict[str, Metric]) -> dict[str, float]:
    """The values of all but the distributions."""
    return {key: metric.value for key, metric in metrics.items() if metric.reduction != "distribution"}


class Ran(NamedTuple):
    """What `Algorithm.loss` returned, with its metrics read."""

    loss: Tensor
    metrics: dict[str, Metric]


def run_loss(
    algorithm: Algorithm, episodes: Step, values: list[Tensor], batch: TrainBatch, entropy: float = 0.7
) -> Ran:
    """`Algorithm.loss` with the given log-probabilities and a constant entropy."""
    logprobs = spread_logprobs(batch, episodes, values)
    output = algorithm.loss(batch, logprobs, torch.full_like(logprobs, entropy))
    return Ran(output.loss, output.read(output.tally.numbers()))


OLD = [-1.2, -0.3, -2.5, -0.05, -0.7, -1.6, -0.2, -3.0, -0.9]
CHANGE = [0.5, 0.25, 1.1, -0.1, -0.6, 0.3, 0.15, -0.45, -1.3]
ADVANTAGES = [1.2] * 4 + [-0.7] * 2 + [0.4] * 3
ENTROPY = [0.1, 0.9, 0.5, 0.2, 0.7, 0.3, 0.8, 0.05, 0.6]


def three() -> LossInputs:
    """Three completions of 4, 2 and 3 tokens, all in the loss; log pi requires grad. No correction."""
    old = torch.tensor(OLD, dtype=torch.float64)
    mask = torch.ones_like(old)
    return LossInputs(
        logprobs=(old + torch.tensor(CHANGE, dtype=torch.float64)).requires_grad_(),
        old_logprobs=old,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        mask=mask,
        entropy=torch.tensor(ENTROPY, dtype=torch.float64),
        sampler_logprobs=old,
        reference_logprobs=None,
        correction=mask,
        sequences=Sequences(torch.tensor([0] * 4 + [1] * 2 + [2] * 3), mask, 3),
        group_ids=torch.zeros(3, dtype=torch.int64),
        normalizers=Normalizers(num_tokens=9, num_sequences=3, num_groups=1, max_completion_tokens=MAX_TOKENS),
    )


def dense_divergence(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """A divergence of probabilities by its definition, [n, V] each -> [n]."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    m = (1 - beta) * p + beta * q
    return beta * kl(q, m) + (1 - beta) * kl(p, m)
