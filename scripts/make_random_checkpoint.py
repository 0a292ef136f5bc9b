"""Make a Hugging Face folder of a published Qwen3 size with random weights: to try memory and speed without a download.

    .venv/bin/python scripts/make_random_checkpoint.py --size 0.6B --output outputs/random/Qwen3-0.6B

The tokenizer is the small byte-level one of the debug configs, so most of the vocabulary stands for no text.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402

from torchtitan_rl.models import QWEN3_SIZES, new_hf_model, qwen3  # noqa: E402
from torchtitan_rl.tasks import SumDigits  # noqa: E402
from torchtitan_rl.tasks.small_tokenizer import make_small_tokenizer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6B", choices=QWEN3_SIZES)
    parser.add_argument("--output", type=Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"--output {args.output} exists already")

    torch.manual_seed(args.seed)
    torch.set_default_dtype(getattr(torch, args.dtype))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output.parent) as unfinished:
        new_hf_model(qwen3(args.size)).save_pretrained(unfinished)
        task = SumDigits.Config().build()
        texts = [task.train_example(i, seed=0).text for i in range(500)]
        make_small_tokenizer(texts, vocab_size=512).save_pretrained(unfinished)
        Path(unfinished).rename(args.output)
        Path(unfinished).mkdir()  # for the context manager to remove
    print(f"{args.output}: Qwen3 {args.size}, random weights in {args.dtype}")


if __name__ == "__main__":
    main()
