"""litellm: its completion function in a loop."""

from _common import STREAMS, TOOLS, converse
from litellm import completion, stream_chunk_builder


def ask(messages):
    response = completion(model="openai/policy", messages=messages, tools=TOOLS, stream=STREAMS)
    if STREAMS:
        response = stream_chunk_builder(list(response), messages=messages)
    return response.choices[0].message


converse(ask)
