"""The chat templates that TRL's package has: prompts and demonstrations equal transformers' rendering, or are refused by name."""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.resources import files

import pytest

from tests.parts.talk import chat_tokenizer
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.renderer import PromptRenderer
from torchtitan_rl.data.row_messages import read_messages, read_tools
from torchtitan_rl.data.task import Example
from torchtitan_rl.errors import UserError

TEMPLATES = sorted(file.name for file in (files("trl") / "chat_templates").iterdir() if file.name.endswith(".jinja"))
VISION = ("idefics3", "llava_next", "smolvlm")
"""Templates that take contents as lists of parts alone."""
FUNCTION = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "n"}}, "required": ["a"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
ASKED = {"role": "user", "content": "3+3?"}
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": "3 and 3"}'}}]
CALLING = {"role": "assistant", "content": None, "tool_calls": CALLS}
TOLD = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "it is 6"}
THOUGHT = {"role": "assistant", "content": "Six.", "reasoning_content": "I add."}

HISTORIES = {
    "plain": [ASKED],
    "system": [{"role": "system", "content": "Be brief."}, ASKED],
    "developer": [{"role": "developer", "content": "a"}, ASKED],
    "several turns": [ASKED, {"role": "assistant", "content": "Six."}, {"role": "user", "content": "And 4+4?"}],
    "earlier thinking": [ASKED, THOUGHT, {"role": "user", "content": "And 4+4?"}],
    "thinking in content": [ASKED, {"role": "assistant", "content": "<think>\nI add.\n</think>\n\nSix."}, ASKED],
    "calls": [ASKED, CALLING, TOLD],
    "calls with thinking": [ASKED, {**CALLING, "reasoning_content": "I call."}, TOLD],
    "calls with content": [ASKED, {**CALLING, "content": "Let me see."}, TOLD],
}
LEARNED = {
    "answer": [{"role": "assistant", "content": "Six."}],
    "thinking": [THOUGHT],
    "call": [CALLING],
    "thinking in content": [{"role": "assistant", "content": "<think>\nI add.\n</think>\n\nSix."}],
    "end of thinking in content": [{"role": "assistant", "content": "I add.\n</think>\n\nSix."}],
}
CASES = [
    *((f"prompt: {name}", history, [], tools) for name, history in HISTORIES.items() for tools in ([], TOOLS)),
    *(
        (f"demonstration: {name}", [ASKED], learned, tools)
        for name, learned in LEARNED.items()
        for tools in ([], TOOLS)
    ),
    *((f"demonstration: after {name}", HISTORIES[name], LEARNED["answer"], []) for name in ("system", "developer")),
]
OF_KIND = {
    "system": ("prompt: system", "demonstration: after system"),
    "developer": ("prompt: developer", "demonstration: after developer"),
    "thinking": ("prompt: earlier thinking", "demonstration: thinking"),
    "calls": ("prompt: calls with tools", "demonstration: call with tools"),
    "tools": ("prompt: plain with tools", "demonstration: answer with tools"),
}
"""A case for RL and one for SFT of each kind of message."""


@cache
def tokenizer_of(template: str):
    made = chat_tokenizer()
    made.chat_template = (files("trl") / "chat_templates" / template).read_text()
    made.add_special_tokens({"bos_token": "<|endoftext|>"})
    return made


def renderings(template: str, thinks: bool) -> Iterator[tuple[str, str, str | UserError]]:
    """(case, transformers' text, the renderer's text or refusal) of each case that transformers renders."""
    made = tokenizer_of(template)
    config = PromptRenderer.Config(enable_thinking=thinks, max_prompt_tokens=4096)
    every_token = range(len(made))
    renderer = config.build(
        task=SumDigits.Config().build(), tokenizer=made, end_token_ids=every_token, max_completion_tokens=4096
    )
    for name, history, learned, tools in CASES:
        messages, following = read_messages(history), read_messages(learned)
        example = Example(
            text="", expected_answer="", messages=messages, demonstration=following or None, tools=read_tools(tools)
        )
        found = renderer.prompts([example])[0]
        try:
            expected = made.apply_chat_template(
                [*messages, *following], tools=tools or None, tokenize=False, add_generation_prompt=not following,
                enable_thinking=thinks,
            )  # fmt: skip
        except Exception:
            assert isinstance(found, UserError), name
            continue
        if not isinstance(found, UserError) and found.demonstration is not None:
            found = found.text + found.demonstration.text
        yield f"{name}{' with tools' * bool(tools)}", expected, getattr(found, "text", found)


def written(case: str) -> Iterator[str]:
    """What must be in a rendering of the case."""
    [(_, history, learned, tools)] = [one for one in CASES if f"{one[0]}{' with tools' * bool(one[3])}" == case]
    for message in (*history, *learned):
        yield (message["content"] or "").rpartition("</think>")[2].strip()
        yield from ("add", "3 and 3") if "tool_calls" in message else ()
    yield from (tool["function"]["description"] for tool in tools)
    if learned:
        yield learned[-1].get("reasoning_content", "")


@pytest.mark.parametrize(
    ("template", "thinks"),
    [(one, on) for one in TEMPLATES for on in {False, "enable_thinking" in tokenizer_of(one).chat_template}],
)
def test_published_template_is_rendered_as_by_transformers_or_refused_by_name(template, thinks):
    if template.startswith(VISION):
        with suppress(UserError):  # the template raises
            assert all(re.search("leaves out|rejects", str(found)) for _, _, found in renderings(template, thinks))
        return
    for case, expected, found in renderings(template, thinks):
        if isinstance(found, UserError):
            known = "leaves out (the|reasoning_content)|rejects|does not begin as the prompt ends|adds an empty block"
            assert re.search(known, str(found))
            assert case not in ("prompt: plain", "prompt: several turns")
        else:
            assert found == expected, case
            assert all(part in found for part in written(case)), case


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        ("cohere2", {"developer", "thinking", "calls", "tools"}),
        ("gemma3", {"developer", "thinking", "calls", "tools"}),
        ("glm4moe", {"developer"}),
        ("gptoss", {"thinking"}),
        ("llama3", {"thinking", "calls", "tools"}),
        ("llama3_2", {"thinking"}),
        ("phi3", {"developer", "thinking", "calls", "tools"}),
        ("qwen3", {"developer"}),
        ("qwen3_instruct_2507", {"developer", "thinking"}),
    ],
)
def test_each_kind_of_message_is_rendered_or_refused_for_rl_and_sft(template, refused):
    thinks = "enable_thinking" in tokenizer_of(f"{template}.jinja").chat_template
    equal = {case for case, expected, found in renderings(f"{template}.jinja", thinks) if found == expected}
    for kind, cases in OF_KIND.items():
        assert [case in equal for case in cases] == [kind not in refused] * 2, kind
