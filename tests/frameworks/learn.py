"""Real runs with agents of frameworks: debug_calculator, in which a command of the framework asks the policy and runs its calls.

    FRAMEWORK_VENVS=/path/to/venvs ./run_train.sh --config tests/frameworks/learn.py:langgraph

The venvs are those of play.py. A step has 24 conversations, each of which starts a process.
"""

import os
from pathlib import Path

from configs.debug_conversations import debug_calculator
from tests.frameworks.play import agent_of
from torchtitan_rl.library.tasks import Calculator


class FrameworkCalculator(Calculator):
    """calculator, played by a framework's agent."""

    framework = ""

    def environment(self, prompt):
        """Returns the agent, which asks the prompt's question."""
        return agent_of(Path(os.environ["FRAMEWORK_VENVS"]), self.framework, prompt.messages[0]["content"])


class OpenAICalculator(FrameworkCalculator):
    framework = "openai"


class LanggraphCalculator(FrameworkCalculator):
    framework = "langgraph"


class PydanticCalculator(FrameworkCalculator):
    framework = "pydantic-ai"


class AISDKCalculator(FrameworkCalculator):
    framework = "AI SDK"


def _learns(task: type[Calculator]):
    config = debug_calculator()
    config.task = task.Config(instruction="", warm_start=config.task.warm_start)
    config.num_steps = 10
    config.num_prompts_per_step = 3
    config.trainer.optimizer.lr = 3e-4
    config.trainer.lr_scheduler.warmup_steps = 0
    config.evaluation.every = 5
    config.evaluation.num_prompts = 16
    config.conversations.max_open = 4  # processes at once
    config.conversations.call_seconds = 240
    config.conversations.wait_for_answers = False
    config.conversations.on_failure = "none"
    return config


def openai():
    """An agent with the `openai` client."""
    return _learns(OpenAICalculator)


def langgraph():
    """langchain's `create_agent`."""
    return _learns(LanggraphCalculator)


def pydantic_ai():
    """pydantic-ai's `Agent`."""
    return _learns(PydanticCalculator)


def ai_sdk():
    """The AI SDK's `generateText`, in node."""
    return _learns(AISDKCalculator)
