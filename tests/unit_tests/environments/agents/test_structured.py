"""Structured answers and required calls, as real clients ask a real engine for them: each turn is as asked, and trained as sampled."""

import contextlib
import copy
import json
import time
from itertools import count
from typing import Literal

import anthropic
import jsonschema
import numpy as np
import openai
import pydantic
import pytest

from tests.parts.conversations import TaskWith, prompts
from tests.parts.pushes import Pair
from tests.parts.stream import ListStream, begun
from tests.parts.talk import chat_tokenizer, save_talker
from tests.parts.tiny import DIMENSIONS, members_of, sampled
from tests.unit_tests.generator.test_kept_tokens import COUNTS, TEMPERATURE, gate_of, kept_sets, scores
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.environments.agents.protocol import ChatRequest
from torchtitan_rl.environments.agents.settings import NotFollowed
from torchtitan_rl.environments.factory import Conversations
from torchtitan_rl.generator import grammars as engine_grammars
from torchtitan_rl.generator.grammars import MOST_CHARACTERS, Grammars, call_form
from torchtitan_rl.generator.in_flight import InFlight
from torchtitan_rl.generator.patches import replace_grammar_backend
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.trainer.gate import LogprobGateError
from torchtitan_rl.trainer.packing import pack
from torchtitan_rl.types import Completion

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


@pytest.fixture(scope="module", autouse=True)
def few_spaces():
    """A random policy would use them."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch.setattr(engine_grammars, "MOST_SPACES", 1)


@pytest.fixture(scope="module")
def grammars():
    """Those of a small tokenizer, without an engine."""
    made = chat_tokenizer()
    return Grammars(made, "auto", [made.eos_token_id], len(made))


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("pair"), saved, records_kept=True, tokenizer=chat_tokenizer())
    made = pair.generator
    grammars = Grammars(made.tokenizer, "auto", made.end_token_ids, made.llm.model_config.get_vocab_size())
    replace_grammar_backend(made.llm, grammars)
    made.make_grammar = grammars.of
    yield pair
    pair.generator.close()


def environments_of(pair, agent):
    """A factory of environments with this agent."""
    return Conversations.Config(max_turns=60, max_traces=60).build(
        members={"": TaskWith(lambda _: AgentEnvironment(agent, role="tool"))}, tokenizer=pair.generator.tokenizer,
        end_token_ids=pair.generator.end_token_ids, template_options={},
    )  # fmt: skip


def play(pair, agent, **sampling):
    """Returns the batch and the samples of four agents' conversations."""
    pair.generator.environments = environments_of(pair, agent)
    config = SamplingConfig(**{"n": 4, "max_tokens": 3000, "temperature": TEMPERATURE, **sampling})
    [group] = sampled(pair.generator, prompts(pair.generator.tokenizer, 1), sampling_config=config)
    return pack(members_of([group]), normalizers=COUNTS, multiple=64), group.samples


async def ask_for_all(task, *, base_url, api_key):
    """Free turns between forms of every API, each a trace of its own."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None)
    claude = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, timeout=None)
    chat, asked = client.chat.completions, {"model": "x", "messages": [USER]}
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
    for form in (
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"structured_outputs": {"choice": ['{"to":30}', '{"to":"up"}']}},
        {"guided_choice": ['{"to":"up"}']},
    ):
        Move.model_validate_json((await chat.create(**asked, extra_body=form)).choices[0].message.content)
    regex, both = {"structured_outputs": {"regex": "a"}}, {"guided_json": {}, "guided_choice": []}
    for form in (regex, {"guided_regex": "a"}, both):
        with pytest.raises(openai.BadRequestError, match="use|describe|ask for one form"):
            await chat.create(**asked, extra_body=form)
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


def was_cut(sample: Completion) -> bool:
    """Whether an update came between two tokens of one turn."""
    if sample.token_versions is None:
        return False
    return bool(((np.diff(sample.token_versions) > 0) & sample.loss_mask[:-1] & sample.loss_mask[1:]).any())


def test_turn_that_is_cut_by_an_update_goes_on_under_its_grammar(pair):
    async def agent(task, *, base_url, api_key):
        chat = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None).chat.completions
        for _ in range(2 + next(numbers) % 6):
            assert (await chat.parse(model="x", messages=[USER], response_format=Move)).choices[0].message.parsed

    generator, groups, version, numbers = pair.generator, [], pair.generator.policy_version, count()
    generator.environments = environments_of(pair, agent)
    stream = ListStream(prompts(generator.tokenizer, 30))
    in_flight = InFlight.Config(prompts=6).build(generator=generator, stream=stream)
    generator.sampling = SamplingConfig(n=2, max_tokens=3000, temperature=TEMPERATURE)
    for step in range(12):  # until one is cut, which depends on when the agents' requests arrive
        generator.policy_version = version + step
        generator.llm.reset_prefix_cache()
        with begun(in_flight, 2, step=step) as whole:
            groups += whole
        samples = [sample for group in groups for sample in group.samples]
        if any(map(was_cut, samples)):
            break
    generator.environments.close()
    generator.policy_version = version
    assert any(map(was_cut, samples)), "no turn was cut, so nothing was tested"
    for sample in samples:
        assert sample.finish_reason == "stop"
        assert all(Move.model_validate_json(turn.text) for turn in sample.turns)
    batch = pack(members_of(groups), normalizers=COUNTS, multiple=64)
    places = batch.loss_positions
    assert (scores(pair, batch).logprobs[places] - batch.sampler_logprobs[places]).abs().max() < 2e-5


def test_greedy_turns_follow_the_form(pair):
    async def agent(task, *, base_url, api_key):
        chat = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None).chat.completions
        assert (await chat.parse(model="x", messages=[USER], response_format=Move)).choices[0].message.parsed

    batch, [sample] = play(pair, agent, n=1, temperature=0)
    assert sample.finish_reason == "stop"
    assert not kept_sets(batch, 320).all()


def nested(depth: int):
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


OPTIONAL = {f"p{number}": {"type": "string"} for number in range(300)}
REFUSED = {
    "deep": (nested(70), "at most 64 levels"),
    "giant": ({"enum": ["x" * MOST_CHARACTERS]}, "expected at most 32,768"),
    "unknown type": ({"type": "colour"}, "Invalid type: colour"),
    "no values": ({"enum": []}, "Unsatisfiable schema"),
    "lost reference": ({"$ref": "#/$defs/gone"}, r"/\$defs/gone' does not exist"),
    "another file": ({"$ref": "https://example.com/a.json"}, "does not fetch"),
    "read past": ({"type": "string", "not": {"const": "a"}}, 'Unimplemented keys: ."not"'),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead.* is not supported"),
    "pattern": ({"type": "string", "pattern": "(("}, "unclosed group"),
    "list": ([1], "describe the format in the prompt"),
    "itself alone": ({"$ref": "#"}, "no text follows it"),
    "count of properties": ({"properties": OPTIONAL, "minProperties": 150}, "min/maxProperties only supported"),
    "count of items": ({"items": {"maxItems": 10**9}}, "maxItems 1,000,000,000; expected at most 10,000"),
    "large grammar": (
        {"properties": {name: {"type": "array", "maxItems": 9999} for name in "abcdefgh"}}, "grammar size.* too big"
    ),
    "large step": ({"type": "integer", "multipleOf": 999983}, r"multipleOf \[999983\]; expected integers"),
    "many branches": (
        {"allOf": [{"anyOf": [{"required": ["a"]}, {"required": [f"b{i}"]}]} for i in range(40)]}, "schema too large"
    ),
    "infinite": ({"const": float("inf")}, "cannot be read: .*not JSON compliant"),
    "surrogate": ({"const": "\ud800"}, "cannot be read: .*surrogates not allowed"),
    "definitions": ({"$defs": [1], "$ref": "#/$defs/0"}, "no grammar follows it"),
    "no list": ({"allOf": 5}, "allOf must be an array"),
    "not a schema": ({"properties": {"a": 5}}, "schema must be an object or boolean"),
}  # fmt: skip


def test_hostile_schemas_are_refused_in_seconds_with_a_sentence(grammars):
    for schema, reason in REFUSED.values():
        body = {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        began = time.monotonic()
        with pytest.raises(NotFollowed, match=reason):
            ChatRequest.read("", json.dumps(body).encode(), grammars.of)
        assert time.monotonic() - began < 3, schema
    for choice in ("none", {"type": "function", "function": {"name": "gone"}}, 3):
        body = {"messages": [USER], "tools": TOOLS, "tool_choice": choice}
        with pytest.raises(NotFollowed, match="asked for tool_choice"):
            ChatRequest.read("", json.dumps(body).encode(), grammars.of)


def test_a_refused_schema_and_an_endless_turn_leave_the_conversation_whole(pair):
    async def agent(task, *, base_url, api_key):
        chat = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None).chat.completions
        asked = {"model": "x", "messages": [USER]}
        for schema in ({"type": "colour"}, {"anyOf": [{"$ref": "#"}, {"const": 1}]}):
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            with contextlib.suppress(openai.BadRequestError):
                await chat.create(**asked, response_format=form)
        await chat.create(**asked, response_format={"type": "json_object"})  # a random policy may not end its keys

    _, samples = play(pair, agent, max_tokens=400)
    assert {one.finish_reason for one in samples} <= {"max_tokens", "stop"}
    for one in samples:
        number, whole = [turn.text for turn in one.turns]
        assert (number, whole[0]) == ("1", "{")


NEXT = {"$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"}, "n": {"$ref": "#/$defs/n"}}}}}
A, B = ({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab")
FOLLOWED = {
    "pattern at the start": ({"type": "string", "pattern": "^[A-Z]"}, ['"Ann"', '"A"'], ['"ann"', '""']),
    "pattern of an address": ({"type": "string", "pattern": "^https?://"}, ['"https://x.org"'], ['"see https://x.org"']),
    "pattern anywhere": (
        {"type": "string", "pattern": "cat|^dog$"}, ['"concatenate"', '"dog"', '"\\"cat"'], ['"dogs"', '"ca\nt"']
    ),
    "length": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"a\\nb"', '"\\"\\\\"', '"\N{GRINNING FACE}b"'], ['"a\nb"', '"a\tb"', '"\\n"', '"abcd"', '"\x01\x02"'],
    ),
    "pattern and length": ({"type": "string", "pattern": "a", "maxLength": 3}, ['"xay"'], ['"xxay"', '"xy"']),
    "string": ({"type": "string"}, ['"a\\nb"', '"\\u0001"'], ['"\\ud800"', '"a\nb"']),
    "number": ({"type": "number"}, ["1.5", "-0.25", "1000000"], ["1e999", "1e5", "9" * 400]),
    "positive": ({"type": "number", "exclusiveMinimum": 0}, ["0.5", "12"], ["0", "-1", "9" * 400]),
    "integer": ({"type": ["integer", "null"]}, ["12", "-3", "null"], ["1.5", "9" * 5000]),
    "step": ({"type": "integer", "multipleOf": 5}, ["15"], ["16"]),
    "anything": ({}, ['{"a":[1,{"b":null}]}', '"x"'], ["[1e999]", '{"a":1e999}', '{"a":{"b":[1e999]}}']),
    "named keys": (B, ['{"b":1}', '{"b" :1}'], ['{"b":1,"c":1}', '{"b":  1}', "{}"]),
    "any keys": ({"type": "object"}, ["{}", '{"a":1}'], ['{"a":1e999}']),
    "anything within": ({"properties": {"a": True}, "type": "object"}, ['{"a":[1]}'], ['{"a":[1e999]}']),
    "all of": ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"b":2}', '{"a":1,"b":1e999}']),
    "beside": ({**A, "required": [], "anyOf": [{"required": ["a"]}]}, ['{"a":1}'], ["{}"]),
    "beside a list": ({"type": "string", "enum": ["a", 1]}, ['"a"'], ["1"]),
    "itself": ({**NEXT, "$ref": "#/$defs/n"}, ['{"v":1,"n":{"v":2}}'], ['{"v":1,"n":{"w":2}}', '{"v":1.5}']),
    "key named as a keyword": ({"properties": {"not": {"const": 1}}, "type": "object"}, ['{"not":1}'], ['{"not":2}']),
    "places": ({"type": "array", "prefixItems": [{"const": 1}, True]}, ['[1,"x"]'], ['["x"]', "[1,2,3]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_json_is_what_the_schema_asks_and_readers_take(grammars, name):
    schema, accepted, refused = FOLLOWED[name]
    grammar = grammars.of(schema, [])
    assert {text: is_whole(grammars, grammar, text) for text in accepted + refused} == {
        **dict.fromkeys(accepted, True), **dict.fromkeys(refused, False)
    }  # fmt: skip
    for text in accepted:
        jsonschema.validate(json.loads(text), schema)


def is_whole(grammars, grammar: str, text: str) -> bool:
    """Whether a turn may have this text."""
    tokens = grammars.tokenizer.tokenize_str(text)
    matcher = grammars.compile_grammar(None, grammar).ll_matcher
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


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
def test_calls_have_the_form_of_the_template_after_thoughts(grammars, template, thinks, accepted, refused):
    grammars = copy.copy(grammars)
    grammars._calls, grammars._thinks = call_form("auto", template), "</think>" in template
    grammar = grammars.of(None, TOOLS, begins_thinking=thinks)
    assert [is_whole(grammars, grammar, text) for text in accepted + refused] == [True] * len(accepted) + [False] * len(
        refused
    )
    assert call_form("auto", "another form {{ tool_calls }}") is None
