"""Groups in flight: which are taken, where they go on, and that no token is lost, sampled twice or of an unknown version."""

import json
from dataclasses import replace

import pytest

from tests.parts.conversations import prompts
from tests.parts.stream import ListStream, begun
from torchtitan_rl.errors import UserError
from torchtitan_rl.generator.in_flight import Carried, InFlight
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import flat

SAMPLING = SamplingConfig(n=3, max_tokens=40)


def repeated(made) -> ListStream:
    """Training prompts of a made-up stream, repeated every seven."""
    return ListStream([replace(prompt, stream_idx=i) for i, prompt in enumerate(prompts(made, 7) * 20)])


class Run:
    """Steps of `needed` groups on one engine, whose weights stay the same; only their version counts up."""

    def __init__(self, generator, made, *, prompts: int, max_age: int = 4, needed: int = 4, sampling=SAMPLING) -> None:
        self.stream, self.needed, self.version = repeated(made), needed, 0
        config = InFlight.Config(prompts=prompts, max_age=max_age)
        self.in_flight = config.build(generator=generator, stream=self.stream)
        self.generator, self.sampling = generator, sampling

    def step(self):
        self.generator.policy_version = self.version
        self.generator.llm.reset_prefix_cache()
        self.generator.sampling = self.sampling
        with begun(self.in_flight, self.needed, step=self.version) as whole:
            groups = sorted(whole, key=lambda group: group.prompt.prompt_idx)
        self.version += 1
        return groups


def test_tokens_that_are_sampled_one_step_ahead_have_the_version_of_their_weights(generator, made):
    run = Run(generator, made, prompts=0, needed=2)
    for step, versions in ((4, None), (5, {3})):
        generator.policy_version = 3
        with begun(run.in_flight, 2, step=step) as whole:
            for one in flat(whole):
                assert one.policy_version == step - 1
                assert (one.token_versions if versions is None else set(one.token_versions.tolist())) == versions


def test_new_prompts_fill_the_free_slots(made):
    stream = repeated(made)
    in_flight = InFlight.Config(prompts=6).build(generator=None, stream=stream)
    first = in_flight._with_carried(stream.next_batch(6))
    assert [p.prompt_idx for p in first] == [0, 1, 2, 3, 4, 5]
    for prompt in (first[1], first[4]):
        in_flight.carried[prompt.prompt_idx] = Carried(prompt=prompt, since=0, samples=[])
    then = in_flight._with_carried(stream.next_batch(4))
    assert [(p.prompt_idx, p.stream_idx) for p in then] == [(0, 6), (1, 1), (2, 7), (3, 8), (4, 4), (5, 9)]


def test_resumed_completions_have_the_greedy_tokens_of_uninterrupted_ones(generator, made):
    greedy = SamplingConfig(n=1, max_tokens=40, temperature=0)
    run = Run(generator, made, prompts=8, sampling=greedy)
    groups = [group for _ in range(6) for group in run.step()]
    cut = [c for c in flat(groups) if c.token_versions is not None and len(set(c.token_versions.tolist())) > 1]
    assert cut, "no completion was cut, so nothing was tested"
    stream = repeated(made)
    generator.llm.reset_prefix_cache()
    whole = generator.generate(stream.next_batch(7), step=0, sampling_config=greedy)
    uncut = {group.prompt.stream_idx: group.samples[0] for group in whole}
    for group in groups:
        [one], other = group.samples, uncut[group.prompt.stream_idx % 7]
        assert (one.token_ids.tolist(), one.text) == (other.token_ids.tolist(), other.text)
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-5)


def test_every_prompt_is_trained_once_within_the_maximum_age(generator, made):
    run = Run(generator, made, prompts=8, max_age=2)
    groups = []
    for step in range(12):
        taken = run.step()
        assert len(taken) == 4
        assert len({g.prompt.prompt_idx for g in taken}) == 4
        assert all(step - c.oldest_version <= 2 for c in flat(taken))
        assert {c.policy_version for c in flat(taken)} == {step}
        groups += taken
    trained = sorted(group.prompt.stream_idx for group in groups)
    carried = sorted(one.prompt.stream_idx for one in run.in_flight.carried.values())
    assert sorted(trained + carried) == list(range(run.stream.seen))
    ages = [c.policy_version - c.oldest_version for c in flat(groups)]
    assert max(ages) == 2


def test_checkpoint_with_changed_prompts_is_refused(generator, made):
    run = Run(generator, made, prompts=8)
    run.step()
    state = json.loads(json.dumps(run.in_flight.state_dict()))
    others = ListStream([run.stream.at(index + 1) for index in range(8)])
    changed = InFlight.Config(prompts=8).build(generator=generator, stream=others)
    with pytest.raises(UserError, match="completions of training prompt"):
        changed.load_state_dict(state)
