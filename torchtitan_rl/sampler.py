"""Samples prompts and has what is sampled graded, with this rank's engine or with generators on ranks of their own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_rl import comm
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.events import record_metric, timed
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.generator.in_flight import Carried, InFlight
from torchtitan_rl.link import Link, Order
from torchtitan_rl.rewards import Grader
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.stored import from_text, to_text
from torchtitan_rl.text import plain
from torchtitan_rl.types import Completion, EvaluationPass, Group, Prompt, ScoredCompletion

if TYPE_CHECKING:
    from torchtitan_rl.generator.demonstrations import Demonstrations, NoEngine

Scored = list[Group[ScoredCompletion]]
"""The groups of all replicas, in the prompts' order, the same on every rank."""


@dataclass(eq=False)
class Sampler:
    """Samples with this rank's engine. Each group is graded as soon as it is whole, while the engine samples the next."""

    generator: "Generator | NoEngine"
    step_sampler: "InFlight | Demonstrations"
    """Samples the groups of a training step, with the generator or from demonstrations."""
    grader: Grader
    keep: Callable[..., None]
    """See `RankObserver.keep`."""

    def draw(self, stream: PromptStream, needed: int, *, first_idx: int = 0) -> list[Prompt]:
        """Returns the stream's next prompts, as many as `training_groups` lacks for `needed` groups."""
        return stream.next_batch(self.step_sampler.num_new(needed), first_idx=first_idx)

    def training_groups(
        self, new: Sequence[Prompt], needed: int, round: int, *, state: TrainerState
    ) -> Scored:
        """Returns `needed` groups of a training step, after `draw` returned `new`. Collective.

        `round`: the number of the call within the step, part of the seed.
        """
        step = state.global_step
        sampling = self.step_sampler.step_groups(new, needed, step=step, round=round)
        # Nothing is sampled yet: this replica's groups come as they get whole, while `_graded` takes them.
        with sampling as groups:
            return self._graded(groups, state)

    def held_out_groups(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        its_pass: EvaluationPass,
        *,
        state: TrainerState,
    ) -> Scored:
        """Returns the groups of one pass over the held-out prompts. Collective."""
        # Always step 0 and a seed for each sample: the draws do not depend on the step or the number of replicas.
        groups = self.generator.generate(prompts, sampling_config=sampling, seeded=True)
        with closing(groups):
            return self._graded(groups, state, f"{its_pass.prefix}/", its_pass.split)

    def go_ahead(self, stream: PromptStream, needed: int, *, state: TrainerState) -> None:
        """Nothing: this rank's engine samples no step before the update of the one before."""

    def arrive(self) -> None:
        """Nothing has been begun."""

    def close(self, stopped: int = 0) -> None:
        """Nothing: no other rank waits for orders."""

    def _graded(
        self,
        groups: Iterator[Group[Completion]],
        state: TrainerState,
        prefix: str = "",
        split: str = "train",
    ) -> Scored:
        """Sample this replica's groups, each when it is asked for. `prefix`, `split`: of the metrics and the tables' rows."""
        grading = self.grader.round(state)
        with timed(f"{prefix}generate"):
            for group in groups:
                self.keep([group], step=state.global_step, split=split)
                # All ranks of one engine have its completions. One grades them, so that no reward function runs twice.
                if self.generator.rank_in_replica == 0:
                    grading.begin(group)
        with timed(f"{prefix}grade"):
            scored = grading.scored_groups()  # waits for the last
            for key, metric in self.grader.drain_metrics():
                record_metric(prefix + key, *metric)
        with timed(f"{prefix}gather"):
            scored = comm.all_gather_lists(scored)
        return sorted(scored, key=lambda group: group.prompt.prompt_idx)


class Answered(NamedTuple):
    """What generators on ranks of their own answer."""

    groups: Scored
    carried: dict[int, Carried]
    """Groups in flight, by prompt_idx."""
    recorded: list[Any]
    """What each of these ranks recorded meanwhile, for `record`: plain values and arrays."""


class FarSampler:
    """`Sampler` of trainers whose generators are other ranks. With `ahead`, these sample a step's groups during the update on those of
    the step before, so the weights are one update older."""

    def __init__(
        self, link: Link, in_flight: InFlight, *, ahead: bool, record: Callable[[Any], None]
    ) -> None:
        """`in_flight` keeps the groups in flight for checkpoints. `record`: see `Collector.add`."""
        self._link, self._in_flight, self._record = link, in_flight, record
        self._ahead, self._under_way = ahead, False
        self._batch: Answered | None = None
        """The next step's groups, sampled and not yet trained on."""

    def draw(self, stream: PromptStream, needed: int, *, first_idx: int = 0) -> list[Prompt]:
        num_new = self._in_flight.num_new(needed) if self._batch is None else 0
        return stream.next_batch(num_new, first_idx=first_idx)

    def training_groups(self, *asked: Any, state: TrainerState) -> Scored:
        if self._batch is None:
            self._order("training_groups", *asked, state=state)
            self._batch = self._answer()
        batch, self._batch = self._batch, None
        return self._taken(batch)

    def held_out_groups(self, *asked: Any, state: TrainerState) -> Scored:
        self._order("held_out_groups", *asked, state=state)
        return self._taken(self._answer())

    def go_ahead(self, stream: PromptStream, needed: int, *, state: TrainerState) -> None:
        """Let the generators sample the groups of `state.global_step`, the next one, until `arrive`."""
        self._under_way = self._ahead and state.global_step <= state.max_steps
        if self._under_way:
            self._order("training_groups", self.draw(stream, needed), needed, 0, state=state)

    def arrive(self) -> None:
        """Wait for what has been begun."""
        if self._under_way:
            self._batch = self._answer()
            self._under_way = False

    def close(self, stopped: int = 0) -> None:
        """End the generators' ranks. stopped: the signal that has ended training, with which they end too."""
        self._link.order(stopped)

    def state_dict(self) -> dict[str, Any]:
        """The groups that are sampled and not yet trained on, with what was recorded meanwhile, as text. A prompt is saved as its
        place in the data and what an environment has made of it."""
        if self._batch is None:
            return {"batch": None}
        groups = []
        for group in self._batch.groups:
            samples = []
            for each in group.samples:
                own = each.completion.prompt
                completion = replace(each.completion, prompt=None)
                each = replace(each, completion=completion, extra=plain(each.extra))
                samples.append((each, own and _as_read(own)))
            place = self._in_flight.place_of(group.prompt)
            is_as_in_data = group.prompt.token_ids.tolist() == place[-1]
            as_read = {} if is_as_in_data else _as_read(group.prompt)
            groups.append((place, as_read, samples))
        return {"batch": to_text((groups, self._batch.recorded))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Without `ahead`, no correction for their age is asked for: they are dropped."""
        if not self._ahead or state["batch"] is None:
            return
        stored, recorded = from_text(state["batch"])
        groups = []
        for place, as_read, samples in stored:
            prompt = self._in_flight.prompt_at(*place)
            if as_read:
                prompt = replace(prompt, **as_read)
            group = Group(prompt=prompt, samples=[])
            for each, own in samples:
                if own:
                    completion = replace(each.completion, prompt=replace(prompt, **own))
                    each = replace(each, completion=completion)
                group.samples.append(each)
            groups.append(group)
        self._batch = Answered(groups, self._in_flight.carried, recorded)

    def _order(self, groups: str, *asked: Any, state: TrainerState) -> None:
        carried = self._in_flight.carried
        arguments = {"groups": groups, "asked": asked, "state": state, "carried": carried}
        self._link.order(Order(state.global_step, "sample", arguments))

    def _answer(self) -> Answered:
        answered = self._link.answer()
        self._in_flight.carried = answered.carried
        return answered

    def _taken(self, batch: Answered) -> Scored:
        for recorded in batch.recorded:
            self._record(recorded)
        return batch.groups


def _as_read(prompt: Prompt) -> dict[str, Any]:
    """Returns the fields of a prompt that an environment may change: what the policy has read."""
    return {name: getattr(prompt, name) for name in ("text", "token_ids", "messages", "tools")}
