"""What the proof of a weight sync costs: the sync without it and with it, in turns, beside a plain copy of the same bytes.

    .venv/bin/python -m torchtitan_rl.run.launch --standalone --nproc_per_node=1 -m scripts.bench.weight_sync [--dtype bfloat16]

The model is debug's (2.4M parameters), or with --size one of 67M or 600M. Random weights; medians of `--repeats` turns.
Processor time is not lengthened by other work that wants the cores.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torchtitan_rl import device  # noqa: F401

# isort: split
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchtitan.config import CommConfig, ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402

from scripts.make_random_checkpoint import qwen3  # noqa: E402
from torchtitan_rl import comm  # noqa: E402
from torchtitan_rl.configs.toys.small_models import new_hf_model, small_qwen3  # noqa: E402
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer  # noqa: E402
from torchtitan_rl.generator.generator import Generator  # noqa: E402
from torchtitan_rl.models.hf import exported_rows, hf_weights  # noqa: E402
from torchtitan_rl.sampling import SamplingConfig  # noqa: E402
from torchtitan_rl.sync.in_process import InProcess, begin_sampling, load_base  # noqa: E402
from torchtitan_rl.sync.shard_checksums import ShardChecksums  # noqa: E402
from torchtitan_rl.trainer.model_loader import ModelLoader  # noqa: E402
from torchtitan_rl.trainer.trainer_config import TrainerConfig  # noqa: E402

SIZES = {
    "debug": lambda: small_qwen3(vocab_size=320),
    "67M": lambda: small_qwen3(vocab_size=8192, dim=768, n_layers=8, n_heads=12, n_kv_heads=4, hidden_dim=2304),
    "0.6B": lambda: qwen3("0.6B"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="debug")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--generator-tp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=61)
    args = parser.parse_args()
    comm.init_process_group(CommConfig(trace_buf_size=0))
    spec = SIZES[args.size]()
    folder = comm.broadcast(tempfile.mkdtemp())
    tokenizer = make_small_tokenizer(["1 + 1"], vocab_size=260)
    if dist.get_rank() == 0:
        new_hf_model(spec).save_pretrained(Path(folder))
    dist.barrier()
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    set_spmd_backend(parallelism.spmd_backend)
    loader = ModelLoader(
        TrainerConfig(parallelism=parallelism, mixed_precision_param=args.dtype, logprob_chunk_tokens=64),
        model_spec=spec,
        folder=folder,
        parallel_dims=ParallelDims.from_config(parallelism, dist.get_world_size()),
        max_model_len=64,
    )
    model, adapter = loader.policy(), loader.state_dict_adapter
    generator = Generator(
        Generator.Config(tensor_parallel_degree=args.generator_tp, dtype=args.dtype, max_model_len=64, sleep=False),
        hf_assets_path=folder,
        tokenizer=tokenizer,
        sampling=SamplingConfig(n=1, max_tokens=4),
        seed=0,
    )
    bench(model, adapter, generator, args.repeats)
    generator.close()
    comm.close_process_group()


def bench(model: torch.nn.Module, adapter: object, generator: Generator, repeats: int) -> None:
    """Time the three in turns and print them on rank 0."""
    policy_shards = ShardChecksums(exported_rows(model, adapter))
    engine = InProcess(generator, None, policy_shards.shapes)
    weights = lambda: hf_weights(model, adapter, generator.dtype)  # noqa: E731
    all_weights = [tensor for _, tensor in weights()]
    copies = [tensor.clone() for tensor in all_weights]

    def without() -> None:
        load_base(generator, weights())
        begin_sampling(generator, 1)

    def proven() -> None:
        without()
        right = policy_shards.checksums(generator.dtype).cpu() * engine.copies(packed=True)
        assert torch.equal(engine.checksums(packed=True)[0], right)

    def copy() -> None:
        for target, tensor in zip(copies, all_weights, strict=True):
            target.copy_(tensor)

    times: dict[Callable[[], None], list[float]] = {without: [], proven: [], copy: []}  # milliseconds
    processor: dict[Callable[[], None], list[float]] = {act: [] for act in times}
    for turn in range(repeats + 3):
        # A copy before each, so that both find the same in the caches.
        for act in (copy, without, copy, proven) if turn % 2 else (copy, proven, copy, without):
            dist.barrier()
            begin, processor_begin = time.perf_counter(), time.process_time()
            act()
            if turn >= 3:
                times[act].append(1e3 * (time.perf_counter() - begin))
                processor[act].append(1e3 * (time.process_time() - processor_begin))
    if dist.get_rank() == 0:
        megabytes = sum(t.nbytes for t in all_weights) / 1e6
        print(f"{megabytes:.1f} MB in {generator.config.dtype}, {dist.get_world_size()} rank(s)")
        for clock, of_act in (("wall", times), ("processor", processor)):
            plain, _, copied = map(statistics.median, of_act.values())
            more = [with_proof - of_sync for of_sync, with_proof in zip(of_act[without], of_act[proven], strict=True)]
            low, middle, high = statistics.quantiles(more, n=4)
            print(
                f"{clock} time: sync {plain:.1f} ms, its proof {middle:+.2f} ms ({100 * middle / plain:+.1f} %; of each pair of "
                f"syncs, half between {low:+.2f} and {high:+.2f}), a plain copy of these bytes {copied:.1f} ms"
            )


if __name__ == "__main__":
    main()
