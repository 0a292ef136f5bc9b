"""pydantic-ai with chat completions."""

import asyncio

from _common import QUESTION, STREAMS, TRIMS, finish, multiply
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


def trimmed(messages):
    return [messages[0], *messages[-2:]] if TRIMS and len(messages) > 3 else messages


agent = Agent(OpenAIChatModel("policy"), instructions="Be short.", tools=[multiply], retries=3)
HISTORY = trimmed


async def main():
    if TRIMS:
        from pydantic_ai.capabilities import ProcessHistory

        trimming = Agent(
            OpenAIChatModel("policy"), instructions="Be short.", tools=[multiply], retries=3,
            capabilities=[ProcessHistory(trimmed)],
        )  # fmt: skip
        finish((await trimming.run(QUESTION)).output)
    elif STREAMS:
        async with agent.run_stream(QUESTION) as result:
            finish(await result.get_output())
    else:
        finish((await agent.run(QUESTION)).output)


asyncio.run(main())
