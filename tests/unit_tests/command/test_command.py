"""The command torchtitan-rl: what it starts, and how many processes of it."""

import json
import os
import re
import subprocess
import sys

import pytest

from torchtitan_rl.command import command
from torchtitan_rl.errors import UserError
from torchtitan_rl.run import run_command
from torchtitan_rl.run.packaged_model import WHEELS

LAUNCHED = [
    "NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "LOG_RANK",
    "PYTHONUNBUFFERED",
]  # fmt: skip


@pytest.fixture
def node(monkeypatch):
    """A node of the given kind, GPUs and cores, with no variable of the launcher set. Returns a function that sets these."""
    for name in (*LAUNCHED, "TORCH_CPP_LOG_LEVEL", "TORCHTITAN_RL_PROGRAM"):
        monkeypatch.setenv(name, "")  # so that what the command sets is undone
        monkeypatch.delenv(name)

    def is_like(kind="cpu", gpus=0, cores=8, **variables):
        monkeypatch.setattr(command, "environment_kind", lambda: kind)
        monkeypatch.setattr(command, "gpu_count", lambda: gpus)
        monkeypatch.setattr(command, "check_build_tools", lambda: None)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return is_like


def processes(arguments):
    return next(arg.partition("=")[2] for arg in arguments if arg.startswith("--nproc_per_node="))


@pytest.mark.parametrize(
    ("kind", "gpus", "variables", "expected"),
    [
        ("cpu", 0, {}, "1"),
        ("cpu", 8, {}, "1"),
        ("gpu", 8, {}, "8"),
        ("gpu", 0, {}, "1"),
        ("gpu", 8, {"NGPU": "2"}, "2"),
        ("cpu", 0, {"NGPU": "4"}, "4"),
    ],
)
def test_a_process_for_each_gpu_of_the_gpu_kind_or_one(node, kind, gpus, variables, expected):
    node(kind, gpus, **variables)
    assert processes(command.training([])) == expected


def test_ranks_on_one_cpu_share_its_cores(node):
    node(cores=8, NGPU="4")
    command.training([])
    assert os.environ["OMP_NUM_THREADS"] == "2"
    node(cores=8, NGPU="16")
    del os.environ["OMP_NUM_THREADS"]
    command.training([])
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_several_nodes_meet_at_the_first(node):
    node(NNODES="2", NODE_RANK="1", MASTER_ADDR="node0")
    arguments = command.training(["--config", "debug"])
    assert arguments[1:5] == ["--nnodes=2", "--node_rank=1", "--master_addr=node0", "--master_port=29500"]
    assert arguments[-4:] == ["-m", "torchtitan_rl.command.train", "--config", "debug"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "two"}, "NNODES = 'two'"),
        ({"NNODES": "2", "MASTER_ADDR": "node0"}, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
        ({"NNODES": "2", "NODE_RANK": "one", "MASTER_ADDR": "node0"}, "NODE_RANK = 'one'"),
        ({"NODE_RANK": "1"}, "NODE_RANK = '1': expected 0, as NNODES is 1"),
        ({"NGPU": "abc"}, "NGPU = 'abc'"),
    ],
)
def test_a_wrong_number_of_nodes_or_a_missing_address_is_refused(node, variables, message):
    node(**variables)
    with pytest.raises(UserError, match=message):
        command.training([])


def run(*arguments, folder, stdout=subprocess.PIPE):
    line = [sys.executable, "-m", "torchtitan_rl.command.command", *arguments]
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(line, cwd=folder, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_help_is_one_screen_with_every_command_and_another_one_is_refused(tmp_path):
    lines = run("--help", folder=tmp_path).stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    commands = [*command.TRAINING, *command.READERS]
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in commands] == commands
    refused = run("trian", folder=tmp_path)
    assert refused.returncode == 2
    assert f"one of {', '.join(commands)}" in refused.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["models"]])
def test_a_reader_that_leaves_as_head_does_is_no_error(tmp_path, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*arguments, folder=tmp_path, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_evaluate_is_training_that_only_evaluates(tmp_path):
    shown = run("evaluate", "--config", "debug", "--print-config", folder=tmp_path).stdout
    assert json.loads(shown)["eval_only"] is True


def test_preview_and_evaluate_have_a_help_of_their_own(tmp_path):
    assert "usage: torchtitan-rl preview --config debug" in run("preview", "--help", folder=tmp_path).stdout
    assert "usage: torchtitan-rl evaluate RUN [--resume RUN/" in run("evaluate", "--help", folder=tmp_path).stdout


@pytest.mark.parametrize("question", [["--help", "8x80", "all"], ["--print-config", "8x80"]])
def test_other_gpus_are_planned_for_before_and_after_all(question, tmp_path):
    shown = run("train", "--config", "sums", *question, folder=tmp_path).stdout
    assert re.search(r"num.prompts.per.step.{,250}?\b32\b", shown, re.DOTALL)  # a GPU's


def test_models_names_packages_and_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert "  none" in run("models", folder=tmp_path).stdout
    made = tmp_path / "outputs" / "models" / "mine"
    made.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (made / name).touch()
    shown = run("models", folder=tmp_path).stdout
    assert f"  {made}\n" in shown
    assert all(f"  {name} " in shown for name in WHEELS)


@pytest.mark.parametrize("question", ["--help", "--list-configs", "--dry-run", "--dry_run", "--help=all"])
def test_a_question_is_answered_by_one_process_that_knows_the_number_of_ranks(node, monkeypatch, question):
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOG_RANK", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that what the command sets is undone
    monkeypatch.setenv("RANK", "3")  # left from another program: rank 3 would say nothing
    monkeypatch.delenv("OMP_WAIT_POLICY")
    node(NGPU="4", NNODES="2")
    arguments = ["--config", "debug", question]
    assert command.training(arguments) == ["torchtitan_rl.command.train", *arguments]
    assert (os.environ["WORLD_SIZE"], os.environ["RANK"]) == ("8", "0")
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"  # as a run's
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"  # spinning threads slow a warm start beside other work


@pytest.mark.parametrize("question", ["--help", "--print-config", "--dry-run", "--dry_run"])
def test_a_question_may_be_about_other_gpus_all_nodes_together(node, monkeypatch, question):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOG_RANK", "OMP_WAIT_POLICY", "TORCHTITAN_RL_PLANNED_GIB"):
        monkeypatch.setenv(name, "")  # so that what the command sets is undone
    node()
    assert command.training([question, "16x80"]) == ["torchtitan_rl.command.train", question]
    assert (os.environ["WORLD_SIZE"], os.environ["TORCHTITAN_RL_PLANNED_GIB"]) == ("16", "80")
    node(NNODES="2")
    with pytest.raises(UserError, match=f"NNODES = '2': expected nothing beside {question} 16x80"):
        command.training([question, "16x80"])


def test_a_wrong_flag_is_said_once_before_any_process_starts_and_ends_with_2(tmp_path):
    result = run("train", "--config", "debug", "--no-such-field", "3", folder=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("no-such-field") == 1


def test_evaluate_takes_the_options_of_the_run_it_names(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", "/here")
    options = ["--config", "rows", "--task.path", "a.jsonl", "--grader.rewards", "x:f", "y:g"]
    options += ["--resume", "auto", "--dump_folder", "old"]
    stored = {"command": ["/x/command/train.py", *options], "folder_of_command": "/there"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    given = run_command.options_of_run(str(tmp_path), ["--grader.rewards=z:h"])
    assert given == ["--config", "rows", "--task.path", "a.jsonl", "--dump-folder", str(tmp_path)]
    assert os.environ["TORCHTITAN_RL_CALLER_FOLDER"] == "/there"


@pytest.mark.parametrize("stored", [None, {}, {"command": ["/x/mine.py"], "folder_of_command": "/"}])
def test_evaluate_names_a_folder_without_a_command_s_run(tmp_path, stored):
    if stored is not None:
        (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=f"RUN = .* expected a.*{'not there' if stored is None else ''}"):
        run_command.options_of_run(str(tmp_path))


def test_evaluate_asks_for_a_secret_that_the_run_s_folder_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", "/here")
    options = ["--grader.rewards", "mine.py:judge(api_key='***')", "--config", "rows"]
    stored = {"command": ["/x/command/train.py", *options], "folder_of_command": "/there"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"it has mine.py:judge\(api_key='\*\*\*'\). Give its option again"):
        run_command.options_of_run(str(tmp_path))
    given = run_command.options_of_run(str(tmp_path), ["--grader.rewards", "mine.py:judge(api_key='k')"])
    assert given == ["--config", "rows", "--dump-folder", str(tmp_path)]
