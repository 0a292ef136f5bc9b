"""A policy with adapters and an engine in one process, for tests of the push."""

from pathlib import Path

import torch

from tests.parts.pushes import Pair
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.lora.lora_config import LoraConfig

LORA = LoraConfig(rank=6, alpha=9.0)  # vLLM pads it to 8
A, B = (f"model.layers.1.mlp.down_proj.lora_{one}.weight" for one in "AB")


class AdapterPair(Pair):
    """Its folder has the base."""

    def __init__(
        self, folder: Path, *, dtype: str = "float32", tp: int = 1, generator_tp: int = 1, lora: LoraConfig = LORA
    ) -> None:
        self.lora = Lora(lora)
        own = {"dtype": dtype, "tensor_parallel_degree": generator_tp}
        super().__init__(folder, lambda _: None, dtype, lora=self.lora, tp=tp, **own)

    def sent(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.lora.weights(self.generator.dtype)}

    def sync(self, weights: dict[str, torch.Tensor] | None = None, version: int = 1) -> int:
        """Push the policy's adapter, or this one in its place."""
        if weights is not None:
            self.lora.weights = lambda _: iter(weights.items())
        try:
            return super().sync(version=version)
        finally:
            vars(self.lora).pop("weights", None)
