"""agno's Agent."""

import os

from _common import QUESTION, STREAMS, TRIMS, finish, multiply
from agno.agent import Agent
from agno.models.openai.like import OpenAILike

model = OpenAILike(id="policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
options = {"max_tool_calls_from_history": 1} if TRIMS else {}
agent = Agent(model=model, tools=[multiply], instructions="Be short.", telemetry=False, **options)
if STREAMS:
    contents = [getattr(event, "content", None) for event in agent.run(QUESTION, stream=True)]
    finish("".join(content for content in contents if isinstance(content, str)))
else:
    finish(agent.run(QUESTION).content)
