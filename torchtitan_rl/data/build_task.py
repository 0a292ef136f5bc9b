"""Builds a run's task and checks its examples."""

from torchtitan_rl.data.task import Example, Task
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.references import tried


def build_task(config: Task.Config) -> Task:
    """Build the task. Raises UserError if a method of a user's task raises, or gives no examples or other ones at each call."""
    task = tried(config, "build")
    for member in dict.fromkeys(tried(task, "members").values()):
        _check_examples(member)
    return task


def _check_examples(member: Task) -> None:
    name = type(member).__name__
    example = tried(member, "train_example", 0, seed=0)
    is_one = isinstance(example, Example)
    expect(is_one, f"{name}.train_example(0)", example, "an Example", "Return one.")
    again = tried(member, "train_example", 0, seed=0)
    shown = [(each.text, each.messages, each.expected_answer) for each in (example, again)]
    expected = "the same example at every call with one index and seed"
    remedy = 'Draw chance from random.Random(f"{seed}/{index}"): ranks and resumed runs ask again.'
    expect(shown[0] == shown[1], f"{name}.train_example(0)", example.text[:80], expected, remedy)
    held_out = tried(member, "held_out_examples", 1)
    expected = "a list with an Example"
    expect(bool(held_out), f"{name}.held_out_examples(1)", held_out, expected, "Return one.")
