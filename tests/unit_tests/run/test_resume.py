"""Which changes of a config a resumed run may not make in silence."""

import shutil
from datetime import datetime

import pytest

from tests.parts.algorithm import algorithm_of
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.references import import_checked
from torchtitan_rl.run import manifest
from torchtitan_rl.run.checkpoint_folder import CheckpointFolder, is_choice
from torchtitan_rl.run.resume import choose_resume, config_fields, prompts_date


@pytest.fixture
def config(tmp_path):
    config = load_config("debug")
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "tokenizer.json").write_text("{}")
    config.hf_assets_path, config.prompts.date = str(tmp_path / "start"), "2024-02-29"
    return config


def resumed(config, run):
    """What the run goes on from."""
    fields = config_fields(config, algorithm_of(config)) | {"prompts.date": prompts_date(config)}
    return choose_resume(config, fields, run)


@pytest.fixture
def accept(config, tmp_path):
    """Resumes from a checkpoint of `config` as it was, with `config` as it is."""
    return accept_from(config, tmp_path)


def accept_from(config, run):
    """Makes checkpoints of `config` as it is in the folder `run`. Returns what resumes from them."""
    run.mkdir(exist_ok=True)
    folder = CheckpointFolder(run)
    for step in (10, 20):
        unfinished = folder.begin(step)
        (unfinished / ".metadata").write_text("index")
        folder.finish(
            step, manifest.describe(unfinished.iterdir()), {"config": config_fields(config, algorithm_of(config))}
        )
    return lambda: resumed(config, run)


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_again(config, tmp_path, capsys):
    assert resumed(config, tmp_path / "new") is None
    assert capsys.readouterr().out == ""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert resumed(config, tmp_path) is None
    assert "has steps and no checkpoint: the run begins again at step 1" in capsys.readouterr().out


def test_a_resumed_run_has_the_date_of_its_start_and_a_new_run_todays(config, tmp_path, capsys):
    accept = accept_from(config, tmp_path / "run")
    config.prompts.date = ""
    runs = ("run", "auto"), ("run", "10"), ("new", "run"), ("new", "run/checkpoint/step-10")
    for config.dump_folder, config.resume in runs:
        config.dump_folder = str(tmp_path / config.dump_folder)
        if not is_choice(config.resume):
            config.resume = str(tmp_path / config.resume)
        assert prompts_date(config) == "2024-02-29"
    config.dump_folder, config.resume = str(tmp_path / "new"), "auto"
    assert prompts_date(config) == str(datetime.now().date())
    config.prompts.date = "2024-03-01"
    accept()
    assert "prompts.date 2024-02-29 -> 2024-03-01" in capsys.readouterr().out


def test_a_harmless_change_is_shown(accept, config, capsys):
    config.trainer.optimizer.lr = 1e-5
    config.trainer.parallelism.tensor_parallel_degree = 2
    assert list(accept().changed) == ["trainer.optimizer.lr", "trainer.parallelism.tensor_parallel_degree"]
    assert capsys.readouterr().out == (
        "changed since step-20: trainer.optimizer.lr 0.0001 -> 1e-05; trainer.parallelism.tensor_parallel_degree 1 -> 2\n"
    )


def test_a_reward_function_that_was_edited_is_shown(config, tmp_path, monkeypatch):
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def length(completions):\n    return [{value}]  # {folder}\n")
    config.grader.rewards = ["mine.py:length"]
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(tmp_path / "a"))
    accept = accept_from(config, tmp_path / "run")
    assert accept().changed == {}
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(tmp_path / "b"))
    assert list(accept().changed) == ["grader.rewards: source of length"]


def test_a_change_that_would_be_silently_wrong_is_refused_until_it_is_accepted(accept, config, tmp_path, capsys):
    config.seed = 4
    config.algorithm.loss.eps_low = 0.3
    (tmp_path / "start" / "tokenizer.json").write_text("{ }")
    with pytest.raises(
        UserError, match=r"'auto': .*loss.eps_low 0.2 -> 0.3 .*; seed 0 -> 4 .*; tokenizer .*--resume-changed"
    ):
        accept()
    config.resume = str(tmp_path)
    with pytest.raises(UserError, match=r"Set it back, or accept it with --resume-changed"):
        resumed(config, tmp_path / "fork")
    config.resume = "auto"
    config.resume_changed = True
    accept()
    assert "seed 0 -> 4" in capsys.readouterr().out


def test_evaluation_alone_takes_other_sizes_of_a_step_but_no_other_objective(accept, config):
    config.eval_only, config.sampling.n = True, config.sampling.n + 1
    assert "sampling.n" in accept().changed
    config.algorithm.loss.eps_low = 0.3
    with pytest.raises(UserError, match=r"algorithm.loss.eps_low 0.2 -> 0.3"):
        accept()


def test_kl_run_with_another_reference_is_refused(accept, config, tmp_path):
    start = tmp_path / "start"
    (start / "model.safetensors").write_bytes(bytes(3 * 2**20))
    config.algorithm.kl.coef = 0.1
    tries = accept_from(config, tmp_path / "run")
    tries()
    other = tmp_path / "other"
    shutil.copytree(start, other)
    (other / "model.safetensors").write_bytes(bytes(2 * 2**20) + b"1" + bytes(2**20 - 1))
    config.hf_assets_path = str(other)
    with pytest.raises(UserError, match="reference .* -> .* \\(the KL term pulls towards other weights\\)"):
        tries()
    config.algorithm.kl.coef = 0.0  # without a reference the start may be another: the weights are the checkpoint's
    accept_from(config, tmp_path / "plain")()


LOSS = """
from torchtitan_rl.algorithm import TokenLoss


class Mine(TokenLoss):
    def __call__(self, inputs):
        return {loss}
"""
PLAIN, WEIGHED = "-inputs.advantages * inputs.logprobs", "-2 * inputs.advantages * inputs.logprobs"


def own_loss(folder, loss, more=""):
    """`Mine` from a file my_loss.py in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "my_loss.py").write_text(LOSS.format(loss=loss) + more)
    return import_checked(folder / "my_loss.py", "test").Mine.Config()


def test_classes_of_the_same_name_in_two_files_are_different(config, tmp_path, capsys):
    config.algorithm.loss = own_loss(tmp_path / "a", PLAIN)
    accept = accept_from(config, tmp_path / "run")
    config.algorithm.loss = own_loss(tmp_path / "b", WEIGHED)
    with pytest.raises(UserError, match=r"algorithm.loss my_loss:Mine \w{12} -> my_loss:Mine \w{12} \(its controllers"):
        accept()
    config.algorithm.loss = own_loss(tmp_path / "c", PLAIN)
    accept()
    assert capsys.readouterr().out == ""


def test_num_steps_below_the_finished_step_is_refused_before_anything_starts(accept, config):
    config.num_steps = 20
    accept()
    config.num_steps = 19
    with pytest.raises(UserError, match="num_steps = 19: expected at least 20, the steps done at step-20. Raise it"):
        accept()


def test_a_job_that_slurm_restarts_goes_on_from_the_newest_checkpoint(accept, config, monkeypatch):
    config.resume = "10"
    assert accept().step == 10
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert accept().step == 20
