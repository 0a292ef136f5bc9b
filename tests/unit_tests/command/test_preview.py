"""`--preview`: what sampled answers mean for training."""

import re

import pytest

from tests.parts.observability import group, sample
from tests.parts.tiny import save_tiny_start
from torchtitan_rl.command.preview import advice, doubtful, measures, verdict
from torchtitan_rl.command.registry import parse_args
from torchtitan_rl.errors import UserError


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([(0, 1), (1, 0)], r"2 of 2 prompts have answers with different rewards, .* learns from\.$"),
        ([(0, 0), (0, 0)], r"0 of 2 prompts have answers with different rewards, .* learns from\. \w"),
        ([(0, 1)] + 7 * [(0, 0)], r"1 of 8 prompts have answers with different rewards, .* A step learns little: "),
    ],
)
def test_only_groups_with_different_rewards_have_something_to_learn_from(rewards, said):
    groups = [group(i, *(sample(reward=float(one)) for one in of_group)) for i, of_group in enumerate(rewards)]
    assert re.match(said, verdict(groups))
    assert f"{2 * len(rewards)} answers: reward" in measures(groups)


def test_a_wrong_answer_that_names_the_expected_one_is_counted():
    samples = [sample(text=text, correct=text == "2") for text in ("2", "It is 2", "It is 3", "")]
    assert "25% right, 25% judged wrong with the expected answer in their text, " in measures([group(1, *samples)])


def test_answers_that_are_judged_wrong_with_the_expected_one_are_shown_once_a_prompt():
    wrong = [sample(text=text, correct=False) for text in ("It is 3", "It is 2", "2 it is")]
    lines = "\n".join(doubtful([group(1, wrong[0]), *(group(1, *wrong) for _ in range(3))]))
    assert lines.count("would you?") == lines.count("'It is 2'") == 2
    assert "It is 3" not in lines
    assert "2 it is" not in lines


@pytest.mark.parametrize(("cut", "said"), [(1, []), (2, ["20% of the answers are cut off at sampling.max_tokens 256"])])
def test_a_limit_that_cuts_many_answers_is_named_with_a_larger_one(cut, said):
    samples = [sample(finish_reason="length" if i < cut else "stop") for i in range(10)]
    lines = advice([group(1, *samples)], 256)
    assert [line.partition(":")[0] for line in lines] == said
    assert all("--sampling.max-tokens 512" in line for line in lines)


def test_a_preview_of_a_run_that_samples_nothing_names_the_dry_run(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan_rl.comm.init_process_group", lambda config: None)
    save_tiny_start(tmp_path)
    options = ["--evaluation.sampling.n", "0"]
    with pytest.raises(UserError, match="a run that samples; .* Use --dry-run"):
        parse_args(["--preview", "--config", "debug_sft", "--hf-assets-path", str(tmp_path), *options])
