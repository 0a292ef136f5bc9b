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
    assert "keep_all_rows" in capsys.readouterr().out


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


def test_training_and_evaluation_groups_are_shown_separately(recorder, tmp_path, capsys):
    one = recorder(keep_all_rows=True)
    for split in ("train", "eval_greedy"):
        rows = rows_of(group(2, sample(0, text=f"of {split}"), text=f"prompt of {split}"), step=4, split=split)
        record_metric(f"{split}/samples", rows, Reduce.TABLE)
    one.flush(4)
    one.close()
    assert main([str(tmp_path), "--step", "4", "--group", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "siblings" in line or "prompt of" in line]
    assert [line.split(" · ")[0].strip() for line in lines] == [
        "eval_greedy", "prompt of eval_greedy", "train", "prompt of train",
    ]  # fmt: skip


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


def test_unselected_rows_are_counted_and_not_shown(recorder, tmp_path, capsys):
    one = recorder(keep_all_rows=True)
    groups = [group(0, *(sample(s, float(s), text=f"answer {s:02d}") for s in range(40)))]
    record_metric("rollout/samples", rows_of(*groups, step=1), Reduce.TABLE)
    one.flush(1)
    one.close()
    selected = [row for row in read_rows(tmp_path) if row["select_reason"]]
    assert 0 < len(selected) < 40
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert {int(n) for n in re.findall(r"answer (\d\d)", shown)} == {row["sample_idx"] for row in selected}
    assert f"{40 - len(selected)} more stored rows of step 1" in shown


@pytest.mark.parametrize("columns", ["30", "200"])
def test_every_sample_has_its_number_at_any_width(run, capsys, monkeypatch, columns):
    folder = run("a")
    monkeypatch.setattr("torchtitan_rl.observability.panels.PLAIN_WIDTH", int(columns))
    for options in (["--best", "1"], ["--group", "1"]):
        assert main([folder, *options]) == 0
        assert "prompt 1 sample 2" in capsys.readouterr().out
    assert main([folder, "--prompt", "What is 1 + 1"]) == 0
    lines = [re.findall(r"\d+", line) for line in capsys.readouterr().out.splitlines()]
    for row in (["3", "1", str(s)] for s in range(3)):
        assert any(numbers[:3] == row for numbers in lines), row


@pytest.mark.parametrize("number", ["all", "-1", "1.5"])
def test_a_number_of_rows_that_is_none_is_named(capsys, number):
    with pytest.raises(SystemExit, match="2"):
        main(["run", f"--best={number}"])
    assert f"--best: {number!r}: expected a number of rows, 0 or more" in capsys.readouterr().err
