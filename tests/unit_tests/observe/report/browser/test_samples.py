"""The table of samples in a browser: filters, order, siblings, one prompt over training, tokens."""

import json

import pytest

from tests.parts.report_page import ROWS_OF_A_PAGE, at, clean, open_samples, shown, text, texts
from tests.parts.report_runs import change_rows, write_run
from torchtitan_rl.observe.report import write_report

SIBLINGS = {"steps": 1, "prompts": 1, "siblings": 3}
"""A run of one group."""

FILTERS = [
    ({"split": "train", "right": "wrong"}, lambda r: not r["correct"]),
    ({"from": "3", "to": "5"}, lambda r: 3 <= r["step"] <= 5),
    ({"low": "0", "finish": "length"}, lambda r: r["reward"] >= 0 and r["finish_reason"] == "length"),
    ({"q": "MAKE [answer] 2"}, lambda r: "make [ANSWER] 2" in r["response"]),
    ({"shown": True}, lambda r: bool(r["select_reason"])),
    ({"high": "-0.8", "q": "what is 13"}, lambda r: r["reward"] <= -0.8 and "What is 13" in r["prompt"]),
    ({"q": "nowhere"}, lambda r: False),
]


@pytest.mark.parametrize(("state", "passes"), FILTERS)
def test_filters_show_the_rows_that_python_says(browser, one, state, passes):
    page, run = one
    browser.open(at(page, view="samples", sort="step", down=False, **state))
    assert shown(browser) == [i for i, row in enumerate(run.rows) if passes(row)]


@pytest.mark.parametrize(("column", "down"), [("reward", True), ("correct", False), ("prompt", True)])
def test_sorts_give_the_order_that_python_says(browser, one, column, down):
    page, run = one
    browser.open(at(page, view="samples", sort=column, down=down))
    order = sorted(range(len(run.rows)), key=lambda i: run.rows[i][column], reverse=down)  # equal ones stay in place
    assert shown(browser) == order


def test_j_and_k_go_through_the_samples_and_turn_the_page(browser, one):
    browser.open(at(one[0], view="samples", sort="step", down=False))
    opened = "Number(document.querySelector('tr.open').dataset.row)"
    assert browser.run(opened) == 0
    for _ in range(ROWS_OF_A_PAGE):
        browser.press("j")
    assert browser.run(opened) == ROWS_OF_A_PAGE
    assert text(browser, ".pager").find("page 2 of") > 0
    browser.press("k")
    assert browser.run(opened) == ROWS_OF_A_PAGE - 1


def test_siblings_come_best_first_with_their_difference_marked(browser, one):
    page, run = one
    browser.open(at(page, view="samples", sort="step", down=False, tab="siblings", open="train/1/0/0"))
    marks = "[Number(e.dataset.sibling), ...[...e.querySelectorAll('mark')].map(m => m.innerText)]"
    order = sorted(range(4), key=lambda i: -run.rows[i]["reward"])
    best = run.rows[order[0]]["answer"]
    assert browser.run(f"[...document.querySelectorAll('[data-sibling]')].map(e => {marks})") == [
        [i] if run.rows[i]["answer"] == best else [i, run.rows[i]["answer"]] for i in order
    ]


def test_words_of_a_sibling_that_begins_otherwise_are_marked_one_by_one(browser, tmp_path):
    said = ["3 and 1 make 4, so: 4", "Well, 3 and 1 make 5, so: 4", "To whom it may concern: this make of car"]

    def changed(row):
        row.update(response=said[row["sample_idx"]], reward=-row["sample_idx"])

    open_samples(browser, tmp_path, changed, run=SIBLINGS, open="train/1/0/0", tab="siblings")
    assert texts(browser, "[data-sibling] mark") == ["Well, ", "5"]


def test_the_list_has_the_part_of_a_prompt_that_others_do_not_share(browser, tmp_path):
    def changed(row):
        row["prompt"] = f"You are a calculator. Add 1{row['prompt_idx']} and 1. Give only the sum."

    open_samples(browser, tmp_path, changed, run={"steps": 1, "siblings": 1})
    assert sorted(texts(browser, "td.c-prompt")) == [f"…1{i}…" for i in range(4)]


def test_a_column_shows_all_digits_of_an_integer(browser, tmp_path):
    open_samples(browser, tmp_path, {"example/id": 12345678901}, run=SIBLINGS, open="train/1/0/0")
    assert "12,345,678,901" in text(browser, ".columns")


def test_how_a_sample_was_made_is_folded(browser, one):
    browser.open(at(one[0], view="samples", open="train/1/0/0"))
    columns = "[...document.querySelectorAll('.columns dt')].filter(e => e.checkVisibility()).map(e => e.innerText)"
    assert browser.run(columns) == ["reward/correct", "reward/format", "extra/steps", "example/operands"]
    browser.run("document.querySelector('.body > details:last-child').open = true")
    assert {"policy_version", "staleness"} <= set(browser.run(columns))


def test_one_prompt_is_followed_over_training(browser, tmp_path):
    def changed(row):
        row["prompt"] = f"prompt {row['prompt_idx']}"

    open_samples(browser, tmp_path, changed, run={"steps": 5}, tab="history", open="train/1/0/0")
    steps = browser.run("[...document.querySelectorAll('[data-step]')].map(e => Number(e.dataset.step))")
    assert steps == [step for step in (1, 2, 3, 4, 5) for _ in range(4)]
    assert clean(browser), browser.errors


VALUES = (
    "Object.fromEntries([...document.querySelectorAll('.token-values dl > div')].map(e => e.innerText.split('\\n')))"
)
TOKENS = {"text": ["4", "<b>", "\n", "obs"], "logprob": [-0.01, -2.0, -0.5, None], "diff": [0.0, 0.5, None, None],
          "advantage": -1.5, "age": [2, 0, 0, 0]}  # fmt: skip


def open_tokens(browser, folder, paint, width=1400, **more):
    """Opens a report of a run whose samples have these tokens, and more of them."""
    write_run(folder, steps=1, prompts=1)
    change_rows(folder, lambda row: row.update(tokens=TOKENS | more, policy_version=7, advantage=-1.5))
    write_report(folder, folder / "r.html")
    browser.open(at(folder / "r.html", view="samples", open="train/1/0/0", paint=paint), width=width)


def click_token(browser, place):
    """What the page says of the token that was clicked."""
    browser.run(f"document.querySelectorAll('.tokens .token')[{place}].click()")
    return browser.run(VALUES)


@pytest.mark.parametrize("width", [1400, 390])
def test_a_token_s_values_are_read_by_click_and_by_keyboard(browser, tmp_path, width):
    open_tokens(browser, tmp_path / "a", "logprob", width)
    assert click_token(browser, 1) == {
        "token": '"<b>"', "place": "2 of 4", "probability": "0.135335", "sampler’s log-prob": "-2", "trainer’s log-prob": "-1.5",
        "trainer − sampler": "0.5", "ratio trainer / sampler": "1.64872", "advantage": "-1.5", "in the loss": "yes", "policy version": "7",
    }  # fmt: skip
    browser.run("document.querySelector('.tokens').focus()")
    browser.press("Home")
    assert browser.run(VALUES)["policy version"] == "5"
    browser.press("End")
    unwritten = {"token": '"obs"', "place": "4 of 4", "in the loss": "no: not written by the policy"}
    assert browser.run(VALUES) == unwritten
    browser.press("ArrowLeft")
    assert browser.run(VALUES)["token"] == '"\\n"'
    place = "document.querySelector('.token-values').getBoundingClientRect()"
    assert browser.run(f"(r => r.top >= 0 && r.bottom <= innerHeight)({place})")
    assert "advantage -1.5" in text(browser, ".badges")
    assert "0, certain" in text(browser, ".scale")
    assert clean(browser), browser.errors


def test_any_number_of_a_token_is_a_colour_and_is_read(browser, tmp_path):
    """Entropy, and what a teacher says, by names that this page may not know."""
    more = {"entropy": [0.1, 0.7, 0.0, None], "divergence": [0.5, 1.0, 0.25, None], "teacher_log_ratios": [-2.0, 1.0, 0.0, None],
            "teacher_s_best": ["4 or 5", "<i>", "", None]}  # fmt: skip
    open_tokens(browser, tmp_path / "a", "teacher_log_ratios", **more)
    assert texts(browser, "[data-paint]") == [
        "no colours", "log-probability", "trainer − sampler", "entropy", "divergence from the teacher", "advantage",
        "age in updates", "teacher log ratios",
    ]  # fmt: skip
    colours = browser.run("[...document.querySelectorAll('.token')].map(e => getComputedStyle(e).backgroundColor)")
    assert len(set(colours[:3])) == 3  # below 0, above 0, 0
    assert text(browser, ".scale").startswith("-2")
    values = click_token(browser, 1)
    expected = {"entropy": "0.7", "divergence from the teacher": "1"}
    expected |= {"teacher log ratios": "1", "teacher s best": "<i>"}
    assert values == values | expected
    assert "entropy" not in click_token(browser, 3)
    assert clean(browser), browser.errors


def test_siblings_that_are_not_stored_are_named(browser, tmp_path):
    open_samples(browser, tmp_path, {"group_size": 5}, run=SIBLINGS, open="train/1/0/0", tab="siblings")
    cards = texts(browser, "[data-sibling] .facts")
    assert all("advantage" in card for card in cards)
    assert "3 of 5 siblings are stored. Not there: samples 3, 4;" in text(browser, ".detail")


def test_a_large_file_that_is_read_in_part_is_said_beside_its_samples(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan_rl.observe.report.load.READ_BYTES", 100)
    write_report(write_run(tmp_path / "a", steps=2), tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="samples"))
    assert len(shown(browser)) == 2
    assert "samples.jsonl is large: 2 of its rows were read" in text(browser, "[data-more]")


def test_samples_open_with_the_worst_training_sample_of_the_last_step(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    rows = change_rows(folder, lambda row: row.update(reward=-9.0 if row["episode_id"] == "train/3/2/0" else 0.5))
    names = [{"split": "eval_greedy", "step": 3, "episode_id": f"eval_greedy/3/{i}/0"} for i in range(16)]
    with open(folder / "samples.jsonl", "a") as file:
        file.writelines(json.dumps(row | name) + " \n" for row, name in zip(rows, names))
    write_report(folder, tmp_path / "r.html")
    browser.open(at(tmp_path / "r.html", view="samples"))
    assert shown(browser) == sorted(range(48), key=lambda i: (-rows[i]["step"], rows[i]["reward"]))
    assert text(browser, ".detail .badge") == "reward -9"
    browser.run(
        "(e => { e.value = 'eval_greedy'; e.dispatchEvent(new Event('change')) })(document.querySelector('[data-field=split]'))"
    )
    assert sorted(shown(browser)) == list(range(48, 64))
    browser.open(at(tmp_path / "r.html", view="samples", open="eval_greedy/3/5/0"))
    assert browser.run("document.querySelector('tr.open') !== null")


def test_the_search_reads_messages_that_are_no_list(browser, tmp_path):
    open_samples(browser, tmp_path, {"messages": 7, "conversation": {"said": "Oak"}}, run=SIBLINGS, q="oak")
    assert sorted(shown(browser)) == [0, 1, 2]
    assert clean(browser), browser.errors


def test_samples_of_which_none_fits_are_said_to_be_stored(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=1, prompts=1, siblings=40, text="word " * 4000)
    write_report(folder, tmp_path / "r.html", size_mb=0.1)
    browser.open(at(tmp_path / "r.html", view="samples"))
    assert "40 more samples do not fit this page" in text(browser, "main")
    assert "No samples are stored" not in text(browser, "main")
    assert clean(browser), browser.errors
