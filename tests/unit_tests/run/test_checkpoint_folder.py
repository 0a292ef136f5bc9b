"""Checkpoint folders: what is trusted, what is skipped and why, what is kept."""

import json
import os
from pathlib import Path

import pytest

from torchtitan_rl.errors import UserError
from torchtitan_rl.run import manifest
from torchtitan_rl.run.checkpoint_folder import CheckpointFolder, find_resume


def make(folder: CheckpointFolder, *steps: int, keep: int = 0) -> CheckpointFolder:
    """Whole checkpoints of two files each, as a run writes them."""
    for step in steps:
        unfinished = folder.begin(step)
        (unfinished / ".metadata").write_bytes(b"index")
        (unfinished / "__0_0.distcp").write_bytes(bytes(range(100)))
        folder.finish(step, manifest.describe(unfinished.iterdir()), {"step": step, "config": {}})
        folder.purge(keep)
    return folder


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path)


def test_newest_complete_checkpoint_is_resumed(folder, tmp_path):
    assert find_resume("auto", tmp_path) is None
    make(folder, 20, 100, 40)
    found = find_resume("auto", tmp_path)
    assert (found.step, found.checkpoint.name, found.fork, found.skipped) == (100, "step-100", False, ())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 40', '"step": 41'))


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "a flipped bit": ("__0_0.distcp", flip, "__0_0.distcp is damaged: its bytes are not those that were written"),
    "a torn file": ("__0_0.distcp", lambda path: path.write_bytes(b"abc"), "__0_0.distcp has 3 bytes in place of 100"),
    "a missing file": ("__0_0.distcp", Path.unlink, r"__0_0.distcp cannot be read \(No such file or directory\)"),
    "an emptied index": (".metadata", lambda path: path.write_bytes(b""), ".metadata has 0 bytes in place of 5"),
    "no manifest": (manifest.NAME, Path.unlink, "it has no manifest.json: it was not finished"),
    "a torn manifest": (manifest.NAME, lambda path: path.write_text("{"), "its manifest.json is damaged"),
    "an edited manifest": (manifest.NAME, edit, "its manifest.json is damaged: it is not what a run writes"),
    "a pipe for a manifest": (manifest.NAME, as_pipe, "it has no manifest.json"),
    "a pipe for a file": ("__0_0.distcp", as_pipe, "__0_0.distcp is no file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_skipped_with_a_reason(folder, tmp_path, damage):
    make(folder, 20, 40)
    name, act, reason = DAMAGES[damage]
    act(folder.steps()[40] / name)
    found = find_resume("auto", tmp_path)
    assert found.step == 20
    assert len(found.skipped) == 1
    with pytest.raises(UserError, match=f"no checkpoint in .* can be used: step-40: {reason}"):
        find_resume("40", tmp_path)


def test_without_a_whole_checkpoint_each_is_named_and_no_new_run_starts(folder, tmp_path):
    for path in make(folder, 20, 40).steps().values():
        flip(path / "__0_0.distcp")
    with pytest.raises(UserError, match="no checkpoint in .* can be used: step-40: .*damaged.*; step-20: .*damaged"):
        find_resume("auto", tmp_path)


def test_partial_checkpoints_are_ignored_and_removed_at_the_next_save(folder, tmp_path):
    make(folder, 20)
    (folder.begin(40) / "__0_0.distcp").write_bytes(b"half")
    folder.steps()[20].rename(folder.path / ".deleting-step-20")
    assert folder.steps() == {}
    make(folder, 60)
    assert sorted(p.name for p in folder.path.iterdir()) == ["step-60"]


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4])])
def test_newest_k_checkpoints_are_kept(folder, keep, left):
    assert list(make(folder, 1, 2, 3, 4, keep=keep).steps()) == left


def test_best_checkpoint_is_kept_until_another_is_best(folder):
    make(folder, 1)
    folder.mark_best(1)
    assert list(make(folder, 2, 3, keep=1).steps()) == [1, 3]
    folder.mark_best(3)
    assert CheckpointFolder(folder.path.parent).best() == 3
    assert list(make(folder, 4, keep=1).steps()) == [3, 4]


def test_steps_after_the_resumed_one_are_set_aside_and_never_overwritten(folder, tmp_path):
    for _ in range(2):
        make(folder, 1, 2)
        assert find_resume("1", tmp_path).step == 1
        folder.set_aside_from(2)
    assert sorted(p.name for p in folder.path.iterdir()) == ["set-aside-step-2", "set-aside-step-2-2", "step-1"]
    for name in ("set-aside-step-2", "set-aside-step-2-2"):
        found = find_resume(str(folder.path / name), tmp_path / "fork")
        assert (found.step, found.checkpoint.name, found.fork) == (2, name, True)


def test_missing_step_is_named_with_the_existing_ones(folder, tmp_path):
    with pytest.raises(UserError, match="resume = '77': expected a step with a checkpoint in .*none yet"):
        find_resume("77", tmp_path)
    make(folder, 20, 40)
    with pytest.raises(UserError, match=r"resume = '77': expected a step with a checkpoint in .*\[20, 40\]"):
        find_resume("77", tmp_path)


def test_never_refuses_a_folder_with_checkpoints(folder, tmp_path):
    assert find_resume("never", tmp_path) is None
    make(folder, 20)
    with pytest.raises(UserError, match=r"resume = 'never': expected a run folder without checkpoints.*\[20\]"):
        find_resume("never", tmp_path)


def test_run_forks_another_until_it_has_its_own_checkpoints(folder, tmp_path):
    (tmp_path / "other").mkdir()
    other = make(CheckpointFolder(tmp_path / "other"), 10, 30)
    for source, step in ((other.path.parent, 30), (other.steps()[10], 10)):
        found = find_resume(str(source), tmp_path)
        assert (found.step, found.fork) == (step, True)
    (tmp_path / "config-1.json").write_text(json.dumps({"resume": str(other.path.parent)}))
    make(folder, 35)
    found = find_resume(str(other.path.parent), tmp_path)
    assert (found.step, found.fork) == (35, False)
    with pytest.raises(UserError, match="resume = '/nowhere': expected auto, never, a step such as 40, or the folder"):
        find_resume("/nowhere", tmp_path / "new")


def test_resume_path_of_an_unrelated_run_is_refused(folder, tmp_path):
    (tmp_path / "other").mkdir()
    make(CheckpointFolder(tmp_path / "other"), 10)
    make(folder, 20, 40)
    for place in ("other", "gone"):
        with pytest.raises(UserError, match=r"expected auto or one of \[20, 40\]: .* was not forked from there"):
            find_resume(str(tmp_path / place), tmp_path)


def test_a_runs_own_folder_or_checkpoint_is_named_by_its_path(folder, tmp_path):
    make(folder, 20, 40)
    assert find_resume(str(tmp_path), tmp_path).step == 40
    assert find_resume(str(folder.steps()[20]), tmp_path).step == 20


NAMES = ("../../../dev/zero", "..", "/dev/zero", "a\0b", "\ud800")


@pytest.mark.parametrize(
    "content",
    [*({"files": {name: {"bytes": 0, "sha256": "0"}}, "config": {}} for name in NAMES),
     {"files": ["a"], "config": {}}, {"files": {"a": 5}, "config": {}}, {"files": {}}],
)  # fmt: skip
def test_a_forged_manifest_is_refused_in_a_sentence_and_reads_nothing_outside_its_folder(content, tmp_path):
    manifest.write(tmp_path, **content)
    assert manifest.examine(tmp_path).startswith("its manifest.json is damaged")
