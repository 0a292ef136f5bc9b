"""Grammars of the policy's turns, for what agents ask with `response_format` and `tool_choice`.

The engine gives the tokens that a grammar does not allow the logit -inf. `KeptTokens` records the others, so that the trainer
scores with the distribution that was sampled from.
"""

import contextlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import check_json_nesting
from vllm.v1.structured_output.backend_xgrammar import (
    XgrammarBackend,
    XgrammarGrammar,
    has_xgrammar_unsupported_json_features,
)

from torchtitan_rl.generator.patches import replace_grammar_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM

MOST_CHARACTERS = 32_768
"""Maximum length of a request's schemas. The time to compile a grammar grows with it."""

MOST_SPACES = 32
"""White space that JSON may have in one place. Without a limit, a policy may write nothing else."""

_READ_PAST = {"not", "if", "dependentRequired", "dependentSchemas", "$anchor", "$dynamicRef"}
"""Keywords that xgrammar does not follow. Beside one of _ALONE it follows none but _NOTES, which say nothing."""
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
_NOTES = {
    "title",
    "description",
    "default",
    "examples",
    "discriminator",
    "$defs",
    "definitions",
    "$schema",
}


@dataclass
class _Grammar(XgrammarGrammar):
    """A turn may end where nothing else is allowed, for example in a schema that contains itself without an end."""

    end_token_ids: Collection[int] = ()
    is_stuck: bool = False

    def fill_bitmask(self, bitmask: Tensor, idx: int) -> None:
        """Allow the next tokens in row `idx` of the bitmask [N, ceil(V / 32)]."""
        super().fill_bitmask(bitmask, idx)
        words = bitmask[idx].numpy().view(np.uint32)  # [ceil(V / 32)]
        self.is_stuck = not words.any()
        for token in self.end_token_ids if self.is_stuck else ():
            words[token // 32] |= np.uint32(1 << token % 32)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on after these tokens. False would end the request with an error, and so the run."""
        return self.is_stuck or super().accept_tokens(request_id, tokens)


class Grammars(XgrammarBackend):
    """Makes and compiles the grammars of one engine. Several threads may use it."""

    def __init__(
        self, llm: "LLM", tokenizer: "PreTrainedTokenizerBase", tool_call_parser: str
    ) -> None:
        config = llm.llm_engine.vllm_config
        super().__init__(config, tokenizer, config.model_config.get_vocab_size())
        replace_grammar_backend(llm, self)
        template = str(tokenizer.chat_template)
        self._thinks = "</think>" in template
        self._calls = call_form(tool_call_parser, template)

    def compile_grammar(self, *args: Any, stop_token_ids: Collection[int] = ()) -> _Grammar:
        """Returns what a request starts with."""
        made = super().compile_grammar(*args, stop_token_ids=stop_token_ids)
        return _Grammar(made.vocab_size, made.matcher, made.ctx, end_token_ids=stop_token_ids)

    def of(
        self, schema: Any, tools: Sequence[Mapping[str, Any]], *, begins_thinking: bool = False
    ) -> str:
        """Returns the grammar of a turn that is JSON as `schema` asks, or else calls of `tools`: see `Answer`.

        Args:
            schema: a JSON schema; None: only calls.
            tools: the functions that may be called; none: only JSON.
            begins_thinking: whether the turn begins inside a `<think>` block.

        Raises:
            ValueError: in words, if no grammar follows them.
        """
        given = json.dumps([schema, *tools])
        if len(given) > MOST_CHARACTERS:
            raise ValueError(
                f"schemas of {len(given):,} characters; expected at most {MOST_CHARACTERS:,}"
            )
        try:
            check_json_nesting(given)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from None
        formats: list[Any] = [self._format_of(tools)] if tools else []
        if schema is not None:
            formats.append(_json_as(schema))
        elements: list[Any] = [{"type": "or", "elements": formats}]
        if begins_thinking or self._thinks:
            begin = "" if begins_thinking else "<think>"
            thoughts: Any = {
                "type": "tag",
                "begin": begin,
                "content": {"type": "any_text"},
                "end": "</think>",
            }
            thoughts = thoughts if begins_thinking else {"type": "optional", "content": thoughts}
            elements = [thoughts, {"type": "regex", "pattern": "[ \\n]*"}, *elements]
        grammar = json.dumps(
            {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
        )
        try:
            self.compiler.compile_structural_tag(grammar)  # which keeps it for the engine
        except RuntimeError as error:
            raise ValueError(re.sub(r"^\S+ \S+:\d+: ", "", str(error)).strip()) from None
        return grammar

    def _format_of(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        """Calls of these tools, with arguments as their schemas ask where a grammar can follow them."""
        if self._calls is None:
            raise ValueError(
                "there is no grammar here for the form in which the policy writes tool calls"
            )
        begin, end, separator = self._calls
        tags: list[Any] = []
        for tool in tools:
            function, arguments = tool["function"], _json_as({"type": "object"})
            with contextlib.suppress(ValueError):
                arguments = _json_as(function.get("parameters") or {"type": "object"})
            tags.append(
                {
                    "type": "tag",
                    "begin": begin % json.dumps(function["name"]),
                    "content": arguments,
                    "end": end,
                }
            )
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": separator,
            "at_least_one": True,
        }


def call_form(tool_call_parser: str, template: str) -> tuple[str, str, str] | None:
    """Returns what the policy writes before the arguments of a call of %s, after them, and between calls; None if unknown."""
    line = "\n" if "<tool_call>" in template else ""
    hermes = f'<tool_call>{line}{{"name": %s, "arguments": ', f"}}{line}</tool_call>", "\n"
    llama = '{"name": %s, "parameters": ', "}", "; "
    is_known = line or "tool_calls" not in template
    auto = llama if 'parameters": dictionary' in template else hermes if is_known else None
    return {"auto": auto, "hermes": hermes, "llama3_json": llama}.get(tool_call_parser)


def _json_as(schema: Any) -> Any:
    """JSON as a schema asks. Raises ValueError with a keyword that xgrammar does not follow."""
    if has_xgrammar_unsupported_json_features(schema):
        raise ValueError("no grammar follows a keyword of the schema")
    checked = json.loads(json.dumps(schema), object_hook=_checked)
    return {"type": "json_schema", "json_schema": checked, "max_whitespace_cnt": MOST_SPACES}


def _checked(part: dict[str, Any]) -> dict[str, Any]:
    unread = part.keys() & _READ_PAST
    for key in _ALONE:
        if isinstance(part.get(key), str | list):
            unread |= part.keys() - _NOTES - {key}
    if unread or not str(part.get("$ref", "#")).startswith("#"):
        raise ValueError(f"no grammar follows {', '.join(sorted(unread)) or '$ref'} here")
    return part
