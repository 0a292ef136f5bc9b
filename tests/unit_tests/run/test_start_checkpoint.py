"""Where a run starts from: the folder, the model in it, its tokenizer."""

import json
import re

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.parts.tiny import save_odd_checkpoint, save_tiny_checkpoint
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.data.tasks import Task
from torchtitan_rl.run.start_checkpoint import load_tokenizer, prepare_start, unlike_its_file


@pytest.fixture
def config(tmp_path, monkeypatch):
    """debug, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return load_config("debug")


def test_task_makes_a_start_checkpoint_if_no_folder_is_named(config, tmp_path):
    class WithStart(Task.Config):
        def start_checkpoint(self, cache_root):
            save_tiny_checkpoint(cache_root / "mine")
            (cache_root / "mine" / "tokenizer_config.json").write_text("{}")
            return cache_root / "mine"

    config.task = WithStart()
    prepare_start(config)
    assert config.hf_assets_path == str(tmp_path / "outputs/start_checkpoints/mine")


def test_model_is_read_from_the_folder(config, tmp_path):
    save_odd_checkpoint(tmp_path, "llama")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    config.hf_assets_path = str(tmp_path)
    prepare_start(config)
    assert (config.model_spec.name, config.model_spec.flavor) == ("llama3", "3x72")


@pytest.mark.parametrize(
    ("made_by", "digits", "said"),
    [
        ("GPT2Tokenizer", r"\p{N}", "GPT2Tokenizer reads .* 'Ġ12'.*, and tokenizer.json as .* 'Ġ', '1', '2'"),
        ("LlamaTokenizerFast", r" ?\p{N}+", "LlamaTokenizer reads .*, and tokenizer.json as .* 'Ġ12'"),
        ("TokenizersBackend", r"\p{N}", ""),
        ("GPT2Tokenizer", r" ?\p{N}+", ""),
    ],
)
def test_a_tokenizer_that_transformers_makes_otherwise_than_its_file_is_named(tmp_path, made_by, digits, said):
    """The model was trained with the file's tokens. Whether a text comes back whole does not show it."""
    text = Tokenizer(models.BPE())
    pieces = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
    words, bytes_alone = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=on) for on in (True, False))
    text.decoder = decoders.ByteLevel()
    text.pre_tokenizer = words
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text.train_from_iterator(["we need 12 and 34 to add 12"] * 9, trainers.BpeTrainer(initial_alphabet=alphabet))
    text.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pieces), "isolated"), bytes_alone])
    text.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": made_by}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = unlike_its_file(load_tokenizer(str(tmp_path)))
    assert re.search(said, found) if said else not found
