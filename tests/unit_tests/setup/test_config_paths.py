"""A relative path in a config file means a file beside it, from wherever the command is called."""

import pytest

from torchtitan_rl.library.tasks import Rows
from torchtitan_rl.setup.registry import parse_args

MINE = """
from configs.debug import debug
from torchtitan_rl.library.tasks import Rows


def mine():
    config = debug()
    config.task = Rows.Config(path="rows.jsonl", held_out_paths={"hard": "hard.jsonl"}, warm_start="start.py:recipe")
    config.grader.rewards = ["brief=rewards/my.py:brevity(scale=2)", "torchtitan_rl.library.rewards:length(target=8)"]
    config.metrics.sinks = ["jsonl", "my_sink.py:Csv:per_rank_reduce", "my_package.sinks:Csv"]
    config.hf_assets_path = "policy"
    config.prompts.demonstrate = "start.py:demonstrate"
    config.teacher = "start.py:recipe"
    return config
"""
ROW = '{"prompt": "of the %s", "answer": "1"}\n'
REWARD = "def brevity(scale):\n    return lambda completions, **_: [scale for _ in completions]\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A config with files beside it; the command is called in another folder, which has rows of the same name."""
    project, caller = tmp_path / "project", tmp_path / "caller"
    for folder in (project / "rewards", project / "policy", caller):
        folder.mkdir(parents=True)
    (project / "mine.py").write_text(MINE)
    (project / "start.py").write_text("def recipe():\n    ...\n")
    (project / "my_sink.py").write_text("")
    (project / "rewards" / "my.py").write_text(REWARD)
    for folder in (project, caller):
        (folder / "rows.jsonl").write_text(ROW % folder.name * 3)
        (folder / "hard.jsonl").write_text(ROW % f"{folder.name}, hard")
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(caller))
    return project


def test_paths_of_a_config_are_beside_it(project):
    _, config = parse_args(["--config", f"{project / 'mine.py'}:mine"])
    assert config.task.path == str(project / "rows.jsonl")
    assert config.task.held_out_paths == {"hard": str(project / "hard.jsonl")}
    assert config.task.warm_start == f"{project}/start.py:recipe"
    assert config.hf_assets_path == str(project / "policy")
    assert config.grader.rewards[0] == f"brief={project}/rewards/my.py:brevity(scale=2)"
    assert config.grader.rewards[1].startswith("torchtitan_rl.library.rewards:")
    assert config.metrics.sinks == ["jsonl", f"{project}/my_sink.py:Csv:per_rank_reduce", "my_package.sinks:Csv"]
    assert config.prompts.demonstrate == f"{project}/start.py:demonstrate"
    assert config.teacher == f"{project}/start.py:recipe"
    assert config.resume == "auto"


def test_paths_of_the_command_line_are_the_callers(project):
    reference = f"{project / 'mine.py'}:mine"
    _, config = parse_args(
        ["--config", reference, "--task.path", "rows.jsonl", "--task.held-out-paths.hard", "hard.jsonl"]
    )
    task = Rows.Config(path=config.task.path, held_out_paths=config.task.held_out_paths).build()
    assert "of the caller" in task.train_example(0, seed=0).text
    assert "of the caller, hard" in task.held_out_examples(1)[0].text
