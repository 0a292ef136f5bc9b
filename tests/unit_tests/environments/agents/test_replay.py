"""Agents that compact, edit, retry and run sub-agents: every sampled token is trained once, after what its request showed."""

import asyncio
import json
import random

import httpx
import numpy as np
import pytest

from tests.parts.conversations import ScriptedEngine, conversation, conversations, play, prompts
from tests.parts.replay import Exchange, faults, sampled_runs
from torchtitan_rl.conversation import Conversation, Sampled
from torchtitan_rl.environments.agents import AgentEnvironment, gateway
from torchtitan_rl.generator.generator import group_prompt

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}


class Chatter(ScriptedEngine):
    """A policy whose turns all differ, some of which call the tool."""

    def __init__(self, made, seed: int) -> None:
        super().__init__(made)
        self._chance, self._count = random.Random(seed), 0

    def step(self) -> list[Sampled]:
        indices, self.asked = self.asked, []
        return [self._turn(index) for index in indices]

    def _turn(self, index: int) -> Sampled:
        self._count += 1
        text = f"turn {self._count}"
        if self._chance.random() < 0.3:
            text += f'<tool_call>{{"name": "look", "arguments": {{"at": {self._count}}}}}</tool_call>'
        ids = self.made(text + self.made.eos_token)["input_ids"]
        return Sampled(index, ids, [-0.5] * len(ids), text, "stop")


def rewriting_agent(log: list[Exchange]):
    """An agent that does at random what agents do to their histories. It logs what it sends and gets."""

    async def agent(task, *, base_url, api_key):
        chance = random.Random(task)
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as web:

            async def ask(messages) -> dict:
                request = json.loads(json.dumps({"model": "x", "messages": messages, "tools": [TOOL]}))
                answer = await web.post(f"{base_url}/chat/completions", json=request)
                assert answer.status_code == 200, answer.text
                message = answer.json()["choices"][0]["message"]
                log.append(Exchange(request, json.loads(json.dumps(message))))
                return message

            def answers(message, chance=chance) -> list[dict]:
                calls = message.get("tool_calls") or ()
                told = [
                    {"role": "tool", "tool_call_id": call["id"], "content": f"seen {chance.random()}"} for call in calls
                ]
                return told or [{"role": "user", "content": f"go on {chance.random()}"}]

            async def sub_agent(name: str) -> None:
                messages = [{"role": "user", "content": f"You are {name} of {task}."}]
                own = random.Random(f"{name} of {task}")  # answers to both arrive in any order
                for _ in range(2):
                    message = await ask(messages)
                    messages += [message, *answers(message, own)]

            messages = [{"role": "user", "content": f"task {task}"}]
            for _ in range(chance.randint(2, 5)):
                message = await ask(messages)
                if chance.random() < 0.2:  # thrown away, and asked again
                    message = await ask(messages)
                messages += [message, *answers(message)]
                event = chance.random()
                if event < 0.25:  # compaction
                    last = [one for one in messages[-1:] if one["role"] == "user"]
                    messages = [{"role": "user", "content": f"task {task}, so far: {len(messages)}"}, *last]
                elif event < 0.45:  # an edit of the policy's own text
                    edited = next(i for i, one in enumerate(messages) if one["role"] == "assistant")
                    messages[edited] = {**messages[edited], "content": f"edited {chance.random()}"}
                elif event < 0.6:
                    await asyncio.gather(sub_agent("one"), sub_agent("two"))

    return agent


def play_all(made, number: int, seed: int, **config) -> list[tuple[list[Exchange], Conversation]]:
    logs = [[] for _ in range(number)]
    played = [conversation(prompt) for prompt in prompts(made, number)]

    def make(prompt):
        return AgentEnvironment(rewriting_agent(logs[prompt.prompt_idx]), task=seed * number + prompt.prompt_idx)

    limits = {"max_turns": 100, "max_traces": 100, "call_seconds": 300, "max_open": 64, **config}
    play(conversations(make, made, **limits), Chatter(made, seed), played)
    return list(zip(logs, played, strict=True))


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_every_sampled_token_is_trained_once_after_what_its_request_showed(made, number):
    played = play_all(made, number, seed=1)
    for log, one in played:
        assert one.finish_reason == "stop", one.error
        assert faults(log, one.prompt, one.completion(0), made) == []
    traces = [len(one.traces) for _, one in played]
    assert max(traces) >= 5
    assert np.mean(traces) > 2


def titled_agent(log: list[Exchange], order: str):
    """An agent that also asks for a title of its conversation: before, after or beside its first request, as opencode does."""

    async def agent(task, *, base_url, api_key):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as web:

            async def ask(messages, **more) -> dict:
                request = json.loads(json.dumps({"model": "x", "messages": messages, **more}))
                answer = await web.post(f"{base_url}/chat/completions", json=request)
                log.append(Exchange(request, answer.json()["choices"][0]["message"]))
                return answer.json()["choices"][0]["message"]

            main = [{"role": "system", "content": "You write."}, {"role": "user", "content": "Write a line."}]
            title = [{"role": "system", "content": "Give a title."}, {"role": "user", "content": "Write a line."}]
            if order == "before":
                await ask(title)
            asked = [ask(main), ask(title)] if order == "beside" else [ask(main)]
            message, *_ = await asyncio.gather(*asked)
            await ask([*main, message, {"role": "user", "content": "Go on."}])
            if order == "after":
                await ask(title)

    return agent


def test_a_title_before_beside_or_after_the_first_request_is_a_trace_of_its_sample(made):
    logs = {order: [] for order in ("before", "beside", "after")}
    [prompt] = prompts(made, 1)
    played = [conversation(prompt, i) for i in range(3)]
    agents = iter([titled_agent(log, order) for order, log in logs.items()])
    play(conversations(lambda _: AgentEnvironment(next(agents)), made, max_open=1), Chatter(made, 5), played)
    shared = group_prompt(played)
    assert {one.prompt.text for one in played} > {shared.text}
    for log, one in zip(logs.values(), played, strict=True):
        completion = one.completion(0, shared)
        assert (one.finish_reason, len(one.turns), len(one.traces)) == ("stop", 3, 2)
        assert faults(log, completion.prompt or shared, completion, made) == []


def test_the_checker_sees_a_token_that_is_wrong_missing_or_twice(made):
    log, one = max(play_all(made, 8, seed=2), key=lambda pair: len(pair[1].traces))
    completion = one.completion(0)
    runs = len(sampled_runs(one.prompt, completion))
    assert runs == len(log)
    assert len(faults(log[1:], one.prompt, completion, made)) == 1
    assert len(faults([*log, log[0]], one.prompt, completion, made)) == 1
    context = int(np.flatnonzero(~completion.loss_mask)[0])
    completion.token_ids[context] += 1
    assert faults(log, one.prompt, completion, made)
    completion.token_ids[context] -= 1
    completion.loss_mask[int(np.flatnonzero(completion.loss_mask)[0])] = False
    assert faults(log, one.prompt, completion, made)


def test_sub_agents_that_ask_at_once_have_the_same_rollout_every_time(made, monkeypatch):
    monkeypatch.setattr(gateway, "TOGETHER_SECONDS", 0.2)  # on a loaded machine two requests are rarely 20 ms apart
    first, second = (
        [one.completion(0) for _, one in play_all(made, 12, seed=3, wait_for_answers=True)] for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.traces == other.traces
        assert one.turns
        assert [turn.trace for turn in one.turns] == [turn.trace for turn in other.turns]
