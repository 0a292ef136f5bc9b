"""A choice of prompts of your own: docs/extending.md. Set `config.prompts = Replay.Config()`."""

import json
from dataclasses import replace

from torchtitan_rl.data.stream import PromptStream


class Replay(PromptStream):
    """Asks again, once in a while, the prompts that some samples got right and others did not: up to half of a step."""

    def __init__(self, config, **parts):
        super().__init__(config, **parts)
        self.again = []  # stream_idx of each, the oldest first

    def next_batch(self, num_prompts, *, first_idx=0):
        old, self.again = self.again[: num_prompts // 2], self.again[num_prompts // 2 :]
        asked = [replace(self.at(place), prompt_idx=first_idx + i) for i, place in enumerate(old)]
        return asked + super().next_batch(num_prompts - len(old), first_idx=first_idx + len(old))

    def observe(self, groups):
        for group in groups:
            if len({episode.scored.correct for episode in group.samples}) > 1:
                self.again.append(group.prompt.stream_idx)

    def state_dict(self):
        return {**super().state_dict(), "again": json.dumps(self.again)}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.again = json.loads(state_dict["again"])
