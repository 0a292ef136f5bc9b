"""Where a run starts from: the folder, the model in it, its tokenizer."""

import pytest

from tests.parts.tiny import save_odd_checkpoint, save_tiny_checkpoint
from torchtitan_rl.library.tasks import Task
from torchtitan_rl.setup.registry import load_config
from torchtitan_rl.setup.start_checkpoint import prepare_start


@pytest.fixture
def config(tmp_path, monkeypatch):
    """debug, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return load_config("debug")


def test_task_makes_a_start_checkpoint_if_no_folder_is_named(config, monkeypatch):
    class WithStart(Task.Config):
        def start_checkpoint(self, cache_root):
            save_tiny_checkpoint(cache_root / "mine")
            (cache_root / "mine" / "tokenizer_config.json").write_text("{}")
            return cache_root / "mine"

    config.task = WithStart()
    prepare_start(config)
    assert config.hf_assets_path == "outputs/start_checkpoints/mine"


def test_model_is_read_from_the_folder(config, tmp_path):
    save_odd_checkpoint(tmp_path, "llama")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    config.hf_assets_path = str(tmp_path)
    prepare_start(config)
    assert (config.model_spec.name, config.model_spec.flavor) == ("llama3", "3x72")
