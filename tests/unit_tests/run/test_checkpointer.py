"""Saving and loading whole states through DCP, on one rank: what is written, what is refused, what a failure says."""

import pickle
import resource
import signal
from pathlib import Path, PosixPath
from types import SimpleNamespace

import pytest
import torch

from torchtitan_rl import build
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.run.checkpointer import Checkpointer
from torchtitan_rl.run.manifest import examine

pytestmark = pytest.mark.usefixtures("one_rank")


class Counter:
    """A state of a number, a tensor and a text."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"count": torch.tensor(self.value), "json": f'{{"at": {self.value}}}', "rate": 0.5 * self.value}

    def load_state_dict(self, state):
        self.value = int(state["count"])
        assert (state["json"], state["rate"]) == (f'{{"at": {self.value}}}', 0.5 * self.value)


def checkpointer(folder, value=0, **config):
    model = torch.nn.Linear(64, 64)
    torch.nn.init.constant_(model.weight, value)
    parts = SimpleNamespace(model=model, optimizer=Counter(value), scheduler=Counter(value), lora=None)
    config = Checkpointer.Config(**{"interval": 2, **config})
    return config.build(
        trainer=parts, prompts=Counter(value), run_state=Counter(value), run_folder=folder, config_fields={"seed": 3}
    )


def test_checkpoint_is_complete_and_restores_everything(tmp_path):
    saver, other = checkpointer(tmp_path, 7), checkpointer(tmp_path, 1)
    assert [saver.save(1), saver.save(2), saver.save(3, last_step=True)] == [False, True, True]
    folder = saver.folder.steps()[3]
    assert examine(folder) == ""
    other.load(folder)
    assert torch.equal(other.model.weight, saver.model.weight)
    assert [state.value for state in other.states.values()] == [7] * 4


def test_the_best_is_saved_when_it_is_found_and_survives(tmp_path):
    saver = checkpointer(tmp_path, keep_latest_k=1)
    saver.keep_best(1)
    assert saver.save(1)
    for step in range(2, 7):
        saver.save(step)
    assert list(saver.folder.steps()) == [1, 6]


def test_a_kill_as_the_best_gets_its_name_leaves_it_marked(tmp_path, monkeypatch):
    def kill(self, target):
        rename(self, target)
        if target.name == "step-1":
            raise SystemExit("killed")

    rename = Path.rename
    saver = checkpointer(tmp_path)
    saver.keep_best(1)
    monkeypatch.setattr(Path, "rename", kill)
    with pytest.raises(SystemExit):
        saver.save(1)
    monkeypatch.undo()
    assert list(saver.folder.steps()) == [1]
    again = checkpointer(tmp_path, keep_latest_k=1)
    for step in range(2, 5):
        again.save(step)
    assert list(again.folder.steps()) == [1, 4]


def test_later_checkpoints_are_set_aside_with_the_first_step_after_going_back_and_not_before(tmp_path, capsys):
    saver = checkpointer(tmp_path, keep_latest_k=0)
    for step in (2, 4, 6):
        saver.save(step)
    again = checkpointer(tmp_path)
    again.load(again.folder.steps()[2])
    assert list(again.folder.steps()) == [2, 4, 6]  # a start that fails here has lost nothing
    again.save(3)
    assert list(again.folder.steps()) == [2]
    assert "later step kept as set-aside-step-4" in capsys.readouterr().out
    again.save(4)
    again.save(6)
    assert sorted(path.name for path in again.folder.path.glob("*step*")) == [
        "set-aside-step-4", "set-aside-step-6", "step-4", "step-6",
    ]  # fmt: skip


def test_checkpoint_of_another_model_is_refused_in_one_line(tmp_path):
    saver = checkpointer(tmp_path)
    saver.save(2)
    other = checkpointer(tmp_path)
    other.model = torch.nn.Linear(32, 32)
    with pytest.raises(UserError, match="step-2 cannot be loaded: rank 0: ValueError: .*[Ss]ize mismatch") as said:
        other.load(saver.folder.steps()[2])
    assert "\n" not in str(said.value)


def test_an_entry_that_the_checkpoint_lacks_is_refused(tmp_path):
    saver, other = checkpointer(tmp_path, 7), checkpointer(tmp_path, 1)
    saver.save(2)
    other.states["optimizer"].state_dict = lambda: {"level": 1}
    with pytest.raises(UserError, match="optimizer.level"):
        other.load(saver.folder.steps()[2])


class Malicious:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ((print, ("this ran",)), "the index names builtins.print"),
        ((getattr, (PosixPath, "home")), "the index asks for the attribute home of .*, which is no Enum"),
    ],
)
def test_checkpoint_index_with_code_is_refused_without_running_it(tmp_path, capsys, call, said):
    saver = checkpointer(tmp_path)
    saver.save(2)
    folder = saver.folder.steps()[2]
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(*call)))
    with pytest.raises(UserError, match=said):
        saver.load(folder)
    assert "this ran" not in capsys.readouterr().out


def test_checkpoint_value_with_code_is_refused_without_running_it(tmp_path, capsys):
    saver = checkpointer(tmp_path)
    saver.states["train_state"].state_dict = lambda: {"json": Malicious(print, ("this ran",))}
    saver.save(2)
    with pytest.raises(UserError, match="rank 0: UnpicklingError: Weights only load failed"):
        saver.load(saver.folder.steps()[2])
    assert "this ran" not in capsys.readouterr().out


@pytest.fixture
def full_disk(monkeypatch):
    """No file may grow beyond 8 kB, as on a disk that fills up while a checkpoint is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(signal, "SIGXFSZ", signal.signal(signal.SIGXFSZ, signal.SIG_IGN), raising=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_keeps_earlier_checkpoints_and_the_next_step_saves_again(tmp_path, full_disk, capsys):
    saver = checkpointer(tmp_path)
    assert not saver.save(2)
    said = capsys.readouterr().out
    assert "step 2 is not saved: writing it failed" in said
    assert "tried again after each step, until step 4" in said
    assert saver.folder.steps() == {}
    assert not list(saver.folder.path.glob(".writing*"))
    assert not saver.save(3)
    with pytest.raises(TrainingStopped, match="step 4 cannot be saved: .*newest checkpoint is none"):
        saver.save(4)
    full_disk()
    assert saver.save(5)
    assert not saver.save(7)


def test_missing_disk_space_is_reported_in_bytes_at_the_start_and_before_writing(tmp_path, monkeypatch):
    saver = checkpointer(tmp_path)
    saver.check_room()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    lacks = r"dump_folder = .*room for a checkpoint of 5\d,\d{3} bytes, but 4\d,\d{3} bytes are missing"
    with pytest.raises(UserError, match=lacks):
        saver.check_room()
    lacks = r"step 3 cannot be saved: the disk of .* lacks 4\d,\d{3} bytes \(0.00 GiB\)"
    with pytest.raises(TrainingStopped, match=lacks):
        saver.save(3, last_step=True)
    assert saver.folder.steps() == {}


def test_half_a_checkpoint_of_a_killed_start_takes_no_room_of_the_next_one(tmp_path, monkeypatch):
    half = tmp_path / "checkpoint" / ".writing-step-4"
    half.mkdir(parents=True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0 if half.exists() else 10**9))
    checkpointer(tmp_path).check_room()


def test_an_evaluation_alone_needs_no_room(tmp_path, monkeypatch):
    def made(**parts):
        return SimpleNamespace(**parts, recorder=None, tensors=dict)

    checked = []
    for part in ("Controller", "_build_observer", "RunState"):
        monkeypatch.setattr(build, part, lambda *_, **__: made())
    trainer = made(gate=None, after_load=lambda: None)
    monkeypatch.setattr(build, "build_parts", lambda *_, **__: made(algorithm=None, trainer=trainer))
    monkeypatch.setattr(build, "_build_sampler", lambda *_: (None, {}))
    monkeypatch.setattr(build, "_build_checkpointer", lambda *_: made(check_room=lambda: checked.append(1)))
    for eval_only, checks in ((True, 0), (False, 1)):
        config = load_config("debug")
        config.eval_only = eval_only
        build.build_run(config, tmp_path, resolved=made(config=config))
        assert len(checked) == checks


def test_a_vanished_run_folder_stops_the_run(tmp_path):
    saver = checkpointer(tmp_path / "gone")
    with pytest.raises(TrainingStopped, match="step 3 cannot be saved: .*gone/checkpoint"):
        saver.save(3, last_step=True)
