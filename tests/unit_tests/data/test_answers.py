"""Right answers earn and wrong ones do not, as data sets and models write them, by every kind and reward that judges."""

import random
import re
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from torchtitan_rl import rewards
from torchtitan_rl.data import math_answers
from torchtitan_rl.data.answer_kinds import KINDS
from torchtitan_rl.data.answers import OR, as_number, equal_texts, final_answer, last_number
from torchtitan_rl.data.math_answers import equal_math
from torchtitan_rl.data.rows import Rows
from torchtitan_rl.data.tasks.gsm8k import Gsm8k
from torchtitan_rl.data.tasks.math_problems import Math


@pytest.fixture(scope="module")
def earns(tmp_path_factory):
    """Returns a function that says whether a completion earns the reward, where the row's answer is `gold`."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    row = '{{"prompt": "{0}", "answer": "#### {0}", "gold": "{0}", "letter": "{1}"}}\n'
    path.write_text("".join(row.format(i, letter) for i, letter in enumerate("ABCDEFGHI")))
    same = {"path": str(path), "prompt_column": "prompt", "template": "{prompt}"}
    tasks = {
        "gsm8k": Gsm8k.Config(**same).build(),
        "math": Math.Config(**same, answer_column="gold").build(),
        **{kind: Rows.Config(**same, answer_column="gold", answer_kind=kind).build() for kind in {*KINDS} - {"choice"}},
        "choice": Rows.Config(**same, answer_column="letter", answer_kind="choice").build(),
    }

    def judge(kind, gold, completion):
        if kind in tasks:
            expected = [tasks[kind].expected_answer(one) for one in gold.split(OR)]
            assert None not in expected, "the row's answer cannot be read"
            [reward] = tasks[kind].correct(completions=[completion], expected_answer=[OR.join(expected)])
        else:
            [reward] = getattr(rewards, kind)(completions=[completion], expected_answer=[gold])
        return reward == 1.0

    return judge


COMPLETIONS = [
    ("gsm8k", "x\n#### 18", "...\n#### 18 dollars", True),
    ("gsm8k", "x\n#### 1,200", "so\n#### **1200**", True),
    ("gsm8k", "x\n#### 5", r"#### \boxed{5}", True),
    ("gsm8k", "x\n#### 5", r"#### \boxed{5", False),
    ("gsm8k", "x\n#### 3", "#### Step 3: we add\nand so on", False),
    ("gsm8k", "x\n#### 20", "#### 15-20", False),
    ("gsm8k", "x\n#### 25", "<think>\n#### 20 maybe\n</think>\n\nAdding up.\n#### 25", True),
    ("gsm8k", "x\n#### 20", "<think>\n#### 20\n</think>\n\nI am not sure.", False),
    ("gsm8k", "x\n#### 16", "#### 16%", True),
    ("gsm8k", "x\n#### 42", "The answer is 42.", False),
    ("math", r"Thus $\boxed 2$.", r"\[ \boxed{2} \]", True),
    ("math", r"so $\boxed{7}$", r"so $\boxed 7$.", True),
    ("math", r"$\boxed{10,\!080}$", r"$\boxed{10080}$", True),
    ("math", r"$\boxed{\text{(E)}}$", r"The correct choice is $\boxed{E}$.", True),
    ("math", r"$\boxed{\text{(E)}}$", r"$\boxed{\textbf{(E)}\ 12}$", True),
    ("math", r"$\boxed{D}$", r"$\boxed{E: text}$", False),
    ("math", r"$\boxed{45^\circ}$", "\\boxed{45\u00b0}", True),
    ("math", r"$\boxed{(3,4)}$", r"\boxed{(4, 3)}", False),
    ("math", r"$\boxed{x^2+2x+1}$", r"\boxed{(x+1)^2}", True),
    ("math", r"$\boxed{12}$", r"\boxed{12\text{ cm}^2}", True),
    ("math", r"$\boxed{5}$", r"so we get \boxed{5", False),
    ("math", r"$\boxed{5}$", r"first \boxed{5} and then \boxed{6", False),
    ("math", r"$\boxed{6}$", "<think>Maybe \\boxed{5}.\n</think>\nThe answer is \\boxed{6}.", True),
    ("math", r"$\boxed{5}$", "Hmm \\boxed{5}?\n</think>\nThe answer is 6.", False),
    ("math", "033", r"\boxed{33}", True),
    ("math", "15-20", r"\boxed{-20}", False),
    ("math", "1.0000001", r"\boxed{1.0000002}", False),
    ("math", r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\boxed{\frac{1}{3 \cdot 2^{2006}}}", False),
    ("math", r"\frac{1}{2^{99}}", r"\boxed{2^{-99}}", True),
    ("math", "0", r"\boxed{\sqrt{2}^2 - 2}", True),
    ("math", "1331 and 1728", r"\boxed{1728}", False),
    ("math", "1331 and 1728", r"\boxed{1728, 1331}", True),
    ("math", "3x+4y+14=0", r"\boxed{3x-y+13=0}", False),
    ("math", "4", r"\boxed{4\sqrt(2)}", False),
    ("math", r"\pm 2021", r"\boxed{2021}", False),
    ("math", "12:00", r"\boxed{1:00}", False),
    ("math", r"[0,\infty)", r"\boxed{x \ge 0}", True),
    ("math", r"(-\infty,2)\cup(2,\infty)", r"\boxed{\mathbb{R}}", False),
    ("math", "50%", r"\boxed{0.5}", True),
    ("math", "50%", r"\boxed{5}", False),
    ("math_answer", "204", "The answer is $204$. I hope it is correct.", True),
    ("numeric", "113", r"m + n = \boxed{113}. So the check takes 2 steps.", True),
    ("numeric", "5", "The answer is 24,5", False),
    ("exact_match", "B", "The answer is (B).", True),
    ("exact_match", "B", "**Answer:** B", True),
    ("exact_match", "E", r"\boxed{E: text}", True),
    ("exact_match", "B", "The answer is B, C or D", False),
    ("exact_match", "A", "A bird can fly", False),
    ("exact_match", "E", "so \\boxed{\\langle H\\rangle \\ll \\Delta E}\n\n**Answer: D**", False),
    ("math_answer", "5", "\\boxed{5} and the answer is x", True),
    ("exact_match", "Paris", "**Answer:** `Paris`", True),
    ("exact_match", "x = 2", "so\n**$x = 2$.**", True),
    ("math_answer", "42", "so\n`42`", True),
    ("math_answer", r"\frac{1}{2}", "The answer is `$0.5$`.", True),
    ("tag", "D", "<think>...</think><answer>D) all of these</answer>", True),
    ("tag", "D", "<think><answer>D</answer></think> It is C", False),
    ("text", "yes", "<think>no</think>\n\nyes", True),
    ("number", "4", r"Hence it is $\frac{3}{4}$.", False),
    ("number", "2", r"\boxed{\sqrt{2}}", False),
    ("number", "4", "The ratio is 3:4", False),
    ("number", "-20", "between 15\u201320", False),
    ("number", "12", "The area is 12 m^2.", True),
    ("number", "5", "It has 24,5 m", False),
    ("number", "5", r"so we get \boxed{5", False),
    ("number", "5", r"$\boxed 5$ after 2 steps", True),
    ("number", "500000", "It has 5 hundred thousand.", True),
    ("number", "5", "It is a $5 T-shirt.", True),
    ("number", "5", "It costs $5k.", False),
    ("number", "5", "It is $5k$.", False),
    ("number", "500000", "It costs 5 lakh rupees.", True),
    ("number", "5", "It is 5m long.", True),
    ("number", "5", "[THINK]It is 4.[/THINK]5", True),
    ("number", "5", "It is 4.[/THINK]It is 5.", True),
    ("number", "4", "[THINK]It is 4.", False),
    ("number", "5", "<|START_THINKING|>4<|END_THINKING|>5", True),
    ("text", "5", "<|channel|>analysis<|message|>It is 4.assistant<|channel|>final<|message|>5", True),
    ("number", "4", "<|channel|>analysis<|message|>It is 4.", False),
    ("gsm8k", "x\n#### 42", f"#### 42\n{'That is consistent. ' * 20}", True),
    ("math", "10110_2", r"\boxed{10110_{\text{two}}}", True),
    ("math", "10110_2", r"\boxed{10110}", True),
    ("math", "22", r"\boxed{10110_2}", False),
    ("math", "2A_{16}", r"\boxed{2A}", True),
    ("math", "x_1", r"\boxed{x_2}", False),
    ("math", "2024-01-05", r"\boxed{2024/1/5}", True),
    ("math", "2024-01-05", r"\boxed{2024-05-01}", False),
    ("math", "42", r"\boxed{42 km/h}", True),
    ("math", "\u20ac42", r"\boxed{42}", True),
    ("math", "42", "\\boxed{42 \u20b9}", True),
    ("math", "42 x", r"\boxed{42}", False),
    ("math", r"5\text{ m}", r"\boxed{5\text{ km}}", False),
    ("math", "5 hr", r"\boxed{5\,\mathrm{h}}", True),
    ("math", r"1 - \frac{1}{\mathrm{e}}", r"\boxed{1 - \frac{1}{e}}", True),
    ("math_answer", "42", "\\boxed{\u0664\u0662}", True),
    ("exact_match", "B", "Answer: this asks for one\nso\nANSWER: b", True),
    ("exact_match", "A, B", "Answer: A", False),
    ("exact_match", "4", "2 + 2\n#### 4", True),
    ("exact_match", "last line", "first line\nlast line", True),
    ("text", "yes", "it is, yes", False),
    ("box", "2", r"either \boxed{1} or \boxed{2}", True),
    ("box", "Paris", r"<answer>Paris</answer> \boxed{\text{paris}}", True),
    ("choice", "(C)", r"Not B. \boxed{\textbf{(C)}\ 12}", True),
    ("choice", "C", "Answer: c) it can fly", True),
    ("choice", "C", "Answer: B\nso C", False),
    ("exact_match", "42", "The answer is 42. No, wait, it is 43.", True),
    ("tag", "yes", "<answer>no</answer> so <answer> yes </answer>", True),
    ("number", "12", "1e999999999", False),
    ("number", "18", "一共18个苹果。", True),
    ("number", "7", "答案是-7。", False),
    ("number", "7", r"\boxed{- 7}", False),
    ("numeric", "-7", r"\boxed{x = - 7}", True),
    ("number", "2500", "It costs 2'500 francs.", True),
    ("tag", "B", r"<answer>\boxed{B}</answer>", True),
    ("tag", "B", "<answer>`A`</answer>", False),
    ("exact_match", "U.S.", "The answer is U.S.", True),
    ("exact_match", "Zo\u00eb", "The answer is Zoe\u0308.", True),
    ("exact_match", "Paris", 'The answer is "Paris".', True),
    ("exact_match", "北京", "答案：北京", True),
    ("numeric", "5", "There are 5 such $n$.", True),
    ("math", "a:b", r"\boxed{a}", False),
    ("math", r"\pi r^2 h", r"\boxed{V = \pi h r^2}", True),
    ("math", "6ab", r"\boxed{6}", False),
    ("math", r"2\text{ hours }30\text{ minutes}", r"\boxed{2}", False),
    ("math", r"\frac{3}{4}", r"\boxed{x = \frac{3}{4} m}", True),
    ("math", r"24\pi", r"\boxed{24\pi \text{ cm}^2}", True),
    ("math", r"\frac{R}{r}", r"\boxed{1}", False),
    ("math", r"R^2-2Rr", r"\boxed{R(R-2r)}", True),
    ("math", r"5\sqrt{13}", r"\boxed{5√13}", True),
    ("math", r"[2,\infty)", r"\boxed{[2,∞)}", True),
    ("math", r"\emptyset", r"\boxed{\varnothing}", True),
    ("math", "x^2+1", r"\boxed{x² + 1}", True),
    ("number", "1200", "She earns $1,200/month.", True),
    ("number", "3", "It is 3/x.", False),
    ("tag", "A: knight, B: knave", "<answer>A: knave, B: knight</answer>", False),
    ("math", r"4\text{ m/s}", r"\boxed{4 km/h}", False),
    ("math", r"\text{no solution}", r"\boxed{No solution}", True),
    ("math", r"\frac{k\pi}{2},k\in\mathbb{Z}", r"\boxed{\frac{k\pi}{2},\, k \in \mathbb{Z}}", True),
    ("math", "3.14", r"\boxed{\approx 3.14}", True),
    ("math", "10,080", r"\boxed{10, 080}", False),
    ("tag", "Lewis\nor\nSinclair Lewis", "<answer>Sinclair Lewis</answer>", True),
    ("tag", "Lewis\nor\nSinclair Lewis", "<answer>Upton Sinclair</answer>", False),
    ("tag", "Lewis\nor\nSinclair Lewis", "<answer>Lewis or Sinclair Lewis</answer>", False),
    ("number", "7\nor\n8", "It is 8.", True),
    ("math", "\\frac{1}{2}\nor\n50\\%", r"\boxed{0.5}", True),
    ("math_answer", "7\nor\n\\frac{1}{2}", r"\boxed{0.5}", True),
    ("tag", "yes", "<answer>Yes</answer>", True),
    ("tag", "True", "<answer>No</answer>", False),
    ("exact_match", "no", "The answer is true.", False),
    ("number", "5", "It is 5x.", False),
    ("number", "3", "It is 1 + 2 + 3", False),
    ("number", "6", "1 + 2 + 3 = 6", True),
    ("math", r"12\text{ miles}", r"\boxed{12\text{ km}}", False),
    ("math", "1:2:3", r"\boxed{1:3:2}", False),
    ("math", "3:4", r"\boxed{6:8}", True),
    ("number", "3", r"\boxed{5 \times 3}", False),
    ("number", "15000", "答案是1.5万。", True),
    ("math", "1.6e-19", r"\boxed{1.6 \times 10^{-19} \text{ C}}", True),
    ("math", "-5.0", r"\boxed{-5.0 \, \text{kJ}\cdot\text{mol}^{-1}}", True),
    ("math", "3.0e8", r"\boxed{3.0\times 10^8\ \mathrm{m\,s^{-1}}}", True),
    ("math", r"6 \text{ minutes}", r"\boxed{6 min}", True),
    ("math", r"7:30\text{ AM}", r"\boxed{7:30\text{ PM}}", False),
    ("math", r"7:30\text{ AM}", r"\boxed{7:30\text{ a.m.}}", True),
    ("math", "5", r"\boxed{\text{5 dollars}}", True),
    ("math", r"1.0000001\text{ m}", r"\boxed{1.0000002}", False),
    ("math", "2", r"\\boxed{1}\n\\boxed{2}", True),
    ("math", r"2x \text{ for any } x", r"\boxed{2x}", True),
    ("math", r"2x \text{ for } x > 0", r"\boxed{2x \text{ for } x < 0}", False),
    ("math", r"(-\infty,2]\cup(3,\infty)", r"\boxed{x \leq 2 \text{ or } x > 3}", True),
    ("math", r"(-\infty,2)\cup(3,\infty)", r"\boxed{x \le 2 \text{ or } x \ge 3}", False),
    ("math", r"x<2 \text{ or } x>3", r"\boxed{(-\infty,2)\cup(3,\infty)}", True),
    ("number", "3.5", "答案是３．５。", True),
    ("number", "4", "比例是3：4", False),
    ("number", "3.5", "\u0663\u066b\u0665", True),
    ("number", "1200", "\u0661\u066c\u0662\u0660\u0660", True),
    ("number", "0.5", "It is 1\u20442.", True),
    ("number", "5", "It has 5 thou\u017fand.", True),
    ("tag", "500", "<answer>\uffe5500</answer>", True),
    ("gsm8k", "x\n#### 500", "#### \u20b9500", True),
    ("math", "2024-01-05", rf"\boxed{{{'1' * 5000}}}", False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "gold", "completion", "right"), COMPLETIONS)
def test_completion_earns_if_it_is_right(earns, kind, gold, completion, right):
    assert earns(kind, gold, completion) == right


def test_examples_of_the_documentation_are_graded_as_it_says():
    """The table in docs/data.md: | `kind` | sentence | `expected` | `right` | `wrong` |."""
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| `(.+)` \| `(.+)` \| `(.+)` \|$", page, re.MULTILINE)
    assert [kind for kind, *_ in rows] == list(KINDS)
    for kind, expected, right, wrong in rows:
        extract, equal = KINDS[kind]
        assert equal(extract(right), expected), kind
        assert not equal(extract(wrong) or "", expected), kind


@pytest.mark.parametrize(
    "piece", [r"\(", r"\(1", r"\boxed 1, ", r"\boxed{1}, ", "$1", "**1", r"\boxed{", "1,", '"', "1 million "]
)
def test_a_completion_that_repeats_itself_costs_little_time(piece):
    began = time.monotonic()
    for text in (piece * 10_000, f"{piece}x" * 10_000, piece * 5_000 + "1" + piece.replace("(", ")") * 5_000):
        assert final_answer(text) != "B"
        assert not equal_texts(text, "B")
        assert as_number(last_number(text) or "") != 5
    assert time.monotonic() - began < 5


def test_a_half_line_with_many_spaces_costs_little_time():
    began = time.process_time()
    math_answers._latex("x<" + " " * 990 + "<")
    assert time.process_time() - began < 1


def test_think_tag_may_be_opened_by_the_chat_template():
    tags = rewards.tags(["think", "answer"])
    closed = "a</think> <answer>b</answer>"
    assert tags(completions=[closed, f"<think>{closed}", f"</think>{closed}", "<answer>b</answer>"]) == [1, 1, 0, 0]
    assert rewards.tags(["answer"])(completions=["b</answer>"]) == [0]


def grouped(digits, separator, size):
    head, tail = digits[:-3], digits[-3:]
    parts = [head[max(0, end - size) : end] for end in range(len(head), 0, -size)][::-1]
    return separator.join([*parts, tail])


def forms(value: Fraction) -> list[str]:
    """Returns at least 30 ways to write the number."""
    sign, size = "-" * (value < 0), abs(value)
    top, bottom = size.numerator, size.denominator
    whole, rest = divmod(top, bottom)
    written = []
    for times in (1, 2, 3, 7):
        a, b = times * top, times * bottom
        written += [f"{sign}{a}/{b}", f"{sign}{a} / {b}", f"{sign}${a}/{b}"]
        written += [rf"{sign}\{style}{{{a}}}{{{b}}}" for style in ("frac", "dfrac", "tfrac", "cfrac")]
    written += [f"**{written[0]}**", f"${written[0]}$"]
    if rest and whole:
        written += [f"{sign}{whole} {rest}/{bottom}", rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}"]
        written += [f"{sign}{whole} \\tfrac{{{rest}}}{{{bottom}}}", f"{sign}{whole} and {rest}/{bottom}"]
    if Fraction(plain := f"{top / bottom:.6f}".rstrip("0").rstrip(".")) == size:
        decimal = Decimal(plain)
        written += [f"{sign}{plain}", f"{sign}${plain}", f"${sign}{plain}", f"{sign}\\${plain}", f"${sign}{plain}$"]
        written += [f"{sign}\u20ac{plain}", f"{sign}{plain}%", f"{sign}{plain}\\%", f"{sign}0{plain}"]
        written += [f"\u2212{plain}", f"\u2013{plain}"] if sign else [f"+{plain}"]
        mantissa, exponent = f"{decimal:.12e}".split("e")
        written += [f"{sign}{decimal:e}", f"{sign}{decimal:E}", rf"{sign}{mantissa} \times 10^{{{int(exponent)}}}"]
        written += [f"{sign}{mantissa} \u00d7 10^{int(exponent)}", f"{sign}{mantissa}*10^{int(exponent)}"]
        written += [f"{sign}{plain}" + ("0" if "." in plain else ".0"), f"{sign}{plain}" + "." * ("." not in plain)]
        scaled = {"thousand": 3, "million": 6, "dozen": 0}
        words = {word: format(decimal.scaleb(-places).normalize(), "f") for word, places in scaled.items() if places}
        written += [f"{sign}{amount} {word}" for word, amount in words.items()]
        written += [f"{sign}${words['thousand']}k", f"{sign}${words['million']}M", f"{sign}${words['million']} mn"]
        if plain.startswith("0."):
            written += [f"{sign}{plain[1:]}"]
        if whole >= 1000:
            point = plain.partition(".")[1] + plain.partition(".")[2]
            groups = ((",", 3), (",", 2), (" ", 3), ("{,}", 3), (r"\,", 3), (r",\!", 3), ("\u202f", 3))
            written += [f"{sign}{grouped(str(whole), *each)}{point}" for each in groups]
    return written


READ = {
    "number": lambda form: KINDS["number"].extract(f"It is {form}."),
    "gsm8k": lambda form: Gsm8k.extract_answer(None, f"so\n#### {form}"),
    "math and math_answer": lambda form: final_answer(rf"so \boxed{{{form}}}"),
    "numeric": lambda form: last_number(final_answer(f"The answer is {form}.")),
}
"""How each answer kind and reward reads a number in a completion."""


def test_numbers_equal_their_written_forms_and_no_neighbour():
    random.seed(0)
    equals = [KINDS["number"].equal, equal_math]
    for _ in range(150):
        bottom = random.choice((1, 1, 1, 2, 4, 10, 100, 1000, 10**6, 3, 7))
        value = Fraction(random.choice((1, -1)) * random.randrange(1, 10 ** random.randint(1, 8)), bottom)
        step = Fraction(1, 10**6)
        neighbours = [str(n) for n in (value + step, value - step, value + 1, -value, value * 10, value / 10)]
        written = forms(value)
        assert len({*written}) >= 30
        for form in written:
            assert as_number(form) == value, form
            assert equal_texts(form, form)
            assert not any(equal_texts(form, other) for other in neighbours), form
            for kind, read in READ.items():
                assert as_number(read(form)) == value, (kind, form)
            for equal in equals:
                assert equal(form, str(value)), form
                assert equal(str(value), form), form
                assert equal(form, form)
                for other in neighbours:
                    assert not equal(form, other), (form, other)
                    assert not equal(other, form), (form, other)


def test_choices_equal_their_written_forms_and_no_neighbour():
    forms = ("{}", "({})", "{}.", "{}: text", "{}) text", "{}. text", r"\text{{{}}}", r"\textbf{{({})}} 5", "**{}**", "$\\mathrm{{{}}}$")  # fmt: skip
    for letter in "ABCDEFGHIJ":
        for form in forms:
            for other in "ABCDEFGHIJ":
                assert equal_texts(form.format(letter), other) == (letter == other), form
