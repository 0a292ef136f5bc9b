import os

import pytest

from torchtitan_rl import device
from torchtitan_rl.command.registry import load_config, parse_args
from torchtitan_rl.errors import UserError
from torchtitan_rl.validation import longest_sequence


@pytest.mark.parametrize("name", ["sums", "rows", "gsm8k", "math", "countdown", "reasoning_gym", "verifiers", "sft"])
def test_a_task_is_sized_for_the_machine(name, monkeypatch):
    sizes = []
    for on_cpu in (True, False):
        monkeypatch.setattr(device, "FOR_CPU", on_cpu)
        config = load_config(name)
        lengths = (config.sampling.max_tokens, longest_sequence(config) - config.prompts.max_prompt_tokens)
        sizes.append((config.num_prompts_per_step, *lengths))
    assert sizes[0] == (8, 256, 256)
    assert all(small < large for small, large in zip(*sizes, strict=True))


def test_a_run_to_resume_is_a_relative_path_too_but_no_step_and_no_choice(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(tmp_path))
    given = {"other/run": str(tmp_path / "other/run"), "~/run": f"{os.environ['HOME']}/run", "auto": "auto", "7": "7"}
    assert {path: parse_args(["--config", "debug", f"--resume={path}"])[1].resume for path in given} == given


def test_run_of_another_config_is_not_taken_for_the_default(tmp_path):
    (tmp_path / "config.json").write_text('{"config": "sums", "command": ["train.py", "--config", "sums"]}')
    with pytest.raises(UserError, match="--config = 'debug': expected sums, .* Its options were: --config sums"):
        parse_args([f"--dump-folder={tmp_path}"])
    assert parse_args([f"--dump-folder={tmp_path}", "--config=debug"])[0] == "debug"


@pytest.mark.parametrize("field", ["hf_assets_path", "teacher"])
def test_a_name_on_the_hub_is_none_wherever_the_caller_is_unless_there_is_such_a_folder(tmp_path, monkeypatch, field):
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(tmp_path))
    command = ["--config", "debug", f"--{field}", "Qwen/Qwen3-0.6B"]
    assert getattr(parse_args(command)[1], field) == "Qwen/Qwen3-0.6B"
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert getattr(parse_args(command)[1], field) == str(tmp_path / "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("size", ["0.6B", "1.7B", "4B", "8B", "14B", "30B-A3B"])
def test_a_qwen3_config_names_the_hub_unless_assets_has_the_folder(size, tmp_path, monkeypatch):
    name = "qwen3_" + size.lower().replace(".", "_").replace("-", "_")
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(tmp_path))
    assert parse_args(["--config", name])[1].hf_assets_path == f"Qwen/Qwen3-{size}"
    folder = tmp_path / "assets" / "hf" / f"Qwen3-{size}"
    folder.mkdir(parents=True)
    assert parse_args(["--config", name])[1].hf_assets_path == str(folder)


def test_more_teachers_are_relative_paths_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(tmp_path))
    command = ["--config", "debug_distill", "--more-teachers", "code", "mine/coder/1", "math", "Qwen/Qwen3-8B"]
    assert parse_args(command)[1].more_teachers == {"code": str(tmp_path / "mine/coder/1"), "math": "Qwen/Qwen3-8B"}


def test_a_teacher_that_a_recipe_makes_is_no_path(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(tmp_path))
    recipe = "torchtitan_rl.configs.toys.answer_recipes:right_sums"
    assert parse_args(["--config", "debug_distill"])[1].teacher == recipe


FILE = """
from __future__ import annotations
from dataclasses import dataclass
from torchtitan_rl.configs.debug import debug
from beside import STEPS
from torchtitan_rl.configs.toys.sum_digits import SumDigits


class Task(SumDigits):
    @dataclass(kw_only=True, slots=True)
    class Config(SumDigits.Config):
        upper: bool = False


def mine():
    config = debug()
    config.num_steps, config.task = STEPS, Task.Config()
    return config


def nothing(): ...
"""


def test_a_function_in_a_file_with_a_task_of_its_own_and_a_module_beside_it(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    (tmp_path / "beside.py").write_text("STEPS = 7\n")
    _, config = parse_args(["--config", f"{file}:mine", "--task.upper"])
    assert (config.num_steps, config.task.upper) == (7, True)
    for reference, message in {
        f"{file}:mien": "expected a function of .*Did you mean mine",
        f"{file}:nothing": "expected a function that returns a RunConfig. It returned None",
        f"{tmp_path}/other.py:mine": "There is no file",
        str(file): "expected path/to/file.py:function",
        f"{tmp_path}/mine.txt:mine": "expected path/to/file.py:function or package.module:function",
        "no_such_package.module:mine": "No module named",
    }.items():
        with pytest.raises(UserError, match=f"--config = .*{message}"):
            load_config(reference)
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(UserError, match=r"--config = .*invalid syntax \(broken.py, line 1\)"):
        load_config(f"{tmp_path}/broken.py:f")


def test_dotted_overrides_reach_the_chosen_pieces():
    options = "--algorithm.loss.eps-high 0.01 --trainer.optimizer.lr 1e-5"
    options += " --trainer.parallelism.tensor-parallel-degree 2 --evaluation.sampling.n 4"
    name, config = parse_args(["--config", "scripts/results_cells.py:gspo", *options.split()])
    assert name == "scripts/results_cells.py:gspo"
    assert type(config.algorithm.loss).__qualname__ == "Gspo.Config"
    assert config.algorithm.loss.eps_high == 0.01
    assert config.trainer.optimizer.lr == 1e-5
    assert config.trainer.parallelism.tensor_parallel_degree == 2
    assert config.evaluation.sampling.n == 4
