"""atomic-agents, over instructor: its answer is a call of its output schema, which is the tool here."""

import instructor
from _common import QUESTION, finish
from _common import multiply as product
from atomic_agents import AgentConfig, AtomicAgent, BaseIOSchema, BasicChatInputSchema
from openai import OpenAI


class multiply(BaseIOSchema):
    """Multiply two integers."""

    a: int
    b: int


config = AgentConfig(client=instructor.from_openai(OpenAI()), model="policy")
answer = AtomicAgent[BasicChatInputSchema, multiply](config).run(BasicChatInputSchema(chat_message=QUESTION))
finish(product(answer.a, answer.b))
