"""A step from 1 to 1,024 H100 by parts, each with its best layout (docs/performance.md, "Scaling, on paper").

    python -m scripts.bench.scaling 8B --completion-tokens 2048 --sequences 4096 --prompt-tokens 256
    python -m scripts.bench.scaling 32B --lora-rank 32 --gpus 8 --engine 4 --fsdp 8    # or a layout that you chose

A part is the larger of what the GPUs need and what the host needs, plus the communication that computation cannot hide. Every
constant is a data sheet's, or was measured, and says where. The collectives' calls and bytes were those of runs
on gloo with 2 and 4 ranks. The lengths are log-normal with the mean --completion-tokens, cut at --longest. With LoRA the base is in bfloat16 and has no
gradients; what the adapters' own products take, in the engine and in an update, is not counted.
"""

import argparse
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torchtitan.protocols.model_spec import ModelSpec

from scripts.make_random_checkpoint import qwen3
from torchtitan_rl import device  # noqa: F401  (before torchtitan)
from torchtitan_rl.models.hf_config import hf_architecture
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.lora.lora_config import LoraConfig, is_adapter
from torchtitan_rl.trainer.model_loader import meta_model

HOST_MS = (0.2, 0.045)
"""Milliseconds of vLLM's scheduler, its output and our code for a decode step: fixed, and for each sequence. Fitted to 3.1, 11.8 and
23.4 ms at 64, 256 and 512 sequences, measured on a CPU with a worker that only counts. A step takes the longer of this and the GPU."""
LAUNCH_S = 9e-6
"""Seconds of the host for an operator in eager mode; an assumption, of the usual 5 to 10 us."""
OPERATORS_OF_LAYER, HEAD_OPERATORS = 60, 2400
"""Operators of the forward: of a layer, and of the head's tiles in a micro-batch of 16,384 tokens. Together the 4,050 counted for 0.6B."""
MEMORY_SHARE, MATRIX_SHARE = 0.8, 0.45
"""Share of the data sheet's memory rate that attention over a cache reaches, and of its matrix peak that the update's products do."""
PUSH_S_OF_TENSOR = 1.3e-3
"""Seconds of a push for each tensor: load, digest and comparison. Fitted to two measured pushes: 0.11 s and 0.52 s."""
PUSH_S = 0.06
"""Seconds of a push besides."""
ENGINE_SHARE, OWN_SHARE, MOST_SEQUENCES = 0.4, 0.85, 512
"""Share of a GPU's memory that the engine has beside a trainer, and alone; the most sequences that it decodes together."""
REDUCE_S = 12e-6
"""Seconds of a small all-reduce over NVLink in the engine, twice a layer with tensor parallelism."""


def draw_lengths(num: int, *, mean: float, longest: int, spread: float = 0.8) -> np.ndarray:
    """Returns lengths of completions, [num] int, log-normal with this mean before the cut at `longest`."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - spread**2 / 2, spread, num)
    return np.clip(np.rint(drawn), 1, longest).astype(int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One GPU of a cluster and its links, from the data sheets."""

    flops: float
    """Dense bfloat16 products, FLOP/s."""
    memory: float
    """Memory, bytes/s."""
    nvlink: float
    """To the other GPUs of the node, bytes/s in one direction."""
    network: float
    """To other nodes, bytes/s in one direction."""
    gib: float = 80.0
    gpus_of_node: int = 8


H100 = Machine(flops=989e12, memory=3.35e12, nvlink=450e9, network=50e9)
"""400 Gbit/s for each GPU, as in a DGX."""
STORAGE = 5e9
"""Bytes/s that all nodes together write to a shared file system."""
FAILURE_HOURS = 45_000.0
"""GPU hours between two interruptions: 419 in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, table 5) are 50,700; rounded down."""
RESTART_S = 300.0
"""Seconds from an interruption to the first step of the restarted run."""


class Model(NamedTuple):
    """What a dense decoder costs, in bfloat16."""

    layers: int
    layer: int
    """Parameters of one layer."""
    outer: tuple[int, ...]
    """Parameters of the units outside the layers: embedding with head and last norm if tied, else embedding, and head with norm."""
    head: int
    kv_bytes: int
    """Bytes of one token's keys and values."""
    width: int
    """Values of a token between two layers."""
    trained: int
    """Parameters that an optimizer updates: all, or LoRA's adapters, which the others do not count."""
    tensors: int
    """Those of a push."""

    @property
    def lora(self) -> bool:
        """Whether adapters alone are trained."""
        return self.trained < self.parameters

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + sum(self.outer)

    @classmethod
    def of(cls, spec: ModelSpec, *, lora_rank: int = 0) -> "Model":
        """Returns the sizes of a model, without its weights; with a rank, of one whose adapters alone are trained."""
        shape, units = hf_architecture(spec.model), units_of(spec)
        # q, k, v and gate, up are fused here and apart in a push
        trained = [parameter.numel() for parameter in meta_model(spec).parameters()]
        tensors = len(trained) + 4 * shape["num_hidden_layers"]
        if lora_rank:
            adapted = meta_model(spec, Lora(LoraConfig(rank=lora_rank))).named_parameters()
            trained = [parameter.numel() for name, parameter in adapted if is_adapter(name)]
            tensors = len(trained)
        return cls(
            layers=shape["num_hidden_layers"],
            layer=units.layers[0],
            outer=units.outer,
            head=shape["vocab_size"] * shape["hidden_size"],
            kv_bytes=4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"],
            width=shape["hidden_size"],
            trained=sum(trained),
            tensors=tensors,
        )


class Units(NamedTuple):
    """Parameters of each group of weights that FSDP gathers together."""

    layers: tuple[int, ...]
    outer: tuple[int, ...]


def units_of(spec: ModelSpec) -> Units:
    """Returns the units of a model: each layer, the embedding, and the norm with the head, which a tied head has in one."""
    layers: dict[str, int] = {}
    embedding = rest = 0
    model = meta_model(spec)
    for name, parameter in model.named_parameters():
        if name.startswith("layers."):
            layer = name.split(".")[1]
            layers[layer] = layers.get(layer, 0) + parameter.numel()
        elif name.startswith("tok_embeddings"):
            embedding += parameter.numel()
        else:
            rest += parameter.numel()
    outer = (embedding + rest,) if model.enable_weight_tying else (embedding, rest)
    return Units(tuple(layers.values()), outer)


class Traffic(NamedTuple):
    """Collectives of one kind on one rank."""

    calls: int
    bytes: int
    """Of the whole tensors, before sharding."""


def update_traffic(units: Units, *, shards: int, replicas: int, microbatches: int, width: int) -> dict[str, Traffic]:
    """The collectives of an update of FSDP2 over `shards` ranks, and HSDP over `replicas` of them, by kind.

    A layer is gathered for the forward and again for the backward; what is outside the layers once, because it stays gathered. Gradients
    are reduced after each micro-batch, in float32.

    Args:
        width: bytes of a gathered weight.
    """
    inner, outer = sum(units.layers), sum(units.outer)
    num_units = len(units.layers) + len(units.outer)
    found: dict[str, Traffic] = {}
    if shards > 1:
        calls = microbatches * (2 * len(units.layers) + len(units.outer))
        found["all_gather"] = Traffic(calls, microbatches * width * (2 * inner + outer))
        found["reduce_scatter"] = Traffic(microbatches * num_units, microbatches * 4 * (inner + outer))
    if replicas > 1:
        found["all_reduce"] = Traffic(microbatches * num_units, microbatches * 4 * (inner + outer) // shards)
    return found


def push_traffic(units: Units, *, embedding: int, shards: int, width: int) -> dict[str, Traffic]:
    """The collectives of a push: a layer is gathered in one call, other tensors one by one. Norms are not counted."""
    if shards == 1:
        return {}
    outer = len(units.outer) * embedding
    return {"all_gather": Traffic(len(units.layers) + len(units.outer), width * (sum(units.layers) + outer))}


class Layout(NamedTuple):
    """How the GPUs share the work."""

    gpus: int
    shards: int
    """FSDP ranks; the rest are replicas."""
    engine: int
    """GPUs of one engine."""
    tp: int = 1
    """The trainer's tensor-parallel degree."""


def decode_seconds(
    lengths: np.ndarray, *, prompt: int, model: Model, engine: int, machine: Machine, share: float = ENGINE_SHARE
) -> float:
    """Returns the seconds in which one engine decodes completions of these lengths.

    Those that its cache does not hold at once wait: they are decoded first, at a full batch of the mean length.
    """
    room = share * machine.gib * 2**30 * engine - 2 * model.parameters
    mean = float(lengths.mean())
    together = max(1, min(MOST_SEQUENCES, int(room / model.kv_bytes / (prompt + mean))))
    last = lengths[-together:]
    full = np.full(together, max(1, round(mean)))
    waves = (len(lengths) - len(last)) / together
    seconds = _decode_together(last, prompt=prompt, model=model, engine=engine, machine=machine)
    if waves > 0:
        seconds += waves * _decode_together(full, prompt=prompt, model=model, engine=engine, machine=machine)
    return seconds


def _decode_together(lengths: np.ndarray, *, prompt: int, model: Model, engine: int, machine: Machine) -> float:
    steps = np.arange(lengths.max())
    active = len(lengths) - np.searchsorted(np.sort(lengths), steps, side="right")  # [steps] sequences that go on
    cached = active * (prompt + steps)  # [steps] tokens that attention reads
    read = (2 * model.parameters + model.kv_bytes * cached) / engine
    products = 2 * model.parameters * active / engine / machine.flops / MATRIX_SHARE
    gpu = np.maximum(read / machine.memory / MEMORY_SHARE, products)
    if engine > 1:
        gpu = gpu + 2 * model.layers * REDUCE_S
    host = (HOST_MS[0] + HOST_MS[1] * active) / 1e3  # [steps]
    return float(np.maximum(gpu, host).sum())


def rate(layout_ranks: int, machine: Machine) -> float:
    """Bytes/s of a ring over so many ranks: NVLink within a node, else the network."""
    return machine.nvlink if layout_ranks <= machine.gpus_of_node else machine.network


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one step."""

    lengths: np.ndarray
    """[sequences] sampled tokens of each completion."""
    prompt: int
    microbatch: int = 16384
    forward_operators: int | None = None
    """Operators of a micro-batch's forward; None: OPERATORS_OF_LAYER and HEAD_OPERATORS."""
    backward: bool = True
    """False: a step whose advantages are all 0 has a forward alone."""
    checkpointing: bool = True
    """Whether the backward computes the layers once more."""
    interval: int = 20
    """Steps between checkpoints."""


def engines_seconds(work: Work, model: Model, *, engines: int, engine: int, **of: Machine | float) -> list[float]:
    """Returns the seconds in which each engine decodes its share of a step; one without a share is left out. `of`: see
    `decode_seconds`."""
    shares = [work.lengths[rank::engines] for rank in range(min(engines, len(work.lengths)))]
    return [decode_seconds(share, prompt=work.prompt, model=model, engine=engine, **of) for share in shares]


def step_seconds(
    work: Work, model: Model, layout: Layout, machine: Machine, decoded: list[float] | None = None
) -> dict[str, float]:
    """Returns the seconds of a step by part: decode, straggler, update, gathers, push, checkpoint, restarts.

    "decode" is the mean engine's time, "straggler" what the slowest engine takes longer, "gathers" what the update's communication takes
    longer than its computation.

    Args:
        decoded: `engines_seconds` of the layout's engines; None: computed here.
    """
    if decoded is None:
        engines = layout.gpus // layout.engine
        decoded = engines_seconds(work, model, engines=engines, engine=layout.engine, machine=machine)
    tokens = float((work.lengths + work.prompt).sum()) / layout.gpus
    scored = float(work.lengths.sum()) / layout.gpus
    back = work.backward * (1 if model.lora else 2)  # a frozen matrix has the gradient of its input alone
    passes = 1 + back + work.backward * work.checkpointing
    inner = model.layers * model.layer
    attended = float((work.lengths + work.prompt).mean()) / 2
    width = model.kv_bytes / 4 / model.layers  # keys' width of a layer; queries have at most 8 times as many
    flops = passes * (2 * inner * tokens + 4 * 4 * width * model.layers * attended * tokens)
    flops += (1 + back) * 2 * model.head * scored
    microbatches = max(1, -(-int(tokens * layout.tp) // work.microbatch))
    forward = work.forward_operators or model.layers * OPERATORS_OF_LAYER + HEAD_OPERATORS
    compute = max(flops / machine.flops / MATRIX_SHARE, microbatches * passes * forward * LAUNCH_S)
    ranks = layout.shards * layout.tp
    replicas = layout.gpus // ranks
    units = Units((model.layer,) * model.layers, model.outer)
    traffic = update_traffic(units, shards=layout.shards, replicas=replicas, microbatches=microbatches, width=2)
    if model.lora:
        traffic |= {
            kind: Traffic(one.calls, 4 * microbatches * model.trained)
            for kind, one in traffic.items()
            if kind != "all_gather"
        }
    inside = sum(one.bytes for kind, one in traffic.items() if kind != "all_reduce") / layout.tp / rate(ranks, machine)
    between = 2 * traffic["all_reduce"].bytes / layout.tp / machine.network if replicas > 1 else 0.0
    # Tensor parallelism gathers and reduces a layer's activations twice each in a pass, and nothing hides it.
    exchanged = 4 * model.layers * passes * 2 * model.width * tokens * (layout.tp - 1) / rate(layout.tp, machine)
    pushed = push_traffic(units, embedding=model.head, shards=ranks, width=2)
    sent = 2 * model.trained if model.lora else sum(one.bytes for one in pushed.values())
    gathered = sent / rate(ranks, machine)
    checkpoint = 12 * model.trained / min(STORAGE, 2e9 * max(1, ranks // machine.gpus_of_node)) / work.interval
    seconds = {
        "decode": float(np.mean(decoded)),
        "straggler": max(decoded) - float(np.mean(decoded)),
        "update": compute,
        "gathers": max(0.0, inside + between - compute) + exchanged,
        "push": PUSH_S + PUSH_S_OF_TENSOR * model.tensors + gathered,
        "checkpoint": checkpoint,
    }
    seconds["restarts"] = restarts_seconds(sum(seconds.values()), work, layout.gpus)
    return seconds


def restarts_seconds(step: float, work: Work, gpus: int) -> float:
    """Returns the seconds that interruptions add to a step."""
    return step * (RESTART_S + work.interval / 2 * step) * gpus / (FAILURE_HOURS * 3600)


def engines_of(gpus: int, model: Model, machine: Machine, *, engine: int = 0, share: float = ENGINE_SHARE) -> list[int]:
    """Returns the GPUs of an engine, or `engine` alone, with which the weights fit into three quarters of its memory."""
    room = 0.75 * share * machine.gib * 2**30
    sizes = (engine,) if engine else (1, 2, 4, 8)
    return [one for one in sizes if gpus % one == 0 and one <= gpus and 2 * model.parameters / one < room]


def shards_of(gpus: int, model: Model, machine: Machine, *, shards: int = 0, tp: int = 1) -> list[int]:
    """Returns the FSDP ranks, or `shards` alone, on which the state fits: over FSDP x TP 16 bytes of each trained parameter and 2 of each
    of LoRA's base."""
    state = 16 * model.trained + 2 * model.parameters * model.lora
    sizes = [shards] if shards else sorted({2**power for power in range(11)} | {gpus // tp})
    fits = [over for over in sizes if over and state / over / tp < 0.6 * machine.gib * 2**30]
    return [over for over in fits if gpus % (over * tp) == 0]


def layouts(
    gpus: int, model: Model, machine: Machine, *, engine: int = 0, shards: int = 0, tp: int = 1
) -> list[Layout]:
    """Returns the layouts, of 0 any, whose engine and state fit."""
    sizes = shards_of(gpus, model, machine, shards=shards, tp=tp)
    return [Layout(gpus, over, one, tp) for one in engines_of(gpus, model, machine, engine=engine) for over in sizes]


def best(
    work: Work, model: Model, gpus: int, machine: Machine, **chosen: int
) -> tuple[Layout, dict[str, float]] | None:
    """Returns the layout with the shortest step and its seconds, of equal ones the first; None if none of `layouts` with `chosen` fits."""
    found = []
    decoded: dict[int, list[float]] = {}  # by GPUs of an engine: it does not depend on the trainer's layout
    for one in layouts(gpus, model, machine, **chosen):
        if one.engine not in decoded:
            engines = gpus // one.engine
            decoded[one.engine] = engines_seconds(work, model, engines=engines, engine=one.engine, machine=machine)
        found.append((one, step_seconds(work, model, one, machine, decoded[one.engine])))
    return min(found, key=lambda pair: round(sum(pair[1].values()), 1), default=None)


class Split(NamedTuple):
    """A step with `generator.ranks` and `generator.ahead` 1."""

    generators: int
    engine: int
    """GPUs of one engine."""
    sampling: float
    """Seconds of the slowest engine."""
    update: float
    """Seconds of the trainers meanwhile."""
    step: float


def best_split(
    work: Work, model: Model, gpus: int, machine: Machine, *, generators: int = 0, engine: int = 0, tp: int = 1
) -> Split | None:
    """Returns the split with the shortest step; None if none fits. The generators' number is `generators`, or one of seven eighths.

    The longer of sampling and update, and after it the push: the weights that the trainers gather go on over the link.
    """
    found = []
    link = 2 * (model.trained if model.lora else model.parameters) / rate(gpus, machine)
    for number in (generators,) if generators else sorted({gpus * eighths // 8 for eighths in range(1, 8)} - {0}):
        trainers = gpus - number
        layouts = [Layout(trainers, over, 1, tp) for over in shards_of(trainers, model, machine, tp=tp)]
        training = [step_seconds(work, model, layout, machine, [0.0]) for layout in layouts]
        for one in engines_of(number, model, machine, engine=engine, share=OWN_SHARE) if training else ():
            of = {"engine": one, "machine": machine, "share": OWN_SHARE}
            sampling = max(engines_seconds(work, model, engines=number // one, **of))
            for parts in training:
                update, between = parts["update"] + parts["gathers"], parts["push"] + parts["checkpoint"] + link
                whole = max(sampling, update) + between
                found.append(Split(number, one, sampling, update, whole + restarts_seconds(whole, work, gpus)))
    return min(found, key=lambda one: round(one.step, 1), default=None)


def print_curve(
    model: Model, work: Work, *, nodes: list[int], longest: int, shards: int = 0, generators: int = 0, **chosen: int
) -> None:
    """Prints a step by parts, for each number of GPUs with its best layout of those with the `chosen` engine, shards and tp, and the
    best split. Its gain is over the best colocated layout with any engine."""
    print(
        f"{len(work.lengths)} completions of {work.lengths.mean():,.0f} tokens on average, at most {longest:,}; seconds on H100, estimated to "
        "about a factor of two"
    )
    print(
        "  GPUs  engine  FSDP x TP  decode  straggler  update  gathers  push  saved    step  tokens/s/GPU  generators x engine  sampling  update    step    gain"
    )
    for gpus in nodes:
        found = best(work, model, gpus, H100, shards=shards, **chosen)
        if found is None:
            print(f"{gpus:6d}  does not fit")
            continue
        layout, parts = found
        step = sum(parts.values())
        shown = (parts["decode"], parts["straggler"], parts["update"], parts["gathers"], parts["push"])
        saved = parts["checkpoint"] + parts["restarts"]
        line = (
            f"{gpus:6d}  {layout.engine:6d}  {layout.shards:4d} x {layout.tp:2d}  {shown[0]:6.1f}  {shown[1]:9.1f}  {shown[2]:6.1f}  {shown[3]:7.1f}"
            f"  {shown[4]:4.1f}  {saved:5.1f}  {step:6.1f}  {work.lengths.sum() / step / gpus:12,.0f}"
        )
        if split := best_split(work, model, gpus, H100, generators=generators, **chosen):
            _, fastest = best(work, model, gpus, H100, shards=shards, **chosen | {"engine": 0}) or found
            gain = sum(fastest.values()) / split.step
            apart = f"{split.generators} x {split.engine}"
            line += f"  {apart:>19}  {split.sampling:8.1f}  {split.update:6.1f}  {split.step:6.1f}  {gain:4.2f} x"
        print(line)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", help="of Qwen3, such as 0.6B, 8B or 32B")
    parser.add_argument("--completion-tokens", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=0, help="sampling.max_tokens; 0: 4 x --completion-tokens")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank alone")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2**power for power in range(11)])
    parser.add_argument("--engine", type=int, default=0, help="GPUs of an engine; 0: the fastest, as for --fsdp")
    parser.add_argument(
        "--fsdp", type=int, default=0, help="ranks over which the trainer is sharded; more are replicas"
    )
    parser.add_argument("--tp", type=int, default=1, help="the trainer's tensor-parallel degree")
    parser.add_argument(
        "--generator-ranks", type=int, default=0, help="of the split on the right, one step ahead; 0: the best eighths"
    )
    args = parser.parse_args()
    ranks = max(args.fsdp, 1) * args.tp
    if any(gpus % ranks or gpus % max(args.engine, 1) for gpus in args.gpus):
        parser.error("--fsdp x --tp, and --engine, must each divide --gpus")
    longest = args.longest or 4 * args.completion_tokens
    lengths = draw_lengths(args.sequences, mean=args.completion_tokens, longest=longest)
    print_curve(
        Model.of(qwen3(args.size), lora_rank=args.lora_rank),
        Work(lengths=lengths, prompt=args.prompt_tokens),
        nodes=args.gpus,
        longest=longest,
        engine=args.engine,
        shards=args.fsdp,
        tp=args.tp,
        generators=args.generator_ranks,
    )


if __name__ == "__main__":
    main()
