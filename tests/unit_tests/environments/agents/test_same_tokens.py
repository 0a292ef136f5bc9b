"""debug_calculator's conversations on a real engine: through HTTP and the `openai` client they have the tokens of those in process."""

import itertools

import numpy as np
import pytest

from tests.parts.conversations import engine
from tests.parts.talk import save_talker
from tests.parts.tiny import DIMENSIONS, sampled
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.configs.toys.calculator import Calculator
from torchtitan_rl.configs.toys.calculator_agent import AgentCalculator, play
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.data.tool_calls import ToolCall
from torchtitan_rl.environments import ToolEnvironment
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.environments.factory import Conversations
from torchtitan_rl.observe.metrics.completions import conversation_metrics
from torchtitan_rl.observe.sample_rows import episode_rows
from torchtitan_rl.types import Group, Member, ScoredCompletion, flat


def calls_in(text, tools):
    """The calls that are read into a random policy's text: right ones, wrong ones, several, none."""
    kinds = [
        [ToolCall("multiply", {"a": len(text), "b": 3})],
        [ToolCall("multiply", {"a": "3", "b": 4}), ToolCall("multiply", {"a": 5, "b": 6})],
        [ToolCall("", {}, "the call is not valid JSON: at the end")],
        [ToolCall("divide", {"a": 1})],
        [ToolCall("multiply", {"a": 1})],
        [],
    ]
    return kinds[len(text) % len(kinds)]


class InProcess(Calculator):
    def environment(self, prompt):
        return ToolEnvironment(self.tools(), parser=calls_in)


class ByHttp(AgentCalculator):
    def environment(self, prompt):
        return AgentEnvironment(play, task=prompt.messages, role="tool", parser=calls_in)


@pytest.fixture(scope="module")
def generator(tmp_path_factory, made):
    with engine(save_talker(tmp_path_factory.mktemp("policy"), **DIMENSIONS), made) as generator:
        yield generator


def conversations(generator, made, task, **config):
    """The groups of four prompts of the task."""
    settings = Conversations.Config(**config)
    generator.environments = settings.build(
        members=task.members(), tokenizer=made, end_token_ids=generator.end_token_ids, template_options={}
    )
    generator.llm.reset_prefix_cache()  # the first call's blocks would change the last bits of the second's numbers
    stream = PromptStream.Config(max_prompt_tokens=200).build(task=task, tokenizer=made, seed=0)
    return sampled(generator, stream.next_batch(4), step=1)


@pytest.mark.parametrize("waits", [True, False])
def test_conversations_through_the_http_client_equal_those_in_process(generator, made, waits):
    config = Calculator.Config(instruction="")
    in_process = conversations(generator, made, InProcess(config), wait_for_answers=waits)
    by_http = conversations(generator, made, ByHttp(config), wait_for_answers=waits)
    turns = [len(one.turns) for one in flat(in_process)]
    assert max(turns) >= 3
    heard = {message["content"][:9] for one in flat(in_process) for turn in one.turns for message in turn.messages}
    assert any(text.isdecimal() for text in heard)
    assert {"error: Va", "error: Lo", "error: Ty"} <= heard
    for here, there in zip(in_process, by_http, strict=True):
        assert here.prompt.text == there.prompt.text
        assert here.prompt.token_ids.tolist() == there.prompt.token_ids.tolist()
    for here, there in zip(flat(in_process), flat(by_http), strict=True):
        assert here.token_ids.tolist() == there.token_ids.tolist()
        assert here.loss_mask.tolist() == there.loss_mask.tolist()
        assert here.sampler_logprobs.tolist() == there.sampler_logprobs.tolist() or not waits
        assert (here.finish_reason, here.text) == (there.finish_reason, there.text)
        assert [turn.columns for turn in here.turns] == [turn.columns for turn in there.turns]
    assert any(turn.columns["tool_errors"] for one in flat(by_http) for turn in one.turns)


class InItsFolder(AgentCalculator):
    """Agents that name a folder in their first request, which is the same one for some samples."""

    def environment(self, prompt, *, seed):
        folder = {"role": "system", "content": f"You work in /tmp/agent-{min(seed % 1000, 500)}."}
        return AgentEnvironment(play, task=[folder, *prompt.messages], role="tool", parser=calls_in)


def test_samples_whose_agents_open_differently_are_a_group_each_with_its_own_prompt(generator, made):
    groups = draft_episodes(
        [
            Group(prompt=group.prompt, samples=[ScoredCompletion(completion=one, reward=1.0) for one in group.samples])
            for group in conversations(generator, made, InItsFolder(Calculator.Config(instruction="")))
        ]
    )
    assert [(group.prompt.prompt_idx, len(group.samples)) for group in groups] == [(i, 4) for i in range(4)]
    members = [[Member.of(group, episode) for episode in group.samples] for group in groups]
    texts = [[member.prompt.text for member in group] for group in members]
    for prompt, episode in itertools.chain(*members):
        completion = episode.completion
        scored = generator.prompt_logprobs(np.array([*prompt.token_ids, *completion.token_ids]))
        scored = scored[len(prompt.token_ids) - 1 :] * completion.loss_mask  # [L]
        np.testing.assert_allclose(scored, completion.sampler_logprobs, atol=2e-4)
    assert [row["prompt"] for row in episode_rows(groups, step=1, split="train")] == [*itertools.chain(*texts)]
    differ = [len(set(of_group)) > 1 for of_group in texts]
    assert any(differ)
    assert conversation_metrics(groups)["conversations/differing_prompts"].value == np.mean(differ)
