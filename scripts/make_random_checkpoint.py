"""Make a Hugging Face folder with random weights, to try memory, speed and other architectures without a download.

.venv/bin/python scripts/make_random_checkpoint.py --size 0.6B --output outputs/random/Qwen3-0.6B
.venv/bin/python scripts/make_random_checkpoint.py --architecture llama --set hidden_size=72 --output outputs/random/llama

The tokenizer is the small byte-level one of the debug configs, so most entries of a large vocabulary are unused.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402
from torchtitan.models.qwen3 import model_registry  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.tools.utils import set_default_dtype  # noqa: E402
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from torchtitan_rl.configs.toys.small_models import new_hf_model  # noqa: E402
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer  # noqa: E402
from torchtitan_rl.configs.toys.sum_digits import SumDigits  # noqa: E402
from torchtitan_rl.fields.references import did_you_mean  # noqa: E402
from torchtitan_rl.models.families import FAMILIES  # noqa: E402
from torchtitan_rl.models.hf_config import hf_architecture, spec_from_folder  # noqa: E402

QWEN3_SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}
"""The default dimensions with --architecture; --set overrides them. Qwen2 needs hidden_size = heads * head_dim."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=QWEN3_SIZES, help="size of a published Qwen3; default: 0.6B")
    parser.add_argument(
        "--architecture", help="make a small model of this model_type instead, such as llama or gemma3_text"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help=f"entries of its config.json; default: {SMALL}",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to create; must not exist")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"--output {args.output} exists already")
    if args.size and args.architecture:
        parser.error(f"--size {args.size} is of Qwen3: leave it out with --architecture, and --set its entries")
    if args.architecture == "":
        parser.error("--architecture '': expected a model_type, such as llama. Leave it out for a Qwen3")
    if args.set and not args.architecture:
        parser.error(f"--set {' '.join(args.set)}: expected --architecture, as a published size has its own entries")
    size = args.size or "0.6B"

    torch.manual_seed(args.seed)
    try:
        with set_default_dtype(getattr(torch, args.dtype)):
            if args.architecture:
                model = small_model(args.architecture, entries(args.set))
            else:
                model = new_hf_model(qwen3(size))
        save(model, args.output)
    except Exception as error:  # whatever transformers raises for entries that make no model, and the disk
        parser.error(f"cannot make the model: {type(error).__name__}: {' '.join(str(error).split())}")
    print(f"{args.output}: {args.architecture or f'Qwen3 {size}'}, random weights in {args.dtype}")


def entries(assignments: list[str]) -> dict[str, Any]:
    """Parses KEY=VALUE pairs with JSON values. Example: entries(["hidden_size=72"]) == {"hidden_size": 72}"""
    found = {}
    for one in assignments:
        key, _, value = one.partition("=")
        try:
            found[key] = json.loads(value)
        except ValueError as error:
            raise ValueError(f"--set {one}: expected KEY=VALUE with a value in JSON, and a text in quotes") from error
    return found


def qwen3(size: str) -> ModelSpec:
    """A Qwen3 with torchtitan's sizes of a published one, or a mixture of experts, "30B-A3B" or "235B-A22B"."""
    published = model_registry(size, attn_backend="varlen").model
    architecture = "Qwen3ForCausalLM" if size in QWEN3_SIZES else "Qwen3MoeForCausalLM"
    entries = hf_architecture(published) | {"max_position_embeddings": published.max_seq_len}
    model_type = FAMILIES[architecture].model_type
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(model_type, architectures=[architecture], **entries).save_pretrained(folder)
        return replace(spec_from_folder(Path(folder)), flavor=size)


def small_model(model_type: str, settings: dict[str, Any]) -> PreTrainedModel:
    """Returns a random model of a transformers model type, with `SMALL`'s dimensions overridden by `settings`."""
    # Many families read entries that their config class does not list, such as head_dim: those of Llama are taken for all.
    if model_type not in CONFIG_MAPPING:
        near = did_you_mean(model_type.lower().removesuffix("forcausallm"), CONFIG_MAPPING.keys())
        raise ValueError(f"--architecture {model_type}: expected a model_type of transformers. {near}".strip())
    own = AutoConfig.for_model(model_type)
    known = {*own.to_dict(), *own.attribute_map, *AutoConfig.for_model("llama").to_dict()}
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"{unknown} are no entries of a {model_type}'s config.json")
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **settings}))


def save(model: PreTrainedModel, output: Path) -> None:
    """Writes the model with a matching tokenizer. The folder appears only when it is complete."""
    task = SumDigits.Config().build()
    texts = [task.train_example(i, seed=0).text for i in range(500)]
    tokenizer = make_small_tokenizer(texts, vocab_size=min(512, model.config.get_text_config().vocab_size))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        Path(unfinished).rename(output)
        Path(unfinished).mkdir()  # the context manager removes it


if __name__ == "__main__":
    main()
