"""scripts/compare_with_transformers.py: the numbers of a folder's policy are those of transformers."""

import json

import pytest

from scripts.compare_with_transformers import main, policy_logprobs, random_tokens, transformers_logprobs
from tests.parts.hf_decoders import BOUNDS, WINDOW, save_hf_family
from tests.parts.multimodal import save_multimodal
from tests.parts.tiny import ODD, save_odd_checkpoint
from torchtitan_rl.models.hf_config import spec_from_folder

SAVED = {
    "qwen3": save_odd_checkpoint,
    "qwen3_moe": save_odd_checkpoint,
    "gemma3_text": save_hf_family,
    "Gemma3ForConditionalGeneration": save_multimodal,
}


@pytest.mark.parametrize("family", SAVED)
def test_policy_of_a_folder_agrees_with_transformers(family, tmp_path, monkeypatch, capsys):
    SAVED[family](tmp_path, family)
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path), "--limit", str(BOUNDS["transformers"])])
    assert main() == 0
    assert "log-probabilities of 31 random tokens differ from transformers' by" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path), "--limit", "0"])
    assert main() == 1


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("mistral", {"sliding_window": WINDOW + 1}),
    ],
)
def test_policy_that_computes_something_else_differs(family, entries, tmp_path):
    (save_odd_checkpoint if family in ODD else save_hf_family)(tmp_path, family)
    spec = spec_from_folder(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))  # transformers alone reads these
    ids = random_tokens(spec)
    difference = policy_logprobs(spec, tmp_path, ids) - transformers_logprobs(spec, tmp_path, ids)
    assert difference.abs().max() > 0.01
