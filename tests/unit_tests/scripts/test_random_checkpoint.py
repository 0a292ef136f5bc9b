"""Random checkpoints of each architecture, with the script's own dimensions."""

import re

import pytest

from scripts import make_random_checkpoint
from scripts.make_random_checkpoint import save, small_model
from torchtitan_rl.library.models import spec_from_folder


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_a_run_accepts_a_checkpoint_of_the_default_dimensions(tmp_path, architecture):
    save(small_model(architecture, {}), tmp_path / "made")
    assert spec_from_folder(tmp_path / "made").model.dim == 256


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--architecture", "lama"], "--architecture lama: expected a model_type of transformers. Did you mean llama"),
        (["--architecture", "llama", "--set", "num_attention_heads=6"], "hidden size .256. is not a multiple"),
        (
            ["--architecture", "llama", "--set", "num_hidden_layers=0"],
            "num_hidden_layers 0, which must be a whole number",
        ),
        (
            ["--architecture", "llama", "--set", "hidden_size=abc"],
            "--set hidden_size=abc: expected KEY=VALUE with a value",
        ),
        (
            ["--architecture", "llama", "--set", "hidden_size"],
            "--set hidden_size: expected KEY=VALUE with a value in JSON",
        ),
        (["--architecture", "llama", "--set", "hiden=5"], ".'hiden'. are no entries of a llama"),
    ],
)
def test_entries_that_make_no_model_are_one_sentence(tmp_path, monkeypatch, capsys, options, says):
    monkeypatch.setattr("sys.argv", ["make_random_checkpoint", *options, "--output", str(tmp_path / "made")])
    with pytest.raises(SystemExit, match="2"):
        make_random_checkpoint.main()
    assert re.search(f"error: cannot make the model: .*{says}", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
