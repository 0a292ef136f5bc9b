"""Many environments beside each other, with a policy that says what it is told to: seeds, limits, and who is closed."""

import copy
import threading
import time

import pytest

from tests.parts.conversations import Says, ScriptedEngine, TaskWith, conversation, conversations, play, prompts, said
from torchtitan_rl.configs.toys.calculator import multiply
from torchtitan_rl.environments import ToolEnvironment
from torchtitan_rl.environments.pool import ConversationError
from torchtitan_rl.errors import UserError


@pytest.fixture
def talk(made):
    """Plays conversations, four of one prompt, to their end. Returns them, with the order in which they ended."""

    def talk(make, *, num=4, prompts_of=1, say="x", tokenizer=made, **config):
        asked = prompts(tokenizer, prompts_of)
        played = [conversation(asked[i * prompts_of // num], i, seed=100 + i) for i in range(num)]
        return played, play(conversations(make, tokenizer, **config), ScriptedEngine(tokenizer, say), played)

    return talk


class Counted(Says):
    """Counts how many are open, all together and at most."""

    lock, open, most, closes = threading.Lock(), 0, 0, []

    def __init__(self, *turns) -> None:
        super().__init__(*turns)
        with self.lock:
            Counted.open += 1
            Counted.most = max(Counted.most, Counted.open)

    def close(self, finish_reason):
        with self.lock:
            Counted.open -= 1
            self.closes.append(finish_reason)


@pytest.fixture(autouse=True)
def none_open():
    Counted.open, Counted.most = 0, 0
    Counted.closes.clear()


def test_every_environment_is_closed_once_when_one_fails(talk):
    class Third(Counted):
        made = 0

        def __init__(self):
            super().__init__("higher", "right")
            Third.made += 1
            self.fails = Third.made == 3

        def step(self, message):
            if self.fails:
                raise ValueError("the dice are lost")
            time.sleep(0.05)
            return super().step(message)

    with pytest.raises(ConversationError, match="the dice are lost"):
        talk(lambda prompt: Third())
    assert (Counted.open, len(Counted.closes)) == (0, 4)


def test_in_flight_groups_with_conversations_are_refused(made):
    with pytest.raises(UserError, match=r"in_flight.prompts = 24: expected 0 with conversations, as TaskWith"):
        conversations(lambda prompt: Says("right"), made).check(prompts(made, 1), in_flight=24)


@pytest.mark.parametrize("waits", [False, True])
def test_at_most_max_open_environments_are_open_at_once(talk, waits):
    played, ended = talk(
        lambda prompt: Counted("higher", "right"), num=40, prompts_of=10, max_open=3, wait_for_answers=waits
    )
    assert sorted(ended) == list(range(40))
    assert {one.finish_reason for one in played} == {"stop"}
    assert (Counted.most, Counted.open) == (3, 0)


def test_resets_run_concurrently_and_block_no_other_conversation(talk):
    """No reset of the first prompt's conversations returns before all twelve have begun and the others have ended."""
    begun, closed = [], []

    class Slow(Says):
        def reset(self):
            begun.append(self)
            give_up = time.monotonic() + 30
            while len(begun) < 12 or len(closed) < 12:
                assert time.monotonic() < give_up
                time.sleep(0.01)
            return ()

    class Ends(Says):
        def close(self, finish_reason):
            closed.append(self)

    _, ended = talk(lambda prompt: Ends("right") if prompt.prompt_idx else Slow("right"), num=24, prompts_of=2)
    assert set(ended[:12]) == set(range(12, 24))


def test_sample_whose_reset_messages_differ_fails_alone_in_any_order(talk):
    class Opens(Says):
        made = 0

        def __init__(self):
            super().__init__("right")
            self.place = Opens.made
            Opens.made += 1

        def reset(self):
            time.sleep(0.2 if self.place == 0 else 0)
            return said("other" if self.place == 2 else "a number").messages

    played, _ = talk(lambda prompt: Opens(), on_failure="none", max_open=1)
    assert [one.finish_reason for one in played] == ["stop", "stop", "env_error", "stop"]
    assert "other messages" in played[2].error
    assert "a number" in played[0].prompt.text


def test_each_sample_gets_its_own_seed_if_the_method_accepts_one(made, talk, monkeypatch):
    seeds = []

    def environment(self, prompt, *, seed):
        seeds.append(seed)
        return Says("right")

    talk(lambda prompt: Says("right"))
    monkeypatch.setattr(TaskWith, "environment", environment)
    talk(None)
    assert sorted(seeds) == [100, 101, 102, 103]
    conversations(None, made).check(prompts(made, 1))


def test_tool_call_marked_by_a_special_token_is_parsed(talk, made):
    """`Sampled.text` has no special tokens, and Mistral's call begins with one."""
    made = copy.deepcopy(made)
    made.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    call = '[TOOL_CALLS][{"name": "multiply", "arguments": {"a": 6, "b": 7}}]'
    played, _ = talk(
        lambda prompt: ToolEnvironment([multiply]), tokenizer=made, say=call, tool_call_parser="mistral", max_turns=2
    )
    assert [turn.columns["tool_calls"] for turn in played[0].turns] == [1, 1]
    assert played[0].turns[0].messages[0]["content"] == "42"
    assert "[TOOL_CALLS]" not in played[0].turns[0].text


def test_tool_limits_are_bounded_by_the_conversation_limits(talk):
    """Else a tool that hangs, or says much, would count as a failure of the environment, which ends the run."""

    def hangs() -> None:
        time.sleep(20)

    def floods() -> str:
        return "x" * 30_000

    call = '<tool_call>{"name": "hangs"}</tool_call><tool_call>{"name": "floods"}</tool_call>'
    played, _ = talk(
        lambda prompt: ToolEnvironment([hangs, floods], seconds=60, most_characters=10**6), say=call,
        call_seconds=5.0, max_answer_characters=100, max_turns=1, num=1,
    )  # fmt: skip
    told = [message["content"] for message in played[0].turns[0].messages]
    assert told[0] == "error: TimeoutError: took longer than 4.5 s"
    assert len(told[1]) <= 100
    assert played[0].finish_reason == "max_turns"
