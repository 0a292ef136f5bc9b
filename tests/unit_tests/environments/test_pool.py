"""Many environments beside each other, with a policy that says what it is told to: seeds, limits, and who is closed."""

import copy
import json
import operator
import os
import re
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from tests.parts.conversations import Says, ScriptedEngine, TaskWith, conversation, conversations, play, prompts, said
from torchtitan_rl.configs.toys.calculator import multiply
from torchtitan_rl.environments import ToolEnvironment, in_process
from torchtitan_rl.environments.pool import ConversationError
from torchtitan_rl.errors import UserError
from torchtitan_rl.rewards.workers import WorkerPool


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

    @in_process
    def hangs() -> None:
        time.sleep(20)

    @in_process
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


def test_time_limit_ends_a_step_that_hangs_and_waits_for_it_no_longer(talk):
    class Hangs(Says):
        def step(self, message):
            time.sleep(15)

    began = time.monotonic()
    played, _ = talk(lambda prompt: Hangs("right"), num=1, time_limit_seconds=1.0, call_seconds=10.0)
    assert played[0].finish_reason == "time"
    assert time.monotonic() - began < 6


def test_environment_that_closes_too_slowly_is_named_with_its_time(made, caplog):
    class Stays(Says):
        def close(self, finish_reason):
            time.sleep(5)

    factory = conversations(lambda prompt: Stays("right"), made, call_seconds=0.5)
    with closing(factory.start([conversation(*prompts(made, 1))])) as pool:
        pool.answers(wait=True, all=False)
    assert "failed to close: TimeoutError: took longer than 0.5 s." in caplog.text


def call_of(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def workers():
    with closing(WorkerPool([operator.call], 2)) as pool:
        yield pool


def holds_the_lock() -> bool:
    return re.match(r"(a+)+$", "a" * 30 + "b") is not None


def dies() -> None:
    os._exit(3)


def fails() -> None:
    raise KeyError("lost")


def test_tool_that_holds_the_interpreters_lock_is_ended_while_other_conversations_go_on(talk, workers):
    steps = []

    class Beside(Says):
        def step(self, message):
            steps.append(time.monotonic())
            time.sleep(0.05)
            return super().step(message)

    class Once(ToolEnvironment):
        def step(self, message):
            return replace(super().step(message), done=True)

    def make(prompt):
        return Beside(*["higher"] * 8) if prompt.prompt_idx else Once([holds_the_lock], seconds=2.5)

    played, ended = talk(make, prompts_of=4, say=call_of("holds_the_lock"), workers=workers)
    [turn] = played[0].turns
    assert turn.messages[0]["content"] == "error: TimeoutError: took longer than 2.5 s"
    assert (turn.columns["tool_errors"], played[0].finish_reason) == (1, "stop")
    assert turn.environment_seconds < 20
    assert ended[-1] == 0
    assert steps[-1] - steps[0] < 2.5  # all three while the tool ran


def test_tool_that_ends_its_process_or_raises_is_answered_with_an_error(talk, workers):
    played, _ = talk(
        lambda prompt: ToolEnvironment([dies, fails, multiply]), num=1, workers=workers, max_turns=1,
        say=call_of("dies") + call_of("fails") + call_of("multiply", a=6, b=7),
    )  # fmt: skip
    assert [message["content"] for message in played[0].turns[0].messages] == [
        "error: WorkerDied: its process ended with exit code 3", "error: KeyError: 'lost'", "42",
    ]  # fmt: skip


def counts() -> int:
    global calls
    calls += 1
    return calls


class Notebook:
    """Can be pickled, so a worker would write into a copy."""

    def __init__(self) -> None:
        self.notes = []

    def write(self, note: str) -> int:
        self.notes.append(note)
        return len(self.notes)

    @in_process
    def note(self, note: str) -> int:
        return self.write(note)


def test_tool_with_state_runs_in_process_by_choice_and_is_refused_otherwise(talk, workers):
    def inner() -> int:
        return 1

    for tool in (inner, Notebook().write, lambda: 1, counts):
        with pytest.raises(UserError, match=r"tools = '.*': expected a function at the top .* Decorate it with"):
            ToolEnvironment([tool])
    notes = {"num": 2, "workers": workers, "max_turns": 2, "say": call_of("note", note="x")}
    played, _ = talk(lambda prompt: ToolEnvironment([Notebook().note]), **notes)
    for each in played:
        assert [turn.messages[0]["content"] for turn in each.turns] == ["1", "2"]
