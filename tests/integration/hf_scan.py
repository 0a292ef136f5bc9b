"""Every causal decoder of the installed transformers, from a small random folder: refused by name, or computed as transformers does.

    .venv/bin/python tests/integration/hf_scan.py [olmo2 starcoder2 ...]

Prints a line for each model type; exits non-zero if one that is accepted differs, or if one fails otherwise than by a refusal.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from tests.parts.hf_decoders import BOUNDS, policy_figures  # noqa: E402
from tests.parts.only_rank import only_rank  # noqa: E402
from torchtitan_rl.errors import UserError  # noqa: E402
from torchtitan_rl.models import spec_from_folder  # noqa: E402
from torchtitan_rl.models.families import FAMILIES  # noqa: E402
from torchtitan_rl.models.multimodal import MULTIMODAL  # noqa: E402

SIZES = {
    "vocab_size": 130, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 100, "max_position_embeddings": 256, "initializer_range": 0.1, "sliding_window": 12,
}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def scan(model_type: str, architecture: str, folder: Path) -> str:
    """Returns one line: the refusal, the difference, or what the model type needs instead of SIZES."""
    try:
        config = AutoConfig.for_model(model_type, **SIZES, **TOKENS)
    except Exception as error:  # as many types as there are validators
        return f"not tried: its config does not take these sizes: {type(error).__name__}"
    config.architectures = [architecture]
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    try:
        windows = spec_from_folder(folder).model.windows
    except UserError as error:
        return f"refused: {str(error).partition('config.json')[2]}"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    model.save_pretrained(folder)
    found = policy_figures(folder)["transformers"]
    verdict = "accepted" if found <= BOUNDS["transformers"] else "WRONG"
    return f"{verdict}: differs by {found:.1e}, windows {sorted({*windows}, key=str)}"


def main() -> None:
    with only_rank():
        lines = {}
        for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
            if architecture in (*FAMILIES, *MULTIMODAL) or (sys.argv[1:] and model_type not in sys.argv[1:]):
                continue
            with tempfile.TemporaryDirectory() as folder:
                lines[model_type] = scan(model_type, architecture, Path(folder))
            print(f"{model_type:24} {lines[model_type][:200]}", flush=True)
    kinds = [line.split(":")[0] for line in lines.values()]
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted({*kinds})))
    sys.exit("WRONG" in kinds)


if __name__ == "__main__":
    main()
