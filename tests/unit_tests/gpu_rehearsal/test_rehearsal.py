"""What GPUs run, on a machine without one (tests/gpu_rehearsal): nothing is wrong, and each introduced fault is seen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_rehearsal import native

ROOT = Path(__file__).parents[3]
LAYOUTS = ["1 ranks", "8 ranks", "8 ranks x TP 2", "16 ranks x HSDP 2", "8 ranks x EP 4"]
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
    """The reports of the rehearsals. They run at once, because each uses one process at first."""
    folder = tmp_path_factory.mktemp("rehearsal")
    programs = {"trainer": ["tests.gpu_rehearsal", "quick"], "engine": ["tests.gpu_rehearsal.engine"]}
    options = {"env": native.clean_environment(), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = {}
    for name, program in programs.items():
        command = [sys.executable, "-m", *program, str(folder / f"{name}.json")]
        started[name] = subprocess.Popen(command, cwd=ROOT, **options)
    said = {name: process.communicate()[0] for name, process in started.items()}
    for name in programs:
        assert (folder / f"{name}.json").exists(), said[name][-4000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in programs}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_simulated_gpu_trainer_runs_on_each_layout_without_faults(reports, layout):
    assert list(reports["trainer"]["layouts"]) == LAYOUTS
    assert reports["trainer"]["layouts"][layout] == []


@pytest.mark.parametrize("fault", SEEN_AS)
def test_introduced_fault_is_detected(reports, fault):
    assert list(reports["trainer"]["faults"]) == list(SEEN_AS)
    assert any(SEEN_AS[fault] in sentence for sentence in reports["trainer"]["faults"][fault])


def test_excess_device_synchronizations_are_reported_with_their_lines(reports):
    [told] = [s for s in reports["trainer"]["faults"]["item() in a loop"] if "host synchronisations" in s]
    assert "trainer/trainer.py:" in told


@pytest.mark.parametrize("part", ["rehearse_steps", "rehearse_configs"])
def test_simulated_gpu_engine_completes_prompts_through_sleeps_and_takes_every_config(reports, part):
    assert reports["engine"][part] == []


INTRODUCED = {
    "rehearse_missing_option": "no_such_option",
    "rehearse_unmapped_proof": "clone uses memory that the sleeping engine has given back",
}
"""Fault of the engine -> what the rehearsal says of it."""


@pytest.mark.parametrize("part", INTRODUCED)
def test_introduced_fault_of_the_engine_is_detected(reports, part):
    assert INTRODUCED[part] in reports["engine"][part][0]
