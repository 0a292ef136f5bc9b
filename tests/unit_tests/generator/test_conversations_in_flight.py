"""Conversations that wait for their environment over an update, and their replay after a resume."""

import json
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.parts.conversations import Says, conversation, conversations, prompts, said
from tests.parts.pushes import fill
from tests.unit_tests.generator.test_in_flight import Run
from torchtitan_rl.configs.toys.calculator_agent import openai_client
from torchtitan_rl.conversation import Sampled
from torchtitan_rl.environments import Context, Turn
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import flat

SAMPLING = SamplingConfig(n=2, max_tokens=60)


@pytest.fixture
def run(generator, made):
    """A run whose prompts have the environments that `make(prompt)` makes."""

    def run(make, *, prompts=6, needed=3, max_age=4, sampling=SAMPLING, **config) -> Run:
        generator.environments = conversations(make, made, **{"max_turn_tokens": 20, **config})
        return Run(generator, made, prompts=prompts, max_age=max_age, needed=needed, sampling=sampling)

    yield run
    generator.environments.close()
    generator.environments = None


class Gate(Says):
    """Does not answer before it is opened."""

    def __init__(self, opens: threading.Event, *turns) -> None:
        super().__init__(*turns)
        self.opens = opens

    def step(self, message):
        assert self.opens.wait(60)
        return super().step(message)


def logprobs(model, prompt, completion) -> np.ndarray:
    """[L] of a completion of one trace, by the model."""
    ids = torch.tensor([[*prompt.token_ids.tolist(), *completion.token_ids.tolist()]])  # [1, Lp + L]
    with torch.no_grad():
        every = model(ids).logits[0].log_softmax(-1)  # [Lp + L, vocabulary]
    return every[:-1].gather(1, ids[0, 1:, None])[len(prompt.token_ids) - 1 :, 0].numpy()


def test_each_token_has_the_version_and_the_logprob_of_the_weights_that_sampled_it(run, generator, folder, made):
    """The first prompt's environment answers in the fourth step; turns of the others are cut by the updates."""
    start, rng = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    weights = [{name: t + 0.02 * torch.randn(t.shape, generator=rng) for name, t in start.items()} for _ in range(6)]
    opens, groups = threading.Event(), []

    def make(prompt):
        first = prompt.text.startswith("<|user|>guess 0<")
        return Gate(opens, *["higher"] * 2) if first else Says("lower", "right")

    slow = run(make)
    for version, one in enumerate(weights):
        if version == 3:
            waiting = slow.in_flight.carried[0]
            assert waiting.since == 0
            assert any(sample.waits for sample in waiting.samples)
            opens.set()
        fill(generator, one, slow.version)
        groups += slow.step()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scored = []
    for one in weights:
        model.load_state_dict(one, strict=False)
        scored.append([logprobs(model, g.prompt, c) for g in groups for c in g.samples])
    versions_of = []
    for i, one in enumerate(flat(groups)):
        versions = np.full(len(one.token_ids), one.policy_version) if one.token_versions is None else one.token_versions
        versions_of.append(versions[one.loss_mask])
        assert one.fresh_mask.tolist() == (one.loss_mask & (versions == one.policy_version)).tolist()
        own = np.array([scored[version][i][place] for place, version in enumerate(versions.tolist())])  # [L]
        assert np.abs(own - one.sampler_logprobs)[one.loss_mask].max() < 1e-4
        said = [(len(part), made.decode(part, skip_special_tokens=True)) for part in parts(one)]
        assert [(turn.num_tokens, turn.text) for turn in one.turns] == said
        assert max(turn.num_tokens for turn in one.turns) <= 20
    [late] = [g for g in groups if g.prompt.text.startswith("<|user|>guess 0<") and g.prompt.stream_idx == 0]
    assert {tuple(dict.fromkeys(c.token_versions[c.loss_mask].tolist())) for c in late.samples} & {(0, 3), (0, 3, 4)}
    cut = [np.flatnonzero(np.diff(versions)).size for versions in versions_of]
    assert sum(cut) > 2
    fill(generator, start)


def parts(completion):
    """The sampled tokens of each turn of a completion with one trace."""
    edges = np.flatnonzero(np.diff(completion.loss_mask)) + 1
    return np.split(completion.token_ids, edges)[0::2]


def test_step_waits_for_the_environment_of_a_group_of_the_greatest_age(run):
    def late():
        time.sleep(1)
        opens.set()

    opens = threading.Event()
    ages = run(lambda prompt: Gate(opens, "right") if "guess 0<" in prompt.text else Says("right"), max_age=1)
    assert 0 not in {group.prompt.stream_idx for group in ages.step()}
    threading.Thread(target=late).start()
    assert 0 in {group.prompt.stream_idx for group in ages.step()}


def test_limits_stand_still_between_two_steps(made):
    class Opens(Says):
        def reset(self):
            opens.wait(60)
            return ()

    opens, [prompt] = threading.Event(), prompts(made, 1)
    factory = conversations(lambda prompt: Opens("higher", "right"), made, time_limit_seconds=2, call_seconds=2)
    one = conversation(prompt)
    with closing(factory.start([one])) as pool:
        pool.leave()
    time.sleep(2.1)
    with closing(factory.start([one])) as pool:
        opens.set()
        one.append_answer(*pool.answers(wait=True, all=False))
        one.append_turn(Sampled(0, [50, 51], [-1.0, -1.0], "x", "stop"))
        pool.step_async(0)
        one.append_answer(*pool.answers(wait=True, all=False))
    assert (one.finish_reason, one.turns[0].messages[0]["content"]) == (None, "higher")


def test_environments_that_are_left_are_closed_with_the_generator(run, generator):
    made_ones = []

    def make(prompt):
        made_ones.append(Says("higher", "right"))
        return made_ones[-1]

    run(make).step()
    assert any(not one.closed for one in made_ones)
    generator.environments.close()
    assert all(len(one.closed) == 1 for one in made_ones)


def test_step_of_whole_groups_alone_hears_the_first_messages_of_the_new_ones(run):
    """Else it would depend on time what the next step and a checkpoint begin with."""
    at_once = run(lambda prompt: Says("right"), max_turn_tokens=1, wait_for_answers=True)
    at_once.step()
    assert all(sample.finish_reason for carried in at_once.in_flight.carried.values() for sample in carried.samples)
    at_once.step()
    assert all(sample.prompt for carried in at_once.in_flight.carried.values() for sample in carried.samples)


class Dice(Says):
    """Answers by its seed, and by what it heard; now and then with a new context."""

    lock, open, most = threading.Lock(), 0, 0

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        with self.lock:
            Dice.open += 1
            Dice.most = max(Dice.most, Dice.open)

    def close(self, finish_reason):
        with self.lock:
            Dice.open -= 1

    def reset(self):
        return said("a number").messages

    def step(self, message):
        self.heard.append(message["content"])
        number = hash((self.seed, *map(len, self.heard))) % 5
        if number == 0 or len(self.heard) > 3:
            return Turn(done=True, reward=float(self.seed % 3))
        text = f"higher {self.seed % 10} {len(message['content'])}"
        if number == 1:
            return Turn(messages=Context([{"role": "user", "content": text}]), reward=0.5)
        return said(text, reward=0.25)


def facts(groups):
    return [
        (g.prompt.stream_idx, c.sample_idx, c.finish_reason, c.token_ids.tolist(), c.sampler_logprobs.tolist(),
         c.loss_mask.tolist(), None if c.token_versions is None else c.token_versions.tolist(), c.traces,
         [(turn.text, turn.messages, turn.reward, turn.num_tokens, turn.trace) for turn in c.turns])
        for g in groups for c in g.samples
    ]  # fmt: skip


def resumed(one: Run, other: Run) -> Run:
    """`other`, where `one` is now."""
    state = json.loads(json.dumps(one.in_flight.state_dict()))
    assert state, "nothing is carried, so nothing was tested"
    other.in_flight.load_state_dict(state)
    assert json.loads(json.dumps(other.in_flight.state_dict())) == state
    other.stream.seen, other.version = one.stream.seen, one.version
    return other


@pytest.mark.parametrize("most_open", [512, 5])
def test_checkpoint_with_conversations_in_flight_resumes_bitwise(run, monkeypatch, most_open):
    monkeypatch.setattr(Dice, "most", 0)

    def seeded(self, prompt, *, seed):
        return Dice(seed)

    monkeypatch.setattr("tests.parts.conversations.TaskWith.environment", seeded)
    limits = {"wait_for_answers": True, "max_open": most_open, "sampling": SamplingConfig(n=3, max_tokens=60)}
    one = run(None, **limits)
    for _ in range(3):
        one.step()
    samples = [sample for carried in one.in_flight.carried.values() for sample in carried.samples]
    assert any(sample.finish_reason is None and sample.texts for sample in samples)
    assert any(sample.finish_reason is not None for sample in samples)
    assert any(sample.prompt is None for sample in samples) == (most_open == 5)
    other = resumed(one, Run(one.generator, one.generator.tokenizer, prompts=6, needed=3, sampling=one.sampling))
    expected = [facts(one.step()) for _ in range(3)]
    one.generator.environments.close()
    found = [facts(other.step()) for _ in range(3)]
    assert found == expected
    assert Dice.most <= most_open
    assert any(row[6] for rows in expected for row in rows)


def test_unanswered_turn_is_asked_again_after_a_resume(run):
    opens = threading.Event()
    one = run(lambda prompt: Gate(opens, "right") if "guess 0<" in prompt.text else Says("right"))
    one.step()
    waiting = one.in_flight.carried[0].samples
    assert any(sample.waits for sample in waiting)
    other = resumed(one, Run(one.generator, one.generator.tokenizer, prompts=6, needed=3, sampling=one.sampling))
    opens.set()
    [late] = [group for _ in range(3) for group in other.step() if group.prompt.stream_idx == 0]
    for sample, recorded in zip(late.samples, waiting, strict=True):
        [turn] = sample.turns
        assert turn.messages[0]["content"] == "right"
        assert sample.token_ids.tolist()[: recorded.num_tokens] == recorded.traces[0].token_ids


def test_conversation_whose_environment_answers_otherwise_after_a_resume_begins_anew(run, capsys):
    answers = ["higher", "right"]
    one = run(lambda prompt: Says(*answers), wait_for_answers=True)
    one.step()
    other = resumed(one, Run(one.generator, one.generator.tokenizer, prompts=6, needed=3, sampling=one.sampling))
    one.generator.environments.close()
    answers[0] = "lower"
    groups = [group for _ in range(3) for group in other.step()]
    assert "conversations in flight begin anew: their environments answer otherwise now" in capsys.readouterr().out
    told = {message["content"] for c in flat(groups) for turn in c.turns for message in turn.messages}
    assert "lower" in told
    trained = [group.prompt.stream_idx for group in groups]
    assert len(set(trained)) == len(trained) == 9


async def asks_twice(task, *, base_url, api_key):
    client, messages = openai_client(base_url).with_options(api_key=api_key), [{"role": "user", "content": task}]
    for number in range(3):
        response = await client.chat.completions.create(model="policy", messages=messages)
        reply = response.choices[0].message.content
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"higher {number}"}]


@pytest.mark.parametrize("waits", [False, True])
def test_agents_over_http_are_carried_and_replayed(run, waits):
    one = run(lambda prompt: AgentEnvironment(asks_twice, task=prompt.text[-20:]), wait_for_answers=waits)
    first = [group for _ in range(4) for group in one.step()]
    assert len({group.prompt.stream_idx for group in first}) == 12
    carried = [c for c in flat(first) if c.token_versions is not None and len(set(c.token_versions.tolist())) > 1]
    assert carried
    assert all(len(c.turns) == 3 for c in flat(first) if c.finish_reason == "stop")
    other = resumed(one, Run(one.generator, one.generator.tokenizer, prompts=6, needed=3, sampling=one.sampling))
    one_goes_on = facts(one.step())
    one.generator.environments.close()
    other_goes_on = facts(other.step())
    if waits:
        assert other_goes_on == one_goes_on


def test_the_limit_of_a_turn_counts_what_an_update_has_cut(made):
    [prompt] = prompts(made, 1)
    one = conversation(prompt, most_in_turn=5, in_turns=True)
    one.append_turn(Sampled(-1, [5, 6, 7], [0.0] * 3, "", None))
    assert one.room() == 2
    one.append_turn(Sampled(-1, [8, 9], [0.0] * 2, "a b", "length"))
    assert one.last.token_ids == [5, 6, 7, 8, 9]
