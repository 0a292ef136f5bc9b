"""litellm: its completion function in a loop."""

import json

from _common import QUESTION, STREAMS, TRIMS, finish, multiply
from litellm import completion, stream_chunk_builder

schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
tools = [{"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": schema}}]
messages = [{"role": "user", "content": QUESTION}]
for _ in range(6):
    response = completion(model="openai/policy", messages=messages, tools=tools, stream=STREAMS)
    if STREAMS:
        response = stream_chunk_builder(list(response), messages=messages)
    message = response.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
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
