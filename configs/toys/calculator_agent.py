"""The task calculator, played by an agent that speaks to the policy through the `openai` client."""

import functools
import json
from typing import TYPE_CHECKING, Any

from torchtitan_rl.configs.toys.calculator import Calculator, multiply
from torchtitan_rl.data.tool_calls import ToolCall
from torchtitan_rl.data.tool_schemas import tool_schemas
from torchtitan_rl.environments.agents.environment import AgentEnvironment
from torchtitan_rl.environments.checks import described
from torchtitan_rl.environments.tools import run_call

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from torchtitan_rl.types import Prompt

TOOLS = {"multiply": multiply}


class AgentCalculator(Calculator):
    """calculator, with an agent that runs the calls instead of the in-process tool environment."""

    def environment(self, prompt: "Prompt") -> AgentEnvironment:
        """Returns an agent that asks the prompt's question."""
        return AgentEnvironment(play, task=prompt.messages, role="tool")


async def play(task: list[dict[str, Any]], *, base_url: str, api_key: str) -> None:
    """Asks the policy, and answers its calls until it makes none."""
    client, messages = openai_client(base_url).with_options(api_key=api_key), [*task]
    schemas, errors = tool_schemas([multiply]), 0
    while True:
        logged = {"columns": {"tool_errors": errors}}  # of the turn before
        response = await client.chat.completions.create(
            model="policy", messages=messages, tools=schemas, extra_body=logged
        )
        message = response.choices[0].message
        if not message.tool_calls:
            return
        messages.append(message.model_dump(exclude_none=True))
        errors = 0
        for call in message.tool_calls:
            answer, failed = _answer(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
            errors += failed


def _answer(name: str, arguments: str) -> tuple[str, bool]:
    """Returns the tool's message, and whether the call failed."""
    try:
        call = ToolCall(name, json.loads(arguments))
    except ValueError:
        call = ToolCall(name, {}, arguments)  # the gateway gives the reason why it cannot be read
    try:
        return run_call(TOOLS, call), False
    except Exception as error:
        return f"error: {described(error)}", True


@functools.cache
def openai_client(base_url: str) -> "AsyncOpenAI":
    """Returns one client for all coroutines. It waits as long as the policy takes: others' turns may come first."""
    from openai import AsyncOpenAI  # vLLM brings it

    return AsyncOpenAI(base_url=base_url, api_key="of each session", timeout=None, max_retries=0)
