"""The trainers' side of generators on other ranks, where it needs no engine; `own_generators*` of the whole runs have both sides."""

from dataclasses import replace
from datetime import date
from types import SimpleNamespace

import numpy as np
import pytest

from tests.parts.stream import ListStream
from torchtitan_rl.generator.in_flight import InFlight
from torchtitan_rl.observe.collector import Collector
from torchtitan_rl.observe.reduce import Reduce
from torchtitan_rl.observe.select import Selection
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.sampler import Answered, FarSampler
from torchtitan_rl.types import Completion, Group, Prompt, ScoredCompletion

PROMPT = Prompt(
    prompt_idx=0, stream_idx=7, text="?", token_ids=[1], expected_answer="", columns={"day": date(2026, 1, 2)}
)
PROMPTS = {(7, 0, 1): PROMPT}
"""The data's prompts by place, prompt_idx and tokens."""
COMPLETION = Completion(
    sample_idx=0, policy_version=6, token_ids=[3, 5], sampler_logprobs=[-1, -2], text="", finish_reason="stop",
    token_versions=np.array([5, 5], np.int32),
)  # fmt: skip
AHEAD = Group(prompt=PROMPT, samples=[ScoredCompletion(completion=COMPLETION, reward=1.0)])


def far_sampler(ahead=True, record=None):
    """Without a link: what it may not ask of the generators fails."""
    in_flight = SimpleNamespace(
        carried={4: "a group"},
        prompt_at=lambda place, idx, tokens: PROMPTS[place, idx, *tokens],
        place_of=lambda prompt: (prompt.stream_idx, prompt.prompt_idx, [1]),
    )
    return FarSampler(None, in_flight, ahead=ahead, record=record)


def test_a_resumed_run_trains_on_the_groups_that_were_sampled_before():
    generators, trainers = Collector(Selection("")), Collector(Selection(""))
    generators.record("mine", 2.0, Reduce.MEAN)
    generators.record("lengths", np.array([3.0, 5.0]), Reduce.DISTRIBUTION)
    before, after = far_sampler(), far_sampler(record=trainers.add)
    after.load_state_dict(before.state_dict())
    assert after._batch is None
    before._batch = Answered([AHEAD], {}, [generators.drain().state_dict()])
    drops = far_sampler(ahead=False)
    for each in (after, drops):
        each.load_state_dict(before.state_dict())
    assert drops._batch is None
    stream = SimpleNamespace(next_batch=lambda num_prompts, *, first_idx: num_prompts)
    assert (after.draw(stream, 1), before.draw(stream, 1)) == (0, 0)
    (trained,) = after.training_groups([], 1, 0, state=TrainerState(global_step=7))
    completion = trained.samples[0].completion
    assert (trained.prompt, completion.policy_version) == (PROMPT, 6)
    assert completion.token_versions.tolist() == [5, 5]
    recorded = trainers.drain().values()
    assert (recorded["mine"], recorded["lengths/p50"]) == (2, 4)
    assert after._in_flight.carried == {4: "a group"}
    assert after.state_dict() == far_sampler().state_dict()  # and once only


def test_what_environments_have_made_of_a_prompt_is_restored():
    """An agent's first request replaces the prompt, and may differ from sample to sample."""
    read = replace(PROMPT, text="Go!", token_ids=[1, 4], messages=[{"role": "user", "content": "Go!"}])
    own = replace(read, text="Go on!", token_ids=[1, 4, 6])
    samples = [ScoredCompletion(completion=replace(COMPLETION, prompt=prompt), reward=1.0) for prompt in (None, own)]
    before, after = far_sampler(), far_sampler(record=lambda recorded: None)
    for each in (before, after):
        each._in_flight = InFlight.Config().build(generator=None, stream=ListStream([PROMPT] * 8))
    before._batch = Answered([Group(prompt=read, samples=samples)], {}, [])
    after.load_state_dict(before.state_dict())
    (trained,) = after.training_groups([], 1, 0, state=TrainerState(global_step=7))
    first, second = (sample.completion.prompt for sample in trained.samples)
    assert first is None
    for prompt, expected in ((trained.prompt, read), (second, own)):
        assert (prompt.text, prompt.token_ids.tolist()) == (expected.text, expected.token_ids.tolist())
        assert (prompt.messages, prompt.columns) == (expected.messages, PROMPT.columns)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_generators_record_is_counted_once_for_all_trainers(rank, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    generators, trainer = Collector(Selection("")), Collector(Selection(""))
    generators.record("reward/one/failures", 3.0, Reduce.SUM)
    with generators.during("timed", "generate"):
        pass
    trainer.add(generators.drain().state_dict())
    assert trainer.elapsed("generate") > 0
    assert trainer.drain().values().get("reward/one/failures") == (3 if rank == 0 else None)


def test_nothing_is_sampled_ahead_of_the_last_step():
    far = far_sampler()
    far.go_ahead(None, 1, state=TrainerState(global_step=10, max_steps=9))
    far.arrive()
    assert far.state_dict() == {"batch": None}
