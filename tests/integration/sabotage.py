"""Each way in which an engine can come to other weights than the policy's: named at a full check, with the tensor's name.

    python -m torchtitan_rl.run.launch --standalone --nproc_per_node=2 -m tests.integration.sabotage --dtype bfloat16 --generator-tp 2

Prints for each what the push said, and the probe's difference as a multiple of the noise. --between shows what a CPU's push between two full
checks says, --hf-assets-path takes a model of a folder instead of a tiny one, and with --generator-ranks the last ranks have the engines. A fault
that arises in an engine is the last engine's alone.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_rl import device  # noqa: F401

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP, CommConfig  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from tests.parts.pushes import Policy, TokenizerStandIn  # noqa: E402
from tests.parts.tiny import sampled, save_tiny_checkpoint, scale_policy, sharded_policy  # noqa: E402
from torchtitan_rl import comm  # noqa: E402
from torchtitan_rl.generator.generator import Generator  # noqa: E402
from torchtitan_rl.generator_rank import GeneratorRank  # noqa: E402
from torchtitan_rl.link import Link, Order  # noqa: E402
from torchtitan_rl.models.hf import hf_weights  # noqa: E402
from torchtitan_rl.sampler import Sampler  # noqa: E402
from torchtitan_rl.sampling import SamplingConfig  # noqa: E402
from torchtitan_rl.sync.in_process import CHANGED, OTHER_VALUES, InProcess  # noqa: E402
from torchtitan_rl.sync.other_ranks import OtherRanks  # noqa: E402
from torchtitan_rl.sync.probe import distances  # noqa: E402
from torchtitan_rl.sync.weight_sync import NOT_SENT, WeightSync, WeightSyncError  # noqa: E402
from torchtitan_rl.types import FloatArray, IntArray, Prompt  # noqa: E402

DOWN = "model.layers.1.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
ROTARY = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
Weights = Iterator[tuple[str, Tensor]]


class Engine:
    """This rank's engine, and what goes wrong in it."""

    def __init__(self, folder: str, dtype: str, generator_tp: int, link: Link | None = None) -> None:
        self.generator = Generator(
            Generator.Config(tensor_parallel_degree=generator_tp, dtype=dtype, max_model_len=256, sleep=False),
            hf_assets_path=folder,
            tokenizer=TokenizerStandIn(),
            sampling=SamplingConfig(n=2, max_tokens=4),
            seed=0,
            norms_round_once=True,
        )
        self.link = link
        self._faults = ExitStack()

    def module(self, name: str) -> torch.nn.Module:
        return self.generator.llm.apply_model(lambda model: model.get_submodule(name))[0]

    @property
    def loader(self) -> torch.nn.Module:
        """The engine's layer of DOWN."""
        return self.module(DOWN.rpartition(".")[0])

    def begin(self, fault: str) -> None:
        """Let the last engine do something wrong until `end`."""
        if self.generator.replica == self.generator.num_replicas - 1:
            self._faults.enter_context(IN_ENGINE[fault](self))

    def end(self) -> None:
        self._faults.close()

    def fill_cache(self) -> None:
        block = self.generator.llm.llm_engine.vllm_config.cache_config.block_size
        tokens = [1 + i % 120 for i in range(block + 3)]
        prompts = [Prompt(prompt_idx=i, text="", token_ids=tokens, expected_answer="") for i in range(2)]
        sampled(self.generator, prompts)

    def logprobs(self, probe: IntArray) -> FloatArray:
        """The last engine's log-probabilities of probe[1:], [L - 1]."""
        return comm.all_gather_lists([self.generator.prompt_logprobs(probe)])[-1]

    def close(self) -> None:
        self.generator.close()

    def carry_out_orders(self) -> None:
        """On ranks that have the engines of others. An error is answered; in a run it ends its rank, and the job."""
        rank = GeneratorRank(self.link, Sampler(self.generator, None, None, None), None, None, lambda: 0)
        while isinstance(order := self.link.order(), Order):
            value, errors = None, []
            try:
                part = rank if hasattr(rank, order.method) else self
                value = getattr(part, order.method)(**order.arguments)
            except RuntimeError as error:
                errors.append(error)
            self.link.answer(next(iter(comm.all_gather_lists(errors)), value))


class FarEngine:
    """The same on other ranks."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def close(self) -> None:
        self._link.order(0)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._link.call, 0, method)


class TellingLink(Link):
    """Raises the error that is answered."""

    def answer(self, value: Any = None, stopped: int = 0) -> Any:
        value = super().answer(value, stopped)
        if isinstance(value, RuntimeError) and not self.samples:
            raise value
        return value


class Pair:
    """A policy in these processes, and engines here or on other ranks."""

    def __init__(
        self,
        folder: str,
        probe: list[int],
        dtype: str,
        engine: Engine | FarEngine,
        connect: Callable,
        check_interval: int,
    ) -> None:
        self.model, self.adapter = sharded_policy(Path(folder), dtype=dtype, seq_len=256, chunk_tokens=64)
        self.engine, self._connect, self.dtype = engine, connect, TORCH_DTYPE_MAP[dtype]
        self.policy = Policy(self.model, self.adapter, dtype=dtype)
        self.probe = np.array(probe)
        self._start: list[Tensor] = []
        self._updates = 0
        self.config = WeightSync.Config(check_interval=check_interval)

    def weights(self) -> Weights:
        return hf_weights(self.model, self.adapter, self.dtype)

    def update(self) -> None:
        """Move every weight from the start, up or down, by 1 % at first, then by 2 or 3 % in turn."""
        scale_policy(self.model, 1.0)  # back to shards
        self._start = self._start or [parameter.detach().clone() for parameter in self.model.parameters()]
        self._updates += 1
        share = 0.01 if self._updates == 1 else 0.02 + 0.01 * (self._updates % 2)
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self._start, strict=True):
                parameter.copy_(start * (1 + share * (1e4 * start).sin().sign()))

    def new_sync(self) -> WeightSync:
        """A sync after its first push, which is right."""
        scale_policy(self.model, 1.0)  # back to shards
        sync = self.config.build(trainer=self.policy, connect=self._connect, probe=self.probe)
        self.push(sync, self.weights())
        return sync

    def push(self, sync: WeightSync, weights: Weights) -> None:
        scale_policy(self.model, 1.0)  # back to shards
        sync.base_weights = lambda: ({name: tensor} for name, tensor in weights)
        sync.push(policy_version=1)

    def probe_ratio(self, sync: WeightSync) -> float:
        """The probe's difference, as a multiple of the noise."""
        engine, policy = self.engine.logprobs(probe=self.probe), self.policy.token_logprobs(self.probe)
        return (distances(engine, policy, sync._coarser) / sync._noise)[0]  # noqa: SLF001


def replaced(name: str, old: dict[str, Tensor], where: tuple) -> Callable[[Weights], Weights]:
    """Send the old values of a part of one tensor."""

    def sabotaged(weights: Weights) -> Weights:
        for other, tensor in weights:
            if other == name:
                tensor = tensor.clone()
                tensor[where] = old[name][where]
            yield other, tensor

    return sabotaged


def scaled(weights: Weights) -> Weights:
    for name, tensor in weights:
        yield name, tensor * 1.01 if name == DOWN else tensor


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: ((other, tensor) for other, tensor in weights if other != name)


SAYS = {
    "stale all": f"{EMBEDDING} {OTHER_VALUES}",
    "one behind": f"{EMBEDDING} {OTHER_VALUES}",
    "one tensor skipped": f"{DOWN} {NOT_SENT}",
    "one tensor x 1.01": f"{DOWN} {OTHER_VALUES}",
    "one stale element": f"{DOWN} {OTHER_VALUES}",
    "one stale row": f"{DOWN} {OTHER_VALUES}",
    "a stale block of 16 x 16": f"{DOWN} {OTHER_VALUES}",
    "stale embedding, new tied head": f"{EMBEDDING} {OTHER_VALUES}",
    "tied head missing": f"lm_head.weight {NOT_SENT}",
    "one tensor changed by the engine's loader": f"{DOWN} {OTHER_VALUES}",
    "wrong tensor-parallel shard in the engine": f"{DOWN} {OTHER_VALUES}",
    "changed just before it was packed": f"{DOWN} {OTHER_VALUES}",
    "shifted by one element on the way": f"{DOWN} {OTHER_VALUES}",
    "rotary cache x 1.05": f"{ROTARY} {CHANGED}",
    "prefix cache kept": "vLLM kept its prefix cache",
}
"""What is wrong, and what the error says."""


def sabotages(pair: Pair, generator_tp: int) -> Iterator[tuple[str, Callable[[Weights], Weights]]]:
    """(what is wrong, what is sent), each after a clean push and an update."""
    start = [(name, tensor.clone()) for name, tensor in pair.weights()]
    yield "stale all", lambda weights: iter(start)
    before = [(name, tensor.clone()) for name, tensor in pair.weights()]
    yield "one behind", lambda weights: iter(before)
    yield "one tensor skipped", without(DOWN)
    yield "one tensor x 1.01", scaled
    old = dict(before)
    yield "one stale element", replaced(DOWN, old, (37, 51))
    yield "one stale row", replaced(DOWN, old, (37,))
    yield "a stale block of 16 x 16", replaced(DOWN, old, (slice(32, 48), slice(16, 32)))
    # Where the head has no packed copy (on a GPU, in bfloat16 on a CPU that lacks it), both names are one parameter of the
    # engine, and the one that is loaded last holds.
    if device.ON_CPU and (pair.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):  # noqa: SLF001
        yield "stale embedding, new tied head", replaced(EMBEDDING, old, ())
    yield "tied head missing", without("lm_head.weight")
    skipped = {
        "wrong tensor-parallel shard in the engine": generator_tp == 1,
        "changed just before it was packed": not device.ON_CPU,
        "shifted by one element on the way": isinstance(pair.engine, Engine),
    }
    yield from ((fault, iter) for fault in IN_ENGINE if not skipped.get(fault))


@contextmanager
def loaded_as(engine: Engine, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The engine's loader changes DOWN."""
    method = engine.loader.quant_method
    pack = method.process_weights_after_loading

    def load_otherwise(layer: torch.nn.Module) -> None:
        if layer is engine.loader:
            layer.weight.data.copy_(change(layer.weight.data))
        pack(layer)

    method.process_weights_after_loading = load_otherwise
    yield
    method.process_weights_after_loading = pack


@contextmanager
def changed_before_packing(engine: Engine) -> Iterator[None]:
    """One element of DOWN changes right before it is packed."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def change_and_pack(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer is engine.loader:
            layer.weight.data[5, 7] += 0.5
        pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = change_and_pack
    yield
    utils.dispatch_cpu_unquantized_gemm = pack


@contextmanager
def shifted_on_the_way(engine: Engine) -> Iterator[None]:
    """DOWN arrives as if its part of a bucket began an element too late."""
    receive = engine.link.receive

    def shifted() -> Iterator[dict[str, Tensor]]:
        for bucket in receive():
            if DOWN in bucket:
                bucket[DOWN] = bucket[DOWN].flatten().roll(1).view_as(bucket[DOWN])
            yield bucket

    engine.link.receive = shifted
    yield
    engine.link.receive = receive


@contextmanager
def other_rotary(engine: Engine) -> Iterator[None]:
    rotary = engine.module(ROTARY.rpartition(".")[0]).cos_sin_cache
    kept = rotary.clone()
    rotary.mul_(1.05)
    yield
    rotary.copy_(kept)


@contextmanager
def kept_cache(engine: Engine) -> Iterator[None]:
    engine.generator.llm.reset_prefix_cache = lambda: True
    yield
    del engine.generator.llm.reset_prefix_cache


IN_ENGINE = {
    "one tensor changed by the engine's loader": partial(loaded_as, change=lambda tensor: tensor * 0.99),
    "wrong tensor-parallel shard in the engine": partial(
        loaded_as, change=lambda tensor: tensor.roll(tensor.shape[1] // 2, 1)
    ),
    "changed just before it was packed": changed_before_packing,
    "shifted by one element on the way": shifted_on_the_way,
    "rotary cache x 1.05": other_rotary,
    "prefix cache kept": kept_cache,
}
"""What is wrong in an engine, and how it comes about while weights are pushed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--generator-tp", type=int, default=1)
    parser.add_argument(
        "--hf-assets-path", default="", help="a folder with a model and its tokenizer; empty: a tiny one"
    )
    parser.add_argument(
        "--between", action="store_true", help="push between two full checks: the probe's word on a CPU"
    )
    parser.add_argument("--generator-ranks", type=int, default=0)
    parser.add_argument("--output", help="write the table here as JSON")
    args = parser.parse_args()
    comm.init_process_group(CommConfig(trace_buf_size=0))
    folder, probe = args.hf_assets_path, np.random.default_rng(1).integers(1, 128, 128).tolist()
    if folder:
        probe = AutoTokenizer.from_pretrained(folder)(Path("README.md").read_text())["input_ids"][:128]
    else:
        folder = comm.broadcast(tempfile.mkdtemp() if dist.get_rank() == 0 else "")
        if dist.get_rank() == 0:
            save_tiny_checkpoint(Path(folder))
        dist.barrier()
    link = TellingLink(args.generator_ranks, timedelta(minutes=5)) if args.generator_ranks else None
    if link and not link.samples:
        engine, connect = FarEngine(link), partial(OtherRanks, link)
    else:
        engine = Engine(folder, args.dtype, args.generator_tp, link)
        connect = partial(InProcess, engine.generator)
    caught = True
    if link and link.samples:
        engine.carry_out_orders()
    else:
        caught = sabotage(Pair(folder, probe, args.dtype, engine, connect, 0 if args.between else 1), args)
    engine.close()
    comm.close_process_group()
    sys.exit(not args.between and not caught)


def sabotage(pair: Pair, args: argparse.Namespace) -> bool:
    """Push once with each fault and print what is said of it. Returns whether each was caught."""
    clean, table = pair.probe_ratio(pair.new_sync()), []
    for what, sent in sabotages(pair, args.generator_tp):
        sync = pair.new_sync()
        pair.update()
        pair.engine.fill_cache()
        if what in IN_ENGINE:
            pair.engine.begin(fault=what)
        try:
            pair.push(sync, sent(pair.weights()))
            said = "nothing"
        except (WeightSyncError, RuntimeError) as error:
            said = str(error)
        table.append({"fault": what, "probe": pair.probe_ratio(sync), "said": said, "caught": SAYS[what] in said})
        pair.engine.end()
    if dist.get_rank() == 0:
        print(f"{args.dtype}, engine TP {args.generator_tp}: the probe of a clean push is {clean:.2g} times the noise")
        for row in table:
            print(
                f"{'caught' if row['caught'] else 'MISSED'}  {row['fault']:42} {row['probe']:8.2g}  {row['said'][:150]}"
            )
        if args.output:
            Path(args.output).write_text(json.dumps(table))
    comm.barrier()
    return all(row["caught"] for row in table)


if __name__ == "__main__":
    main()
