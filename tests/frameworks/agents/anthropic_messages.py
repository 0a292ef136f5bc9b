"""anthropic: a loop over messages, as its docs write it."""

from _common import QUESTION, SCHEMA, STREAMS, called, finish, trimmed
from anthropic import Anthropic

client = Anthropic()
tools = [{"name": "multiply", "description": "Multiply.", "input_schema": SCHEMA}]
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
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": called(c.name, c.input)} for c in calls]
    if results:
        messages.append({"role": "user", "content": results})
    messages = trimmed(messages)
finish(text)
