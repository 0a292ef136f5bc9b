"""smolagents' ToolCallingAgent, whose tool_choice is required."""

from _common import QUESTION, STREAMS, finish, multiply
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id="policy")
agent = ToolCallingAgent(tools=[tool(multiply)], model=model, max_steps=4, stream_outputs=STREAMS, verbosity_level=0)
finish(agent.run(QUESTION))
