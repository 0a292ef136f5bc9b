"""openai: a loop over chat completions, as its docs write it."""

import json

from _common import QUESTION, STREAMS, TRIMS, finish, multiply
from openai import OpenAI

client = OpenAI()
schema = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
}  # fmt: skip
tools = [{"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": schema}}]
messages = [{"role": "user", "content": QUESTION}]
for _ in range(6):
    if STREAMS:
        with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    if not message.tool_calls:
        if message.content:
            break
        messages.append({"role": "user", "content": "Please answer."})
    for call in message.tool_calls or []:
        try:
            arguments = json.loads(call.function.arguments)
            content = multiply(**arguments) if call.function.name == "multiply" else "error: no such tool"
        except (ValueError, TypeError) as error:
            content = f"error: {error}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    if TRIMS and len(messages) > 3:
        messages = [messages[0], *messages[-2:]]
finish(message.content)
