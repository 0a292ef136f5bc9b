"""What all agents here share: the question, the tool and the result."""

import json
import os

with open(os.environ["AGENT_TASK"]) as file:
    QUESTION = json.load(file)
SCENARIO = os.environ.get("SCENARIO", "")
STREAMS = SCENARIO == "stream"
TRIMS = SCENARIO == "trimmed history"


def multiply(a: int, b: int) -> str:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return str(int(a) * int(b))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": SCHEMA}}]


def called(name: str, arguments: str | dict) -> str:
    """The answer to a call, an error if it is none of the tool."""
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return multiply(**arguments) if name == "multiply" else "error: no such tool"
    except (ValueError, TypeError) as error:
        return f"error: {error}"


def trimmed(messages: list) -> list:
    """In its scenario the first message and the last two, else all."""
    return [messages[0], *messages[-2:]] if TRIMS and len(messages) > 3 else messages


def converse(ask) -> None:
    """A loop over chat completions, as its docs write it: `ask(messages)` returns the policy's message."""
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(6):
        message = ask(messages)
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            if message.content:
                break
            messages.append({"role": "user", "content": "Please answer."})
        for call in message.tool_calls or []:
            content = called(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        messages = trimmed(messages)
    finish(message.content)


def finish(answer: object) -> None:
    """Write the result: reward 1 for the right answer."""
    with open(os.environ["AGENT_RESULT"], "w") as file:
        json.dump({"reward": float("12" in str(answer))}, file)
