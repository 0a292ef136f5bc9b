"""Tokenizes demonstrations as the policy would have sampled them, with a mask of the tokens to learn."""

import re
from collections.abc import Callable, Collection, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING

import numpy as np

from torchtitan_rl.data.chat_messages import END_OF_THINKING, REASONING, Message
from torchtitan_rl.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TOKENS = re.compile(r"(?:<[^\s<>]+>|\s)+")


def plain_segments(demonstration: Sequence[Message], end: str) -> list[tuple[str, bool]]:
    """Returns the text of a completion without a chat template as one segment to learn, with its end token."""
    if len(demonstration) != 1 or demonstration[0].keys() & {*REASONING, "tool_calls"}:
        raise ValueError(
            "several messages, calls of tools or thinking in a field of its own need a chat template"
        )
    return [(demonstration[0]["content"] + end, True)]


def chat_segments(
    opened: str,
    messages: Sequence[Message],
    demonstration: Sequence[Message],
    render: Callable[..., str],
) -> list[tuple[str, bool]]:
    """Returns the text that follows the prompt in segments, each with whether it is an assistant's turn.

    Args:
        opened: the prompt, rendered from `messages`, up to where the assistant's turn begins.
        render: renders messages with the chat template; takes `add_generation_prompt`.

    Raises ValueError if an assistant's message is not rendered as the prompt opens it, a message changes the text before it,
    or the template adds an empty block of thinking before the thinking in a message's content.
    """
    history, written = list(messages), opened
    segments: list[tuple[str, bool]] = []
    for place, message in enumerate(demonstration):
        history.append(message)
        following = demonstration[place + 1 : place + 2]
        opens = any(after["role"] == "assistant" for after in following)
        learned = message["role"] == "assistant"
        if following and not (opens or learned):
            continue  # templates write several answers of tools as one turn
        for header in (False, True) if opens else (False,):
            whole = render(history, add_generation_prompt=header)
            if segments and not whole.startswith(written):
                written, segments[-1] = _without_closing(written, whole, *segments[-1])
            if not whole.startswith(written):
                before = render(history[:-1], add_generation_prompt=False)
                if learned and not header and whole.startswith(before):
                    raise ValueError(
                        f"its turn does not begin as the prompt ends, with {written[len(before) :]!r}: pass "
                        "--prompts.enable-thinking for rows with thinking, and leave it out for others"
                    )
                raise ValueError(
                    f"the chat template changes its earlier turns before the role {message['role']!r} "
                    "(task.demonstrations last has one turn)"
                )
            segment, written = whole[len(written) :], whole
            inside = (message.get("content") or "").count(END_OF_THINKING)
            if learned and not header and 0 < inside < segment.count(END_OF_THINKING):
                raise ValueError(
                    "the template adds an empty block before its thinking; write that in reasoning_content"
                )
            segments.append((segment, learned and not header))
    return segments


def _without_closing(
    written: str, whole: str, segment: str, learned: bool
) -> tuple[str, tuple[str, bool]]:
    """Returns the text and its last segment without the tokens that close a conversation, if `whole` goes on without them.

    Phi-3's template writes <|endoftext|> after the last turn alone.
    """
    shared = re.sub(r"<[^<>]*\Z", "", commonprefix([written, whole]))
    closing = written[len(shared) :]
    kept = segment.removesuffix(closing)
    if (
        kept != segment
        and _TOKENS.fullmatch(closing)
        and (kept.rstrip().endswith(">") or not learned)
    ):
        return shared, (kept, learned)
    return written, (segment, learned)


def tokenized(
    segments: Sequence[tuple[str, bool]],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    end_token_ids: Collection[int],
) -> Completion:
    """Returns the segments as a completion. Each is tokenized alone, as a turn is sampled after the tokens before it.

    An assistant's turn is learned up to its first end token. What a template writes after it is not.

    Raises ValueError if a turn to learn has no end token, or there is none.
    """
    token_ids: list[int] = []
    mask: list[bool] = []
    for text, learned in segments:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        end = next((place for place, token in enumerate(ids) if token in end_token_ids), None)
        if learned and end is None:
            raise ValueError(f"a turn has none of the end tokens {sorted(end_token_ids)}")
        length = end + 1 if learned else 0
        token_ids += ids
        mask += [True] * length + [False] * (len(ids) - length)
    if not any(mask):
        raise ValueError("no assistant's turn to learn")
    length = int(np.flatnonzero(mask)[-1]) + 1
    return Completion(
        sample_idx=0,
        policy_version=0,
        token_ids=token_ids[:length],
        sampler_logprobs=np.zeros(length),
        text="".join(text for text, _ in segments),
        finish_reason="stop",
        loss_mask=mask[:length],
    )
