"""chatlas: its chat over chat completions, or responses."""

import os

from _common import QUESTION, STREAMS, finish, multiply
from chatlas import ChatOpenAI, ChatOpenAICompletions

make = ChatOpenAI if os.environ.get("API") == "responses" else ChatOpenAICompletions
chat = make(model="policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
chat.system_prompt = "Be short."
chat.register_tool(multiply)
finish("".join(map(str, chat.stream(QUESTION))) if STREAMS else chat.chat(QUESTION, echo="none", stream=False))
