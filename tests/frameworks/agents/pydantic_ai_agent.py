"""pydantic-ai with chat completions, or with API=responses the Responses API."""

import asyncio
import os

from _common import QUESTION, STREAMS, TRIMS, finish, multiply, trimmed
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

MODEL = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[os.environ["API"]]("policy")
agent = Agent(MODEL, tools=[multiply], retries=3)


async def main():
    if TRIMS:
        from pydantic_ai.capabilities import ProcessHistory

        trimming = Agent(
            MODEL, tools=[multiply], retries=3,
            capabilities=[ProcessHistory(trimmed)],
        )  # fmt: skip
        finish((await trimming.run(QUESTION)).output)
    elif STREAMS:
        async with agent.run_stream(QUESTION) as result:
            finish(await result.get_output())
    else:
        finish((await agent.run(QUESTION)).output)


asyncio.run(main())
