"""What the runs of tests/integration_tests.py start from: functions that fill the folder of a test's data."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.make_arrivals import rows as arrivals

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {
    "qwen3_0_6b": ("qwen3", {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}),
    "qwen3_8b": (
        "qwen3",
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288, "tie_word_embeddings": False},
    ),
    "qwen3_30b_a3b": (
        "qwen3_moe",
        {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
         "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False},
    ),
}  # fmt: skip
"""Architecture and widths of the models of shipped configs."""


def random_start(architecture: str, **settings: object) -> Callable[[Path], None]:
    """A random model in `start`. `settings`: entries of its config.json."""

    def prepare(folder: Path) -> None:
        command = ["scripts/make_random_checkpoint.py", "--architecture", architecture, "--dtype", "float32"]
        command += ["--output", str(folder / "start"), "--set", *(f"{k}={json.dumps(v)}" for k, v in settings.items())]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)

    return prepare


def odd(architecture: str, **more: object) -> Callable[[Path], None]:
    """A random model of odd dimensions in `start`, with untied embeddings."""
    settings = {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "head_dim": 32,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
    }
    settings |= {"vocab_size": 322, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
    return random_start(architecture, **settings | more)


def published(name: str) -> Callable[[Path], None]:
    """Two layers of a published Qwen3 in `start`; on a CPU with 1024 channels, few words, and an eighth of the MLP and of the experts."""
    architecture, widths = PUBLISHED[name]
    settings = {"num_hidden_layers": 2, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, **widths}
    if not torch.cuda.is_available():
        small = {
            key: settings[key] // 8
            for key in ("intermediate_size", "moe_intermediate_size", "num_experts")
            if key in settings
        }
        settings |= {**small, "hidden_size": 1024, "vocab_size": 151936 // 32}
    return random_start(architecture, **settings)


def two_bases(folder: Path) -> None:
    """The same as Qwen3, and `other`, one of whose weights is another."""
    odd("qwen3")(folder)
    shutil.copytree(folder / "start", folder / "other")
    file, name = folder / "other" / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    weights[name][3, 5] += 0.5
    save_file(weights, file, metadata={"format": "pt"})


def arrivals_with_solutions(folder: Path) -> None:
    """debug_rows' file of chat messages, with the column that TRL's accuracy_reward reads."""
    lines = [json.dumps({**row, "solution": f"${row['answer']}$"}) + "\n" for row in arrivals(2000, 0)]
    (folder / "rows.jsonl").write_text("".join(lines))
