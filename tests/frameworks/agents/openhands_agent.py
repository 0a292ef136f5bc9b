"""OpenHands' agent with its terminal."""

import os

from _common import QUESTION
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool

llm = LLM(model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
conversation = Conversation(agent=Agent(llm=llm, tools=[Tool(name=TerminalTool.name)]), workspace=os.getcwd())
conversation.send_message(QUESTION)
conversation.run()
