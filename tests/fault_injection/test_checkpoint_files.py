"""Files of a checkpoint torn, flipped or lost between two starts of a run."""

import json

import pytest

from tests.fault_injection.conftest import STEPS
from tests.fault_injection.harness import copy_until, metrics_of, train, weights_of


def content(run):
    """Every file of a run but its lock, with what it holds and when it was changed."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def flip_a_bit(path):
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


@pytest.mark.quick
def test_damaged_checkpoint_resumes_from_the_one_before_bitwise(whole_run, tmp_path):
    run = copy_until(whole_run, 3, tmp_path)
    flip_a_bit(run / "checkpoint" / "step-3" / "__0_0.distcp")
    ended = train(tmp_path, *STEPS)
    assert ended.code == 0
    ended.says(
        "skipped step-3: __0_0.distcp is damaged", "later step kept as set-aside-step-3", "resuming after step 2"
    )
    ended.never_says("Traceback")
    assert weights_of(run, 6) == weights_of(whole_run, 6)
    assert list(metrics_of(run)) == [1, 2, 3, 4, 5, 6]


def test_fork_writes_to_its_own_folder_and_leaves_the_source_unchanged(whole_run, tmp_path):
    before = sorted(p.name for p in whole_run.rglob("*"))
    ended = train(tmp_path, *STEPS, "--resume", str(whole_run / "checkpoint" / "step-4"))
    assert ended.code == 0
    ended.says("forked from .*step-4", "resuming after step 4")
    assert sorted(p.name for p in whole_run.rglob("*")) == before
    fork, whole = weights_of(tmp_path / "run", 6), weights_of(whole_run, 6)
    assert fork.keys() == whole.keys()
    assert [name for name in whole if fork[name] != whole[name] and "train_state" not in name] == []
    assert list(metrics_of(tmp_path / "run")) == [5, 6]


def test_resume_with_a_changed_config_is_refused_until_accepted(whole_run, tmp_path):
    run = copy_until(whole_run, 2, tmp_path)
    first = (run / "config.json").read_text()
    before = content(run)
    refused = train(tmp_path, *STEPS, "--seed", "5", "--num-prompts-per-step", "8", log="refused.log")
    assert refused.code == 2
    refused.says("num_prompts_per_step 4 -> 8 .*; seed 0 -> 5 .*accept it with --resume-changed")
    assert content(run) == before
    assert json.loads((run / "end.json").read_text())["outcome"] == "done"
    accepted = train(tmp_path, *STEPS, "--seed", "5", "--trainer.optimizer.lr", "2e-4", "--resume-changed")
    assert accepted.code == 0
    accepted.says("changed since step-2: seed 0 -> 5; trainer.optimizer.lr 0.0001 -> 0.0002")
    assert (run / "config-1.json").read_text() == first
