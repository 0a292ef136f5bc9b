"""The policy of a start against transformers' own model of it."""

import json

import pytest

from tests.parts.hf_decoders import WINDOW, save_hf_family
from tests.parts.tiny import ODD, save_odd_checkpoint
from torchtitan_rl.build.second_opinion import compare_start
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.errors import UserError
from torchtitan_rl.models import spec_from_folder


def config_of(folder, spec=None):
    config = load_config("debug")
    config.hf_assets_path, config.model_spec = str(folder), spec or spec_from_folder(folder)
    return config


def save(folder, family, **settings):
    save_odd_checkpoint(folder, family) if family in ODD else save_hf_family(folder, family, **settings)


def change_config(folder, **entries):
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | entries))


@pytest.mark.parametrize("family", [*sorted(ODD), "gemma3_text", "granite", "phi3"])
def test_policy_and_transformers_agree(tmp_path, family, capfd):
    save(tmp_path, family)
    capfd.readouterr()
    said = compare_start(config_of(tmp_path))
    assert said.startswith("the policy's log-probabilities of 31 random tokens are those of transformers to ")
    assert float(said.split(" to ")[1].split()[0]) <= 2e-5
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("llama", {"rms_norm_eps": 0.1}),
        ("mistral", {"sliding_window": WINDOW + 1}),
        ("granite", {"logits_scaling": 2.0}),
    ],
)
def test_a_policy_that_computes_something_else_is_refused(tmp_path, family, entries):
    save(tmp_path, family)
    spec = spec_from_folder(tmp_path)
    change_config(tmp_path, **entries)  # transformers reads this, the policy was made of the entries before
    with pytest.raises(
        UserError, match="hf_assets_path = .*are those of transformers, but for a sequence of 32 tokens they"
    ):
        compare_start(config_of(tmp_path, spec))
