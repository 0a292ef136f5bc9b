"""The code of docs/agents.md, run as it is written, with a policy that says what it is told to."""

import os
import random
import shutil
import sys
from pathlib import Path

import pytest

from tests.unit_tests.docs.test_conversations import talk
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.data.task import recipe_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "agents.md").read_text()


@pytest.fixture
def files(files):
    """Beside the page's files, a venv with the `openai` client."""
    (files / "agent_venv").symlink_to(sys.prefix)
    return files


def test_documented_agent_runs_and_its_reward_is_trained_on(files):
    config = load_config(f"{files}/my_agent_task.py:guess_with_agent")
    secret = int(config.task.build().train_example(0, seed=0).expected_answer)
    prompt, scored = talk(config, str(secret + 1), "x", str(secret))
    assert prompt.messages[0]["content"].startswith("Guess my number")
    assert [message["content"] for message in scored.completion.messages] == [
        str(secret + 1), "lower", "x", "higher", str(secret),
    ]  # fmt: skip
    assert (scored.reward, scored.correct, scored.completion.finish_reason) == (1.0, True, "stop")
    assert scored.completion.turns[-1].columns == {"guesses": 3}


def test_reward_function_receives_the_agents_logs(files):
    config = load_config(f"{files}/my_agent_task.py:guess_with_agent")
    config.grader.rewards, config.grader.weights = [f"{files}/my_agent_rewards.py:quick"], {"quick": 0.2}
    secret = config.task.build().train_example(0, seed=0).expected_answer
    _, scored = talk(config, "x", secret)
    assert scored.reward_breakdown == {"environment_reward": 1.0, "quick": 0.5}
    assert scored.reward == pytest.approx(1.1)


def test_start_of_the_verifiers_example_suits_its_prompts():
    task = load_config(f"{ROOT}/examples/verifiers/my_verifiers_task.py:words").task
    recipe = recipe_of(task.warm_start, "task.warm_start")
    assert recipe.worked(task.build().train_example(0, seed=0), random.Random(0))


@pytest.mark.skipif("VERIFIERS_VENV" not in os.environ, reason="needs a venv with verifiers: docs/agents.md")
def test_verifiers_environment_returns_reward_and_metrics(files):
    for file in (ROOT / "examples" / "verifiers").glob("*.py"):
        shutil.copy(file, files)
    (files / "verifiers_venv").symlink_to(os.environ["VERIFIERS_VENV"])
    config = load_config(f"{files}/my_verifiers_task.py:words")
    config.conversations.call_seconds = 600  # a busy machine
    for said, reward in (("rohcna", 1.0), ("anchor", 0.0)):
        prompt, scored = talk(config, said)
        assert prompt.messages == [{"role": "user", "content": "Spell anchor backwards."}]
        assert (scored.reward, scored.completion.finish_reason) == (reward, "stop")
        assert scored.completion.turns[-1].columns == {"letters": 6.0}
