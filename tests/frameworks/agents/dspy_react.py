"""dspy's ReAct."""

import os

import dspy
from _common import QUESTION, finish, multiply

lm = dspy.LM("openai/policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], cache=False)
dspy.configure(lm=lm)
finish(dspy.ReAct("question -> answer", tools=[multiply], max_iters=4)(question=QUESTION).answer)
