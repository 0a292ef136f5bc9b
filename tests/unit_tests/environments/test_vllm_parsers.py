"""Call formats of other models, read by vLLM's own parsers."""

import logging

import pytest

from tests.parts.talk import chat_tokenizer
from tests.unit_tests.environments.agents.test_gateway import USER, Policy, asks
from torchtitan_rl.configs.toys.calculator import multiply
from torchtitan_rl.data.tool_calls import ToolCall
from torchtitan_rl.data.tool_schemas import tool_schemas
from torchtitan_rl.environments.tools import ToolEnvironment
from torchtitan_rl.environments.vllm_parsers import call_parser
from torchtitan_rl.errors import UserError

GLM = "<tool_call>multiply\n<arg_key>a</arg_key>\n<arg_value>6</arg_value>\n<arg_key>b</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"  # fmt: skip
QWEN = "<tool_call>\n<function=multiply>\n<parameter=a>\n6\n</parameter>\n<parameter=b>\n7\n</parameter>\n</function>\n</tool_call>"  # fmt: skip
KIMI = '<|tool_calls_section_begin|><|tool_call_begin|>functions.multiply:0<|tool_call_argument_begin|>{"a": 6, "b": 7}<|tool_call_end|><|tool_calls_section_end|>'  # fmt: skip

FORMATS = [
    ("hermes", '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>', ()),
    ("llama3_json", '<|python_tag|>{"name": "multiply", "parameters": {"a": 6, "b": 7}}', ("<|python_tag|>",)),
    ("mistral", '[TOOL_CALLS][{"name": "multiply", "arguments": {"a": 6, "b": 7}}]', ("[TOOL_CALLS]",)),
    ("pythonic", "[multiply(a=6, b=7)]", ()),
    ("qwen3_coder", QWEN, ()),
    ("glm45", GLM, ()),
    ("kimi_k2", KIMI, ()),
    ("internlm", '<|action_start|><|plugin|>{"name": "multiply", "parameters": {"a": 6, "b": 7}}<|action_end|>', ()),
]


def tokenizer(*special: str):
    made = chat_tokenizer()
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def parser(name: str, *special: str):
    return call_parser(name, tokenizer(*special), tool_schemas([multiply]))


@pytest.mark.parametrize(("name", "text", "special"), FORMATS, ids=[name for name, _, _ in FORMATS])
def test_tool_call_in_another_models_format_is_parsed_and_run(name, text, special):
    read = parser(name, *special)
    assert read(text, ["multiply"]) == [ToolCall("multiply", {"a": 6, "b": 7})]
    assert read("It is 42.", ["multiply"]) == []
    turn = ToolEnvironment([multiply], parser=read).step({"role": "assistant", "content": text})
    assert [message["content"] for message in turn.messages] == ["42"]


@pytest.mark.parametrize(
    "text", ["<tool_call>{'name'", "<tool_call>\ud800", "[multiply(" * 500, "[TOOL_CALLS]{", "\x00"]
)
@pytest.mark.parametrize(("name", "special"), [(name, special) for name, _, special in FORMATS])
def test_parser_errors_on_policy_text_do_not_stop_the_run(name, special, text, caplog):
    turn = ToolEnvironment([multiply], parser=parser(name, *special)).step({"role": "assistant", "content": text})
    assert turn.done or turn.messages
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(("name", "text"), [("qwen3_coder", QWEN), ("glm45", GLM)])
def test_arguments_of_an_agents_call_have_the_types_of_its_own_tools(name, text):
    read, [tool] = call_parser(name, tokenizer(), []), tool_schemas([multiply])  # the task has no tools
    with Policy(asks({"messages": [USER], "tools": [tool]}), parser=read) as policy:
        assert policy.say(text).columns == {"tool_calls": 1, "tool_errors": 0}
    assert read(text, {"multiply": tool}) == [ToolCall("multiply", {"a": 6, "b": 7})]
    for schema in ({"function": {"name": "multiply", "description": 5}}, {"function": 5}):
        assert read(text, {"multiply": schema}) == [ToolCall("multiply", {"a": "6", "b": "7"})]


def test_parser_incompatible_with_the_tokenizer_is_refused_before_training():
    with pytest.raises(UserError, match=r"tool_call_parser = 'mistral': .*could not locate the tool call token"):
        parser("mistral")
    with pytest.raises(UserError, match=r"tool_call_parser = 'openai'"):
        parser("openai")
