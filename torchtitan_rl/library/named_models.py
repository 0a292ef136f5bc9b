"""Models by name, for configs: torchtitan's models, whose imports take seconds, are imported when one is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torchtitan_rl.core.errors import UserError

if TYPE_CHECKING:
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter


@dataclass(frozen=True)
class NamedModel:
    """The part of torchtitan's ModelSpec that a run uses. The ModelSpec itself is made when it is first used."""

    name: str
    flavor: str
    function: str
    """The function of this module and of library.models that makes it."""
    arguments: dict[str, Any]

    @cached_property
    def spec(self) -> "ModelSpec":
        """torchtitan's ModelSpec. Raises UserError for arguments that make no model."""
        from torchtitan_rl.library import models

        try:
            return getattr(models, self.function)(**self.arguments)
        except TypeError as error:  # an argument that it does not have
            raise UserError(f"model_spec = {self.function}: {error}. Correct its arguments.") from error

    @property
    def model(self) -> "Decoder.Config":
        return self.spec.model

    @property
    def parallelize_fn(self) -> Callable[..., Any]:
        return self.spec.parallelize_fn

    @property
    def state_dict_adapter(self) -> "type[BaseStateDictAdapter]":
        return self.spec.state_dict_adapter


def qwen3(flavor: str) -> NamedModel:
    """torchtitan's Qwen3 of a published size: "0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B" or "235B-A22B"."""
    return NamedModel("qwen3_moe" if "-A" in flavor else "qwen3", flavor, "qwen3", {"flavor": flavor})


def small_qwen3(*, dim: int = 256, n_layers: int = 4, **dimensions: float) -> NamedModel:
    """A Qwen3 of any dimensions, named as in `library.models.small_qwen3`; by default 2.4M parameters at a small vocabulary."""
    dimensions |= {"dim": dim, "n_layers": n_layers}
    name = "qwen3_moe" if dimensions.get("num_experts") else "qwen3"
    return NamedModel(name, f"{n_layers}x{dim}", "small_qwen3", dimensions)
