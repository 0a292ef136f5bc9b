"""Export a run's checkpoint to a Hugging Face folder that transformers and vLLM load.

.venv/bin/python scripts/export_hf.py --run outputs/debug-20261120-130000 --output exported/ [--step 100]
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402

from torchtitan_rl.run.registry import load_config  # noqa: E402
from torchtitan_rl.trainer.hf import hf_weights  # noqa: E402
from torchtitan_rl.trainer.policy import build_policy  # noqa: E402

SHARD_BYTES = 4 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--step", type=int, help="which checkpoint; default the last")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    described = json.loads((args.run / "config.json").read_text())
    checkpoint = find_checkpoint(args.run / described["checkpoint"]["folder"], args.step, parser)
    config = load_config(described["config"])
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29577",
    }
    dist.init_process_group("gloo" if device.ON_CPU else "nccl")
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    set_spmd_backend(parallelism.spmd_backend)
    model = build_policy(
        config.model_spec,
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        parallelism=parallelism,
        training=TrainingConfig(seq_len=128),
        compile_config=CompileConfig(),
        activation_checkpoint="none",
        logprob_chunk_tokens=1,
        dump_folder="",
    )
    state = model.state_dict()
    dcp.load(state, checkpoint_id=str(checkpoint))
    model.load_state_dict(state)
    adapter = config.model_spec.state_dict_adapter(config.model_spec.model, None)
    args.output.mkdir(parents=True, exist_ok=True)
    write_safetensors(hf_weights(model, adapter, getattr(torch, args.dtype)), model.enable_weight_tying, args.output)
    copy_assets(Path(described["hf_assets_path"]), args.output, args.dtype)
    dist.destroy_process_group()
    print(f"{args.output}: {checkpoint.name} of {args.run} in {args.dtype}")


def find_checkpoint(folder: Path, step: int | None, parser: argparse.ArgumentParser) -> Path:
    """The folder of one checkpoint; a parser error that lists what there is when it is missing."""
    steps = sorted(int(p.parent.name.removeprefix("step-")) for p in folder.glob("step-*/.metadata"))
    if not steps or (step is not None and step not in steps):
        parser.error(f"--step {step}: {folder} has checkpoints of steps {steps}")
    return folder / f"step-{steps[-1] if step is None else step}"


def write_safetensors(weights, tied: bool, output: Path) -> None:
    """Shards of at most SHARD_BYTES and their index; a tied output head is left to the embedding."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    held = 0
    for name, tensor in weights:
        if tied and name == "lm_head.weight":
            continue
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and held + size > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = tensor.cpu().contiguous()
        held += size
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, output / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_assets(source: Path, output: Path, dtype: str) -> None:
    """Everything of the starting folder but its weights, with the exported dtype in config.json."""
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy2(file, output / file.name)
    config = json.loads((output / "config.json").read_text())
    config["dtype"] = dtype
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
