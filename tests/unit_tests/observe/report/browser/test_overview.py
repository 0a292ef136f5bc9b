"""The overview in a browser: lines, charts, and how a run ended."""

import json
import random

from tests.parts.report_page import at, clean, text, texts
from tests.parts.report_runs import change_rows, row_of, write_evaluations, write_run
from torchtitan_rl.observe.report import load_run, write_report
from torchtitan_rl.observe.report.overview import lines
from torchtitan_rl.run.run_end import write_end


def test_the_overview_has_the_lines_and_draws_the_curves(browser, one):
    page, _ = one
    browser.open(page)
    assert "reward 0.4" in text(browser, ".lines")
    titles = browser.run("[...document.querySelectorAll('figure[data-chart]')].map(f => f.dataset.chart)")
    assert {"Reward", "Held-out accuracy", "Entropy", "Gradient norm", "Time of a step"} <= set(titles)
    assert "mine/length" in titles  # a reward function logs it
    assert "KL" not in titles  # this run has none
    browser.wait("document.querySelectorAll('canvas').length >= 4")
    painted = "[...document.querySelector('canvas').getContext('2d').getImageData(0, 0, 300, 150).data].some(v => v)"
    assert browser.run(painted)


def test_curves_that_do_not_move_are_folded_with_their_values(browser, one):
    browser.open(one[0])
    folded = browser.run("[...document.querySelectorAll('.still figure')].map(f => f.dataset.chart)")
    assert "Gradient norm" in folded
    assert "Entropy" not in folded
    assert "Gradient norm 0.2 · " in text(browser, ".still summary")
    assert browser.run("document.querySelectorAll('.still canvas').length") == 0
    browser.run(
        "[...document.querySelectorAll('.lines button')].find(b => b.innerText.startsWith('log-probs')).click()"
    )
    browser.wait(f"document.querySelectorAll('.still canvas').length === {len(folded)}")


def test_one_held_out_prompt_is_shown_before_and_after(browser, tmp_path):
    folder = write_evaluations(write_run(tmp_path / "a", steps=4))
    write_report(folder, tmp_path / "r.html")
    browser.open(tmp_path / "r.html", height=900)
    assert texts(browser, ".example .chip") == ["wrong → right 2", "right → right 1", "wrong → wrong 1"]
    assert text(browser, ".example .asked") == "What is 0 + 1?"
    answers = [said.split("\n") for said in texts(browser, ".example .sibling")]
    answers = [(said[0][:6], said[-1]) for said in answers]
    assert answers == [("step 0", "answer 0 · expected 1"), ("step 4", "answer 1 · expected 1")]
    assert browser.run("document.querySelector('.example').getBoundingClientRect().bottom") < 900
    browser.run("document.querySelector('.example .chip').click()")  # again: the next prompt
    assert text(browser, ".example .asked") == "What is 1 + 1?"
    browser.run("document.querySelectorAll('.example .sibling button')[1].click()")
    assert text(browser, ".detail .facts").startswith("step 4 · eval_greedy")
    assert clean(browser), browser.errors


def test_runs_are_compared_in_curves_settings_and_answers(browser, tmp_path):
    sizes = ("a", 0, 4), ("b", 1, 8)
    runs = [write_evaluations(write_run(tmp_path / name, seed=seed, steps=steps)) for name, seed, steps in sizes]
    change_rows(
        runs[1],
        lambda row: row.update(response=f"b: {row['response']}", correct=row["correct"] and row["prompt_idx"] > 0),
    )
    write_report(runs[0], tmp_path / "r.html", others=runs[1:])
    browser.open(tmp_path / "r.html")
    chart = "document.querySelector('[data-chart=Reward]')"
    browser.wait(f"{chart}.querySelector('canvas') !== null")
    assert browser.run(f"[...{chart}.querySelectorAll('.keys i')].map(e => e.innerText)") == ["a", "b"]
    assert browser.run(f"{chart}.querySelector('.plot').plot.data.length") == 3
    assert texts(browser, "[data-table=settings] tbody tr") == ["num_steps\t4\t8", "seed\t0\t1"]
    assert texts(browser, ".example .chip") == ["right · wrong 1", "right · right 2", "wrong · wrong 1"]
    browser.open(at(tmp_path / "r.html", view="prompts"))
    assert texts(browser, "[data-table=answers] tbody tr")[0].startswith(
        "…0 + 1?\t✓ 0 and 1 make 1\t✗ b: 0 and 1 make 1"
    )
    browser.run("document.querySelectorAll('[data-table=answers] button')[1].click()")
    assert text(browser, ".detail .facts").startswith("b · step 8 · eval_greedy")
    browser.open(at(tmp_path / "r.html", view="samples", run="a", split="train"))
    assert set(texts(browser, "td.c-run")) == {"a"}
    assert clean(browser), browser.errors


def test_a_resume_with_another_config_is_marked_on_the_curves(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=12)
    settings = json.loads((folder / "config.json").read_text())
    painted = []
    for changed in ({}, {"trainer.optimizer.lr": "0.1 -> 0.2"}):
        resumed = {"resumed": {"step": 6, "changed": changed}}
        (folder / "config.json").write_text(json.dumps(settings | resumed))
        write_report(folder, tmp_path / "r.html")
        browser.open(tmp_path / "r.html")
        browser.wait("document.querySelector('[data-chart=Reward] canvas') !== null")
        painted.append(browser.run("document.querySelector('[data-chart=Reward] canvas').toDataURL()"))
    assert painted[0] != painted[1]
    assert "from step 6 on: trainer.optimizer.lr 0.1 → 0.2" in text(browser, ".lines")


def test_a_failed_run_is_understood_from_the_first_screen_which_leads_to_its_samples(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=5, num_steps=50)
    before = load_run(folder)
    drafted = {"unfinished": True, "reward": None, "correct": None, "advantage": None, "left_out": "its step failed"}
    rows = [row_of(6, p, i, 4, random.Random(0), "as far as it came") | drafted for p in range(3) for i in range(4)]
    (folder / "samples.unfinished.jsonl").write_text("\n".join(map(json.dumps, rows)) + " \n")
    assert lines(load_run(folder)) == lines(before)  # they are in no line
    error = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\nKeyError: furlong\n'
    write_end(folder, "failed", error, code=1, rank=1, phase="step 6: grade")
    write_report(folder, tmp_path / "r.html")
    browser.open(tmp_path / "r.html", height=900)
    said = text(browser, ".ending")
    assert said.startswith("Failed in step 6, grade (rank 1): 5 of 50 steps")
    assert "KeyError: furlong" in said
    assert browser.run("document.querySelector('.ending').getBoundingClientRect().bottom") < 900
    assert "12 samples of step 6, as far as they came" in text(browser, ".ending")
    browser.run("document.querySelector('[data-failed]').click()")
    assert browser.run("document.querySelectorAll('tr[data-row]').length") == 12
    assert "not in the loss: its step failed" in text(browser, ".detail")
    browser.run("history.back()")
    browser.wait("document.querySelector('main').dataset.view === 'overview'")
    assert clean(browser), browser.errors


def test_a_measurement_has_the_step_at_which_it_was_made(browser, one):
    browser.open(one[0])  # evaluated at steps 0, 4, 8 and 12
    chart = "document.querySelector('[data-chart=\"Held-out accuracy\"]')"
    browser.run(f"{chart}.scrollIntoView()")
    browser.wait(f"{chart}.querySelector('canvas') !== null")
    for step, expected in ((3, ["25.0 %, step 0"]), (4, ["41.7 %"])):
        browser.run(
            f"(p => p.setCursor({{ left: p.valToPos({step}, 'x'), top: 10 }}))({chart}.querySelector('.plot').plot)"
        )
        browser.wait(f"{chart}.querySelector('.where').innerText === 'step {step}'")
        assert browser.run(f"[...{chart}.querySelectorAll('.key b')].map(e => e.innerText)") == expected


def test_runs_are_compared_by_each_one_s_answer_also_to_a_prompt_that_comes_twice(browser, tmp_path):
    runs = [write_evaluations(write_run(tmp_path / name, steps=4)) for name in ("a", "b")]
    prompts = {"a": [0, 0, 2, 3], "b": [0, 1, 2, 3]}  # run a has the first one twice
    for run in runs:
        change_rows(run, lambda row, run=run: row.update(prompt=f"prompt {prompts[run.name][row['prompt_idx']]}"))
    write_report(runs[0], tmp_path / "r.html", others=runs[1:])
    browser.open(at(tmp_path / "r.html", view="prompts"))
    lines = texts(browser, "[data-table=answers] tbody tr")
    assert sorted(line.split("\t")[0] for line in lines) == ["prompt 0", "prompt 2", "prompt 3"]
    browser.open(tmp_path / "r.html")
    assert [said[0] for said in texts(browser, ".example .sibling")] == ["a", "b"]
    assert clean(browser), browser.errors


def test_samples_of_an_evaluation_that_failed_are_no_prompt_after_training(browser, tmp_path):
    folder = write_evaluations(write_run(tmp_path / "a", steps=4))
    drafted = {
        "unfinished": True,
        "split": "eval_greedy",
        "table": "evaluation/samples",
        "reward": None,
        "correct": None,
    }
    rows = [
        row_of(5, p, 0, 1, random.Random(0), "drafted") | drafted | {"episode_id": f"eval_greedy/5/{p}/0"}
        for p in range(4)
    ]
    (folder / "samples.unfinished.jsonl").write_text("\n".join(map(json.dumps, rows)) + " \n")
    write_report(folder, tmp_path / "r.html")
    browser.open(tmp_path / "r.html")
    assert texts(browser, ".example .chip") == ["wrong → right 2", "right → right 1", "wrong → wrong 1"]
