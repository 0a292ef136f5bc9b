"""Unfinished groups' conversations in a checkpoint. After a resume, new environments hear the policy's turns again."""

import base64
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchtitan_rl.conversation import Conversation, Sampled, TraceTokens
from torchtitan_rl.types import FinishReason

if TYPE_CHECKING:
    from torchtitan_rl.generator.generator import Generator


_FIELDS = "token_ids", "sampler_logprobs", "loss_mask", "versions"
"""Those of `TraceTokens` that are kept, beside the records."""


class Recorded(NamedTuple):
    """A conversation between two steps. What an environment has said is in it to compare."""

    seed: int
    prompt: list[int] | None
    """The prompt's tokens after the reset; None without an environment so far."""
    traces: list[TraceTokens]
    texts: list[str]
    """The turns that an environment has answered, and its rewards."""
    rewards: list[float | None]
    waits: bool
    last: tuple[str, FinishReason | None]
    """The text and the end of the policy's last turn."""
    finish_reason: FinishReason | None

    @classmethod
    def of(cls, conversation: Conversation) -> "Recorded":
        """The conversation so far, after its `end_step`."""
        last, turns = conversation.last, conversation.turns
        return cls(
            seed=conversation.seed,
            prompt=conversation.prompt.token_ids.tolist() if conversation.in_turns else None,
            traces=conversation.traces,
            texts=[turn.text for turn in turns],
            rewards=[turn.reward for turn in turns],
            waits=conversation.waits,
            last=(last.text, last.finish_reason) if last and last.finish_reason else ("", None),
            finish_reason=conversation.finish_reason,
        )

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values: records as their shape and base64."""
        traces: list[list[Any]] = []
        for trace in self.traces:
            shape, data = None, b""
            if trace.records is not None:
                shape, data = trace.records.shape, trace.records.tobytes()
            fields = [getattr(trace, name) for name in _FIELDS]
            traces.append([*fields, shape, base64.b64encode(data).decode()])
        return {**self._asdict(), "traces": traces}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Recorded":
        """What `as_json` returned."""
        traces: list[TraceTokens] = []
        for *fields, shape, encoded in values["traces"]:
            traces.append(TraceTokens(**dict(zip(_FIELDS, fields, strict=True))))
            if shape is not None:
                records = np.frombuffer(base64.b64decode(encoded), dtype=np.uint8)
                traces[-1].records = records.reshape(shape)
        return cls(**{**values, "traces": traces})

    @property
    def num_tokens(self) -> int:
        """Tokens of all traces."""
        return sum(len(trace.token_ids) for trace in self.traces)

    def begins_with(self, other: "Recorded") -> bool:
        """Whether this one may go on from where the other is: its environment has said the same."""
        same = self.prompt == other.prompt and len(self.traces) >= len(other.traces)
        same = same and self.rewards[: len(other.rewards)] == other.rewards
        for own, trace in zip(self.traces, other.traces, strict=False):
            length = len(trace.token_ids)
            same = same and own.token_ids[:length] == trace.token_ids
            same = same and own.loss_mask[:length] == trace.loss_mask
        return same

    def next_turn(self, conversation: Conversation) -> Sampled | None:
        """Returns the next turn that was answered; None after the last. If the environment has said something else, the turn
        has no tokens and ends the conversation."""
        left, is_over = len(self.texts) - len(conversation.turns), self.finish_reason is not None
        if not self.begins_with(Recorded.of(conversation)) or (is_over and left == 0):
            return Sampled(-1, [], [], "", "length")
        if left == 0:
            return None
        trace, begin = self.traces[conversation.current], len(conversation.trace.token_ids)
        turn = slice(begin, begin + [*trace.loss_mask[begin:], False].index(False))
        end = self.last[1] if is_over and left == 1 else "stop"
        tokens, logprobs = trace.token_ids[turn], trace.sampler_logprobs[turn]
        return Sampled(-1, tokens, logprobs, self.texts[-left], end)

    def complete(self, conversation: Conversation) -> bool:
        """Give a conversation the last turn, if that has no answer, and the versions. Returns whether it is then this one."""
        trace, begin = self.traces[conversation.current], len(conversation.trace.token_ids)
        if conversation.finish_reason is None and begin < len(trace.token_ids):
            tokens, logprobs = trace.token_ids[begin:], trace.sampler_logprobs[begin:]
            conversation.append_turn(Sampled(-1, tokens, logprobs, *self.last))
        for own, trace in zip(conversation.traces, self.traces, strict=False):
            own.versions, own.records = list(trace.versions), trace.records
        now = Recorded.of(conversation)
        is_same = self.begins_with(now) and now.begins_with(self)
        return is_same and now.finish_reason == self.finish_reason


def replay(generator: "Generator", asked: list[tuple[list[Conversation], int, Recorded]]) -> int:
    """Put conversations where they were recorded, with environments that stay open for a sampling round. Collective for a
    replica's ranks.

    Args:
        asked: (a group of new conversations, the place in it, what was recorded). A conversation whose environment now
            answers otherwise stays new.

    Returns: how many do.
    """
    asked.sort(key=lambda one: one[2].finish_reason is None)  # the last ones stay open
    factory = generator.environments
    played = [replace(group[i], traces=[TraceTokens()], turns=[]) for group, i, _ in asked]
    num_open = sum(recorded.finish_reason is None for *_, recorded in asked)
    most_open = max(factory.config.max_open, num_open)
    # An environment that hears what it did not expect may fail.
    limits = replace(factory.config, on_failure="none", max_open=most_open)
    pool = nullcontext()
    if generator.rank_in_replica == 0:
        pool = closing(factory.start(played, generator.make_grammar, limits=limits))
    with pool as environments:
        missing = len(generator.share(environments.indices if environments else ()))
        while missing:
            answers = environments.answers(wait=True, all=False) if environments else ()
            for answer in generator.share(answers):
                index, turn = answer.conversation_idx, None
                played[index].append_answer(answer)
                if played[index].in_turns and answer.end is None:
                    turn = asked[index][2].next_turn(played[index])
                if turn is None:
                    missing -= 1
                    continue
                played[index].append_turn(turn)
                if environments:
                    environments.step_async(index)
        if environments:
            environments.leave()
    num_new = 0
    for conversation, (group, i, recorded) in zip(played, asked, strict=True):
        if recorded.complete(conversation):
            group[i] = conversation
        else:
            num_new += 1
    return num_new
