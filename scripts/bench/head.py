"""The scoring head, forward and backward, against the matrix products that no implementation can do without.

    .venv/bin/python scripts/bench/head.py --tokens 8192 --vocabulary 151936

Prints the time of the head over that of three pure products of the same operands (logits, both gradients), and how far memory
rises, the weight's gradient included. The products of the head are four: logits are made again in the backward.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.measure import alternate, extra_peak_bytes, machine_line  # noqa: E402

# isort: split
import torch  # noqa: E402

from torchtitan_rl.device import DEVICE_TYPE  # noqa: E402
from torchtitan_rl.models.logprobs import chunked_logprobs, product, wide  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--chunk-rows", type=int)
    parser.add_argument("--entropy", action="store_true", help="the entropy has a gradient too")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.dim, device=DEVICE_TYPE).to(dtype).requires_grad_()  # [T, D]
    weight = torch.empty(args.vocabulary, args.dim, dtype=dtype, device=DEVICE_TYPE).normal_(std=0.02).requires_grad_()
    labels = torch.randint(0, args.vocabulary, (args.tokens,), device=DEVICE_TYPE)  # [T]

    def head() -> None:
        logprobs, entropy = chunked_logprobs(
            hidden, weight, labels, temperature=args.temperature, chunk_tokens=args.chunk_tokens,
            chunk_rows=args.chunk_rows, compile=args.compile,
        )  # fmt: skip
        torch.autograd.grad((logprobs + (entropy if args.entropy else 0)).mean(), (hidden, weight))

    @torch.no_grad()
    def products() -> None:
        """Of the same size in all, in pieces small enough for any machine."""
        for rows in weight.split(8192):  # [R, D]
            z = product(wide(hidden), wide(rows).T).to(dtype)  # [T, R]
            z @ rows, z.T @ hidden

    risen = extra_peak_bytes(head)
    found = alternate({"products": products, "head": head}, repeats=args.repeats)
    ratio = (
        found["head"].cpu / found["products"].cpu
        if DEVICE_TYPE == "cpu"
        else found["head"].wall / found["products"].wall
    )
    flops = 6 * args.tokens * args.vocabulary * args.dim
    print(machine_line())
    print(f"T {args.tokens}, V {args.vocabulary}, D {args.dim}, {args.dtype}, temperature {args.temperature}")
    for name, seconds in found.items():
        print(
            f"{name:9s} {seconds.wall:7.2f} s wall {seconds.cpu:7.2f} s cpu  {flops / seconds.cpu / 1e9:6.0f} GFLOP/s of cpu"
        )
    print(
        f"head / products {ratio:.2f}; memory risen by {risen / 1e9:.2f} GB, {weight.nbytes / 1e9:.2f} of it the gradient"
    )


if __name__ == "__main__":
    main()
