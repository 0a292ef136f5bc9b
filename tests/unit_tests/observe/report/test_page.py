"""The file: whole, bounded, and with nothing in its data that a page could run."""

import json
import re

import pytest

from tests.parts.report_runs import HOSTILE, change_rows, write_run
from torchtitan_rl.errors import UserError
from torchtitan_rl.observe.report import load_run, write_report
from torchtitan_rl.observe.report.__main__ import main
from torchtitan_rl.observe.report.overview import ending

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def data_of(page):
    """What the scripts of the page read."""
    return json.loads(DATA.search(page.read_text("utf-8"))[1])


def column(data, name):
    """A column of the page's rows."""
    return [row[name] for row in data["rows"]]


def test_a_folder_that_is_no_run_ends_with_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "expected the folder of a run" in capsys.readouterr().err


def test_several_runs_are_one_page_beside_them(tmp_path, capsys):
    folders = [write_run(tmp_path / place / "run", steps=1) for place in ("a", "b")]
    assert main([*map(str, folders)]) == 0
    assert capsys.readouterr().out.startswith(str(tmp_path / "a" / "comparison.html"))
    data = data_of(tmp_path / "a" / "comparison.html")
    assert [run["name"] for run in data["runs"]] == [*map(str, folders)]  # as both are called run
    assert len(set(column(data, "episode_id"))) == len(data["rows"]) == 2 * 16


def test_a_run_beside_itself_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected each run once"):
        main([str(tmp_path / "run"), f"{tmp_path}/other/../run"])


def test_every_row_and_value_is_in_the_file(tmp_path):
    folder, output = write_run(tmp_path / "a"), tmp_path / "r.html"
    run = write_report(folder, output)
    data = data_of(output)
    assert len(data["rows"]) == len(run.rows) == 12 * 16
    for name in ("step", "prompt", "response", "correct", "reward", "finish_reason", "extra/steps", "example/operands"):
        assert column(data, name) == [row[name] for row in run.rows], name
    assert data["runs"][0]["series"]["evaluation/accuracy"][:5] == [0.25, None, None, None, pytest.approx(0.416667)]


def test_another_file_in_the_place_of_the_page_is_refused_and_stays(tmp_path):
    (tmp_path / "r.html").write_text("theirs")
    with pytest.raises(FileExistsError, match="--output = .*r.html': expected a new file or an earlier report"):
        write_report(write_run(tmp_path / "a"), tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == "theirs"


def test_page_has_no_external_resources(tmp_path):
    write_report(write_run(tmp_path / "a"), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "default-src 'none'" in page
    assert re.findall(r"(?:src|href)=\S+", DATA.sub("", page).split("<script>")[0]) == ['href="data:,">']
    assert "The MIT License" in page
    assert "Leon Sorokin" in page


def test_no_text_can_close_the_data_script(tmp_path):
    write_report(write_run(tmp_path / "a", text=HOSTILE), tmp_path / "r.html")
    raw = (tmp_path / "r.html").read_bytes()
    embedded = DATA.search(raw.decode("utf-8"))[1]
    assert not set(embedded) & set("<>&\u2028\u2029")
    assert HOSTILE in column(json.loads(embedded), "response")
    assert raw.count(b"<script") == raw.count(b"</script>") == 2


def test_samples_beyond_the_size_are_left_out_in_whole_groups_and_counted(tmp_path):
    folder, output = write_run(tmp_path / "a", steps=40, prompts=40, text="word " * 400), tmp_path / "r.html"
    write_report(folder, output, size_mb=0.9)
    data = data_of(output)
    assert output.stat().st_size < 1.2e6
    groups = list(zip(column(data, "step"), column(data, "prompt_idx")))
    assert 0 < len(groups) == 40 * 40 * 4 - data["left"] < 40 * 40 * 4
    assert {groups.count(group) for group in set(groups)} == {4}
    assert sum(reason == "top" for reason in column(data, "select_reason")) == 40  # the selected stay in the page
    write_report(folder, output, size_mb=100)
    assert data_of(output)["left"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "r.html"]


@pytest.mark.parametrize("missing", ["config.json", "environment.json", "samples.jsonl", "metrics.jsonl"])
def test_a_run_without_one_of_its_files_is_still_a_report_with_a_note(tmp_path, missing):
    folder = write_run(tmp_path / "a", steps=2)
    (folder / missing).unlink()
    write_report(folder, folder / "r.html")
    assert data_of(folder / "r.html")["runs"][0]["notes"] == [f"{missing} is missing"]


def test_resumes_are_those_that_no_later_start_took_back(tmp_path):
    folder = write_run(tmp_path / "a", steps=2)
    starts = [(10, {"lr": "1 -> 2"}), (20, {"lr": "2 -> 3"}), (15, {"num_steps": "20 -> 30"}), (18, {"num_steps": "30 -> 40", "lr": "2 -> 1"})]  # fmt: skip
    for number, (step, changed) in enumerate(starts, 2):
        name = f"config-{number}.json" if number <= len(starts) else "config.json"
        (folder / name).write_text(json.dumps({"resumed": {"step": step, "changed": changed}}))
    assert load_run(folder).resumes == [
        {"step": 10, "changed": {"lr": "1 -> 2"}}, {"step": 18, "changed": {"lr": "2 -> 1"}}
    ]  # fmt: skip


def test_warnings_of_libraries_come_last(tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    said = ["vllm.triton_utils.importing: Disabling Triton.", "torchtitan_rl.observe: no learning signal"]
    (folder / "logs" / "rank_0.log").write_text("".join(f"2026-11-21 12:00:00,000 WARNING {text}\n" for text in said))
    assert [(one["text"], one["library"]) for one in load_run(folder).warnings] == [(said[1], False), (said[0], True)]


def test_incomplete_and_invalid_lines_are_left_out(tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(folder / name, "a") as file:
            file.write('[1, 2]\nnot json\n{"step": "three"}\n{"step": 4, "reward/me')
    run = load_run(folder)
    assert run.steps == [0, 1, 2, 3]
    assert len(run.rows) == 3 * 16


def test_run_without_a_recorded_end_says_how_far_it_has_come(tmp_path):
    folder = write_run(tmp_path / "a", steps=7, num_steps=50)
    said = ending(load_run(folder))["text"]
    assert said.startswith("7 of 50 steps in 0:00:14, the last at 2023")
    assert "no end is recorded" in said


def test_a_group_larger_than_the_page_leaves_its_room_to_others(tmp_path):
    folder, output = (
        write_run(tmp_path / "a", steps=2, prompts=3, siblings=40, text="word " * 4000),
        tmp_path / "r.html",
    )
    write_report(folder, output, size_mb=0.1)
    data = data_of(output)
    assert {*column(data, "prompt_idx")} == {1, 2}  # the samples of prompt 0 have 0.8 MB
    assert data["left"] == 2 * 40


def test_a_table_of_one_s_own_may_have_any_cell_in_a_column_of_samples(tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    change_rows(folder, lambda row: row.update(table="own", split=["a"], select_reason=3, messages="a text"))
    write_report(folder, tmp_path / "r.html")
    assert len(data_of(tmp_path / "r.html")["rows"]) == 16


def test_rows_without_a_name_are_those_of_two_files(tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    rows = change_rows(folder, lambda row: row.pop("episode_id"))
    (folder / "samples.unfinished.jsonl").write_text(json.dumps(rows[0]) + " \n")
    assert len(load_run(folder).rows) == 17


def test_an_error_is_not_cut_by_many_different_warnings(tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    said = [f"WARNING my_reward: cannot parse '{chr(97 + i % 26) * (i + 1)}'" for i in range(150)] + [
        "ERROR root: it died"
    ]
    log = "".join(f"2026-11-21 12:00:00,000 {line}\n" for line in said)
    (folder / "logs" / "rank_0.log").write_text(log)
    assert [one["text"] for one in load_run(folder).warnings if one["level"] == "ERROR"] == ["root: it died"]


def test_an_integer_that_javascript_would_round_is_a_text(tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    change_rows(folder, lambda row: row.update({"example/id": 2**60 + 1, "example/small": 2**53}))
    write_report(folder, tmp_path / "r.html")
    data = data_of(tmp_path / "r.html")
    assert {*column(data, "example/id")} == {str(2**60 + 1)}
    assert {*column(data, "example/small")} == {2**53}
