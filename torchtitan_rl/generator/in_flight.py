"""Sampling over several steps: a step ends when enough groups are whole, and the others go on after its update.

A carried group keeps its tokens with their log-probabilities, and its environments. Which groups make a step depends on tokens
and the environments' answers. None is thrown away: a group that has reached the greatest age is waited for.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.config import Configurable

from torchtitan_rl import comm
from torchtitan_rl.conversation import Conversation
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.errors import UserError
from torchtitan_rl.events import progress, record_metric, record_metrics
from torchtitan_rl.fields.number import number
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.generator.replay import Recorded, replay
from torchtitan_rl.replicated import check_replicated
from torchtitan_rl.types import Completion, Group, Metric, Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Carried:
    """A prompt whose group continues in the next step."""

    prompt: Prompt
    since: int
    """The policy version of the group's first tokens."""
    samples: list[Recorded]


class InFlight(Configurable):
    """The carried groups. Between steps they are equal on every rank and part of checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        prompts: int = number(0, least=0, remedy="Use 1.5 times num_prompts_per_step, or 0.")
        """Prompts that are sampled at once. A step ends when num_prompts_per_step of them are whole; the others go on after
        the update. 0: every step waits for its longest completion."""

        max_age: int = number(4, least=1, remedy="Use 4.")
        """Most updates between a group's first token and the step that trains on it. That step waits for the group."""

    def __init__(self, config: Config, *, generator: Generator, stream: PromptStream) -> None:
        """`stream`: the training prompts, of which each step takes the next ones."""
        self.config = config
        self.carried: dict[int, Carried] = {}  # by prompt_idx
        self._generator = generator
        self._stream = stream
        self._here: dict[int, list[Conversation]] = {}
        """The conversations of this replica's carried groups, by prompt_idx. A resumed run has none at first."""

    @property
    def active(self) -> bool:
        """Whether a step may begin or end with unfinished groups."""
        return bool(self.config.prompts or self.carried)

    def num_new(self, needed: int) -> int:
        """Returns how many new prompts a step of `needed` groups begins with."""
        return max(0, max(needed, self.config.prompts) - len(self.carried))

    @contextmanager
    def step_groups(
        self, new: Sequence[Prompt], needed: int, *, step: int, round: int = 0
    ) -> Iterator[Iterator[Group[Completion]]]:
        """In the context, iterate over this replica's share of a step's `needed` groups, each as soon as it is whole.

        When the context ends, the groups that are not whole are carried to the next step, on every rank. Collective.

        Args:
            new: `num_new` prompts.
            step, round: see `Generator.begin`.
        """
        prompts = self._with_carried(new)
        check_replicated(step, prompts)
        with closing(self._sample(prompts, needed=needed, step=step, round=round)) as groups:
            yield groups
        if self.active:
            self._carry(prompts)

    def _with_carried(self, new: Sequence[Prompt]) -> list[Prompt]:
        """Returns the carried prompts and the new ones, by prompt_idx. A new prompt gets the smallest index that is free.

        Replicas share the prompts by index, so a carried group stays on its replica, and its successor gets its place.
        """
        if not self.active:
            return list(new)
        free = sorted(set(range(len(self.carried) + len(new))) - set(self.carried))
        prompts = [
            replace(prompt, prompt_idx=index) for prompt, index in zip(new, free, strict=False)
        ]
        prompts += [carried.prompt for carried in self.carried.values()]
        return sorted(prompts, key=lambda prompt: prompt.prompt_idx)

    def _sample(
        self, prompts: Sequence[Prompt], *, needed: int, step: int, round: int
    ) -> Iterator[Group[Completion]]:
        """Yields the first groups that are whole, this replica's share of `needed`. The others are kept for the next step."""
        generator = self._generator
        if not self.active:
            yield from generator.generate(prompts, step=step, round=round)
            return
        begun = generator.begin(prompts, step=step, round=round, carried=self._here)
        self._restore(begun.groups)
        self._here = {}
        share = len(range(generator.replica, needed, generator.num_replicas))
        left, urgent, taken = share, self._urgent(begun.prompts, share), set()
        with closing(begun.whole_groups()) as whole:
            for group in whole:
                index = group.prompt.prompt_idx
                if index in urgent or left > len(urgent):  # room is kept for the urgent ones
                    urgent.discard(index)
                    taken.add(index)
                    left -= 1
                    yield group
                if not left:
                    break
            begun.cut()
        for prompt, group in zip(begun.prompts, begun.groups, strict=True):
            if prompt.prompt_idx not in taken:
                self._here[prompt.prompt_idx] = group

    def _restore(self, groups: Sequence[list[Conversation]]) -> None:
        """Bring the carried samples among `groups` that are not here to where they were: after a resume, which may have more or
        fewer samples a group."""
        asked: list[tuple[list[Conversation], int, Recorded]] = []
        for group in groups:
            index = group[0].prompt.prompt_idx
            is_resumed = index in self.carried and index not in self._here
            samples = self.carried[index].samples if is_resumed else []
            for i, sample in enumerate(samples[: len(group)]):
                group[i].seed = sample.seed
                if sample.prompt is None:
                    sample.complete(group[i])
                else:
                    asked.append((group, i, sample))
        num_new = replay(self._generator, asked) if asked else 0
        if num_new and self._generator.rank_in_replica == 0:
            record_metric("in_flight/begun_anew", float(num_new), "sum")
            of_all = f"{num_new} of {len(asked)} conversations in flight"
            progress(f"{of_all} begin anew: their environments answer otherwise now")

    def _urgent(self, mine: Sequence[Prompt], size: int) -> set[int]:
        """Returns the carried groups among `mine` that the step waits for, at most `size`, by prompt_idx: the oldest."""
        version = self._generator.policy_version
        carried = [self.carried[p.prompt_idx] for p in mine if p.prompt_idx in self.carried]
        old = [group for group in carried if version - group.since >= self.config.max_age]
        old.sort(key=lambda group: (group.since, group.prompt.prompt_idx))
        return {group.prompt.prompt_idx for group in old[:size]}

    def _carry(self, prompts: Sequence[Prompt]) -> None:
        """Make the groups that all replicas have kept of `prompts` the carried ones, on every rank. Collective."""
        generator, version = self._generator, self._generator.policy_version
        kept: list[Carried] = []
        for prompt in prompts:
            group, before = self._here.get(prompt.prompt_idx), self.carried.get(prompt.prompt_idx)
            for conversation in group or ():
                conversation.end_step(version)
            if group and generator.rank_in_replica == 0:
                since = before.since if before else version
                samples = [Recorded.of(conversation) for conversation in group]
                kept.append(Carried(prompt=prompt, since=since, samples=samples))
        self.carried = {
            carried.prompt.prompt_idx: carried for carried in comm.all_gather_lists(kept)
        }
        samples = [sample for carried in self.carried.values() for sample in carried.samples]
        waiting = sum(sample.waits for sample in samples)
        oldest = max((version - carried.since + 1 for carried in self.carried.values()), default=0)
        record_metrics(
            {
                "in_flight/groups": Metric(float(len(self.carried)), "max"),
                "in_flight/tokens": Metric(float(sum(s.num_tokens for s in samples)), "max"),
                "in_flight/waiting": Metric(float(waiting), "max"),
                "in_flight/oldest": Metric(float(oldest), "max"),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """The carried groups, as JSON values. A prompt is saved as its place in the data, and its tokens to compare."""
        return {
            str(index): [
                carried.prompt.stream_idx,
                carried.prompt.token_ids.tolist(),
                carried.since,
                [sample.as_json() for sample in carried.samples],
            ]
            for index, carried in self.carried.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises UserError if the data have other prompts there now."""
        self.carried = {}
        for index, (place, tokens, since, samples) in state.items():
            prompt = self.prompt_at(place, int(index), tokens)
            restored = [Recorded.from_json(sample) for sample in samples]
            self.carried[int(index)] = Carried(prompt=prompt, since=since, samples=restored)

    def place_of(self, prompt: Prompt) -> tuple[int, int, list[int]]:
        """Returns the arguments by which `prompt_at` finds a training prompt, also one that an environment has changed."""
        tokens = self._stream.at(prompt.stream_idx).token_ids.tolist()
        return prompt.stream_idx, prompt.prompt_idx, tokens

    def prompt_at(self, place: int, prompt_idx: int, tokens: list[int]) -> Prompt:
        """Returns the training prompt at a place in the data. Raises UserError if it has not these tokens."""
        prompt = replace(self._stream.at(place), prompt_idx=prompt_idx)
        if prompt.token_ids.tolist() != tokens:
            raise UserError(
                f"the checkpoint holds completions of training prompt {place}, whose text has changed. "
                "Resume with the data that the run was started with."
            )
        return prompt
