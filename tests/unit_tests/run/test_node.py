"""What is asked of a node without torch, with stand-ins for nvidia-smi and compilers on PATH."""

import sysconfig

import pytest

from torchtitan_rl.errors import UserError
from torchtitan_rl.run import node
from torchtitan_rl.run.node import check_build_tools, gpu_count

LISTED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa1111-0000)
  MIG 3g.40gb     Device  0: (UUID: MIG-cccc)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-aabb2222-0000)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb3333-0000)"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that is all of PATH; `place(name, text)` adds a program that prints `text`."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def add(name, text=""):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)

    return add


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("0,2", 2), (" 1 ", 1), ("", 0), ("-1", 0), ("GPU-bbbb3333-0000", 1), ("GPU-bbbb,GPU-aabb", 2)],
)
def test_gpus_are_counted_as_cuda_sees_them(place, monkeypatch, visible, count):
    place("nvidia-smi", LISTED)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == count


@pytest.mark.parametrize("visible", [None, "", "0", "MIG-cccc"])
def test_a_node_without_a_driver_has_no_gpu(place, monkeypatch, visible):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == 0
    place("nvidia-smi", "NVIDIA-SMI has failed because it could not communicate with the driver")
    assert gpu_count() == 0


@pytest.fixture
def headers(tmp_path, monkeypatch):
    """Python.h of a stand-in for Python's headers."""
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    (tmp_path / "Python.h").touch()
    return tmp_path / "Python.h"


def test_a_missing_compiler_is_named_with_its_package(place, headers, monkeypatch):
    place("cc")  # Triton does not look for this name
    with pytest.raises(UserError, match=r"no C compiler.*apt install gcc"):
        check_build_tools()
    monkeypatch.setenv("CC", "cc")
    check_build_tools()


def test_missing_headers_are_named_with_their_package(place, headers):
    place("gcc")
    headers.unlink()
    with pytest.raises(UserError, match=r"Python\.h is missing.*python3\.\d+-dev"):
        check_build_tools()


def test_a_missing_library_of_the_engine_is_named_with_its_package(monkeypatch):
    node.check_engine_library()
    monkeypatch.setattr(node, "CPU_ENGINE_LIBRARY", "libnone.so.9")
    with pytest.raises(UserError, match=r"libnone\.so\.9 is missing.*apt install libnuma1"):
        node.check_engine_library()
