"""strands-agents: its agent over chat completions."""

import os

from _common import QUESTION, finish, multiply
from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(
    client_args={"api_key": os.environ["OPENAI_API_KEY"], "base_url": os.environ["OPENAI_BASE_URL"]}, model_id="policy"
)
agent = Agent(model=model, tools=[tool(multiply)], system_prompt="Be short.", callback_handler=None)
finish(agent(QUESTION))
