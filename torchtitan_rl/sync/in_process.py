"""The transport to the engine in this rank's process: what is sent, and what the receiver answers.

`sync/other_ranks.py` has the transport to generators on ranks of their own, with the same methods.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_rl import comm
from torchtitan_rl.device import ON_CPU
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.generator.patches import (
    apply_adapter_at_once,
    num_cached_blocks,
    repack_experts,
)
from torchtitan_rl.models.hf import pairs
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.sync.engine_weights import EngineWeights, Shapes, find_adapter, find_base
from torchtitan_rl.sync.lora_engine import replace_adapter
from torchtitan_rl.types import FloatArray, IntArray

Weights = Iterable[Mapping[str, Tensor]]
"""{Hugging Face's or peft's name: full tensor in the engine's dtype} of each block."""

OTHER_VALUES = "arrived with other values than the policy holds"
CHANGED = "is a constant of the engine that has changed since its start"


class InProcess:
    """Loads weights into the engine, and reads what it computes with."""

    def __init__(self, generator: Generator, lora: Lora | None, shapes: Shapes) -> None:
        """The engine's present constants count as correct. `shapes`: of the policy's weights."""
        self._generator, self._lora = generator, lora
        self._model: nn.Module = generator.inspect(lambda model: model)
        self.dtype = generator.dtype
        self._weights = EngineWeights(
            shapes,
            rank=generator.rank_in_replica,
            degree=generator.config.tensor_parallel_degree,
            dtype=generator.dtype,
            device=next(self._model.parameters()).device,
        )
        head = generator.wide_head
        find_base(self._weights, self._model, unused=head.source if head else None)
        if lora:
            find_adapter(self._weights, self._model)
            if ON_CPU:
                apply_adapter_at_once(self._model)
        self._placed = False
        """Whether vLLM has loaded the weights once. The proof has then compared them where `EngineWeights` has them."""
        # Buffers that are computed from the model's config.
        self._constants = {
            name: buffer.clone() for name, buffer in self._model.named_buffers() if "rotary" in name
        }

    def send(
        self, base: Weights | None, adapter: Weights, *, policy_version: int
    ) -> dict[str, int]:
        """Load the weights into the engine. Returns the bytes of each tensor by its name. Collective, as the iterators are.

        Args:
            base: gathered while it is read, one block at a time; None: the engine keeps the one it has.
            adapter: empty without LoRA.
            policy_version: recorded on every completion sampled after this push.
        """
        sizes: dict[str, int] = {}
        self._generator.wake_weights()
        if base is not None:
            blocks = _counted(base, sizes)
            if self._placed and not ON_CPU:
                self._weights.load(blocks)
            else:
                load_base(self._generator, pairs(blocks))
            self._placed = True
        if self._lora:
            replace_adapter(self._model, dict(pairs(_counted(adapter, sizes))), self._lora)
        begin_sampling(self._generator, policy_version)
        return sizes

    @property
    def asleep(self) -> bool:
        return self._generator.asleep

    def copies(self, *, packed: bool) -> Tensor:
        """See `EngineWeights.copies`; on the CPU."""
        return self._weights.copies(packed=packed).cpu()

    def checksums(self, *, packed: bool) -> Tensor:
        """Returns each engine's checksums, summed over its copies and its ranks, [engines, names] int64 on the CPU. Collective."""
        mine = self._weights.checksums(packed=packed)  # [names] this rank's part
        generator = self._generator
        of_engines = mine.new_zeros(generator.num_replicas, len(mine))
        of_engines[generator.replica] = mine
        dist.all_reduce(of_engines)
        return of_engines.cpu()

    def faults(self) -> dict[str, str]:
        """Returns {name: fault} of what any rank's engine computes with beside its weights. Collective."""
        constants = ((n, self._model.get_buffer(n), start) for n, start in self._constants.items())
        faults = {name: CHANGED for name, buffer, start in constants if not buffer.equal(start)}
        head = self._generator.wide_head
        if head and not head.is_current():
            faults["lm_head.weight"] = OTHER_VALUES
        return dict(comm.all_gather_lists(list(faults.items())))

    def logprobs(self, *, probe: IntArray) -> list[FloatArray]:
        """Returns the log-probabilities of probe[1:] of each rank's engine, [L - 1] each. Collective."""
        return comm.all_gather_lists([self._generator.prompt_logprobs(probe)])


def load_base(generator: Generator, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of an engine that is awake but its adapters."""
    if ON_CPU:
        generator.llm.apply_model(repack_experts)
    # On a CPU `load_weights` would leave the packed copies as they are; without an iterator, vLLM reads the folder again.
    generator.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    if generator.wide_head:
        generator.wide_head.refresh()


def begin_sampling(generator: Generator, policy_version: int) -> None:
    """Let an engine whose weights are loaded sample, without the prefix cache of the old ones."""
    generator.wake(policy_version)  # last, so that the gathered blocks had room
    if not generator.llm.reset_prefix_cache() or num_cached_blocks(generator.llm):
        raise RuntimeError(
            "vLLM kept its prefix cache after a weight sync: completions would mix old and new weights."
        )


def _counted(weights: Weights, sizes: dict[str, int]) -> Iterator[Mapping[str, Tensor]]:
    for block in weights:
        sizes |= {name: tensor.nbytes for name, tensor in block.items()}
        yield block
