"""Estimate the time of a config's step and its memory, without starting a run.

    .venv/bin/python scripts/estimate.py --config qwen3_8b --gpus 8 --gpu H100
    .venv/bin/python scripts/estimate.py --config debug --gpus 1 --gpu here --prompt-tokens 13 --completion-tokens 26

The lower bound of each part comes from torchtitan_rl/observability/metrics/efficiency.py. The expected time is the
bound divided by the efficiency that a machine reaches (--decode-share, --train-share, --sync-share; a run reports them
as efficiency/*). The estimate assumes completions of equal length and communication hidden behind computation. It
leaves out rewards and prefill. A prompt is counted once for each completion.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan)

# isort: split
from torchtitan_rl.library.lora.policy import Lora  # noqa: E402
from torchtitan_rl.observability.machine import Speeds, measured_speeds  # noqa: E402
from torchtitan_rl.observability.metrics.efficiency import bound_seconds  # noqa: E402
from torchtitan_rl.setup.memory import choose_by_memory, footprint_of, memory_need, meta_model  # noqa: E402
from torchtitan_rl.setup.registry import load_config  # noqa: E402

GIB = 2**30
# From the data sheets: dense peak FLOP/s (float32 without tensor cores, bfloat16), memory bytes/s; GiB.
GPUS = {
    "A100": (Speeds(19.5e12, 312e12, 2.04e12), 80),
    "H100": (Speeds(67e12, 989e12, 3.35e12), 80),
    "H200": (Speeds(67e12, 989e12, 4.8e12), 141),
    "B200": (Speeds(75e12, 2250e12, 8.0e12), 180),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--gpu", choices=[*GPUS, "here"], default="H100")
    parser.add_argument("--prompt-tokens", type=int, help="default: half of prompts.max_prompt_tokens")
    parser.add_argument("--completion-tokens", type=int, help="default: sampling.max_tokens")
    parser.add_argument("--decode-share", type=float, default=0.3)
    parser.add_argument("--train-share", type=float, default=0.4)
    parser.add_argument("--sync-share", type=float, default=0.3)
    args = parser.parse_args()
    config = load_config(args.config)
    speeds, gib = GPUS[args.gpu] if args.gpu in GPUS else (measured_speeds(), None)
    prompt = args.prompt_tokens or config.prompts.max_prompt_tokens // 2
    completion = args.completion_tokens or config.sampling.max_tokens
    sequences = config.num_prompts_per_step * config.sampling.n
    length = prompt + completion
    model = meta_model(config.model_spec, Lora.of(config.trainer.lora))
    passes = config.trainer.num_epochs * sequences
    work = [passes * length, passes * length * (length + 1) / 2, passes * completion]  # in either pass
    bounds = bound_seconds(
        [(prompt, completion)] * sequences,
        work=[work, work],
        speeds=speeds,
        footprint=footprint_of(config, model=model, world_size=args.gpus),
    )
    shares = {"decode": args.decode_share, "train": args.train_share, "sync": args.sync_share}
    print(f"{args.config} on {args.gpus} x {args.gpu}: {sequences} sequences of {prompt} + {completion} tokens")
    for name, bound in bounds.items():
        print(f"{name:7s} {bound / shares[name]:8.2f} s expected, {bound:8.2f} s at least")
    total = sum(bound / shares[name] for name, bound in bounds.items())
    print(f"step    {total:8.2f} s expected, {sequences * completion / total:,.0f} new tokens a second")
    if gib is not None:
        print(choose_by_memory(config, world_size=args.gpus, gpu_bytes=gib * GIB))
        need = memory_need(config, world_size=args.gpus, gpu_bytes=gib * GIB)
        verdict = "fits" if need.peak <= gib * GIB else "does not fit: more GPUs, or a smaller micro-batch or engine"
        print(f"memory  {need.peak / GIB:.1f} GiB: {verdict} {gib} GiB")


if __name__ == "__main__":
    main()
