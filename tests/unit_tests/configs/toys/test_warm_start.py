"""The warm start's mechanics, on a model of a few steps; what it teaches is measured by the debug job itself."""

import dataclasses
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from torchtitan_rl.configs.toys.answer_recipes import sums
from torchtitan_rl.configs.toys.sum_digits import debug_task
from torchtitan_rl.configs.toys.warm_start import _pad, _tokenize, _worked, ensure_checkpoint, make_checkpoint

DIMENSIONS = {"vocab_size": 320, "dim": 64, "hidden_dim": 64, "n_layers": 1, "n_heads": 2, "head_dim": 32}
TINY = dataclasses.replace(sums(), steps=3, batch_size=4, dimensions=DIMENSIONS)
TASK = debug_task().build()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "start"
    make_checkpoint(folder, TASK, 0, TINY)
    return folder


def test_warm_start_loss_covers_the_completion_and_its_end_token(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [example.text + completion for example, completion in _worked(TASK, TINY, 0, 20)]
    token_ids, labels = _pad(_tokenize(TASK, TINY, 0, 20, tokenizer), tokenizer.pad_token_id)
    for row, text in enumerate(texts):
        learned = labels[row][labels[row] != -100]
        assert tokenizer.decode(learned) == text.partition("\n")[2] + tokenizer.eos_token
        first = (labels[row] != -100).nonzero()[0].item()
        assert tokenizer.decode(token_ids[row, : first + 1]).endswith("?\n")


def test_warm_start_writes_a_hugging_face_checkpoint(folder):
    model = Qwen3ForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == len(tokenizer) == 320
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.dtype == torch.float32
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_warm_start_is_deterministic_and_keeps_random_state_and_threads(folder, tmp_path):
    torch.manual_seed(7)
    before, threads, python = torch.get_rng_state(), torch.get_num_threads(), random.getstate()
    make_checkpoint(tmp_path / "again", TASK, 0, TINY)
    assert torch.equal(torch.get_rng_state(), before)
    assert (torch.get_num_threads(), random.getstate()) == (threads, python)
    weights = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    make_checkpoint(tmp_path / "other", TASK, 1, TINY)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_interrupted_warm_start_is_not_used_and_is_removed(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("torchtitan_rl.configs.toys.warm_start._train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure_checkpoint(TASK, TINY, tmp_path)
    folder = ensure_checkpoint(TASK, TINY, tmp_path)
    Qwen3ForCausalLM.from_pretrained(folder)
    assert not list(tmp_path.glob(".*partial"))


def test_concurrent_runs_make_one_warm_start_checkpoint(tmp_path, capsys):
    with ThreadPoolExecutor(2) as runs:
        folders = {*runs.map(lambda _: ensure_checkpoint(TASK, TINY, tmp_path), range(2))}
    assert capsys.readouterr().out.count("warm start: wrote") == 1
    Qwen3ForCausalLM.from_pretrained(*folders)


def test_a_rank_waits_for_local_rank_0(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = []
    waiting = threading.Thread(target=lambda: found.append(ensure_checkpoint(TASK, TINY, tmp_path)))
    waiting.start()
    waiting.join(timeout=0.5)
    assert waiting.is_alive()
    monkeypatch.setenv("LOCAL_RANK", "0")
    made = ensure_checkpoint(TASK, TINY, tmp_path)
    waiting.join(timeout=60)
    assert found == [made]
