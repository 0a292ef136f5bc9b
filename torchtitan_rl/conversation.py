"""The state of one unfinished sample: the policy's turns and the environment's answers so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from zlib import crc32

import numpy as np

from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import (
    NO_RECORD,
    Completion,
    FinishReason,
    Prompt,
    RecordArray,
    Trace,
    TurnRecord,
)


class Sampled(NamedTuple):
    """One turn of the policy, as the engine sampled it."""

    conversation_idx: int
    """Index of its conversation in the call."""
    token_ids: Sequence[int]
    sampler_logprobs: Sequence[float]
    text: str
    finish_reason: FinishReason | None
    """stop or length; None for a turn that is not at its end"""
    records: RecordArray | None = None
    """What the engine recorded at the first tokens of the context and this turn; None if it records nothing."""


class Answer(NamedTuple):
    """An environment's answer to one turn or its first messages, identical on every rank of the engine."""

    conversation_idx: int = -1
    """Index of its conversation in the call, set by the pool."""
    turn: TurnRecord | None = None
    """The answered turn, with its reward if it has one; None for the reset."""
    token_ids: Sequence[int] = ()
    """Rendered tokens that the policy reads next."""
    end: FinishReason | None = None
    """Why the conversation is over; None if it continues."""
    error: str | None = None
    """The environment's error, if `end` is "env_error"."""
    prompt: Prompt | None = None
    """Of a reset: the prompt with the environment's first messages; None if the conversation has no environment."""
    trace: int | None = None
    """Index of the trace that the tokens continue; None: the current one."""
    origin: Trace | None = None
    """Of a new trace, whose context the tokens are; None if the tokens continue one."""
    grammar: str | None = None
    """What the policy's next turn must be: a structural tag of vLLM, as JSON. None: any text."""


@dataclass(slots=True, kw_only=True, eq=False)
class TraceTokens:
    """One exact token sequence. Tokens are only appended: the policy's as they were sampled, others as they were
    rendered."""

    origin: Trace = Trace()
    token_ids: list[int] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    records: RecordArray | None = None
    """What the engine recorded at the prompt's tokens, of the first trace, and at these."""
    versions: list[int] = field(default_factory=list)
    """The policy version of the tokens from earlier steps. The other tokens are of this step."""

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_sampled: bool
    ) -> None:
        """Append tokens that the policy sampled, or others."""
        self.token_ids += token_ids
        self.sampler_logprobs += logprobs
        self.loss_mask += [is_sampled] * len(token_ids)

    def remember(self, records: RecordArray, positions: int) -> None:
        """Append what the engine recorded to what it recorded in earlier turns, so that the first `positions` tokens
        have a row.

        A later turn may compute an earlier token again, with newer weights. What counts is how a token was read when
        its successor was sampled.
        """
        if self.records is not None:
            records = np.concatenate([self.records, records[len(self.records) :]])
        self.records = filled(records, positions)

    @property
    def context_key(self) -> int:
        """A number that depends on the context alone, not on when the trace began."""
        context = self.token_ids[: self.origin.context_tokens]
        return crc32(np.array(context, np.int32).tobytes())


def filled(records: RecordArray, positions: int) -> RecordArray:
    """Returns `positions` rows: the first ones of `records`, and NO_RECORD where there are no more."""
    missing = max(0, positions - len(records))
    shape = (missing, *records.shape[1:])
    without = np.full(shape, NO_RECORD, np.uint8)
    return np.concatenate([records[:positions], without])


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """A rollout: its traces, one of which is continued next. Most have only one."""

    prompt: Prompt
    sample_idx: int
    sampling: SamplingConfig
    """Its max_tokens limits the sampled tokens of all turns together."""
    most_in_turn: int
    """Maximum number of sampled tokens in one turn."""
    most_tokens: int
    """Maximum number of tokens in the prompt and all turns of one trace together."""
    most_in_rollout: int | None = None
    """Maximum number of tokens in all traces together; None: no limit."""
    seed: int = 0
    """For its environment. It differs from sample to sample and from step to step."""
    in_turns: bool = False
    """Whether an environment answers. Without one, the first turn is the last."""
    traces: list[TraceTokens] = field(default_factory=lambda: [TraceTokens()])
    current: int = 0
    """Index of the trace in which the policy's last turn was sampled, or its next one will be."""
    num_sampled: int = 0
    last: Sampled | None = None
    """The policy's most recent turn, whose log-probabilities are in its trace."""
    waits: bool = False
    """Whether an environment has yet to answer that turn."""
    grammar: str | None = None
    """That of the policy's next turn: see `Answer`."""
    turns: list[TurnRecord] = field(default_factory=list)
    """The turns that have been answered."""
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def trace(self) -> TraceTokens:
        """The current trace."""
        return self.traces[self.current]

    @property
    def begun(self) -> Sampled | None:
        """The turn that the policy has begun in an earlier step and goes on with."""
        is_begun = self.last is not None and self.last.finish_reason is None
        return self.last if is_begun else None

    @property
    def context(self) -> list[int]:
        """All tokens before the next turn."""
        before = self.prompt.token_ids.tolist() if self.current == 0 else []
        return [*before, *self.trace.token_ids]

    def room(self, more: int = 0, *, trace: int | None = None) -> int:
        """Returns the most tokens that the next turn may have after `more` tokens of an answer; 0 or less means
        none.

        Args:
            trace: the trace of the answer, which may be a new one. None: the current one.
        """
        trace = self.current if trace is None else trace
        used = more
        if trace < len(self.traces):
            used += len(self.traces[trace].token_ids)
        if trace == 0:
            used += len(self.prompt.token_ids)
        left_to_sample = self.sampling.max_tokens - self.num_sampled
        left_in_trace = self.most_tokens - used
        left_in_turn = self.most_in_turn - len(self.begun.token_ids if self.begun else ())
        room = min(left_to_sample, left_in_trace, left_in_turn)
        if self.most_in_rollout is None:
            return room
        whole = len(self.prompt.token_ids) + more
        for other in self.traces:
            whole += len(other.token_ids)
        return min(room, self.most_in_rollout - whole)

    @property
    def turn_key(self) -> tuple[int, ...]:
        """Numbers that name the next turn within the rollout, for its seed: (turn,) in the first trace.

        In another one the turn, the context, and how many earlier traces have the same. So the order in which
        sub-agents take their turns does not change what each is told.
        """
        number = sum(turn.trace == self.current for turn in self.turns)
        if self.current == 0:
            return (number,)
        key = self.trace.context_key
        alike = sum(trace.context_key == key for trace in self.traces[1 : self.current])
        return number, key, alike

    def append_turn(self, sampled: Sampled) -> None:
        """Append a turn of the policy as it was sampled, or as far as it was: it then has no finish_reason, and the next one
        goes on with it."""
        begun = self.begun
        self.trace.append(sampled.token_ids, sampled.sampler_logprobs, is_sampled=True)
        if sampled.records is not None:
            read = len(self.context) - 1  # not the last token yet
            self.trace.remember(sampled.records, read)
        self.num_sampled += len(sampled.token_ids)
        if begun is not None:
            sampled = sampled._replace(token_ids=[*begun.token_ids, *sampled.token_ids])
        self.last = sampled
        if sampled.finish_reason is None and self.room() <= 0:  # a limit is lower after a resume
            self.last = sampled = sampled._replace(finish_reason="length")
        self.waits = self.in_turns and sampled.finish_reason is not None
        if not self.in_turns:
            self.finish_reason = sampled.finish_reason

    def append_answer(self, answer: Answer) -> None:
        """Append the environment's answer to the last turn. The answer to the reset replaces the prompt."""
        if answer.origin is not None:
            self.traces.append(TraceTokens(origin=answer.origin))
        if answer.trace is not None:
            self.current = answer.trace
        logprobs = [0.0] * len(answer.token_ids)
        self.trace.append(answer.token_ids, logprobs, is_sampled=False)
        if answer.turn is not None:
            self.turns.append(answer.turn)
        elif answer.prompt is not None:
            self.prompt = answer.prompt
            self.in_turns = True
        self.waits = False
        self.grammar = answer.grammar
        self.finish_reason = answer.end
        self.error = answer.error

    def end_step(self, policy_version: int) -> None:
        """Note the policy version of this step's tokens, before those of the next."""
        for trace in self.traces:
            trace.versions += [policy_version] * (len(trace.token_ids) - len(trace.versions))

    def completion(self, policy_version: int, shared: Prompt | None = None) -> Completion:
        """Returns the whole conversation as a completion. Call it when the conversation is over.

        `shared`: the group's prompt. The completion has its own if that has other tokens.
        """
        own_prompt = None
        has_read = shared is not None and self.num_sampled > 0  # a failed reset has no tokens
        if has_read and not np.array_equal(self.prompt.token_ids, shared.token_ids):
            own_prompt = self.prompt
        text = self.last.text if self.last else ""
        if self.in_turns:
            text = "\n".join(turn.text for turn in self.turns)
        versions: list[int] = []
        whole = TraceTokens()
        traces: list[Trace] = []
        recorded = [trace.records for trace in self.traces if trace.records is not None]
        records: list[RecordArray] = []  # of the prompt's tokens and all traces
        for i, trace in enumerate(self.traces):
            if recorded:
                num_prompt = len(self.prompt.token_ids) if i == 0 else 0
                own = recorded[0][:0] if trace.records is None else trace.records
                records.append(filled(own, num_prompt + len(trace.token_ids)))
            traces.append(replace(trace.origin, begin=len(whole.token_ids)))
            whole.token_ids += trace.token_ids
            whole.sampler_logprobs += trace.sampler_logprobs
            whole.loss_mask += trace.loss_mask
            num_new = len(trace.token_ids) - len(trace.versions)
            versions += trace.versions + [policy_version] * num_new
        is_carried = any(trace.versions for trace in self.traces)
        return Completion(
            sample_idx=self.sample_idx,
            policy_version=policy_version,
            token_ids=whole.token_ids,
            sampler_logprobs=whole.sampler_logprobs,
            loss_mask=whole.loss_mask,
            text=text,
            finish_reason=self.finish_reason,
            turns=tuple(self.turns),
            traces=tuple(traces),
            prompt=own_prompt,
            error=self.error,
            token_versions=np.array(versions, dtype=np.int32) if is_carried else None,
            sampler_records=np.concatenate(records) if records else None,
        )
