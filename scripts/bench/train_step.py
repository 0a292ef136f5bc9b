"""One update (pack, forward, backward, clip, AdamW) as a fraction of the matrix peak, against transformers on a padded batch.

    .venv/bin/python scripts/bench/train_step.py --model tiny          the debug configs' 2.4M parameters, 128 x 26 new tokens
    .venv/bin/python scripts/bench/train_step.py --model 100m --dtype float32

Both sides train the same random episodes of log-normal length and are timed in turn; the peak is that of one large product,
measured in between. No completion has an advantage of 0, so all of them go through the backward.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.measure import alternate, build_trainer, machine_line, random_step, start  # noqa: E402

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402

from torchtitan_rl.core.device import DEVICE_TYPE  # noqa: E402
from torchtitan_rl.core.types import Episode, Group, flat  # noqa: E402
from torchtitan_rl.library.models import new_hf_model, qwen3, small_qwen3  # noqa: E402
from torchtitan_rl.observability.metrics.efficiency import TokenFlops  # noqa: E402

MODELS = {
    "tiny": lambda: small_qwen3(vocab_size=320),
    "100m": lambda: small_qwen3(
        vocab_size=32768, dim=768, n_layers=12, n_heads=12, n_kv_heads=6, hidden_dim=2048, max_seq_len=4096
    ),
    "0.6b": lambda: qwen3("0.6B"),
}
PRODUCT = 2048  # rows and columns of the product that is taken for the peak
PRODUCTS = 20  # at a time: the first ones after an update find neither caches nor threads ready


def padded_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[Group[Episode]]) -> None:
    """The same policy gradient as a plain loop over a right-padded batch computes it."""
    members = [(g.prompt.token_ids, e) for g in groups for e in g.samples]
    width = max(len(p) + len(e.completion.token_ids) for p, e in members)
    tokens = torch.zeros(len(members), width, dtype=torch.long)  # [N, L]
    advantages = torch.zeros(len(members), width)  # [N, L]
    for i, (prompt, episode) in enumerate(members):
        sequence = np.concatenate([prompt, episode.completion.token_ids])
        tokens[i, : len(sequence)] = torch.from_numpy(sequence)
        advantages[i, len(prompt) : len(sequence)] = episode.credit.advantage
    tokens, advantages = tokens.to(DEVICE_TYPE), advantages.to(DEVICE_TYPE)
    count = sum(len(e.completion.token_ids) for e in flat(groups))
    for part in torch.arange(len(members)).split(32):  # micro-batches, or the logits would not fit
        logp = model(tokens[part]).logits[:, :-1].float().log_softmax(-1)  # [n, L - 1, V]
        chosen = logp.gather(-1, tokens[part, 1:, None])[..., 0]  # [n, L - 1]
        (-(chosen * advantages[part, 1:]).sum() / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--completions", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=13)
    parser.add_argument("--mean-tokens", type=float, default=26)
    parser.add_argument("--sigma", type=float, default=0.0, help="of the log of the lengths; 0.5 is usual")
    parser.add_argument("--tokens-at-once", type=int, default=8192, help="packed tokens of one micro-batch")
    parser.add_argument(
        "--alone", action="store_true", help="without transformers, whose model takes memory beside ours"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    start(args.threads)
    spec = MODELS[args.model]()
    drawn = np.random.default_rng(0).lognormal(np.log(args.mean_tokens), args.sigma, args.completions)
    lengths = drawn.astype(int).clip(1, 4000).tolist()
    vocabulary = spec.model.vocab_size
    groups = random_step(lengths, prompt_tokens=args.prompt_tokens, group_size=8, vocabulary=vocabulary)
    max_len = args.prompt_tokens + max(lengths)
    trainer = build_trainer(spec, dtype=args.dtype, max_len=max_len, max_tokens_per_microbatch=args.tokens_at_once)
    a, b = (torch.randn(PRODUCT, PRODUCT, device=DEVICE_TYPE).to(getattr(torch, args.dtype)) for _ in range(2))
    sides = {"products": lambda: [a @ b for _ in range(PRODUCTS)], "packed": lambda: trainer.update(groups)}
    if not args.alone:
        model = new_hf_model(spec).to(DEVICE_TYPE, getattr(torch, args.dtype))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        sides["padded"] = lambda: padded_step(model, optimizer, groups)
    found = alternate(sides, repeats=args.repeats)
    clock = "cpu" if DEVICE_TYPE == "cpu" else "wall"
    seconds = {name: getattr(value, clock) for name, value in found.items()}
    peak = PRODUCTS * 2 * PRODUCT**3 / seconds["products"]
    report = trainer.update(groups)
    flops = TokenFlops.of(trainer._model_spec.model, trainer.model).total(report.work)
    print(machine_line())
    print(
        f"{args.model} {args.dtype}: {report.trained_tokens} tokens in {args.completions} sequences, peak {peak / 1e9:.0f} GFLOP/s"
    )
    print(f"packed {seconds['packed']:.3f} s {clock}, {flops / seconds['packed'] / peak:.0%} of the matrix peak")
    if not args.alone:
        ratio = seconds["padded"] / seconds["packed"]
        print(f"padded {seconds['padded']:.3f} s {clock}: packed is {ratio:.2f} x as fast")


if __name__ == "__main__":
    main()
