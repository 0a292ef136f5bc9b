"""torchtitan-rl evaluate: a run is evaluated with its own options."""

import json

import pytest

from torchtitan_rl.setup.evaluate import command_of, without
from torchtitan_rl.setup.offline import main


def test_the_options_of_a_run_are_kept_but_for_where_it_started_and_wrote(tmp_path):
    command = ["train.py", "--config", "debug", "--dump-folder", "out", "--task.max-integers", "3", "--resume=auto"]
    command += ["--hf_assets_path", "start", "--evaluation.every", "5"]
    (tmp_path / "config.json").write_text(json.dumps({"command": command, "folder_of_command": "/of/the/run"}))
    options = ["--config", "debug", "--task.max-integers", "3", "--evaluation.every", "5"]
    assert command_of(tmp_path) == (options, "/of/the/run")


def test_an_option_that_is_given_again_takes_the_place_of_the_runs_with_all_its_values():
    options = [
        "--config",
        "debug",
        "--grader.rewards",
        "a.py:f",
        "b.py:g",
        "--metrics.sinks=jsonl",
        "--eval_only",
        "--seed",
        "1",
    ]
    left = ["--config", "debug", "--seed", "1"]
    assert without(options, {"--grader.rewards", "--metrics.sinks", "--eval-only"}) == left


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        (None, ["--step", "3"], "--step 3: expected a run's folder, but"),
        (None, ["--nproc", "0"], "--nproc 0: expected 1 or more"),
        ("{}", [], "config.json is not as a run writes it: KeyError: 'command'"),
        ("[]", [], "config.json is not as a run writes it: TypeError"),
    ],
)
def test_a_folder_that_is_no_run_or_a_damaged_one_is_named(tmp_path, monkeypatch, capsys, config, options, says):
    if config:
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "environment.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", str(tmp_path), *options])
    assert says in capsys.readouterr().err


def test_an_option_that_does_not_exist_is_named_before_the_export(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"command": ["train.py", "--config", "debug"]}))
    (tmp_path / "environment.json").write_text("{}")
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", str(tmp_path), "--num-stepz", "3"])
    assert "--num-stepz" in capsys.readouterr().err
