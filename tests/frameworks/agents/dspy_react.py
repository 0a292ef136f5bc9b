"""dspy's ReAct. Its fallback to JSON output cannot be followed; a text that it cannot read is a turn without a reward."""

import os

import dspy
from _common import QUESTION, finish, multiply
from dspy.utils.exceptions import AdapterParseError

lm = dspy.LM("openai/policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], cache=False)
dspy.configure(lm=lm, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False))
try:
    finish(dspy.ReAct("question -> answer", tools=[multiply], max_iters=4)(question=QUESTION).answer)
except AdapterParseError:
    finish("")
