"""openai: a loop over chat completions, as its docs write it."""

from _common import QUESTION, STREAMS, TOOLS, called, finish, trimmed
from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": QUESTION}]
for _ in range(6):
    if STREAMS:
        with client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
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
