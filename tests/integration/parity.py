"""What the sampler sampled is what the optimizer sees, and sharding changes neither: run under torchrun on any layout.

    torchrun --nproc_per_node=4 tests/integration/parity.py --tp 2 --generator-tp 2
    torchrun --nproc_per_node=1 tests/integration/parity.py --dtype bfloat16
    torchrun --nproc_per_node=2 tests/integration/parity.py --tp 2 --architecture llama

Compares, on a tiny random model: the policy's log-probabilities with transformers' (always float32); the engine's with the
policy's after each weight sync, in completions of one turn and in conversations; and sharded gradients with those of one unsharded process. Exits non-zero on a difference.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from torchtitan_rl.sync.in_process import InProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchtitan.config import CommConfig, ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402

from tests.parts.hf_decoders import packed, transformers_logprobs  # noqa: E402
from tests.parts.pushes import SEQUENCES, Policy, TokenizerStandIn  # noqa: E402
from tests.parts.tiny import ODD, save_odd_checkpoint, save_tiny_checkpoint, scale_policy, sharded_policy  # noqa: E402
from torchtitan_rl import comm  # noqa: E402
from torchtitan_rl.environments import Environment, Turn  # noqa: E402
from torchtitan_rl.environments.factory import Conversations  # noqa: E402
from torchtitan_rl.generator.generator import Generator  # noqa: E402
from torchtitan_rl.models.hf import hf_weights  # noqa: E402
from torchtitan_rl.models.score import score  # noqa: E402
from torchtitan_rl.sampling import SamplingConfig  # noqa: E402
from torchtitan_rl.sync.weight_sync import WeightSync  # noqa: E402
from torchtitan_rl.trainer.model_loader import load_hf_weights  # noqa: E402
from torchtitan_rl.types import Prompt  # noqa: E402

# Largest allowed difference in log-probability of (policy and transformers, sampler and policy) and of gradients (relative).
BOUNDS = {"float32": (1e-5, 1e-4, 1e-4), "bfloat16": (0.1, 0.3, 0.2)}


class Echo(Environment):
    """Answers twice, each time after another while, with the first two tokens of what it heard."""

    def __init__(self, prompt: Prompt) -> None:
        self.left, self.seconds = 2, 0.01 * prompt.prompt_idx

    def step(self, message: dict) -> Turn:
        time.sleep(self.seconds)
        self.left -= 1
        return Turn(messages=[{"role": "user", "content": message["content"]}], done=self.left < 0)


class Echoes:
    """In place of a task: every second prompt has an environment."""

    def environment(self, prompt: Prompt) -> Environment | None:
        return Echo(prompt) if prompt.prompt_idx % 2 else None

    def tools(self) -> tuple[()]:
        return ()


class EchoingConversations(Conversations):
    """Conversations whose words are token ids."""

    def __init__(self) -> None:
        self.config = self.Config()
        self._members, self._templates, self._left = {"": Echoes()}, {"": self}, {}

    def answer(self, messages: list[dict], last_token: int) -> list[int]:
        return [int(word) for word in messages[0]["content"].split()[:2]] + [99]


def check_gradients(model, adapter, folder: str, dims: ParallelDims, dtype: str, failures: list[str]) -> float:
    """Each data-parallel rank takes every dp_size-th sequence; summed gradients must be the whole's."""
    most_diff, _, most_relative = BOUNDS[dtype]
    batch = dims.get_mesh("batch") if dims.dp_enabled else None
    size, rank = (batch.size(), batch.get_local_rank()) if batch else (1, 0)
    sequences = SEQUENCES * -(-size // len(SEQUENCES))  # at least one for each rank
    expected_logprobs, expected_grads = transformers_logprobs(Path(folder), list(map(torch.tensor, sequences)))
    count = sum(len(s) - 1 for s in sequences)
    parts = [torch.tensor(s) for s in sequences[rank::size]]
    padding = -sum(map(len, parts)) % (8 * dims.tp)
    tokens, labels, layout, mask = packed(parts, padding, device.DEVICE_TYPE)
    logprobs = score(model, tokens, labels, layout, 1.0).logprobs
    (logprobs * mask).sum().div(count).backward()

    begins = [0]
    for s in sequences:
        begins.append(begins[-1] + len(s) - 1)
    mine = torch.cat([expected_logprobs[begins[i] : begins[i + 1]] for i in range(rank, len(sequences), size)])
    diff = float((logprobs[mask.bool()].detach().cpu() - mine).abs().max())
    if not diff < most_diff:
        failures.append(f"policy and transformers differ by {diff:.2e} in log-probability")
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, p in model.named_parameters():  # the adapter renames and splits gradients as it does weights
        with torch.no_grad():
            p.copy_(grads[name])
    model_grads = {name: t.cpu() for name, t in hf_weights(model, adapter, torch.float32)}
    worst = max(
        float((model_grads[n] - g).abs().max() / g.abs().max().clamp_min(1e-8)) for n, g in expected_grads.items()
    )
    if not worst < most_relative:
        failures.append(f"sharded and single-process gradients differ by {worst:.2e} (relative)")
    load_hf_weights(model, adapter, folder)
    return diff


def check_sync(model, adapter, generator: Generator, multiple: int, failures: list[str]) -> list[dict[str, float]]:
    """The engine's log-probability of what it samples against the policy's, after the first sync and after a change."""
    found = []
    most_diff = BOUNDS[generator.config.dtype][1]
    # Sharper distributions round more: with 0.3, Qwen2.5's float32 is 2e-4 from float64 on either side, with 0.2 it is 4e-5.
    growth = 0.2 if generator.config.dtype == "float32" else 0.05
    policy = Policy(model, adapter, dtype=generator.config.dtype)
    config = WeightSync.Config(check_interval=1)
    sync = config.build(trainer=policy, connect=partial(InProcess, generator), probe=np.array(SEQUENCES[0]))

    sequences = SEQUENCES * -(-generator.num_replicas // len(SEQUENCES))  # at least one for each engine
    prompts = [Prompt(prompt_idx=i, text="", token_ids=s, expected_answer="") for i, s in enumerate(sequences)]
    turns = 0  # completions of several turns
    for version in range(3):
        if version:
            torch.manual_seed(version)
            scale_policy(model, 1 + growth * version)
        policy.parallel_dims.dp_shard = 1 + version % 2  # both ways to gather
        sync.push(policy_version=version)
        diffs = []
        seen: dict[tuple[int, int], tuple] = {}
        for group in comm.all_gather_lists(list(generator.generate(prompts, step=version))):
            for completion in group.samples:
                key = group.prompt.prompt_idx, completion.sample_idx
                sampled = completion.token_ids.tolist(), completion.sampler_logprobs.tolist()
                if key in seen:  # of another rank of the engine
                    if seen[key] != sampled:
                        failures.append(f"ranks of one engine sampled otherwise for prompt {key[0]}")
                    continue
                seen[key] = sampled
                sequence = np.concatenate([group.prompt.token_ids, completion.token_ids])
                scored = policy.token_logprobs(sequence)[len(group.prompt.token_ids) - 1 :]
                diffs.append(np.abs(scored - completion.sampler_logprobs)[completion.loss_mask])
                turns += len(completion.turns) > 1
        diff = np.concatenate(diffs)
        found.append({"mean": float(diff.mean()), "p99": float(np.quantile(diff, 0.99)), "max": float(diff.max())})
        if not diff.max() < most_diff:
            failures.append(f"after sync {version} sampler and policy differ by {diff.max():.2e} in log-probability")
    if not turns:
        failures.append("no conversation came to a second turn")
    return found


def save(folder: Path, architecture: str | None, *, tie: bool) -> None:
    """The checkpoint to compare on."""
    if architecture:
        save_odd_checkpoint(folder, architecture, tie=tie)
    else:
        save_tiny_checkpoint(folder, tie=tie, n_heads=8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--generator-tp", type=int, default=1)
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--architecture", choices=list(ODD), help="one of odd dimensions instead of the tiny Qwen3")
    parser.add_argument(
        "--dtype", choices=list(BOUNDS), default="float32", help="of the policy's and the engine's arithmetic"
    )
    parser.add_argument("--output", help="write the differences here as JSON")
    args = parser.parse_args()
    comm.init_process_group(CommConfig(trace_buf_size=0))
    parallelism = ParallelismConfig(
        tensor_parallel_degree=args.tp, data_parallel_replicate_degree=args.replicate, spmd_backend="partial_dtensor"
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    folder = comm.broadcast(tempfile.mkdtemp() if dist.get_rank() == 0 else "")
    if dist.get_rank() == 0:
        save(Path(folder), args.architecture, tie=not args.untied)
    dist.barrier()
    model, adapter = sharded_policy(
        Path(folder),
        dtype=args.dtype,
        seq_len=256,
        chunk_tokens=5,
        tensor_parallel_degree=args.tp,
        data_parallel_replicate_degree=args.replicate,
    )
    failures: list[str] = []
    policy_diff = check_gradients(model, adapter, folder, dims, args.dtype, failures)
    generator = Generator(
        Generator.Config(tensor_parallel_degree=args.generator_tp, dtype=args.dtype, max_model_len=64, sleep=False),
        hf_assets_path=folder,
        tokenizer=TokenizerStandIn(),
        sampling=SamplingConfig(n=2, max_tokens=16, stop_token_ids=list(range(1, 60))),
        seed=0,
        environments=EchoingConversations(),
        norms_round_once=True,
    )
    sync_diffs = check_sync(model, adapter, generator, 8 * dims.tp, failures)
    found = {"policy_diff": policy_diff, "sync_diffs": sync_diffs, "failures": failures}
    print(f"rank {dist.get_rank()}: {json.dumps(found)}", flush=True)
    if args.output and dist.get_rank() == 0:
        Path(args.output).write_text(json.dumps(found))
    comm.barrier()
    generator.close()
    comm.close_process_group()
    sys.exit(bool(failures))


if __name__ == "__main__":
    os.environ.setdefault("RANK", "0")
    main()
