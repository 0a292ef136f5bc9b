"""anthropic: a loop over messages, as its docs write it."""

from _common import QUESTION, STREAMS, TRIMS, finish, multiply
from anthropic import Anthropic

client = Anthropic()
schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
tools = [{"name": "multiply", "description": "Multiply.", "input_schema": schema}]
messages = [{"role": "user", "content": QUESTION}]
for _ in range(6):
    asked = {"model": "policy", "max_tokens": 500, "messages": messages, "tools": tools}
    if STREAMS:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    if message.content:
        messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    text = "".join(block.text for block in message.content if block.type == "text")
    if not calls:
        if text:
            break
        messages.append({"role": "user", "content": "Please answer."})
    results = []
    for call in calls:
        try:
            content = multiply(**call.input) if call.name == "multiply" else "error: no such tool"
        except (ValueError, TypeError) as error:
            content = f"error: {error}"
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": content})
    if results:
        messages.append({"role": "user", "content": results})
    if TRIMS and len(messages) > 3:
        messages = [messages[0], *messages[-2:]]
finish(text)
