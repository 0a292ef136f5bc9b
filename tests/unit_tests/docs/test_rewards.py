"""The code of docs/rewards.md, run as it is written."""

import re
from pathlib import Path

import pytest

from tests.parts.grading import TaskOf, build_grader, logged, score
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.rewards import Grader

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


@pytest.mark.parametrize("messages", [None, [{"role": "user", "content": "What is 12 + 34?"}]])
def test_the_reward_functions_score_and_log(files, messages):
    config = Grader.Config(
        rewards=[f"{files}/my_rewards.py:brevity", f"{files}/my_rewards.py:judge"],
        weights={"brevity": 0.1},
        on_failure_of={"judge": "none"},
        time_limit_seconds_of={"judge": 10},
    )
    grader = build_grader(config, SumDigits.Config().build())
    first, second = score(grader, "[ANSWER] 46", "", messages=messages)
    assert first.reward_breakdown == {"correct": 1.0, "format": 0.2, "brevity": 1 - 11 / 64, "judge": 1.0}
    assert first.reward == pytest.approx(2.2 + 0.1 * (1 - 11 / 64))
    assert second.reward_breakdown["judge"] is None
    assert second.reward == pytest.approx(-1.0 + 0.1)
    assert (first.extra, second.extra) == ({"brevity/tokens": 11}, {"brevity/tokens": 0})
    assert logged(grader) == {"extra/brevity/share_over_64_tokens": (0.0, "mean", 2)}


def test_the_task_gives_prompts_and_rewards(files):
    from my_task import WORDS, Backwards

    task = Backwards.Config().build()
    tokenizer = make_small_tokenizer(WORDS, vocab_size=280)
    stream = PromptStream.Config().build(task=task, tokenizer=tokenizer, seed=0)
    two_epochs = [p.expected_answer for p in stream.next_batch(14)]
    assert sorted(two_epochs[:7]) == sorted(two_epochs[7:]) == sorted(word[::-1] for word in WORDS[3:])
    assert two_epochs[:7] != two_epochs[7:]
    [held_out] = stream.held_out(1)
    assert held_out.text == "Spell anchor backwards.\n"
    scored = score(build_grader(Grader.Config(), task), "rohcna", "It is ROHCNA", "rohcxx", "", prompt=held_out)
    assert [s.reward for s in scored] == [1.0, 1.0, pytest.approx(0.5 * 4 / 6), 0.0]


def test_documented_keywords_are_passed_to_reward_functions(files):
    table = re.search(r"\| keyword .*?\n\n", PAGE, re.DOTALL)[0]
    named = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line))
    seen = {}

    def curious(**keywords):
        seen.update(keywords)
        return [0.0]

    score(build_grader(Grader.Config(in_process=["curious"]), TaskOf(curious)), "x")
    assert set(named) == set(seen)
