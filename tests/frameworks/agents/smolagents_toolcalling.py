"""smolagents' ToolCallingAgent; its default tool_choice, required, cannot be followed."""

from _common import QUESTION, STREAMS, finish, multiply
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id="policy", tool_choice="auto")
agent = ToolCallingAgent(tools=[tool(multiply)], model=model, max_steps=4, stream_outputs=STREAMS, verbosity_level=0)
finish(agent.run(QUESTION))
