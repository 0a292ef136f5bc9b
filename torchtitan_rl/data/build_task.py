"""Builds a run's task and checks what its methods return."""

from typing import Any

from torchtitan_rl.data.task import Example, Task
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.references import tried


def build_task(config: Task.Config) -> Task:
    """Build the task.

    Raises:
        UserError: if a method of a user's task raises, or returns another type than the interface says.
    """
    task = tried(config, "build")
    members = tried(task, "members")
    by_name = (
        isinstance(members, dict)
        and members
        and all(isinstance(member, Task) for member in members.values())
    )
    expect(
        bool(by_name),
        f"{type(task).__name__}.members()",
        members,
        "tasks by name",
        'Return {"": self}.',
    )
    for member in dict.fromkeys(members.values()):
        _check_examples(member)
        _check_functions(member)
    return task


def _check_examples(member: Task) -> None:
    """Check that a task gives examples, the same ones at every call."""
    name = type(member).__name__
    example = tried(member, "train_example", 0, seed=0)
    expect(
        isinstance(example, Example),
        f"{name}.train_example(0)",
        example,
        "an Example",
        "Return one.",
    )
    again = tried(member, "train_example", 0, seed=0)
    equal = (example.text, example.messages, example.expected_answer) == (
        again.text,
        again.messages,
        again.expected_answer,
    )
    expect(
        equal, f"{name}.train_example(0)", example.text[:80], "the same example at every call with one index and seed",
        'Draw chance from random.Random(f"{seed}/{index}"): ranks and resumed runs ask again.',
    )  # fmt: skip
    held_out = tried(member, "held_out_examples", 1)
    listed = _is_list(held_out) and held_out and all(isinstance(each, Example) for each in held_out)
    expect(
        bool(listed),
        f"{name}.held_out_examples(1)",
        held_out,
        "a list with an Example",
        "Return one.",
    )


def _check_functions(member: Task) -> None:
    """Check that a task gives lists of functions."""
    name = type(member).__name__
    for method in ("reward_functions", "tools"):
        functions = tried(member, method)
        listed = _is_list(functions) and all(map(callable, functions))
        expect(
            listed,
            f"{name}.{method}()",
            functions,
            "a list of functions",
            "Return one; [] for none.",
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
