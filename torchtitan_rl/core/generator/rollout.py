"""The one loop that samples: every conversation goes on by itself, and what ends makes room for what waits."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torchtitan_rl.core.events import timed
from torchtitan_rl.core.generator.conversation import Answer, Conversation, ResetResult, Sampled
from torchtitan_rl.core.types import FinishReason

Share = Callable[[Any], Any]
"""The value of an engine's first rank, on all its ranks: all must ask the engine for the same, in the same order."""


class Engine(Protocol):
    """What samples: requests go in at any time, and whole turns come out."""

    @property
    def busy(self) -> bool: ...

    def add(self, place: int, conversation: Conversation, *, seeded: bool) -> None:
        """Ask for the conversation's next turn, sampled with a seed of its own or with the draws of the whole batch."""

    def step(self) -> list[Sampled]:
        """Sample a token of every turn that has a place in the batch; the turns that ended with it."""


class Environments(Protocol):
    """The environments of one call's conversations, by place."""

    def reset_results(self) -> dict[int, ResetResult]:
        """Waits for all resets and returns their results by place."""

    def step_async(self, place: int) -> None:
        """Starts the environment's step on the policy's last turn."""

    def answers(self, *, wait: bool, all: bool) -> list[Answer]:
        """Returns the answers that have arrived; with `wait` at least one, with `all` every outstanding one."""

    def close(self, place: int, reason: FinishReason) -> None:
        """Close the environment of a conversation that is over."""


class EnvironmentFactory(Protocol):
    """Makes the environments that answer the policy."""

    max_turn_tokens: int | None
    """Tokens of one turn; None: no other limit than the completion's."""
    wait_for_answers: bool
    """Sample nothing while an environment is asked."""

    def start(self, conversations: list[Conversation]) -> Environments:
        """The environments of these conversations, each new and being reset."""


def roll_out(
    conversations: list[Conversation],
    engine: Engine,
    environments: Environments | None,
    share: Share,
    *,
    wait_for_answers: bool,
    seeded: bool = False,
) -> Iterator[int]:
    """Bring all conversations to their end; the place of each as it ends. One without an environment ends with its first turn.

    Args:
        environments: the running environments, on the engine's first rank; None on other ranks and without environments.
        wait_for_answers: sample nothing while an environment is asked, so that what is in a batch, and with it the last
            bit of every number, does not depend on time.
        seeded: sample each conversation with seeds of its own even where all are asked for at once.
    """
    with timed("generate/environments"):
        reset_results: dict[int, ResetResult] = share(environments and environments.reset_results())
    # Where all is asked for at once, the order of the batch's draws is the same again, and costs less than seeds.
    seeded = seeded or bool(reset_results)
    for place, result in (reset_results or {}).items():
        _open(place, conversations[place], result, environments)
    for place, conversation in enumerate(conversations):
        if conversation.finish_reason is None:
            engine.add(place, conversation, seeded=seeded)
        else:
            yield place
    asked = 0
    while engine.busy or asked:
        for sampled in engine.step() if engine.busy else ():
            conversation = conversations[sampled.place]
            conversation.append_turn(sampled)
            if conversation.in_turns:
                asked += 1
                if environments is not None:
                    environments.step_async(sampled.place)
            else:
                yield sampled.place
        if not asked:
            continue
        with timed("generate/environments"):
            answers: list[Answer] = share(
                environments and environments.answers(wait=not engine.busy, all=wait_for_answers)
            )
        asked -= len(answers)
        for answer in answers:
            conversations[answer.place].append_answer(answer)
            if answer.end is None:
                engine.add(answer.place, conversations[answer.place], seeded=seeded)
            else:
                yield answer.place


def _open(place: int, conversation: Conversation, result: ResetResult, environments: Environments | None) -> None:
    """Give a conversation the prompt with what its environment said first, or end it: it failed, or there is no room."""
    conversation.in_turns = True
    conversation.prompt, conversation.error = result
    if result.error is not None:
        conversation.finish_reason = "env_error"
    elif conversation.room() <= 0:
        conversation.finish_reason = "max_tokens"
        if environments is not None:
            environments.close(place, "max_tokens")
