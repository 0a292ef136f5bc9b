"""countdown: reach a target with the four operations, using each given number once."""

import ast
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_rl.data.answers import last_tagged
from torchtitan_rl.data.task import Example, RewardFunction, Task
from torchtitan_rl.data.tasks.procedural import ProceduralTask, plain_example
from torchtitan_rl.fields.number import number

if TYPE_CHECKING:
    from torchtitan_rl.types import Prompt

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SYMBOLS = dict(zip(_OPERATIONS.values(), "+-*/", strict=True))
_OTHER_SIGNS = {"×": "*", "÷": "/", "\u2212": "-", "\\times": "*", "\\cdot": "*", "\\div": "/"}
_LONGEST = 200
"""Maximum characters of an expression. The longest right answer has about 50."""


class _Problem(NamedTuple):
    numbers: list[int]
    target: int
    expression: str
    """One expression that reaches the target."""


class Countdown(ProceduralTask):
    """Prompts with a few numbers and a target. The reward is 1 for an expression that reaches it, plus 0.1 for the format."""

    name = "countdown"
    more_with = ", or set a larger task.max_numbers"

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        min_numbers: int = number(3, least=2, most=6)
        """Fewest numbers in a prompt, at least 2."""

        max_numbers: int = number(4, least="min_numbers", most=6)
        """Most numbers in a prompt, at most 6."""

        largest: int = number(99, least=10)
        """Largest number in a prompt; the smallest is 1. Targets are at most ten times as large."""

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (self.correct, self.format)

    def correct(
        self, *, completions: list, numbers: list[list[int]], target: list[int], **_: Any
    ) -> list[float]:
        """1 for an expression with these numbers that reaches the target, else 0."""
        answers = map(self.answer, completions)
        return [float(reaches(a, n, t)) for a, n, t in zip(answers, numbers, target, strict=True)]

    def format(self, *, completions: list, **_: Any) -> list[float]:
        """0.1 for an answer between the tags."""
        return [0.1 if self.answer(c) is not None else 0.0 for c in completions]

    def extract_answer(self, text: str) -> str | None:
        return last_tagged(text)

    def judge(self, answer: str | None, prompt: "Prompt") -> bool:
        return reaches(answer, prompt.columns["numbers"], prompt.columns["target"])

    def draw(self, rng: random.Random) -> _Problem:
        """Returns random numbers and a reachable target, found by combining two numbers at a time until one is left."""
        while True:
            numbers = [
                rng.randint(1, self.config.largest)
                for _ in range(rng.randint(self.config.min_numbers, self.config.max_numbers))
            ]
            left = [(Fraction(number), str(number)) for number in numbers]
            while len(left) > 1:
                rng.shuffle(left)
                (a, first), (b, second) = left.pop(), left.pop()
                joined = [
                    (operation(a, b), f"({first} {symbol} {second})")
                    for operation, symbol in _SYMBOLS.items()
                    if b or symbol != "/"
                ]
                left.append(rng.choice([each for each in joined if each[0].denominator == 1]))
            [(target, expression)] = left
            if 0 < target <= 10 * self.config.largest and target not in numbers:
                return _Problem(numbers, int(target), expression[1:-1])

    def key(self, problem: _Problem) -> str:
        return f"{sorted(problem.numbers)}={problem.target}"

    def example(self, problem: _Problem) -> Example:
        numbers, target, expression = problem
        question = (
            f"Using the numbers {numbers}, write an expression that equals {target}. Use each number exactly once, and "
            "only +, -, *, / and parentheses. Think first, then give the expression between <answer> and </answer>, "
            "for example <answer>(1 + 2) * 3</answer>."
        )
        # The expression is one of many right answers.
        return plain_example(question, expression, numbers=numbers, target=target)


def reaches(expression: str | None, numbers: Sequence[int], target: int) -> bool:
    """Returns whether the expression uses each number exactly once and equals the target. A trailing "= 9" is ignored.

    Example: reaches("(1 + 2) * 3", [3, 1, 2], 9) == True
    """
    evaluated = evaluate(expression.partition("=")[0]) if expression else None
    if evaluated is None:
        return False
    value, used = evaluated
    return sorted(used) == sorted(numbers) and value == target


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Returns (exact value, numbers used) of an arithmetic expression; None if it is not one.

    Nothing is executed: the syntax tree is walked, and only integers and the four operations are accepted. So "9**9**9"
    is rejected instead of evaluated.
    """
    if len(expression) > _LONGEST:
        return None
    used: list[int] = []
    try:
        for sign, symbol in _OTHER_SIGNS.items():
            expression = expression.replace(sign, symbol)
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Returns the value of a node and appends its numbers to `used`. Raises ValueError for anything but arithmetic."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError("not arithmetic")
