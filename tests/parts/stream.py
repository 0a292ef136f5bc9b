"""A prompt stream of given prompts."""

from dataclasses import replace

from torchtitan_rl.types import Prompt


class ListStream:
    """Stands for `data.stream.PromptStream`: the prompts of a list, once and in order."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts
        self._seen = 0

    def at(self, stream_idx: int) -> Prompt:
        return self._prompts[stream_idx]

    def next_batch(self, num_prompts: int, *, first_idx: int = 0) -> list[Prompt]:
        new = self._prompts[self._seen : self._seen + num_prompts]
        self._seen += len(new)
        return [replace(prompt, prompt_idx=first_idx + i) for i, prompt in enumerate(new)]
