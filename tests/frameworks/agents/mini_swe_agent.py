"""mini-swe-agent's DefaultAgent in a local environment: its tool is bash."""

import os

from _common import QUESTION, finish
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name="openai/policy", cost_tracking="ignore_errors",
    model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"], "drop_params": True},
)  # fmt: skip
agent = DefaultAgent(
    model, LocalEnvironment(), system_template="Be short.", instance_template="{{task}}", step_limit=6, cost_limit=0
)
finish(agent.run(QUESTION))
