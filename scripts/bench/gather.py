"""What it costs to give every rank all completions of a step: arrays as raw buffers against Python lists, in one run.

    torchrun --nproc_per_node=2 scripts/bench/gather.py [--completions 1024] [--tokens 2048 8192 32768] [--repeat 5]

Both ways gather the same token ids, log-probabilities and loss masks, with no text. Prints seconds (median of the repeats)
and bytes a token on the wire, from rank 0.
"""

import argparse
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan)

# isort: split
import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402

from torchtitan_rl.core import comm  # noqa: E402
from torchtitan_rl.core.types import Completion, Group, Prompt  # noqa: E402

GROUP_SIZE = 8


def groups_of(completions: int, tokens: int) -> list[Group[Completion]]:
    """This rank's share of random completions."""
    rng = np.random.default_rng(dist.get_rank())
    prompt = Prompt(prompt_idx=0, text="", token_ids=[1], expected_answer="")

    def completion(sample_idx: int) -> Completion:
        token_ids, logprobs = rng.integers(0, 150_000, tokens), -rng.random(tokens)
        return Completion(
            sample_idx=sample_idx,
            policy_version=0,
            token_ids=token_ids,
            sampler_logprobs=logprobs,
            text="",
            finish_reason="stop",
        )

    count = completions // GROUP_SIZE // dist.get_world_size()
    return [Group(prompt=prompt, samples=[completion(i) for i in range(GROUP_SIZE)]) for _ in range(count)]


def as_lists(groups: list[Group[Completion]]) -> list:
    """The same payloads as Python objects, one for each number."""
    return [
        (c.token_ids.tolist(), c.sampler_logprobs.tolist(), c.loss_mask.tolist())
        for group in groups
        for c in group.samples
    ]


def gather_objects(mine: list) -> list:
    """torch's own way: pickle, gather, unpickle."""
    shares: list = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    return [item for share in shares for item in share]


def seconds(gather: Callable[[list], list], mine: list, repeat: int) -> float:
    """Median over `repeat` gathers of the slowest rank's seconds, after one to warm up."""
    taken = []
    for _ in range(1 + repeat):
        dist.barrier()
        begin = time.perf_counter()
        gather(mine)
        taken.append(max(comm.all_gather_lists([time.perf_counter() - begin])))
    return statistics.median(taken[1:])


def wire_bytes(mine: list) -> int:
    """Bytes that this rank sends."""
    buffers: list[pickle.PickleBuffer] = []
    return len(pickle.dumps(mine, protocol=5, buffer_callback=buffers.append)) + sum(b.raw().nbytes for b in buffers)


def main() -> None:
    """Run every size and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--lists-up-to", type=int, default=8192, help="longest completions that are also sent as lists")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    for tokens in options.tokens:
        mine = groups_of(options.completions, tokens)
        share = sum(len(group.samples) for group in mine) * tokens
        line = f"{options.completions} x {tokens}: arrays {seconds(comm.all_gather_lists, mine, options.repeat):.3f} s"
        line += f", {wire_bytes(mine) / share:.2f} bytes a token"
        if tokens <= options.lists_up_to:
            lists = as_lists(mine)
            line += (
                f"; lists {seconds(gather_objects, lists, options.repeat):.3f} s, {wire_bytes(lists) / share:.2f} bytes"
            )
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
