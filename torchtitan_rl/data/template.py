"""`ChatTemplate` renders only the messages that follow the policy's turn, and leaves earlier tokens unchanged."""

import copy
import functools
import json
import re
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torchtitan_rl.data.chat_messages import Message, Render, Tools, left_out, render_chat
from torchtitan_rl.data.tool_calls import opened_thinking
from torchtitan_rl.errors import UserError
from torchtitan_rl.text import mapped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BREAK = "\ufdd0"
"""Splits the text of a special token, so that it is tokenized as plain text. It is a Unicode noncharacter."""


_POLICY_TEXT = "x7q"
"""A placeholder for the policy's turn. In the rendered text, everything after it belongs to the environment's
answer."""
_QUESTION: Message = {"role": "user", "content": "q"}


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    """Returns the pattern of texts that the tokenizer reads as a special token, such as "<|im_end|>"."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, special)) or "(?!)")


class ChatTemplate:
    """Renders an environment's messages as the tokens that follow the policy's turn."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        end_token_ids: Collection[int],
        tools: Tools | None = None,
        **options: Any,
    ) -> None:
        """`end_token_ids` can end a turn of the policy. `tools` and the template's further `options` are those of the prompt."""
        # A copy and a lock: several threads render conversations, and a tokenizer is not thread-safe.
        self.tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._special = special_tokens(tokenizer)
        self._end_token_ids = end_token_ids
        self._tools = tools
        self._options = options

    def with_tools(self, tools: Tools) -> "ChatTemplate":
        """Returns this template with other tools. Both share the tokenizer and its lock."""
        other = copy.copy(self)
        other._tools = tools or None
        return other

    def prompt(
        self, messages: Sequence[Message], first_messages: Sequence[Message]
    ) -> tuple[str, list[int]]:
        """Returns text and tokens of the prompt, the environment's first messages and the generation prompt.

        Raises ValueError if the template leaves out a message or the tools.
        """
        whole = [*messages, *(self._as_text(self._with_calls(first)) for first in first_messages)]
        text = self._render(whole)
        self._check_written(self._render, whole, self._tools)
        return text.replace(BREAK, ""), self._tokens(text)

    def answer(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Returns the tokens between the policy's `last_token` and its next turn.

        These are the end of the turn, the messages, and the header of the next turn. Exceptions of the template, for
        example for an order of roles that it does not allow, are passed on. Raises ValueError if it leaves out a message.
        """
        answers = [*map(self._as_text, messages)]
        token_ids = self._tokens(self._answer_text(answers))
        self._check_written(lambda marked, _: self._answer_text(marked), answers, None)
        return token_ids[token_ids[0] == last_token :]

    def policy_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a turn of the policy with its special tokens, but without the end token."""
        ended = token_ids[-1] in self._end_token_ids
        with self._lock:
            kept = token_ids[:-1] if ended else token_ids
            return self.tokenizer.decode(kept, skip_special_tokens=False)

    @functools.cached_property
    def begins_thinking(self) -> bool:
        """Whether each turn of the policy begins inside a `<think>` block, which the template has opened."""
        return opened_thinking(self._render([_QUESTION])) == "<think>"

    def check(self, role: str) -> None:
        """Raise UserError if the template cannot render an environment's message in `role` after the policy's turn."""
        reply: Message = {"role": role, "content": "r"}
        if role == "tool":
            reply["name"] = "tool"
        try:
            self.answer([reply], last_token=-1)
        except Exception as error:
            raise UserError(
                f"hf_assets_path (chat template) = {self.tokenizer.name_or_path!r}: expected a template that renders a message of role "
                f"{role!r} after the policy's turn, but: {error}. Use an instruct model that supports this role."
            ) from error

    def _check_written(self, render: Render, messages: list[Message], tools: Tools | None) -> None:
        if missing := left_out(render, messages, tools, str(self.tokenizer.chat_template)):
            raise ValueError(f"the chat template leaves out {missing}")

    def _answer_text(self, messages: Sequence[Message]) -> str:
        _, policy_text, answer = self._render(
            [_QUESTION, {"role": "assistant", "content": _POLICY_TEXT}, *messages]
        ).partition(_POLICY_TEXT)
        if not policy_text:
            raise ValueError("the template leaves out the policy's turn")
        return answer

    def _render(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        tools = tools or self._tools
        options = {"add_generation_prompt": True, "tools": tools, **self._options}
        return render_chat(self.tokenizer, messages, **options)

    def _with_calls(self, message: Message) -> Message:
        """Writes an assistant's calls into its text, if the template would leave them out."""
        if "tool_calls" not in message or "tool_calls" in str(self.tokenizer.chat_template):
            return message
        functions = [json.dumps(call["function"]) for call in message["tool_calls"]]
        calls = "".join(f"<tool_call>{function}</tool_call>" for function in functions)
        return {"role": message["role"], "content": message["content"] + calls}

    def _as_text(self, message: Message) -> Message:
        """Breaks up special tokens in the message's text, so that only the template can begin or end a message."""
        return mapped(
            message,
            lambda text: self._special.sub(lambda token: token[0][0] + BREAK + token[0][1:], text),
        )

    def _tokens(self, text: str) -> list[int]:
        with self._lock:
            parts = self.tokenizer(text.split(BREAK), add_special_tokens=False)["input_ids"]
        return [token_id for part in parts for token_id in part]
