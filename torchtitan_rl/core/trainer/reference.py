"""The frozen reference: gives the tokens of a step's episodes log pi_ref, for the KL and for losses that ask for it."""

from collections.abc import Sequence
from contextlib import nullcontext

from torchtitan_rl.core.trainer.episode_scores import episode_logprobs
from torchtitan_rl.core.trainer.trainer import Trainer
from torchtitan_rl.core.types import Episode, Group, flat


class Reference:
    """The start of the policy, a `services.Source`. With LoRA it is the policy's base, which takes no second copy."""

    name = "reference"

    def __init__(self, trainer: Trainer) -> None:
        """Load the start's weights once more, unless the policy has adapters. Collective."""
        self.trainer = trainer
        self.model = trainer.model
        if trainer.lora is None:
            self.model = trainer.load_policy().requires_grad_(False)

    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Set every episode's `reference_logprobs` to log pi_ref of its tokens, [L], on every rank. Collective."""
        lora = self.trainer.lora
        with lora.off(self.model) if lora else nullcontext():
            logprobs = episode_logprobs(self.trainer, self.model, groups)
        for episode, values in zip(flat(groups), logprobs, strict=True):
            episode.reference_logprobs = values
