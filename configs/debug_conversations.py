"""Conversations, a tool and a game, for any machine."""

from torchtitan_rl.algorithm import Algorithm, GroupMean
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.debug import debug
from torchtitan_rl.configs.toys.calculator import Calculator
from torchtitan_rl.configs.toys.calculator_agent import AgentCalculator
from torchtitan_rl.configs.toys.guess_number import GuessNumber


def debug_calculator() -> RunConfig:
    """A small model learns to call a tool.

    The starting policy has the habit of giving a wrong product without the tool. One answer in four calls `multiply`.
    """
    config = _debug_talk(max_turns=3)
    config.task = Calculator.Config(
        instruction="", warm_start="torchtitan_rl.configs.toys.conversation_recipes:calculator"
    )
    config.num_steps = 30
    return config


def debug_agent() -> RunConfig:
    """debug_calculator with the tool in an agent of its own.

    The agent speaks to the policy over HTTP with the `openai` client. The conversations are those of debug_calculator, token for token. docs/agents.md explains it.
    """
    config = debug_calculator()
    config.task = AgentCalculator.Config(instruction="", warm_start=config.task.warm_start)
    return config


def debug_guess() -> RunConfig:
    """A small model learns to find one of 7 numbers in 3 guesses.

    Each guess has its own advantage. The starting policy has the habit of guessing the lowest remaining number; 44 % of its guesses are the middle one.
    It wins 53 % of the held-out games at the start. docs/measured/results.md has the results.
    """
    config = _debug_talk(max_turns=3)
    config.task = GuessNumber.Config(span=7, warm_start="torchtitan_rl.configs.toys.conversation_recipes:guesser")
    config.algorithm = Algorithm.Config(advantage=GroupMean.Config(), credit="turn")
    config.num_prompts_per_step = 64  # with few prompts, luck outweighs good guessing
    config.num_steps = 40
    config.trainer.optimizer.lr = 2e-4
    return config


def _debug_talk(max_turns: int) -> RunConfig:
    config = debug()
    config.prompts.max_prompt_tokens = 64
    config.sampling.max_tokens = 96
    config.evaluation.num_prompts = 64
    config.generator.max_model_len = 256
    config.conversations.max_turns = max_turns
    config.conversations.wait_for_answers = True  # the environments answer at once, so runs are bit-for-bit repeatable
    return config
