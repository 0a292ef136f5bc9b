"""Divides a step's episodes into mini-batches, and these into micro-batches within a token budget, equally many on every
rank."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.events import progress
from torchtitan_rl.trainer.packing import count_work, pack
from torchtitan_rl.types import Episode, Group, Member, TrainBatch

Item = list[Member]
"""Sequences that share a micro-batch: a single one, or a whole group if the loss asks for that."""

LEAST_TOKENS, ONE_IN = 512, 16
"""So many fresh tokens of an optimizer step are scored at least, and one in so many of the items without a gradient."""

Plan = list[list[list[Member]]]
"""[data-parallel rank][micro-batch] -> the members of one forward, the same on every rank."""


class MiniBatch(NamedTuple):
    """The micro-batches of one optimizer step. Every data-parallel rank has equally many."""

    plan: Plan
    num_forward_only: int
    """How many micro-batches, at the front of each rank's, have a gradient of zeros. They get a forward, for metrics and the
    logprob check, and no backward."""
    loss_tokens_for_one: float
    """Loss tokens without a gradient for each that is scored. Means over tokens count a scored one so many times."""
    unscored_tokens: int
    """Tokens, prompts included, that get no forward because nothing is learned from them."""
    batches: list[TrainBatch]
    """This rank's. At least one gets a backward."""


@dataclass(kw_only=True)
class Batcher:
    """Makes this rank's micro-batches."""

    algorithm: Algorithm
    max_tokens: int
    """The budget of one micro-batch. A larger item gets a micro-batch of its own."""
    multiple: int = 1
    """A micro-batch is padded to a multiple of so many tokens."""
    attention_cost: float = 0.0
    """The cost of attending to one token, relative to one token's other work, to balance the ranks."""
    share_prompts: bool = False
    """Keep a rank's items of one prompt together, so that `pack` holds their prompt once. False: fill the micro-batches as well
    as can be."""
    read_prompts_once: bool = False
    """Keep a prompt's items together on a rank too, up to a quarter of its share, and count their prompt once. False: it counts
    once for each completion, also where `pack` shares it, as attention reads it for each."""
    num_ranks: int = 1
    """The data-parallel ranks, of which this one is `rank`."""
    rank: int = 0
    _warned_of_size: bool = field(default=False, init=False)

    def minibatch(self, groups: Sequence[Group[Episode]], *, score_all: bool = True) -> MiniBatch:
        """Plan and pack the groups of one optimizer step.

        Args:
            score_all: whether all episodes without a gradient get a forward, not only those that `draw` chooses.
        """
        loss = self.algorithm.policy_loss
        no_gradient: list[Item] = []
        with_gradient: list[Item] = []
        for item in items_of(groups, whole_groups=loss.whole_groups):
            is_zero = all(self.algorithm.zero_gradient(member.episode) for member in item)
            (no_gradient if is_zero else with_gradient).append(item)
        scored = no_gradient if score_all else draw(no_gradient, known=_fresh_tokens(with_gradient))
        without_backward = self.plan(scored)
        num_forward_only = len(without_backward[0])  # as on every rank
        # AdamW needs a gradient, even of zeros, on every rank: an empty micro-batch if there is nothing to learn.
        with_backward = self.plan(with_gradient) if with_gradient else [[[]]] * self.num_ranks
        plan = [first + then for first, then in zip(without_backward, with_backward, strict=True)]
        batches = self._packed(plan, groups, columns=loss.reads)
        tokens, _, loss_tokens = self._work(no_gradient)
        scored_tokens, _, scored_loss_tokens = self._work(scored)
        for_one = loss_tokens / max(scored_loss_tokens, 1)
        return MiniBatch(plan, num_forward_only, for_one, tokens - scored_tokens, batches)

    def microbatches(self, groups: Sequence[Group[Episode]]) -> list[TrainBatch]:
        """Plan and pack the groups for forwards that read no credit. Returns this rank's micro-batches."""
        items = items_of(groups, whole_groups=self.algorithm.policy_loss.whole_groups)
        return self._packed(self.plan(items), groups)

    def _work(self, items: Sequence[Item]) -> tuple[int, int, int]:
        return count_work([*chain.from_iterable(items)], share_prompts=self.share_prompts)

    def _packed(
        self, plan: Plan, groups: Sequence[Group[Episode]], columns: Sequence[str] = ()
    ) -> list[TrainBatch]:
        """This rank's micro-batches. `groups`: of the whole optimizer step, for the normalizers."""
        sums = self.algorithm.normalizers(groups)
        layout = {"multiple": self.multiple, "share_prompts": self.share_prompts}
        own = plan[self.rank]
        return [pack(members, normalizers=sums, columns=columns, **layout) for members in own]

    def plan(self, items: Sequence[Item]) -> Plan:
        """Assign items to ranks and split each rank's share into micro-batches. Warns once of an item over the token budget.

        Returns:
            [rank][micro-batch] -> members. Every rank has the same number of micro-batches, so that collectives match.
            Ranks with too few items get empty ones. Without items no rank has any.
        """
        self._warn_of_size(items)
        if self.read_prompts_once:
            share = sum(map(num_tokens, items)) // self.num_ranks
            items = _joined(items, min(self.max_tokens, share // 4))
        priced: list[_Priced] = []
        for item in items:
            tokens, pairs, _ = count_work(item, share_prompts=self.read_prompts_once)
            priced.append(_Priced(item, tokens, tokens + self.attention_cost * pairs))
        # The most costly first, each to the least loaded rank: loads are within 4/3 of the optimum (Graham, 1969).
        shares: list[list[_Priced]] = [[] for _ in range(self.num_ranks)]
        loads = [(0.0, rank) for rank in range(self.num_ranks)]
        for costly in sorted(priced, key=lambda one: -one.cost):  # stable
            load, rank = heapq.heappop(loads)
            shares[rank].append(costly)
            heapq.heappush(loads, (load + costly.cost, rank))
        plan = [_fit(share, self.max_tokens, by_prompt=self.share_prompts) for share in shares]
        most = max(len(microbatches) for microbatches in plan)
        return [microbatches + [[]] * (most - len(microbatches)) for microbatches in plan]

    def _warn_of_size(self, items: Sequence[Item]) -> None:
        largest = max(items, key=num_tokens, default=[])
        if num_tokens(largest) > self.max_tokens and not self._warned_of_size:
            self._warned_of_size = True
            kind = "group" if len(largest) > 1 else "sequence"
            progress(
                f"trainer.max_tokens_per_microbatch {self.max_tokens}: the {kind} of {largest[0].name} has "
                f"{num_tokens(largest)} tokens and cannot be split, so its micro-batch takes more memory"
            )

    def count(self, minibatches: Sequence[MiniBatch]) -> tuple[npt.NDArray[np.float64], list[int]]:
        """Returns the work of one pass over the step, of all ranks: `UpdateReport.work` [2, 3] and `rank_tokens`."""
        work = np.zeros((2, 3))
        rank_tokens = [0] * self.num_ranks
        for minibatch in minibatches:
            for rank, microbatches in enumerate(minibatch.plan):
                for i, members in enumerate(microbatches):
                    counts = count_work(members, share_prompts=self.share_prompts)
                    rank_tokens[rank] += counts[0]
                    has_backward = i >= minibatch.num_forward_only
                    work += np.outer([1, has_backward], counts)
        return work, rank_tokens


def items_of(groups: Sequence[Group[Episode]], *, whole_groups: bool) -> list[Item]:
    """Returns the episodes in the loss, one by one or by groups. Episodes without sampled tokens are left out."""
    items: list[Item] = []
    for group in groups:
        members = [
            Member.of(group, episode)
            for episode in group.samples
            if episode.in_loss and episode.completion.loss_mask.any()
        ]
        if not whole_groups:
            items += [[member] for member in members]
        elif members:
            items.append(members)
    return items


def draw(items: Sequence[Item], *, known: int) -> list[Item]:
    """Returns the items without a gradient that are scored for the comparison with the sampler, in their order.

    One in ONE_IN, and more until LEAST_TOKENS are compared. Chance chooses, by the prompts and the policy's version: the same on every
    rank and after a resume.

    Args:
        known: fresh tokens of the optimizer step that have a gradient and are compared in any case.
    """
    members = chain.from_iterable(items)
    names = [(m.prompt.prompt_idx, m.episode.completion.policy_version) for m in members]
    chosen: set[int] = set()
    for i in np.random.default_rng(np.ravel(names)).permutation(len(items)):
        if len(chosen) * ONE_IN >= len(items) and known >= LEAST_TOKENS:
            break
        chosen.add(i)
        known += _fresh_tokens([items[i]])
    return [item for i, item in enumerate(items) if i in chosen]


def _fresh_tokens(items: Sequence[Item]) -> int:
    """The sampled tokens of the newest weights, on which the gate compares trainer and sampler."""
    members = chain.from_iterable(items)
    return sum(np.count_nonzero(member.episode.completion.fresh_mask) for member in members)


def split_groups(groups: Sequence[Group[Episode]], num_parts: int) -> list[list[Group[Episode]]]:
    """Split the groups with a loss into at most `num_parts` mini-batches with equal numbers of groups, to within one.

    No mini-batch is empty: without a group in the loss nothing is updated. One whose advantages are all 0 still takes a step,
    with a gradient of zeros; momentum and weight decay then move the policy.
    """
    in_loss = [group for group in groups if any(episode.in_loss for episode in group.samples)]
    num_parts = min(num_parts, len(in_loss))
    return [in_loss[part::num_parts] for part in range(num_parts)]


def _joined(items: Sequence[Item], most: int) -> list[Item]:
    """Joins items of one prompt up to `most` tokens, of which the prompt's count once."""
    joined: list[Item] = []
    for item in sorted(items, key=lambda item: item[0].prompt.prompt_idx):  # stable
        both = [*joined[-1], *item] if joined else item
        is_one_prompt = both[0].prompt.prompt_idx == item[0].prompt.prompt_idx
        if joined and is_one_prompt and count_work(both, share_prompts=True)[0] <= most:
            joined[-1] = both
        else:
            joined.append(item)
    return joined


class _Priced(NamedTuple):
    """An item, its tokens, and the cost of a forward and backward over it in units of a token's work without attention."""

    item: Item
    tokens: int
    cost: float


def _fit(items: Sequence[_Priced], max_tokens: int, *, by_prompt: bool) -> list[list[Member]]:
    """First-fit decreasing: each item goes into the first micro-batch with enough room, or begins another. Next-fit by prompt
    looks into the last alone: a prompt is in few of them."""
    microbatches: list[list[Member]] = []
    used: list[int] = []  # tokens of each
    ordered = sorted(items, key=lambda one: -one.tokens)  # stable
    if by_prompt:
        ordered = sorted(items, key=lambda one: one.item[0].prompt.prompt_idx)
    for item, size, _ in ordered:
        for i in range(len(used))[-1 if by_prompt else 0 :]:
            if used[i] + size <= max_tokens:
                microbatches[i] += item
                used[i] += size
                break
        else:
            microbatches.append([*item])
            used.append(size)
    return microbatches


def num_tokens(members: Sequence[Member]) -> int:
    return sum(member.num_tokens for member in members)
