"""Call formats that vLLM's tool parsers read, by the names of `vllm serve --tool-call-parser`."""

import copy
import logging
import re
import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from torchtitan_rl.data.tool_calls import CallParser, ToolCall, parse_calls, tool_call
from torchtitan_rl.environments.checks import described
from torchtitan_rl.errors import UserError, expect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELD = "conversations.tool_call_parser"


def call_parser(
    name: str, tokenizer: "PreTrainedTokenizerBase", schemas: list[dict[str, Any]]
) -> CallParser:
    """Returns the parser of this name, `parse_calls` for "auto". Some formats need the tools' schemas to know an argument's type.

    Raises UserError if there is no such parser, or it cannot be used with this tokenizer.
    """
    if name == "auto":
        return parse_calls
    from vllm.tool_parsers import ToolParserManager

    known = ToolParserManager.list_registered()
    expected = f"auto or one of vLLM's parsers: {', '.join(known)}"
    expect(name in known, _FIELD, name, expected, "Use the one of the model's card.")
    return VllmParser(name, tokenizer, schemas)


class VllmParser:
    """One of vLLM's tool parsers. Each text gets a new one, because they keep state.

    They do not distinguish a broken call from none, and log each with a traceback, which is silenced here.
    """

    def __init__(
        self, name: str, tokenizer: "PreTrainedTokenizerBase", schemas: list[dict[str, Any]]
    ) -> None:
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        for package in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(package).setLevel(logging.CRITICAL)
        # A copy and a lock: several threads read calls, and a tokenizer is not thread-safe.
        self._tokenizer = get_cached_tokenizer(copy.deepcopy(tokenizer))
        self._lock = threading.Lock()
        self._name, self._own_tools, self._tools = name, schemas, schemas
        try:
            self._parser = ToolParserManager.get_tool_parser(name)
            self._read_for(schemas)
            self("", ())
        except Exception as error:
            raise UserError(
                f"{_FIELD} = {name!r}: expected a parser that can read the text of {tokenizer.name_or_path!r}. Use the "
                f"one of the model's card. {described(error)}"
            ) from error

    def __call__(self, text: str, tools: Collection[str]) -> list[ToolCall]:
        schemas = [*tools.values()] if isinstance(tools, Mapping) else self._own_tools
        with self._lock:
            if schemas != self._tools:
                try:
                    self._read_for(schemas)
                except Exception:  # an agent may send anything as a schema
                    self._read_for([])
                self._tools = schemas
            plain = self._special.sub("", text)
            extracted = self._new_parser().extract_tool_calls(plain, request=self._request)
        functions = [call.function for call in extracted.tool_calls]
        return [tool_call(function.name, function.arguments) for function in functions]

    def _read_for(self, tools: list[dict[str, Any]]) -> None:
        """Reads the texts that follow as calls of these tools."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        asked = {"tools": tools, "tool_choice": "auto"} if tools else {}
        messages = [{"role": "user", "content": ""}]
        self._request = ChatCompletionRequest(model=self._name, messages=messages, **asked)
        self._request = self._new_parser().adjust_request(self._request)
        # Without tools no parser says whether it needs special tokens.
        skips = tools and self._request.skip_special_tokens
        special = self._tokenizer.all_special_tokens if skips else ()
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def _new_parser(self) -> Any:
        return self._parser(self._tokenizer, self._request.tools)
