"""What GPUs run, on a machine without one (tests/gpu_rehearsal): nothing is wrong, and each introduced fault is seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_rehearsal import native

ROOT = Path(__file__).parents[3]
LAYOUTS = ["1 ranks", "8 ranks", "8 ranks x TP 2", "16 ranks x HSDP 2"]
SEEN_AS = {
    "a CPU tensor in a collective": "a CPU tensor in allreduce_",
    "a stream race": "while another stream uses it",
    "item() in a loop": "the budget is",
    "another order of collectives": "rank 1 has allreduce_",
    "memory that is kept": "update peaks at",
    "labels of other values": "labels differs from the CPU's",
}
"""Introduced fault (tests/gpu_rehearsal/faults.py) -> what the rehearsal says of it."""

pytestmark = pytest.mark.skipif(native.reason_to_skip() is not None, reason=native.reason_to_skip() or "")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    """The reports of the trainer's and the engine's rehearsal. Both run at once, because each uses one process at first."""
    folder = tmp_path_factory.mktemp("rehearsal")
    programs = {"trainer": ["tests.gpu_rehearsal", "quick"], "engine": ["tests.gpu_rehearsal.engine"]}
    names = "TORCHTITAN", "TORCHELASTIC", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "VLLM", "TORCH_COMPILE"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", *program, str(folder / f"{name}.json")],
            cwd=ROOT,
            env=clean | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, program in programs.items()
    }
    said = {name: process.communicate()[0] for name, process in started.items()}
    for name in programs:
        assert (folder / f"{name}.json").exists(), said[name][-4000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in programs}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_runs_on_each_layout_and_nothing_is_wrong(reports, layout):
    assert list(reports["trainer"]["layouts"]) == LAYOUTS
    assert reports["trainer"]["layouts"][layout] == []


@pytest.mark.parametrize("fault", SEEN_AS)
def test_an_introduced_fault_is_seen(reports, fault):
    assert list(reports["trainer"]["faults"]) == list(SEEN_AS)
    assert any(SEEN_AS[fault] in sentence for sentence in reports["trainer"]["faults"][fault])


def test_too_many_synchronisations_are_told_with_their_lines(reports):
    [told] = [s for s in reports["trainer"]["faults"]["item() in a loop"] if "host synchronisations" in s]
    assert "core/trainer/trainer.py:" in told


def test_engine_as_on_cuda_completes_every_prompt_over_sleeps_and_preemptions(reports):
    assert reports["engine"]["rehearse_steps"] == []


def test_every_shipped_config_makes_an_engine_for_cuda(reports):
    assert reports["engine"]["rehearse_configs"] == []


def test_an_option_that_vllm_lacks_is_seen(reports):
    assert "no_such_option" in reports["engine"]["rehearse_missing_option"][0]


def test_a_proof_that_reads_a_sleeping_engine_is_seen(reports):
    assert (
        "clone uses memory that the sleeping engine has given back" in reports["engine"]["rehearse_unmapped_proof"][0]
    )


def test_without_gpp_the_reason_to_skip_names_it(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    assert "needs g++" in native.reason_to_skip()
