"""Adapters in transformers' layers: each matrix of the targets gets an A and a B of its own, as with peft."""

from typing import NamedTuple

from torch import Tensor, nn

from torchtitan_rl.errors import expect
from torchtitan_rl.models.lora.lora_config import LoraConfig


class Names(NamedTuple):
    """The names of a target's matrices."""

    torchtitan: tuple[str, ...]
    transformers: tuple[str, ...]
    """A merged matrix needs all targets that it holds."""


MATRICES = {
    "qkv_proj": Names(("wqkv", "wq", "wk", "wv"), ("q_proj", "k_proj", "v_proj", "qkv_proj")),
    "o_proj": Names(("wo",), ("o_proj",)),
    "gate_proj": Names(("w1",), ("gate_proj", "gate_up_proj")),
    "up_proj": Names(("w3",), ("up_proj", "gate_up_proj")),
    "down_proj": Names(("w2",), ("down_proj",)),
}
"""By the targets of `LoraConfig`."""


class LoraLinear(nn.Linear):
    """W x + b + scale · B A x, with W and b frozen."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        """Take the place of `base`, whose parameters it keeps."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self._lora_scaling = scale
        made = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_a = nn.Linear(base.in_features, rank, **made)
        self.lora_b = nn.Linear(rank, base.out_features, **made)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return super().forward(input) + self._lora_scaling * self.lora_b(self.lora_a(input))


def add_adapters(layers: nn.Module, config: LoraConfig) -> None:
    """Replace the targets' matrices in transformers' decoder layers.

    Raises UserError, naming the field, if the model lacks a target or has it merged with one that is left out.
    """
    field, targets = "trainer.lora.targets", config.targets
    lacking = set(targets)
    for module in list(layers.modules()):
        for name, child in list(module.named_children()):
            held = {target for target, names in MATRICES.items() if name in names.transformers}
            if held.isdisjoint(targets) or not isinstance(child, nn.Linear):
                continue
            expected = f"{' and '.join(sorted(held))}, which are one {name}"
            expect(held <= set(targets), field, targets, expected, "Name all or none of these.")
            setattr(module, name, LoraLinear(child, config.rank, config.alpha / config.rank))
            lacking -= held
    expected = f"matrices of the model, which has no {', '.join(sorted(lacking))}"
    expect(not lacking, field, targets, expected, "Leave it out.")
