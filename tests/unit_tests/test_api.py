"""A run from Python: rows and rewards as objects, in the process of a notebook or a script, which goes on afterwards."""

import gc
import os
import signal
import subprocess
import sys

import pytest

import torchtitan_rl
from tests.parts.talk import save_talker
from torchtitan_rl.errors import UserError

SMALL = {
    "num_prompts_per_step": 2, "sampling__n": 2, "sampling__max_tokens": 8, "generator__max_model_len": 64,
    "prompts__max_prompt_tokens": 48, "evaluation__every": 0, "metrics__console_every": 0, "trainer__optimizer__lr": 1e-4,
}  # fmt: skip
ROWS = [{"prompt": f"Think of {number}.", "answer": str(number)} for number in range(8)]


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return save_talker(tmp_path_factory.mktemp("talker"))


def length_of(unit):
    def length(completions, answer, **_):
        return [-len(text) / unit - int(number) for text, number in zip(completions, answer, strict=True)]

    return length


def test_run_resumes_in_the_same_process_after_one_that_failed(talker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)

    def fails(completions, **_):
        raise KeyError("x")

    gc.disable()  # as the command's process until its imports are done
    with pytest.raises(Exception, match="Reward function 'fails' failed"):
        torchtitan_rl.train(talker, ROWS, [fails], num_steps=1, dump_folder="run", **SMALL)
    assert gc.isenabled()
    torchtitan_rl.train(talker, ROWS, [length_of(100)], num_steps=1, dump_folder="run", **SMALL)
    run = torchtitan_rl.train(talker, ROWS, [length_of(100)], num_steps=2, dump_folder="run", **SMALL)
    assert run.curve("reward/length/mean")[0] == [1, 2]
    assert {sample["response"] for sample in run.samples if sample["step"] == 2}
    assert signal.getsignal(signal.SIGINT) is handler
    (run.folder / "evaluation").mkdir()
    (run.folder / "evaluation" / "step-2.json").write_text("the run's own")
    kept = ("config.json", "end.json", "report.html", "metrics.jsonl", "evaluation/step-2.json")
    record = {name: (run.folder / name).read_bytes() for name in kept}
    torchtitan_rl.train(talker, ROWS, [length_of(1)], eval_only=True, num_steps=9, dump_folder="run", **SMALL)
    assert (run.folder / "evaluation" / "alone" / "step-2.json").exists()
    assert {name: (run.folder / name).read_bytes() for name in record} == record
    with pytest.raises(UserError, match="task.path .* belongs to other data"):
        torchtitan_rl.train(talker, ROWS[1:], [length_of(100)], num_steps=2, dump_folder="run", **SMALL)
    with pytest.raises(UserError, match="Did you mean reward/length/mean"):
        run.curve("reward/lenght/mean")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"trainer__lr": 1e-5}, "Did you mean trainer.optimizer.lr?"),
        ({"num_steps": "5"}, "num_steps = '5': expected a valid integer"),
        ({"rows": [{"prompt": object()}]}, "rows: expected .* Object of type object is not JSON serializable"),
        ({"config": "debug", "rows": ROWS}, "config = 'debug': expected one whose task reads rows"),
        ({"rewards": [lambda completions, **_: [0]]}, "Define it with def"),
        ({"rewards": lambda completions, **_: [0]}, "Define it with def"),
        ({"config": "debug", "rewards": "none.py:brief"}, "grader.rewards = 'none.py:brief': expected a file"),
        ({"rewards": [length_of(1), length_of(2)]}, "a name of its own"),
    ],
)
def test_wrong_argument_is_named_before_anything_starts(setting, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        torchtitan_rl.train(**setting)


def test_package_is_imported_without_torch():
    code = "import torchtitan_rl, sys; assert 'torch' not in sys.modules; assert callable(torchtitan_rl.train)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_engine_does_not_warn_of_numa_as_in_a_run_of_the_command(monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")  # set back after the test
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    with pytest.raises(UserError, match="--config = 'rowz'"):
        torchtitan_rl.train(config="rowz")
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"


def test_texts_are_graded_without_a_model_as_a_run_grades_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n} + 0?", "answer": {n}}}\n' for n in range(9)))
    (tmp_path / "mine.py").write_text(
        "def cut(prompts, completions, finish_reasons, answer, **_):\n"
        "    return [-float(p == f'{a} + 0?' and f == 'length') for p, a, f in zip(prompts, answer, finish_reasons)]\n"
    )
    few = {"task__path": "rows.jsonl", "task__held_out_share": 0.2, "grader__rewards": ["mine.py:cut"]}
    [asked] = torchtitan_rl.grade([""], place=3, **few)
    assert (asked.reward, asked.answer, asked.correct) == (0, None, False)
    texts = [f"<think>or {n}</think> {n}" for n in range(9)] + ["<think>0 1 2"]
    graded = torchtitan_rl.grade(texts, place=3, end="length", **few)
    assert sorted(one.reward for one in graded) == [-1] * 9 + [0]
    assert [one.answer for one in graded] == [*map(str, range(9)), None]
    assert [one.correct for one in graded].count(True) == 1
