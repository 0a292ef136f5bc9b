"""Structured answers and required calls, as real clients ask a real engine for them: each turn is as asked, and trained as sampled."""

import copy
import json
from typing import Literal

import anthropic
import openai
import pydantic
import pytest
import xgrammar

from tests.parts.conversations import TaskWith, prompts
from tests.parts.talk import chat_tokenizer, save_talker
from tests.parts.tiny import DIMENSIONS, members_of, sampled
from tests.unit_tests.generator.test_kept_tokens import COUNTS, TEMPERATURE, gate_of, kept_sets, scores
from tests.unit_tests.sync.test_weight_sync import Pair
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.environments.factory import Conversations
from torchtitan_rl.generator import grammars as engine_grammars
from torchtitan_rl.generator.grammars import MOST_CHARACTERS, Grammars, call_form
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.trainer.gate import LogprobGateError
from torchtitan_rl.trainer.packing import pack

USER = {"role": "user", "content": "Where to?"}


class Move(pydantic.BaseModel):
    """Its values are few, because a random policy writes long ones."""

    to: Literal["north", "up", 30]


SCHEMA = Move.model_json_schema()
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("move", "look")]
CLAUDES = [{"name": tool["function"]["name"], "input_schema": SCHEMA} for tool in TOOLS]


def saved(folder):
    """A random policy that ends a turn with any special token."""
    save_talker(folder, **DIMENSIONS)
    ends = [token for token, one in chat_tokenizer().added_tokens_decoder.items() if one.special]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    engine_grammars.MOST_SPACES = 1  # a random policy would use them
    pair = Pair(tmp_path_factory.mktemp("pair"), saved, records_kept=True, tokenizer=chat_tokenizer())
    pair.grammars = Grammars(pair.generator.llm, pair.generator.tokenizer, "auto")
    pair.generator.make_grammar = pair.grammars.of
    yield pair
    pair.generator.close()


def play(pair, agent, **sampling):
    """Returns the batch and the samples of four agents' conversations."""
    pair.generator.environments = Conversations.Config(max_turns=60, max_traces=60).build(
        members={"": TaskWith(lambda _: AgentEnvironment(agent, role="tool"))}, tokenizer=pair.generator.tokenizer,
        end_token_ids=pair.generator.end_token_ids, template_options={},
    )  # fmt: skip
    config = SamplingConfig(**{"n": 4, "max_tokens": 3000, "temperature": TEMPERATURE, **sampling})
    [group] = sampled(pair.generator, prompts(pair.generator.tokenizer, 1), sampling_config=config)
    return pack(members_of([group]), normalizers=COUNTS, multiple=64), group.samples


async def ask_for_all(task, *, base_url, api_key):
    """Free turns between forms of every API, each a trace of its own."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None)
    claude = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, timeout=None)
    asked = {"model": "x", "messages": [USER]}
    parsed = await client.chat.completions.parse(**asked, response_format=Move)
    assert isinstance(parsed.choices[0].message.parsed, Move)
    assert isinstance((await client.responses.parse(model="x", input="?", text_format=Move)).output_parsed, Move)
    await client.chat.completions.create(**asked)
    for form in (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"extra_body": {"output_format": {"type": "json_schema", "schema": SCHEMA}}},
    ):
        Move.model_validate_json((await claude.messages.create(**asked, max_tokens=9, **form)).content[0].text)
    look = {"type": "function", "function": {"name": "look"}}
    for choice, names in (("required", {"move", "look"}), (look, {"look"})):
        answer = await client.chat.completions.create(**asked, tools=TOOLS, tool_choice=choice)
        for call in answer.choices[0].message.tool_calls:
            Move.model_validate_json(call.function.arguments)
            assert call.function.name in names
    for choice in ({"type": "any"}, {"type": "tool", "name": "move"}):
        answer = await claude.messages.create(**asked, max_tokens=9, tools=CLAUDES, tool_choice=choice)
        assert all(Move(**block.input) for block in answer.content)
        assert answer.stop_reason == "tool_use"
    answer = await client.chat.completions.create(
        **asked, tools=TOOLS, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    )
    assert answer.choices[0].message.tool_calls or Move.model_validate_json(answer.choices[0].message.content)
    await client.chat.completions.create(**asked, tools=TOOLS)
    return 1.0


@pytest.mark.parametrize("top_k", [0, 7])
def test_every_form_is_followed_and_trained_exactly(pair, top_k):
    batch, samples = play(pair, ask_for_all, top_k=top_k)
    assert [one.finish_reason for one in samples] == ["stop"] * 4
    places, kept = batch.loss_positions, kept_sets(batch, 320)
    assert len(places) == sum(turn.num_tokens for one in samples for turn in one.turns)  # each token once
    found = (scores(pair, batch).logprobs[places] - batch.sampler_logprobs[places]).abs()
    free = kept.all(1)
    assert (free.sum() > 0) == (top_k == 0)
    assert (~free).sum() > len(places) / 2
    assert found.max() < 2e-5
    assert kept.gather(1, batch.labels[places, None]).all()
    gate_of(pair, batch)
    batch.sampler_records = None
    with pytest.raises(LogprobGateError, match="a grammar"):
        gate_of(pair, batch)


def test_greedy_turns_follow_the_form(pair):
    async def agent(task, *, base_url, api_key):
        chat = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None).chat.completions
        assert (await chat.parse(model="x", messages=[USER], response_format=Move)).choices[0].message.parsed

    batch, [sample] = play(pair, agent, n=1, temperature=0)
    assert sample.finish_reason == "stop"
    assert not kept_sets(batch, 320).all()


def nested(depth: int):
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


REFUSED = {
    "deep": (nested(70), "at most 64 levels"),
    "giant": ({"enum": ["x" * MOST_CHARACTERS]}, "expected at most 32,768"),
    "unknown type": ({"type": "colour"}, "Unsupported type"),
    "no values": ({"enum": []}, "must not be empty"),
    "lost reference": ({"$ref": "#/$defs/gone"}, r"Cannot find field \$defs"),
    "another file": ({"$ref": "https://example.com/a.json"}, r"no grammar follows \$ref"),
    "read past": ({"type": "string", "not": {"const": "a"}}, "no grammar follows not here"),
    "beside": ({"type": "object", "anyOf": [{"required": ["a"]}]}, "no grammar follows type here"),
    "unsupported": ({"type": "integer", "multipleOf": 5}, "no grammar follows"),
    "pattern": ({"type": "string", "pattern": "(("}, "not closed"),
    "list": ([1], "describe the format in the prompt"),
}
NOTHING_OR_ONE = ({"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"const": 1}]})


def test_hostile_schemas_get_a_sentence_or_end_their_own_conversation(pair):
    async def agent(task, *, base_url, api_key):
        chat = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None).chat.completions
        asked = {"model": "x", "messages": [USER]}
        for schema, reason in REFUSED.values():
            with pytest.raises(openai.BadRequestError, match=reason):
                await chat.create(**asked, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
        for choice in ("none", {"type": "function", "function": {"name": "gone"}}, 3):
            with pytest.raises(openai.BadRequestError, match="asked for tool_choice"):
                await chat.create(**asked, tools=TOOLS, tool_choice=choice)
        for schema in NOTHING_OR_ONE:
            await chat.create(**asked, response_format={"type": "json_schema", "json_schema": {"schema": schema}})

        await chat.create(**asked, response_format={"type": "json_object"})  # a random policy may not end its keys

    _, samples = play(pair, agent, max_tokens=400)
    assert {one.finish_reason for one in samples} <= {"max_tokens", "stop"}
    for one in samples:
        nothing, number, whole = [turn.text for turn in one.turns]
        assert (nothing, number, whole[0]) == ("", "1", "{")


QWEN = 'within <tool_call></tool_call>: {"name": <function-name>}{{ message.tool_calls }}'
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of arguments}. {{ message.tool_calls }}'
HERMES_CALL = '<tool_call>\n{"name": "look", "arguments": {"to": 30}}\n</tool_call>'
LLAMA_CALL = '{"name": "look", "parameters": {"to": "up"}}'


@pytest.mark.parametrize(
    ("template", "thinks", "accepted", "refused"),
    [
        (QWEN, False, [HERMES_CALL, f"{HERMES_CALL}\n{HERMES_CALL}"], [LLAMA_CALL, f"So: {HERMES_CALL}", ""]),
        (LLAMA, False, [LLAMA_CALL, f"{LLAMA_CALL}; {LLAMA_CALL}"], [HERMES_CALL, LLAMA_CALL.replace("up", "in")]),
        (
            f"{QWEN} </think>",
            False,
            [HERMES_CALL, f"<think>\nhm\n</think>\n\n{HERMES_CALL}"],
            [f"hm</think>{HERMES_CALL}"],
        ),
        (QWEN, True, [f"hm\n</think>\n\n{HERMES_CALL}"], [HERMES_CALL, f"hm</think>so {HERMES_CALL}"]),
    ],
)
def test_calls_have_the_form_of_the_template_after_thoughts(pair, template, thinks, accepted, refused):
    grammars = copy.copy(pair.grammars)
    grammars._calls, grammars._thinks = call_form("auto", template), "</think>" in template
    compiled = grammars.compiler.compile_structural_tag(grammars.of(None, TOOLS, begins_thinking=thinks))

    def is_whole(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_terminated()

    assert [is_whole(text) for text in accepted + refused] == [True] * len(accepted) + [False] * len(refused)
    assert call_form("auto", "another form {{ tool_calls }}") is None
