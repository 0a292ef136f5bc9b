"""python -m torchtitan_rl.observability.samples: ranked, filtered, siblings, over time, two runs."""

import re

import pytest

from tests.parts.observability import NASTY, group, rows_of, sample
from torchtitan_rl.observability import Reduce, read_rows, record_metric
from torchtitan_rl.observability.samples import main


@pytest.fixture
def run(recorder, tmp_path):
    """A run of three steps: two prompts with three responses each."""

    def make(name, keep_all_rows=True):
        one = recorder(folder=tmp_path / name, keep_all_rows=keep_all_rows)
        for step in (1, 2, 3):
            groups = [
                group(p, *(sample(s, 10 * p + s + step / 10, text=f"answer {step}-{p}-{s}") for s in range(3)))
                for p in range(2)
            ]
            record_metric("rollout/samples", rows_of(*groups, step=step), Reduce.TABLE)
            one.flush(step)
        one.close()
        return str(tmp_path / name)

    return make


def test_default_shows_selected_rows_of_the_last_step(run, capsys):
    folder = run("a")
    assert main([folder]) == 0
    output = capsys.readouterr().out
    selected = [row["response"] for row in read_rows(folder) if row["step"] == 3 and row["select_reason"]]
    assert sorted(re.findall(r"answer \d-\d-\d", output)) == sorted(selected)


def test_best_and_worst_cover_the_whole_run_or_one_step(run, capsys):
    folder = run("a")
    assert main([folder, "--best", "2", "--worst", "1"]) == 0
    output = capsys.readouterr().out
    places = [output.index(text) for text in ("answer 3-1-2", "answer 2-1-2", "answer 1-0-0")]
    assert places == sorted(places)
    assert "answer 1-0-1" not in output
    assert main([folder, "--step", "1", "--best", "1"]) == 0
    assert "answer 1-1-2" in capsys.readouterr().out


def test_samples_of_a_group_are_shown_side_by_side(run, capsys):
    assert main([run("a"), "--group", "1", "--step", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(all(f"answer 2-1-{s}" in line for s in range(3)) for line in lines)
    assert main([run("b", keep_all_rows=False), "--group", "1"]) == 0
    assert "3 stored of 3 siblings" in capsys.readouterr().out


@pytest.mark.parametrize("view", [[], ["--best", "1"], ["--group", "0"]])
def test_the_question_of_a_chat_template_s_prompt_is_shown(recorder, tmp_path, capsys, view):
    question = "What is 23 + 45?\nGive only the number."
    text = f"<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    [row] = rows_of(group(0, sample(0, 1.0, text="It is 68.")))
    row |= {"prompt": text, "messages": [{"role": "user", "content": question}]}
    one = recorder()
    record_metric("rollout/samples", [row], Reduce.TABLE)
    one.flush(1)
    one.close()
    assert main([str(tmp_path), *view]) == 0
    output = capsys.readouterr().out
    for line in ("user", *question.split("\n"), "It is 68."):
        assert line in output
    assert "lines ..." not in output


def test_one_prompt_is_shown_over_the_steps(run, capsys):
    assert main([run("a"), "--prompt", "What is 1 + 1"]) == 0
    output = capsys.readouterr().out
    places = [output.index(f"answer {step}-1-0") for step in (1, 2, 3)]
    assert places == sorted(places)
    assert "-0-0" not in output


def test_empty_filter_results_have_their_exit_codes(run, capsys, tmp_path):
    folder = run("a")
    assert main([folder, "--split", "train", "--table", "rollout/samples"]) == 0
    assert main([folder, "--split", "eval"]) == 1
    assert main([folder, "--group", "9"]) == 1
    assert main([str(tmp_path / "nowhere")]) == 2
    errors = capsys.readouterr().err
    assert "matches. It has steps 1 to 3 (3 of them), splits train, tables rollout/samples." in errors
    assert "prompt_idx 9; stored: [0, 1]" in errors
    assert "samples.jsonl does not exist" in errors


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"\xff\xfe\x00", 1, "It has no rows of a whole step: the first is not over, or the file is damaged."),
        (b'{"step": 1, "x": \n{"step": 1} \n', 2, "samples.jsonl: line 1 is damaged. A resume keeps this file aside"),
        (b"[1] \n", 2, "samples.jsonl: line 1 is damaged."),
        (b'{"prompt": "a"} \n', 2, "samples.jsonl: line 1 is damaged."),
        (b'{"step": ' + b"[" * 5000 + b"]" * 5000 + b"} \n", 2, "samples.jsonl: line 1 is damaged."),
    ],
)
def test_damage_is_named(tmp_path, capsys, content, code, says):
    (tmp_path / "samples.jsonl").write_bytes(content)
    assert main([str(tmp_path)]) == code
    assert says in capsys.readouterr().err


def test_control_characters_are_escaped_in_every_view(recorder, tmp_path, capsys):
    one = recorder(keep_all_rows=True)
    rows = rows_of(group(0, *(sample(s, text=NASTY) for s in range(2))))
    record_metric("t", rows, Reduce.TABLE)
    one.flush(1)
    one.close()
    views = ([], ["--best", "1"], ["--group", "0"], ["--prompt", "What"])
    for view in views:
        assert main([str(tmp_path), *view]) == 0
        output = capsys.readouterr().out
        assert not any(harmful in output for harmful in ("\x1b", "\x00", "\u202e"))
        assert "[/answer]" in output
