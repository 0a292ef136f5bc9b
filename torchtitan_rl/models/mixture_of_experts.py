"""Mixtures of experts: the entries of config.json that describe one, and torchtitan's config of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan.config import Configurable
from torchtitan.models.common import TransformerBlock
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from torchtitan_rl.errors import expect
from torchtitan_rl.models.experts import ExactExperts, Float32Gate, PackedMoE
from torchtitan_rl.types import NO_RECORD

if TYPE_CHECKING:
    from torchtitan.config import ParallelismConfig
    from torchtitan.models.common.decoder import Decoder
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """A model's mixture of experts, which all its layers but the dense ones have."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    """Whether the weights of a token's experts are divided by their sum."""
    dense: tuple[int, ...] = ()
    """The layers with one MLP instead."""

    @classmethod
    def of(cls, found: "PretrainedConfig") -> "MixtureOfExperts":
        layers, step = range(found.num_hidden_layers), found.decoder_sparse_step
        return cls(
            num_experts=found.num_experts,
            num_experts_per_tok=found.num_experts_per_tok,
            moe_intermediate_size=found.moe_intermediate_size,
            norm_topk_prob=found.norm_topk_prob,
            dense=tuple(i for i in layers if i in found.mlp_only_layers or (i + 1) % step),
        )

    def config(self, dim: int) -> PackedMoE.Config:
        """Returns the config of a layer with inputs of size `dim`, whose weights are read from a folder.

        Without torchtitan's load balancing: its bias of experts is in no Hugging Face model and not in the engine.
        """
        experts, chosen = self.num_experts, self.num_experts_per_tok
        return PackedMoE.Config(
            num_experts=experts,
            router=TokenChoiceTopKRouter.Config(
                num_experts=experts,
                top_k=chosen,
                gate=Float32Gate.Config(
                    in_features=dim, out_features=experts, param_init={"weight": skip_param_init}
                ),
                score_func="softmax",
                route_norm=self.norm_topk_prob,
            ),
            routed_experts=RoutedExperts.Config(
                inner_experts=ExactExperts.Config(
                    dim=dim,
                    hidden_dim=self.moe_intermediate_size,
                    num_experts=experts,
                    param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init),
                ),
                token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=experts, top_k=chosen),
            ),
            load_balance_coeff=None,
        )


def mixture_entries(layers: Sequence[TransformerBlock.Config]) -> dict[str, Any]:
    """Returns the config.json entries of a model's mixture; {} for a dense model."""
    moe = next((layer.moe for layer in layers if layer.moe is not None), None)
    if moe is None:
        return {}
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "moe_intermediate_size": moe.routed_experts.inner_experts.hidden_dim,
        "norm_topk_prob": moe.router.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(layers) if layer.moe is None],
    }


def check_mixture(
    model: "Decoder.Config",
    trainer: Configurable.Config,
    generator: Configurable.Config,
    *,
    world_size: int,
    on_cpu: bool,
) -> None:
    """Check the degrees and settings of a mixture of experts, and that a dense model has no expert parallelism.

    Raises UserError, naming the field, the value, what was expected and the remedy.
    """
    entries = mixture_entries(model.layers)
    if not entries:
        field, degree = "expert_parallel_degree", trainer.parallelism.expert_parallel_degree
        expected, remedy = "1, as the model has no experts", "Use FSDP, HSDP and TP."
        expect(degree == 1, f"trainer.parallelism.{field}", degree, expected, remedy)
        replay, expected = generator.router_replay, "False, as the model has no experts"
        expect(not replay, "generator.router_replay", replay, expected, "Leave it off.")
        return
    if generator.router_replay:
        _check_replay(entries, generator, on_cpu)
    _check_degrees(entries, trainer.parallelism, world_size)
    expected = "False for a mixture of experts: it is not tested"
    expect(not trainer.compile, "trainer.compile", True, expected, "Leave it off.")
    rank = trainer.lora.rank
    expected = "0 for a mixture of experts: with adapters vLLM takes experts that a CPU cannot run, so it is not tested"
    expect(rank == 0, "trainer.lora.rank", rank, expected, "Train all weights.")
    degree, inner = generator.tensor_parallel_degree, entries["moe_intermediate_size"]
    field = "generator.tensor_parallel_degree"
    expected = f"a divisor of moe_intermediate_size {inner}"
    expect(inner % degree == 0, field, degree, expected, "Use another degree.")


def _check_replay(entries: dict[str, Any], generator: Configurable.Config, on_cpu: bool) -> None:
    """Check what a replay of the engine's choices needs."""
    degree, experts = generator.tensor_parallel_degree, entries["num_experts"]
    expected = "1 with generator.router_replay: vLLM 0.32 gives the experts of a token to the first rank of an engine alone"
    remedy = "Turn generator.router_replay off."
    holds = on_cpu or degree == 1
    expect(holds, "generator.tensor_parallel_degree", degree, expected, remedy)
    expected = f"fewer than {NO_RECORD} experts, which one byte can tell apart, but the model has {experts}"
    expect(experts < NO_RECORD, "generator.router_replay", True, expected, "Turn it off.")


def _check_degrees(entries: dict[str, Any], p: "ParallelismConfig", world_size: int) -> None:
    """Check that the trainer's degrees divide a mixture's experts, with these entries of config.json, and each other."""
    of_trainer = "trainer.parallelism."
    tp, ep = p.tensor_parallel_degree, p.expert_parallel_degree
    experts, inner = entries["num_experts"], entries["moe_intermediate_size"]
    expected = "1 for a mixture of experts: no such layout is tested"
    remedy = "Use data_parallel_shard_degree (FSDP) and expert_parallel_degree. The generator's tensor_parallel_degree may differ."
    expect(tp == 1, f"{of_trainer}tensor_parallel_degree", tp, expected, remedy)
    replicate = p.data_parallel_replicate_degree
    expected = "1 for a mixture of experts: torchtitan 0.3.0 cannot load its weights into replicas"
    field = f"{of_trainer}data_parallel_replicate_degree"
    expect(replicate == 1, field, replicate, expected, "Use FSDP alone.")
    shards = p.data_parallel_shard_degree if p.data_parallel_shard_degree > 0 else world_size
    divides = shards % ep == 0 and experts % ep == 0
    expected = f"a divisor of the {shards} FSDP ranks and of num_experts {experts}"
    remedy = "Use another degree, or start other ranks."
    expect(divides, f"{of_trainer}expert_parallel_degree", ep, expected, remedy)
    split, ranks = (inner, shards // ep) if shards > experts else (experts, shards)
    expected = (
        f"one with which FSDP divides num_experts {experts}, or with more ranks than experts moe_intermediate_size {inner}, "
        f"but {ranks} ranks do not divide {split}"
    )
    field, degree = f"{of_trainer}data_parallel_shard_degree", p.data_parallel_shard_degree
    expect(split % ranks == 0, field, degree, expected, "Change it, or start other ranks.")
