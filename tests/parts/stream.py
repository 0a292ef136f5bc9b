"""A prompt stream of given prompts."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from torchtitan_rl.types import Completion, Group, Prompt

if TYPE_CHECKING:  # the rehearsal pretends a GPU before the generator is imported
    from torchtitan_rl.generator.in_flight import InFlight


class ListStream:
    """Stands for `data.stream.PromptStream`: the prompts of a list, once and in order."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts
        self.seen = 0

    def at(self, stream_idx: int) -> Prompt:
        return self._prompts[stream_idx]

    def next_batch(self, num_prompts: int, *, first_idx: int = 0) -> list[Prompt]:
        new = self._prompts[self.seen : self.seen + num_prompts]
        self.seen += len(new)
        return [replace(prompt, prompt_idx=first_idx + i) for i, prompt in enumerate(new)]


def begun(in_flight: "InFlight", needed: int, *, step: int) -> AbstractContextManager[Iterator[Group[Completion]]]:
    """A step of `needed` groups with the next prompts of the stream of `in_flight`, as `Sampler.training_groups` begins it."""
    new = in_flight._stream.next_batch(in_flight.num_new(needed))  # noqa: SLF001
    return in_flight.step_groups(new, needed, step=step)
