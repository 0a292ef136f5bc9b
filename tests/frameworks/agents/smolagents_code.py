"""smolagents' CodeAgent: the policy writes code."""

from _common import QUESTION, STREAMS, finish, multiply
from smolagents import CodeAgent, OpenAIModel, tool

agent = CodeAgent(
    tools=[tool(multiply)], model=OpenAIModel(model_id="policy"), max_steps=4, stream_outputs=STREAMS, verbosity_level=0
)
finish(agent.run(QUESTION))
