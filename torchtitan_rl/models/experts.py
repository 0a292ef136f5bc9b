"""Mixture of experts over a pack: exact in any dtype, without the padding of a pack, and measured."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.qwen3 import Qwen3Model

from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.models.logprobs import all_reduce
from torchtitan_rl.types import NO_RECORD, Metric, SegmentLayout


class ExactExperts(GroupedExperts, OwnConfig):
    """torchtitan's experts in the dtype of their weights. torchtitan's own round input and weights to bfloat16."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """x [R, D], sorted by expert, and the number of rows of each expert, [E] -> [R, D]"""
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)  # [E]
        gate = _transposed(self.w1_EFD)  # [E, D, F]
        down = _transposed(self.w2_EDF)  # [E, F, D]
        up = _transposed(self.w3_EFD)  # [E, D, F]
        opened = F.silu(self._grouped_mm(A=x_RD, B_t=gate, offs=ends))  # [R, F]
        inner = opened * self._grouped_mm(A=x_RD, B_t=up, offs=ends)  # [R, F]
        return self._grouped_mm(A=inner, B_t=down, offs=ends)  # [R, D]


def _transposed(weight: Tensor) -> Tensor:
    """This rank's experts of a weight [E, X, Y] -> [E, Y, X]."""
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    return weight.transpose(-2, -1)


class Float32Gate(Linear, OwnConfig):
    """A router's logits in float32. torchtitan asks autocast for that, which on a CPU has no float32."""

    def forward(self, input: Tensor) -> Tensor:
        """[1, n, D] -> [1, n, E]"""
        return F.linear(input.float(), self.weight.float())


class PackedMoE(MoE, OwnConfig):
    """torchtitan's mixture of experts for one pack. Padding at the pack's end is not routed and not counted.

    With `replayed`, tokens go to the experts that the sampler recorded (R3, arXiv 2510.11370). Their weights are the
    router's own, and so is its gradient.

    Forwards with a gradient count what their tokens chose, until `take_counts`. Forwards without one, such as those of an
    evaluation, count nothing.
    """

    def __init__(self, config: MoE.Config) -> None:
        super().__init__(config)
        self.padding = 0
        """Rows at the end of the next pack that are not routed. Set by `PackedQwen3.see_pack`; the backward may read it again."""
        self.entropy: Tensor | float = 0.0
        """The sum of the routers' entropies of the tokens in `tokens_per_expert_E`, in nats."""
        self.replayed: Tensor | None = None
        """[T, K] uint8, the experts of each row of the next pack; NO_RECORD where the router chooses. None: everywhere.
        Set as `padding` is."""
        self.replays: Tensor | float = 0.0
        """Tokens with replayed experts, and those of them for which the router would have chosen others: [2]."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        """[1, T, D] -> [1, T, D], 0 on padding"""
        routed = x_BLD[:, : x_BLD.shape[1] - self.padding]  # [1, n, D]
        bias = None if self.replayed is None else self._bias(routed.shape[1])  # [1, n, E]
        # [1, n, K], [1, n, K], [1, n, E]
        weights, chosen, probabilities = self.router(routed, bias)
        is_chosen = torch.zeros_like(probabilities, dtype=torch.bool)  # [1, n, E]
        is_chosen.scatter_(-1, chosen, True)
        counts = is_chosen.sum((0, 1))  # [E] int64
        if torch.is_grad_enabled():
            p = probabilities.detach()  # [1, n, E]
            self.tokens_per_expert_E += counts
            self.entropy = self.entropy - torch.special.xlogy(p, p).sum()
            if self.replayed is not None:
                self._count_replays(chosen[0], p[0])
        out = self.routed_experts(routed, weights, chosen, counts)  # [1, n, D]
        return F.pad(out, (0, 0, 0, self.padding))

    def _bias(self, rows: int) -> Tensor:
        """[1, n, E], what torchtitan adds to the probabilities for the choice alone: more than any at replayed experts."""
        experts = self.router.num_experts
        # [n, K], E where nothing was recorded
        chosen = self.replayed[:rows].long().clamp(max=experts)
        bias = torch.zeros(rows, experts + 1, device=chosen.device)
        return bias.scatter_(-1, chosen, 2.0)[None, :, :experts]

    def _count_replays(self, chosen: Tensor, probabilities: Tensor) -> None:
        """Add one pack's replays, [n, K] of [n, E]."""
        replayed = self.replayed[: len(chosen), 0] != NO_RECORD  # [n]
        least = probabilities.gather(-1, chosen).amin(-1)  # [n], of the chosen
        most = probabilities.scatter(-1, chosen, 0.0).amax(-1)  # [n], of the others
        otherwise = replayed & (most > least)  # [n]
        counts = torch.stack([replayed.sum(), otherwise.sum()])  # [2]
        self.replays = self.replays + counts

    def take_counts(self) -> Tensor:
        """Returns (tokens of each expert, sum of entropies, replays), [E + 3] float32, since the last call."""
        zeros = self.tokens_per_expert_E.new_zeros
        sums = zeros(1) + self.entropy, zeros(2) + self.replays
        taken = torch.cat([self.tokens_per_expert_E, *sums])  # [E + 3]
        self.tokens_per_expert_E.zero_()
        self.entropy = self.replays = 0.0
        return taken


class PackedQwen3(Qwen3Model, OwnConfig):
    """A Qwen3 whose mixtures are told of each pack."""

    def see_pack(self, layout: SegmentLayout, records: Tensor | None) -> None:
        """Tell the mixtures which rows of the next forward, and of its backward, are padding, and to which experts the others go.

        Called before each forward. `records`: [T, R] uint8, the experts that the sampler chose in all layers; None: the routers choose.
        """
        for number, layer in self.layers.items():
            if not getattr(layer, "moe_enabled", False):
                continue
            layer.moe.padding = layout.padding
            layer.moe.replayed = None
            if records is not None:
                of_layers = records.view(len(records), len(self.layers), -1)  # [T, layers, K]
                layer.moe.replayed = of_layers[:, int(number)]  # [T, K]

    def update_metrics(self, group: dist.ProcessGroup | None) -> dict[str, Metric]:
        """Metrics of the forwards with a gradient since the last call. Collective over `group`, the data-parallel ranks."""
        mixtures_of_layers = list(mixtures(self))
        counted = torch.stack([moe.take_counts() for moe in mixtures_of_layers])  # [layers, E + 3]
        counted = all_reduce(counted, group).cpu()  # the host waits once
        counts = counted[:, :-3]  # [layers, E]
        entropies = counted[:, -3]  # [layers]
        replayed, otherwise = counted[:, -2:].sum(0).tolist()
        tokens = counts.sum(1) / mixtures_of_layers[0].router.top_k  # [layers]
        if not tokens.all():
            return {}
        largest = counts.amax(1) / counts.mean(1)  # [layers]
        values = {
            "moe/largest_load": largest.max(),
            "moe/router_entropy": (entropies / tokens).mean(),
            "moe/dead_experts": (counts == 0).sum(),
        }
        if replayed:
            values["moe/replayed"] = replayed / tokens.sum()
            values["moe/chosen_otherwise"] = otherwise / replayed
        return {name: Metric(float(value), "mean") for name, value in values.items()}


def mixtures(model: Decoder) -> Iterator[PackedMoE]:
    """Yields the mixture of each layer that has one."""
    for layer in model.layers.values():
        if getattr(layer, "moe_enabled", False):
            yield layer.moe
