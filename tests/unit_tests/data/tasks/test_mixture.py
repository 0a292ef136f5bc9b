"""Mixtures: drawn by weight, the same on every rank, resumed at the exact place, each member for itself."""

from collections import Counter

import pytest

from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.data.tasks.countdown import Countdown
from torchtitan_rl.data.tasks.mixture import Mixture, Share
from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.field_limits import check_fields
from torchtitan_rl.observe.metrics.reward_stats import groups_by_task, task_metrics
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import Completion, Episode, Group, ScoredCompletion

SHORT = SamplingConfig(n=4, max_tokens=16)


def mixture(**shares) -> Mixture:
    return Mixture.Config(
        tasks=shares or {"sums": sums(3), "countdown": Share(task=Countdown.Config(), sampling=SHORT)}
    ).build()


def sums(weight=1.0, **settings) -> Share:
    return Share(task=SumDigits.Config(max_integers=2, instruction="", **settings), weight=weight)


@pytest.fixture
def tokenizer():
    return make_small_tokenizer(["What is 12 + 34? [ANSWER] 46"] * 4, vocab_size=300)


def test_mixture_members_are_drawn_by_weight_from_their_own_streams():
    task = mixture()
    examples = [task.train_example(index, seed=0) for index in range(6000)]
    asked = Counter(example.task for example in examples)
    assert asked["sums"] / 6000 == pytest.approx(0.75, abs=0.02)
    for name, member in task.members().items():
        mine = [example.text for example in examples if example.task == name]
        assert mine[:50] + mine[-50:] == [
            member.train_example(i, seed=0).text for i in [*range(50), *range(len(mine) - 50, len(mine))]
        ]


def test_mixture_resumes_at_the_exact_position_on_every_rank(tokenizer):
    def stream():
        return PromptStream.Config(read_ahead=8).build(task=mixture(), tokenizer=tokenizer, seed=0)

    whole = stream()
    whole.next_batch(13)
    state = whole.state_dict()
    expected = [(p.task, p.text, p.sampling) for p in whole.next_batch(20)]
    for _ in range(2):
        resumed = stream()
        resumed.load_state_dict(state)
        assert [(p.task, p.text, p.sampling) for p in resumed.next_batch(20)] == expected


def test_mixture_uses_the_warm_start_of_its_first_member_with_one(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torchtitan_rl.configs.toys.warm_start.ensure_checkpoint", lambda task, recipe, root: root / recipe.name
    )
    both = {"countdown": Share(task=Countdown.Config()), "sums": sums()}
    assert Mixture.Config(tasks=both).start_checkpoint(tmp_path) == tmp_path / "sums"
    assert Mixture.Config(tasks={"countdown": both["countdown"]}).start_checkpoint(tmp_path) is None


def test_invalid_members_are_errors_with_a_remedy():
    with pytest.raises(UserError, match="task.tasks.sums.weight = 0: expected more than 0"):
        check_fields(Mixture.Config(tasks={"sums": sums(0)}), "task")
    with pytest.raises(UserError, match="task.tasks = 'a/b': expected a name without /"):
        mixture(**{"a/b": sums()})
    with pytest.raises(UserError, match="expected one task or more"):
        Mixture.Config().build()


def test_metrics_are_split_by_mixture_member(tokenizer):
    prompts = PromptStream.Config(read_ahead=0).build(task=mixture(), tokenizer=tokenizer, seed=0).next_batch(8)
    groups = [Group(prompt=p, samples=[episode(p.task == "sums", i) for i in range(2)]) for p in prompts]
    algorithm = Algorithm.Config().build(max_completion_tokens=16)
    found = {name: task_metrics(asked, f"train/{name}", algorithm) for name, asked in groups_by_task(groups).items()}
    assert found["sums"]["train/sums/accuracy"].value == 1.0
    assert found["countdown"]["train/countdown/accuracy"].value == 0.0
    assert found["sums"]["train/sums/prompts"].value + found["countdown"]["train/countdown/prompts"].value == 8


def episode(right: bool, sample_idx: int) -> Episode:
    completion = Completion(
        sample_idx=sample_idx, policy_version=0, token_ids=[1], sampler_logprobs=[0.0], text="x", finish_reason="stop"
    )
    return Episode(scored=ScoredCompletion(completion=completion, reward=float(right), correct=right))
