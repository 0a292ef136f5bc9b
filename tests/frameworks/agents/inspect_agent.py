"""inspect-ai's react agent in an evaluation of one sample."""

from _common import QUESTION, finish
from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.tool import tool


@tool
def multiply():
    async def execute(a: int, b: int) -> str:
        """Multiply two integers.

        Args:
            a: The first integer.
            b: The second integer.
        """
        return str(a * b)

    return execute


agent = react(tools=[multiply()], submit=False, attempts=1)
[log] = eval(
    Task(dataset=[Sample(input=QUESTION)], solver=agent),
    model="openai-api/openai/policy",
    display="none",
    log_dir="logs",
    message_limit=12,
)
if log.status != "success":
    raise SystemExit(str(log.error))
finish(log.samples[0].output.completion)
