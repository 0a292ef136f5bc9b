"""A chat template as conversations need it: what is said next is rendered alone, and nothing said before is touched."""

import copy
import re
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_rl.core.errors import UserError, expect
from torchtitan_rl.core.generator.environment import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAID = "x7q"
"""Stands for what the policy said; its place in the rendered text is where an answer's own text begins."""
_ASKED: Message = {"role": "user", "content": "q"}
_FIELD = "hf_assets_path (chat template)"
_BREAK = "\ufdd0"
"""Where the text of a special token is broken, so that it is read as text. A noncharacter, which no text holds."""


class ChatTemplate:
    """Renders what an environment says as the tokens that follow the policy's own."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        end_token_ids: Collection[int],
        tools: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            end_token_ids: any of which ends a turn of the policy.
            tools: as the prompt's rendering was told of.
            options: further arguments of the template, as the prompt's rendering had them.
        """
        # A copy and a lock: conversations are rendered in threads, for which no tokenizer is made.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._end_token_ids = end_token_ids
        self._tools = tools
        self._options = options

    def prompt(self, messages: Sequence[Message], said: Sequence[Message]) -> tuple[str, list[int]]:
        """Text and tokens of a whole prompt with what an environment said, up to where the policy begins to speak."""
        text = self._render([*messages, *map(self._as_text, said)])
        return text.replace(_BREAK, ""), self._tokens(text)

    def answer(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """The tokens between the policy's `last_token` and its next turn: the turn's end, the messages, the next turn's head.

        Raises what the template raises for messages in an order that it does not allow.
        """
        token_ids = self._tokens(self._answer_text([*map(self._as_text, messages)]))
        return token_ids[token_ids[0] == last_token :]

    def check(self, role: str, rewrites: Literal["refuse", "append"]) -> None:
        """Try the template with an answer in `role`.

        Raises:
            UserError: without a template; where it knows no tools or no such role; where a turn does not end with one of the
                end tokens; where it rewrites earlier turns and `rewrites` is "refuse".
        """
        name = self._tokenizer.name_or_path
        expect(
            bool(self._tokenizer.chat_template), _FIELD, name, "a tokenizer with a chat template, for conversations",
            "Use an instruct model's folder, or set chat_template in its tokenizer_config.json.",
        )  # fmt: skip
        reply: Message = {"role": role, "content": "r3z"} | ({"name": "tool"} if role == "tool" else {})
        try:
            answer = self._answer_text([reply])
            first, whole = self._tokens(answer)[0], self._conversation(_SAID, reply)
        except Exception as error:
            raise UserError(
                f"{_FIELD} = {name!r}: expected one that takes a message of role {role!r} after the policy's; it says: {error}"
            ) from error
        told = not self._tools or self._tools[0]["function"]["name"] in whole
        expect(told, _FIELD, name, "one that shows tools to the policy", "Use a model that was trained with tools.")
        expect(
            "r3z" in answer, _FIELD, name, f"one that shows messages of role {role!r}", "Use a model that knows them."
        )
        expect(
            first in self._end_token_ids, _FIELD, name,
            f"one that ends the policy's turn with an end token {sorted(self._end_token_ids)}, but it goes on {answer[:20]!r}",
            "Add the token to eos_token_id in generation_config.json.",
        )  # fmt: skip
        head = self._render([_ASKED])
        thinks = "<think>" in str(self._tokenizer.chat_template) and "</think>" not in head
        said = f"<think>\nt5w\n</think>\n\n{_SAID}" if thinks else _SAID
        expect(
            rewrites == "append" or self._conversation(said, reply) == head + said + answer, _FIELD, name,
            f"one that leaves earlier turns as they were; after {said!r} the policy would read other text than it was sampled "
            "with (thinking that is dropped, for example)",
            "Use a template that keeps them, or conversations.rewrites append: go on with what was said as it was sampled.",
        )  # fmt: skip

    def _conversation(self, said: str, reply: Message) -> str:
        return self._render([_ASKED, {"role": "assistant", "content": said}, reply])

    def _answer_text(self, messages: Sequence[Message]) -> str:
        _, found, answer = self._render([_ASKED, {"role": "assistant", "content": _SAID}, *messages]).partition(_SAID)
        if not found:
            raise ValueError("the template leaves out what the policy said")
        return answer

    def _render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, tools=self._tools, **self._options
        )

    def _as_text(self, message: Message) -> Message:
        """The message with each special token's text broken: only the template may end a message or begin another's."""
        return {
            key: self._special.sub(lambda found: found[0][0] + _BREAK + found[0][1:], value)
            if isinstance(value, str)
            else value
            for key, value in message.items()
        }

    def _tokens(self, text: str) -> list[int]:
        with self._lock:
            parts = [self._tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(_BREAK)]
        return [token_id for part in parts for token_id in part]
