"""debug with conversations: a tool to be called and a game of several turns, for any machine, without a download."""

from configs.debug import debug
from torchtitan_rl.core.algorithm import Algorithm, GroupMean
from torchtitan_rl.library.tasks import Calculator, GuessNumber
from torchtitan_rl.setup.config import RunConfig


def debug_calculator() -> RunConfig:
    """Learns to call a tool on one CPU process, with its own warm start; needs nothing.

    The policy starts with the habit of multiplying in its head, wrongly; one answer in seven calls `multiply`.
    """
    config = _debug_talk(max_turns=3)
    config.task = Calculator.Config(
        instruction="", warm_start="torchtitan_rl.library.starts.conversation_recipes:calculator"
    )
    config.num_steps = 30
    return config


def debug_guess() -> RunConfig:
    """Learns to find a number of 7 in 3 guesses, each with an advantage of its own, on one CPU process; needs nothing.

    The policy starts with a habit, the lowest number that is left; a little less than half of its guesses are the middle. Seen:
    53 % of the held-out games won at the start, 95 % after 20 steps (seed 0; docs/conversations.md).
    """
    config = _debug_talk(max_turns=3)
    config.task = GuessNumber.Config(span=7, warm_start="torchtitan_rl.library.starts.conversation_recipes:guesser")
    config.algorithm = Algorithm.Config(advantage=GroupMean.Config(), credit="turn")
    config.num_prompts_per_step = 64  # only many numbers tell a good guess from a lucky one
    config.num_steps = 40
    config.trainer.optimizer.lr = 2e-4
    return config


def _debug_talk(max_turns: int) -> RunConfig:
    config = debug()
    config.prompts.max_prompt_tokens = 64
    config.sampling.max_tokens = 96
    config.evaluation.sampling.max_tokens = 96
    config.evaluation.num_prompts = 64
    config.generator.max_model_len = 256
    config.conversations.max_turns = max_turns
    config.conversations.wait_for_answers = (
        True  # its environments answer at once, so a run is repeatable to the last bit
    )
    return config
