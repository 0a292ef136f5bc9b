"""Peak memory of a step by what holds it, against what run/memory.py predicts before a run.

    .venv/bin/python scripts/bench/memory.py --model 100m --dtype bfloat16
    .venv/bin/python scripts/bench/memory.py --model 0.6b --dtype bfloat16 --lora-rank 32 --no-engine

Weights, moments, gradients and what the backward keeps are counted tensor by tensor; the rest is how far this process's memory
rises over what was in use. The prediction is for a GPU: a CPU's engine packs its matrices a second time, and float32 attention
inside a bfloat16 trunk keeps more.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.measure import (  # noqa: E402
    build_trainer,
    checkpoint_of,
    extra_peak_bytes,
    in_use_bytes,
    machine_line,
    random_step,
    start,
)

# isort: split
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from configs.debug import debug  # noqa: E402
from scripts.bench.train_step import MODELS  # noqa: E402
from torchtitan_rl.core.device import DEVICE_TYPE  # noqa: E402
from torchtitan_rl.core.generator import SamplingConfig  # noqa: E402
from torchtitan_rl.core.trainer.logprobs import chunked_logprobs  # noqa: E402
from torchtitan_rl.core.trainer.trainer import Trainer  # noqa: E402
from torchtitan_rl.library.models import new_hf_model  # noqa: E402
from torchtitan_rl.library.starts.small_tokenizer import make_small_tokenizer  # noqa: E402
from torchtitan_rl.setup.memory import memory_need  # noqa: E402
from torchtitan_rl.setup.run_config import RunConfig  # noqa: E402

GIB = 2**30


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of different storages."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def kept_for_backward(trainer: Trainer, groups: list) -> int:
    """The most that a forward of the update keeps, besides weights."""
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        trainer.update(groups)
    weights = {p.to_local().data_ptr() for p in trainer.model.parameters()}
    return num_bytes(t for t in kept if t.data_ptr() not in weights and not isinstance(t, torch.nn.Parameter))


def head_peak(config: RunConfig, tokens: int, dtype: torch.dtype) -> int:
    """How far memory rises in the scoring head, without the gradient of its weight."""
    dim, vocabulary = config.model_spec.model.dim, config.model_spec.model.vocab_size
    hidden = torch.randn(tokens, dim, device=DEVICE_TYPE).to(dtype).requires_grad_()  # [T, D]
    weight = torch.randn(vocabulary, dim, device=DEVICE_TYPE).to(dtype)  # [V, D]
    labels = torch.randint(0, vocabulary, (tokens,), device=DEVICE_TYPE)  # [T]

    def score() -> None:
        logprobs, _ = chunked_logprobs(hidden, weight, labels, chunk_tokens=config.trainer.logprob_chunk_tokens)  # [T]
        logprobs.mean().backward()

    score()
    return extra_peak_bytes(score)


def engine_bytes(config: RunConfig) -> int:
    """How far memory rises with an engine of this model."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_small_tokenizer(["1 + 1"], vocab_size=260)
        new_hf_model(config.model_spec).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        before = in_use_bytes()
        generator = config.generator.build(
            hf_assets_path=folder, tokenizer=tokenizer, sampling=SamplingConfig(n=1, max_tokens=4), seed=0
        )
        risen = in_use_bytes() - before
        generator.close()
    return risen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="100m")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096, help="of the one micro-batch")
    parser.add_argument("--sequence-tokens", type=int, default=256)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--hf-assets-path", default="", help="the model; default: random weights, made here")
    parser.add_argument("--no-engine", action="store_true", help="measure the trainer alone")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518"}  # which vLLM wants too
    start(args.threads)
    config = debug()
    config.model_spec = MODELS[args.model]()
    config.generator.dtype = config.trainer.mixed_precision_param = args.dtype
    config.generator.max_model_len, config.trainer.max_tokens_per_microbatch = 2 * args.sequence_tokens, args.tokens
    prompt = args.sequence_tokens // 4
    groups = random_step(
        [args.sequence_tokens - prompt] * (args.tokens // args.sequence_tokens),
        prompt_tokens=prompt, group_size=4, vocabulary=config.model_spec.model.vocab_size,
    )  # fmt: skip
    config.trainer.lora.rank = args.lora_rank
    folder = args.hf_assets_path or checkpoint_of(config.model_spec)
    at_first, built = in_use_bytes(), []
    build = partial(
        build_trainer, config.model_spec, dtype=args.dtype, max_len=args.sequence_tokens, folder=folder,
        max_tokens_per_microbatch=args.tokens, lora=config.trainer.lora,
    )  # fmt: skip
    building = extra_peak_bytes(lambda: built.append(build()))
    [trainer] = built
    trainer.update(groups)
    state = [t for o in trainer.optimizer for s in o.state.values() for t in s.values() if t.numel() > 1]
    parameters = list(trainer.model.parameters())
    gradients = num_bytes(p for p in parameters if p.requires_grad)
    predicted = memory_need(config, world_size=1, gpu_bytes=0).updating
    predicted.pop("CUDA and NCCL")
    measured = {
        "weights, moments and gradients": num_bytes(parameters) + gradients + num_bytes(state),
        "activations": kept_for_backward(trainer, groups),
        "log-probabilities": head_peak(config, args.tokens, getattr(torch, args.dtype)),
    }
    rest = in_use_bytes() - at_first
    whole = rest + extra_peak_bytes(lambda: trainer.update(groups))
    print(machine_line())
    print(
        f"{args.model} {args.dtype}, a micro-batch of {args.tokens} tokens in sequences of {args.sequence_tokens}; GiB"
    )
    for name, expected in predicted.items():
        found = f"{measured[name] / GIB:8.3f}" if name in measured else "       -"
        print(f"{name:32s} {found} measured {expected / GIB:8.3f} predicted")
    print(f"{'the whole at its peak':32s} {whole / GIB:8.3f} measured {sum(predicted.values()) / GIB:8.3f} predicted")
    print(f"{'at rest, and while it was built':32s} {rest / GIB:8.3f} measured {building / GIB:8.3f} measured")
    if args.no_engine:
        return
    engine = engine_bytes(config) / GIB
    need = sum(p.numel() for p in parameters) * (4 if args.dtype == "float32" else 2) / GIB
    print(
        f"{'engine':32s} {engine:8.3f} measured, {need:.3f} of weights and {os.environ['VLLM_CPU_KVCACHE_SPACE']} of cache"
    )


if __name__ == "__main__":
    main()
