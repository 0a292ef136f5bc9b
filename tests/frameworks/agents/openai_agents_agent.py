"""openai-agents with the Responses API, its default, or with API=chat_completions that one."""

import asyncio
import os

from _common import QUESTION, STREAMS, TRIMS, finish, multiply, trimmed
from agents import Agent, RunConfig, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from agents.run import CallModelData, ModelInputData

set_tracing_disabled(True)
set_default_openai_api(os.environ["API"])


def trim(data: CallModelData) -> ModelInputData:
    return ModelInputData(input=trimmed(data.model_data.input), instructions=data.model_data.instructions)


async def main():
    agent = Agent(name="multiplier", instructions="Be short.", tools=[function_tool(multiply)], model="policy")
    config = RunConfig(call_model_input_filter=trim if TRIMS else None)
    if STREAMS:
        result = Runner.run_streamed(agent, QUESTION, run_config=config)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, QUESTION, run_config=config)
    finish(result.final_output)


asyncio.run(main())
