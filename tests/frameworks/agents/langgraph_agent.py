"""langchain's create_agent, a langgraph graph; trimmed: with SummarizationMiddleware."""

from _common import QUESTION, STREAMS, TRIMS, finish, multiply
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="policy", streaming=STREAMS)
middleware = []
if TRIMS:
    from langchain.agents.middleware import SummarizationMiddleware

    middleware = [SummarizationMiddleware(model=model, trigger=("messages", 4), keep=("messages", 2))]
agent = create_agent(model, tools=[multiply], system_prompt="Be short.", middleware=middleware)
state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]}, {"recursion_limit": 30})
finish(state["messages"][-1].content)
