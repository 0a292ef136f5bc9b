"""gsm8k, math, countdown and reasoning_gym: their examples, their splits and their judgements."""

import json

import pytest

from torchtitan_rl import rewards
from torchtitan_rl.data import math_answers
from torchtitan_rl.data.math_answers import equal_math
from torchtitan_rl.data.tasks.countdown import reaches
from torchtitan_rl.data.tasks.gsm8k import Gsm8k
from torchtitan_rl.data.tasks.math_problems import Math
from torchtitan_rl.data.tasks.reasoning_gym import ReasoningGym
from torchtitan_rl.errors import UserError
from torchtitan_rl.types import Prompt


def folder_of(path, **splits):
    for split, rows in splits.items():
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompt_of(example) -> Prompt:
    return Prompt(
        prompt_idx=0, text="?", token_ids=[1], expected_answer=example.expected_answer, columns=example.columns
    )


def test_gsm8k_reads_the_published_columns_and_compares_the_final_number(tmp_path):
    rows = [{"question": f"{i} eggs?", "answer": f"He has <<{i}+0={i}>>.\n#### 1,{i:03}"} for i in range(5)]
    task = Gsm8k.Config(path=folder_of(tmp_path, train=rows[:4], test=rows[4:])).build()
    [held_out] = task.held_out_examples(10)
    assert held_out.text.startswith("4 eggs?\nReason")
    assert held_out.expected_answer == "1,004"
    for text, right in (("so #### 1004", True), ("#### 1,004.", True), ("1004", False), ("#### 5 #### 1004.0", True)):
        assert task.judge(task.extract_answer(text), prompt_of(held_out)) == right


def test_math_compares_latex_by_value(tmp_path):
    rows = [{"problem": f"Halve {i}.", "solution": rf"It is \boxed{{\frac{{{i}}}{{2}}}}."} for i in (1, 3, 5)]
    task = Math.Config(path=folder_of(tmp_path, train=rows[1:], test=rows[:1])).build()
    [held_out] = task.held_out_examples(10)
    assert held_out.text == "Halve 1.\nReason step by step, and put the final answer within \\boxed{}."
    assert held_out.expected_answer == r"\frac{1}{2}"
    for text, right in ((r"\boxed{0.5}", True), (r"\boxed{1/2}", True), ("0.5", False), (r"\boxed{\frac{", False)):
        assert task.judge(task.extract_answer(text), prompt_of(held_out)) == right


@pytest.mark.parametrize("gold", ["The sequence converges.", r"\frac{1}{", r"\left( x", r"AB \parallel CD"])
def test_an_answer_that_math_verify_cannot_read_is_left_out_and_named(tmp_path, capsys, gold):
    """Any other way to write it would earn nothing."""
    rows = [{"problem": f"Halve {i}.", "solution": rf"\frac{{{i}}}{{2}}"} for i in range(120)] + [
        {"problem": "Why?", "solution": gold}
    ]
    task = Math.Config(path=folder_of(tmp_path, train=rows, test=rows[:1])).build()
    task.leave_out(lambda examples: [None] * len(examples))
    assert "1 no answer that can be read in 'solution' (row 121)" in capsys.readouterr().out
    assert rewards.math_answer(completions=[r"\boxed{7}"], expected_answer=[gold]) == [None]


SENTENCES = [
    "The minimum is $4$, reached at $x=1$.", "answer (B) $10$, and not $20$", r"By AM-GM, \(a+b\) is least. $\blacksquare$",
    r"\boxed{\blacksquare}",
]  # fmt: skip


def test_math_reads_the_answer_beside_a_solution(tmp_path):
    rows = [{"problem": f"{i}?", "solution": SENTENCES[i], "answer": f"{i}"} for i in range(3)]
    task = Math.Config(path=folder_of(tmp_path, train=rows, test=rows[2:])).build()
    assert [task.held_out_examples(9)[0].expected_answer] == ["2"]


def test_math_on_a_prompt_in_another_column_names_both_settings(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "reward_model": {"ground_truth": i}} for i in range(3)]
    path = folder_of(tmp_path, train=rows, test=rows[:1])
    with pytest.raises(UserError, match="task.prompt_column = 'problem'.* For another one, give task.template too"):
        Math.Config(path=path).build()
    task = Math.Config(path=path, prompt_column="prompt", template="").build()
    assert task.held_out_examples(1)[0].expected_answer == "0"


def test_a_tasks_own_split_is_not_asked_of_one_held_out_file(tmp_path):
    rows = [{"problem": f"Halve {i}.", "solution": rf"\boxed{{{i}/2}}"} for i in range(3)]
    path = folder_of(tmp_path, train=rows[1:], own=rows[:1])
    own = str(tmp_path / "own.jsonl")
    for settings in ({"held_out_path": own}, {"held_out_paths": {"own": own}}):
        [held_out] = Math.Config(path=path, **settings).build().held_out_examples(1)
        assert held_out.text.startswith("Halve 0.")


def test_a_solution_without_a_box_is_no_answer_unless_it_is_one_alone(tmp_path, capsys):
    alone = [r"$\frac{1}{2}$", "4", "x = 3", "$1$ and $2$", "$4$ cm"]
    rows = [{"problem": f"{text}?", "solution": text} for text in alone + SENTENCES]
    task = Math.Config(path=folder_of(tmp_path, train=rows, test=rows[:1])).build()
    task.leave_out(lambda examples: [None] * len(examples))
    assert f"{len(SENTENCES)} without an answer (rows 6, 7, 8, 9)" in capsys.readouterr().out
    assert {task.train_example(i, seed=0).expected_answer for i in range(4)} == {*alone[1:]}


def test_endless_math_comparison_is_killed_and_a_slow_one_is_right_after_it(monkeypatch):
    """The sum takes 0.6 s of CPU time."""
    monkeypatch.setattr(math_answers, "LONGEST_SECONDS", 3.0)
    assert not equal_math("5^{9^{9^9}}", "7")
    assert equal_math(r"\sum_{k=1}^{n} k^3", r"\left(\frac{n(n+1)}{2}\right)^2")


def test_a_comparison_finds_nothing_that_earlier_ones_have_kept(monkeypatch):
    """Such as sympy's cache, by which a slow right answer was in time only after a similar one."""
    kept = []
    monkeypatch.setattr(math_answers, "_warm_up", lambda: None)
    monkeypatch.setattr(math_answers, "_compare", lambda *pair: kept.append(pair) or len(kept) == 1)
    assert [equal_math("x", f"y_{number}") for number in range(3)] == [True] * 3


@pytest.mark.parametrize(
    ("expression", "right"),
    [
        ("(1 + 2) * 3", True),
        ("3 * (2 + 1) = 9", True),
        ("9", False),
        ("(1 + 2) * 3 * 1", False),
        ("9**9**9", False),
        ("__import__('os').system('true')", False),
        ("(" * 150 + "1", False),
        ("12 * 3 / 4", False),
        (r"(1 + 2) \times 3", True),
        (None, False),
    ],
)
def test_countdown_takes_expressions_that_use_each_number_once(expression, right):
    assert reaches(expression, [3, 1, 2], 9) == right


def test_reasoning_gym_mixes_tasks_by_weight_and_scores_with_their_own_scorers():
    pytest.importorskip("pycosat", reason="reasoning_gym needs it, and a C compiler to install it")
    task = ReasoningGym.Config(
        tasks=[("spell_backward", 1.0), ("gcd", 3.0)], settings=[("spell_backward.max_word_len", "4")]
    ).build()
    examples = [task.train_example(index, seed=0) for index in range(100)]
    names = [example.columns["entry"]["metadata"]["source_dataset"] for example in examples]
    assert 0.6 < names.count("gcd") / 100 < 0.9
    assert examples[:20] == [task.train_example(index, seed=0) for index in range(20)]
    held_out = task.held_out_examples(10)
    assert not {example.text for example in held_out} & {example.text for example in examples}
    for example in held_out:
        answer = example.expected_answer
        assert task.judge(task.extract_answer(f"so <answer>{answer}</answer>"), prompt_of(example))
        assert not task.judge(task.extract_answer(answer), prompt_of(example))
        assert (
            task.score(completions=[f"<answer>{answer}</answer>", ""], entry=[example.columns["entry"]] * 2)[0] == 1.0
        )


def test_reasoning_gym_reads_the_last_number_of_a_completion_without_tags():
    pytest.importorskip("pycosat", reason="reasoning_gym needs it, and a C compiler to install it")
    task = ReasoningGym.Config(tasks=[("gcd", 1.0)], answer_kind="number").build()
    [example] = task.held_out_examples(1)
    entry, answer = [example.columns["entry"]], example.expected_answer
    assert task.score(completions=[f"The GCD of these numbers is {answer}."], entry=entry) == [1.0]
    assert task.score(completions=[f"{answer}, or rather {int(answer) + 1}"], entry=entry) == [0.0]


def test_reasoning_gym_gives_0_for_an_answer_that_a_task_cannot_parse():
    pytest.importorskip("pycosat", reason="reasoning_gym needs it, and a C compiler to install it")
    task = ReasoningGym.Config(tasks=[("prime_factorization", 1.0)]).build()
    [example] = task.held_out_examples(1)
    entry, right = example.columns["entry"], example.expected_answer
    answers = ["<answer>two and three</answer>", f"<answer>{right}</answer>"]
    assert task.score(completions=answers, entry=[entry] * 2) == [0.0, 1.0]
