"""openai: a loop over chat completions."""

from _common import STREAMS, TOOLS, converse
from openai import OpenAI

chat, asked = OpenAI().chat.completions, {"model": "policy", "tools": TOOLS}


def ask(messages):
    if STREAMS:
        with chat.stream(**asked, messages=messages) as stream:
            return stream.get_final_completion().choices[0].message
    return chat.create(**asked, messages=messages).choices[0].message


converse(ask)
