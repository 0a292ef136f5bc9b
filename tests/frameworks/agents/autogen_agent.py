"""autogen's AssistantAgent; trimmed: with BufferedChatCompletionContext."""

import asyncio

from _common import QUESTION, STREAMS, TRIMS, finish, multiply
from autogen_agentchat.agents import AssistantAgent
from autogen_core.model_context import BufferedChatCompletionContext
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def main():
    client = OpenAIChatCompletionClient(model="policy", model_info={**INFO, "multiple_system_messages": True})
    agent = AssistantAgent(
        "multiplier", model_client=client, tools=[multiply], system_message="Be short.", max_tool_iterations=5,
        model_client_stream=STREAMS, model_context=BufferedChatCompletionContext(buffer_size=3) if TRIMS else None,
    )  # fmt: skip
    result = await agent.run(task=QUESTION)
    finish(result.messages[-1].to_text())


asyncio.run(main())
