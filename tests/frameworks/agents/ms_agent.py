"""agent-framework (Microsoft): its agent over responses or chat completions."""

import asyncio
import os

from _common import QUESTION, STREAMS, finish, multiply
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

make = OpenAIChatCompletionClient if os.environ.get("API") == "chat" else OpenAIChatClient
client = make(model="policy", api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"])


async def main():
    options = {"store": False}  # with it the history is sent whole, not as previous_response_id
    agent = client.as_agent(name="player", instructions="Be short.", tools=[multiply], default_options=options)
    if STREAMS:
        finish("".join([part.text async for part in agent.run(QUESTION, stream=True)]))
    else:
        finish(await agent.run(QUESTION))


asyncio.run(main())
