"""Compare the log-probabilities of a model folder with transformers' own, on random tokens, in float32 on the CPU.

.venv/bin/python scripts/compare_with_transformers.py outputs/random/llama

A run compares its policy with its engine. This script finds what both compute wrongly together. Exit code 1: they differ by more than --limit.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402

from torchtitan_rl.models.hf_config import spec_from_folder  # noqa: E402
from torchtitan_rl.models.hf_decoder import longest_window  # noqa: E402
from torchtitan_rl.models.score import score  # noqa: E402
from torchtitan_rl.trainer.model_loader import load_hf_weights, meta_model  # noqa: E402
from torchtitan_rl.types import SegmentLayout  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="config.json and safetensors")
    parser.add_argument("--limit", type=float, default=0.01, help="largest difference that is rounding, in nats")
    args = parser.parse_args()
    spec = spec_from_folder(args.folder)
    ids = random_tokens(spec)
    difference = (policy_logprobs(spec, args.folder, ids) - transformers_logprobs(spec, args.folder, ids)).abs()
    largest, tokens = difference.max().item(), len(difference)  # NaN is above every limit
    print(f"{args.folder}: log-probabilities of {tokens} random tokens differ from transformers' by {largest:.1e}")
    return 0 if largest <= args.limit else 1


def random_tokens(spec: ModelSpec) -> Tensor:
    """Returns token ids, [L]: 32, or enough to fill the longest sliding window, but at most 512."""
    length = min(max(32, longest_window(spec.model) + 16), 512, spec.model.max_seq_len)
    return torch.randint(0, spec.model.vocab_size, (length,), generator=torch.Generator().manual_seed(0))


def cpu_policy(spec: ModelSpec, folder: Path, *, seq_len: int) -> Decoder:
    """Returns the policy that training would build of a folder, unsharded, for sequences up to seq_len tokens."""
    model = meta_model(spec, seq_len=seq_len).to_empty(device="cpu")
    model.init_weights(buffer_device=None)
    load_hf_weights(model, spec.state_dict_adapter(spec.model, None), str(folder))
    return model


@torch.no_grad()
def policy_logprobs(spec: ModelSpec, folder: Path, ids: Tensor) -> Tensor:
    """Returns log π(ids[1:]), [L - 1]."""
    model = cpu_policy(spec, folder, seq_len=len(ids))
    layout = SegmentLayout.of([len(ids)], device="cpu")
    return score(model, ids, ids.roll(-1), layout, 1.0).logprobs[:-1]


@torch.no_grad()
def transformers_logprobs(spec: ModelSpec, folder: Path, ids: Tensor) -> Tensor:
    """Returns transformers' log π(ids[1:]), [L - 1], with eager attention. A text that is part of a model is asked as such."""
    whole = getattr(transformers, getattr(spec.model, "part_of", "") or "AutoModelForCausalLM")
    model = whole.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)  # [L - 1, V]
    return logprobs.gather(-1, ids[1:, None])[:, 0]


if __name__ == "__main__":
    sys.exit(main())
