"""google-adk: its agent with LiteLlm."""

import asyncio
import os

from _common import QUESTION, STREAMS, finish, multiply
from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


async def main():
    model = LiteLlm(model="openai/policy", api_base=os.environ["OPENAI_BASE_URL"])
    runner = InMemoryRunner(
        Agent(name="player", model=model, instruction="Be short.", tools=[multiply]), app_name="play"
    )
    session = await runner.session_service.create_session(app_name="play", user_id="user")
    said = types.Content(role="user", parts=[types.Part(text=QUESTION)])
    config = RunConfig(streaming_mode=StreamingMode.SSE if STREAMS else StreamingMode.NONE)
    answer = ""
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=said, run_config=config):
        answer += "".join(part.text or "" for part in (event.content.parts or ())) if event.content else ""
    finish(answer)


asyncio.run(main())
