"""litellm: its completion function in a loop."""

from _common import QUESTION, STREAMS, TOOLS, called, finish, trimmed
from litellm import completion, stream_chunk_builder

messages = [{"role": "user", "content": QUESTION}]
for _ in range(6):
    response = completion(model="openai/policy", messages=messages, tools=TOOLS, stream=STREAMS)
    if STREAMS:
        response = stream_chunk_builder(list(response), messages=messages)
    message = response.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        if message.content:
            break
        messages.append({"role": "user", "content": "Please answer."})
    for call in message.tool_calls or []:
        content = called(call.function.name, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    messages = trimmed(messages)
finish(message.content)
