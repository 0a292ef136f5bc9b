"""crewai's Agent, by kickoff."""

import os

os.environ.update({"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"})
from _common import QUESTION, STREAMS, finish, multiply  # noqa: E402
from crewai import LLM, Agent  # noqa: E402
from crewai.tools import tool  # noqa: E402

llm = LLM(
    model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], stream=STREAMS
)
agent = Agent(
    role="multiplier", goal="multiply", backstory="none", llm=llm, tools=[tool("multiply")(multiply)], max_iter=5
)
finish(agent.kickoff(QUESTION).raw)
