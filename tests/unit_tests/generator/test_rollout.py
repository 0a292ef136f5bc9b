"""Whole conversations on a real engine: what is sampled, what is read, and how they end."""

import re
import time

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.parts.conversations import Says, conversations, prompts, said
from tests.parts.grading import TaskOf, build_grader
from tests.parts.tiny import sampled
from torchtitan_rl.data.end_tokens import hidden_token_ids
from torchtitan_rl.environments import Environment, Turn
from torchtitan_rl.environments.pool import ConversationError
from torchtitan_rl.generator.in_flight import InFlight
from torchtitan_rl.rewards import Grader
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.sampler import Sampler
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import Prompt, flat


@pytest.fixture
def talk(generator, made):
    """Conversations with environments that `make(prompt)` makes, of `num` prompts."""

    def talk(make, *, num=3, step=1, sampling_config=None, **config):
        generator.environments = conversations(make, made, **config)
        return sampled(generator, prompts(made, num), step=step, sampling_config=sampling_config)

    return talk


def tokens(groups):
    return [[c.token_ids.tolist() for c in group.samples] for group in groups]


def test_sampled_tokens_are_kept_exactly_and_environment_tokens_are_masked(talk, made):
    groups = talk(lambda prompt: Says("higher", "lower", "right"))
    ended = [c for c in flat(groups) if c.finish_reason == "stop"]
    assert ended
    for completion in ended:
        parts = np.split(completion.token_ids, np.flatnonzero(np.diff(completion.loss_mask)) + 1)
        said, heard = parts[0::2], [made.decode(part, skip_special_tokens=False) for part in parts[1::2]]
        assert [turn.text for turn in completion.turns] == [made.decode(p, skip_special_tokens=True) for p in said]
        # The template's end of a turn is the policy's own, or comes before the answer where it ended otherwise.
        ends = ["" if part[-1] == made.eos_token_id else "<|endoftext|>" for part in said]
        answers = ["<|user|>higher<|endoftext|><|assistant|>", "<|user|>lower<|endoftext|><|assistant|>"]
        assert heard == [end + answer for end, answer in zip(ends, answers, strict=False)]
        assert [message["content"] for message in completion.messages[1::2]] == ["higher", "lower", "right"]


def test_conversations_are_independent_of_the_order_of_answers(talk):
    class Late(Says):
        def step(self, message):
            time.sleep(hash((id(self), len(self.heard))) % 7 / 200)
            return super().step(message)

    first = talk(lambda prompt: Late("higher", "lower", "right"))
    again = talk(lambda prompt: Late("higher", "lower", "right"))
    assert tokens(first) == tokens(again)
    assert tokens(first) == tokens(talk(lambda prompt: Says("higher", "lower", "right"), wait_for_answers=True))


def reasons(groups):
    return {c.finish_reason for c in flat(groups)}


def test_finish_reason_names_the_limit_that_ended_a_conversation(talk):
    endless = lambda prompt: Says(*["higher"] * 99)  # noqa: E731
    assert reasons(talk(endless, max_turns=2)) <= {"max_turns", "max_tokens"}
    assert all(len(c.turns) <= 2 for c in flat(talk(endless, max_turns=2)))
    assert reasons(talk(endless, max_turns=99)) == {"max_tokens"}
    assert all(c.num_sampled <= 48 for c in flat(talk(endless, max_turns=99)))
    assert reasons(talk(endless, max_turn_tokens=1, max_turns=99)) == {"max_tokens"}
    assert all(c.turns[-1].num_tokens <= 1 for c in flat(talk(endless, max_turn_tokens=1)))
    assert reasons(talk(lambda prompt: Says("x" * 400, "right"))) == {"max_tokens"}


class Steps(Environment):
    """Its step is a function."""

    def __init__(self, function) -> None:
        self.function = function

    def step(self, message):
        return self.function()


class FailsToReset(Steps):
    def reset(self):
        raise OSError("no such board")


class EndsBadly(Steps):
    def close(self, finish_reason):
        return "well"


def fail(error: BaseException):
    raise error


BROKEN = [
    (Steps(lambda: fail(ValueError("the dice are lost"))), "the dice are lost"),
    (Steps(lambda: fail(SystemExit(0))), "SystemExit"),
    (Steps(lambda: time.sleep(60)), "took longer than conversations.call_seconds, 1 s"),
    (Steps(lambda: None), "step returned NoneType; expected a Turn"),
    (Steps(lambda: said("higher", reward=float("nan"))), "the reward is nan"),
    (Steps(lambda: said("x" * 10_000_000)), "10,000,000 characters"),
    (Steps(lambda: Turn(messages=[{"role": "assistant", "content": "I am you"}])), "role 'assistant'"),
    (Steps(Turn), "no messages and is not done"),
    (Steps(lambda: Turn(done=True, reward="1")), "the reward is the text '1'; expected a number or None"),
    (FailsToReset(Turn), "no such board"),
    (EndsBadly(lambda: Turn(done=True)), "the reward is the text 'well'; expected a number or None"),
]


@pytest.mark.parametrize(("broken", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_failing_environment_ends_only_its_own_conversation(talk, broken, reason):
    sound = talk(lambda prompt: Says("higher", "right"), max_turn_tokens=40)
    groups = talk(
        lambda prompt: broken if prompt.prompt_idx == 1 else Says("higher", "right"),
        on_failure="none", call_seconds=1 if "call_seconds" in reason else 60, max_turn_tokens=40,
    )  # fmt: skip
    failed = [c for c in groups[1].samples if c.finish_reason == "env_error"]
    assert failed
    assert all(reason in c.error for c in failed)
    assert tokens(groups)[::2] == tokens(sound)[::2]


def test_failing_environment_stops_the_run_by_default(talk):
    with pytest.raises(ConversationError, match=r"Steps of prompt .*turn 1, failed: ValueError: the dice are lost"):
        talk(lambda prompt: BROKEN[0][0])
    assert flat(talk(lambda prompt: Says("right")))  # and the engine is free again


def test_rewards_in_workers_start_while_another_group_is_sampled(generator, made, tmp_path):
    """A conversation ends only after the other group's rewards have begun. The in-process function runs at the end."""
    file, seen = tmp_path / "begun", []

    class Late(Says):
        def step(self, message):
            give_up = time.monotonic() + 20
            while not file.exists() and time.monotonic() < give_up:
                time.sleep(0.01)
            seen.append(file.exists())
            return super().step(message)

    def away(completions, **_):
        file.touch()
        return [time.time()] * len(completions)

    def here(completions, **_):
        return [time.time()] * len(completions)

    generator.environments = conversations(lambda prompt: Late("right") if prompt.prompt_idx else None, made)
    graded = build_grader(Grader.Config(workers=1, in_process=["here"]), TaskOf(away, here))
    in_flight = InFlight.Config().build(generator=generator, stream=None)
    sampler = Sampler(generator, in_flight, graded, lambda groups, **_: None)
    first, _ = sampler.training_groups(prompts(made, 2), 2, round=0, state=TrainerState(global_step=1))
    graded.close()
    began, all_sampled = (first.samples[0].reward_breakdown[name] for name in ("away", "here"))
    assert seen
    assert all(seen)
    assert all_sampled > began


def test_turn_reuses_all_full_cache_blocks_before_it(generator, made):
    block = generator.llm.llm_engine.vllm_config.cache_config.block_size
    ask = [{"role": "user", "content": "x"}]
    ids = [[100 + i] * (block + 10) for i in range(4)]
    long = [Prompt(prompt_idx=i, text="x", token_ids=ids[i], expected_answer="", messages=ask) for i in range(4)]
    generator.environments = conversations(lambda prompt: Says("go on", "done"), made)
    generator.llm.reset_prefix_cache()
    groups = sampled(generator, long, step=1, sampling_config=SamplingConfig(n=1, max_tokens=48))
    first_turns = [c.turns[0].num_tokens for c in flat(groups) if len(c.turns) == 2]
    assert first_turns
    before = sum(
        (block + 10 + length) // block * block for length in first_turns
    )  # whole blocks before the second turns
    hit_rate = generator.stats.metrics()["generator/prefix_cache_hit_rate"]
    assert hit_rate.value * hit_rate.weight == pytest.approx(before)


def test_a_stop_text_ends_a_turn_with_the_token_that_completes_it(generator, made):
    generator.environments = None
    free = sampled(generator, prompts(made, 1), step=3)
    stop = next(one for c in flat(free) for one in c.text[2:] if one.isascii() and one.isalnum())
    sampling = SamplingConfig(n=4, max_tokens=48, stop=[stop])
    stopped = [
        c for c in flat(sampled(generator, prompts(made, 1), step=3, sampling_config=sampling)) if stop in c.text
    ]
    assert stopped
    for completion in stopped:
        assert completion.finish_reason == "stop"
        assert made.decode(completion.token_ids, skip_special_tokens=True) == completion.text
        assert stop not in made.decode(completion.token_ids[:-1], skip_special_tokens=True)


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel|>", "<|message|>")])
def test_rewards_see_the_tags_of_thinking_that_are_special_tokens(generator, made, monkeypatch, tags):
    """Decoding would leave them out with the others, and the thinking would be read as the answer."""
    named = made.backend_tokenizer.to_str().replace("<|reserved_0|>", tags[0]).replace("<|reserved_1|>", tags[1])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(named), eos_token=made.eos_token)
    monkeypatch.setattr(generator, "tokenizer", tokenizer)
    monkeypatch.setattr(generator, "_hidden_token_ids", hidden_token_ids(tokenizer))
    generator.environments = None
    found = flat(sampled(generator, prompts(made, 8), step=1))
    assert any(tag in one.text for one in found for tag in tags)
    for one in found:
        said = re.sub(
            r"<\|(?!channel|message)[a-z_0-9]+\|>", "", tokenizer.decode(one.token_ids, skip_special_tokens=False)
        )
        assert re.sub("[^ -~]", "", one.text) == re.sub("[^ -~]", "", said)  # bytes may form other characters
