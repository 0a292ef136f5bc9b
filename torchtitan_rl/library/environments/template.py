"""`ChatTemplate` renders only the messages that follow the policy's turn, and leaves earlier tokens unchanged."""

import copy
import functools
import json
import re
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_rl.common.text import mapped
from torchtitan_rl.core.errors import UserError, expect
from torchtitan_rl.library.chat_messages import Message, Render, Tools, left_out
from torchtitan_rl.library.environments.checks import BREAK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_POLICY_TEXT = "x7q"
"""A placeholder for the policy's turn. In the rendered text, everything after it belongs to the environment's
answer."""
_QUESTION: Message = {"role": "user", "content": "q"}
_FIELD = "hf_assets_path (chat template)"


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
        """
        Args:
            end_token_ids: the tokens that can end a turn of the policy.
            tools: JSON schemas, the same as for the prompt.
            options: further arguments of the template, the same as for the prompt.
        """
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

    def prompt(self, messages: Sequence[Message], first_messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Returns text and tokens of the prompt, the environment's first messages and the generation prompt.

        Raises ValueError if the template leaves out a message or the tools.
        """
        whole = [*messages, *(self._as_text(self._with_calls(one)) for one in first_messages)]
        text = self._render(whole)
        self._check_written(self._render, whole, self._tools)
        return text.replace(BREAK, ""), self._tokens(text)

    def answer(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Returns the tokens between the policy's `last_token` and its next turn.

        These are the end of the turn, the messages, and the header of the next turn. Exceptions of the template, for
        example for an order of roles that it does not allow, are passed on. Raises ValueError if it leaves out a message.
        """
        said = [*map(self._as_text, messages)]
        token_ids = self._tokens(self._answer_text(said))
        self._check_written(lambda marked, _: self._answer_text(marked), said, None)
        return token_ids[token_ids[0] == last_token :]

    def policy_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a turn of the policy with its special tokens, but without the end token."""
        ended = token_ids[-1] in self._end_token_ids
        with self._lock:
            return self.tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=False)

    @functools.cached_property
    def begins_thinking(self) -> bool:
        """Whether each turn of the policy begins inside a `<think>` block, which the template has opened."""
        _, found, opened = self._render([_QUESTION]).rpartition("<think>")
        return bool(found) and "</think>" not in opened

    def check(self, role: str, rewrites: Literal["refuse", "append"]) -> None:
        """Checks that the template can render an environment's message in `role`.

        Raises:
            UserError: if there is no template, it does not render tools or the role, it does not end a turn with one of
            the
                end tokens, or it changes earlier turns while `rewrites` is "refuse".
        """
        name = self.tokenizer.name_or_path
        expect(
            bool(self.tokenizer.chat_template), _FIELD, name, "a tokenizer with a chat template, for conversations",
            "Use an instruct model's folder, or set chat_template in its tokenizer_config.json.",
        )  # fmt: skip
        reply: Message = {"role": role, "content": "r3z"} | ({"name": "tool"} if role == "tool" else {})
        try:
            answer = self._answer_text([reply])
            first, whole = self._tokens(answer)[0], self._conversation(_POLICY_TEXT, reply)
        except Exception as error:
            raise UserError(
                f"{_FIELD} = {name!r}: expected a template that accepts a message of role {role!r} after the policy's "
                f"turn, but it raises: {error}"
            ) from error
        shows_tools = not self._tools or self._tools[0]["function"]["name"] in whole
        expect(shows_tools, _FIELD, name, "a template that renders tools", "Use a model that was trained with tools.")
        expect(
            "r3z" in answer, _FIELD, name, f"a template that renders messages of role {role!r}",
            "Use a model that supports this role.",
        )  # fmt: skip
        expect(
            first in self._end_token_ids, _FIELD, name,
            f"a template that ends the policy's turn with one of the end tokens {sorted(self._end_token_ids)}, but the "
            f"turn is followed by {answer[:20]!r}",
            "Add the token to eos_token_id in generation_config.json.",
        )  # fmt: skip
        if rewrites == "refuse":
            self._check_keeps(reply, answer)

    def _check_keeps(self, reply: Message, answer: str) -> None:
        head = self._render([_QUESTION])
        thinks = "<think>" in str(self.tokenizer.chat_template) and "</think>" not in head
        turn = f"<think>\nt5w\n</think>\n\n{_POLICY_TEXT}" if thinks else _POLICY_TEXT
        spaced = f"{turn} \n" if thinks else f" {turn} \n"
        for tried, suspect in ((turn, "dropped thinking?"), (spaced, "white space at its ends?")):
            expect(
                self._conversation(tried, reply) == head + tried + answer, _FIELD, self.tokenizer.name_or_path,
                f"a template that keeps earlier turns as they were sampled, but it changes {tried!r} ({suspect})",
                "Use one that keeps them, or set conversations.rewrites append to keep every turn as it was sampled.",
            )  # fmt: skip

    def _check_written(self, render: Render, messages: list[Message], tools: Tools | None) -> None:
        if missing := left_out(render, messages, tools, str(self.tokenizer.chat_template)):
            raise ValueError(f"the chat template leaves out {missing}")

    def _conversation(self, turn: str, reply: Message) -> str:
        return self._render([_QUESTION, {"role": "assistant", "content": turn}, reply])

    def _answer_text(self, messages: Sequence[Message]) -> str:
        _, found, answer = self._render(
            [_QUESTION, {"role": "assistant", "content": _POLICY_TEXT}, *messages]
        ).partition(_POLICY_TEXT)
        if not found:
            raise ValueError("the template leaves out the policy's turn")
        return answer

    def _render(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, tools=tools or self._tools, **self._options
        )

    def _with_calls(self, message: Message) -> Message:
        """Writes an assistant's calls into its text, if the template would leave them out."""
        if "tool_calls" not in message or "tool_calls" in str(self.tokenizer.chat_template):
            return message
        calls = [f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message["tool_calls"]]
        return {"role": message["role"], "content": "".join([message["content"], *calls])}

    def _as_text(self, message: Message) -> Message:
        """Breaks up special tokens in the message's text, so that only the template can begin or end a message."""
        return mapped(message, lambda text: self._special.sub(lambda found: found[0][0] + BREAK + found[0][1:], text))

    def _tokens(self, text: str) -> list[int]:
        with self._lock:
            parts = [self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(BREAK)]
        return [token_id for part in parts for token_id in part]
