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
task, settings = Task(dataset=[Sample(input=QUESTION)], solver=agent), {"display": "none", "log_dir": "logs"}
[log] = eval(task, model="openai-api/openai/policy", message_limit=12, **settings)
if log.status != "success":
    raise SystemExit(str(log.error))
finish(log.samples[0].output.completion)
