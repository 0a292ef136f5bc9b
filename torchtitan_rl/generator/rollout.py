"""The sampling loop. Conversations advance independently, and the engine's batch is refilled as turns end."""

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from torchtitan_rl.conversation import Answer, Conversation
from torchtitan_rl.events import timed
from torchtitan_rl.generator.turn_engine import TurnEngine

if TYPE_CHECKING:
    from torchtitan_rl.environments.pool import EnvironmentPool

Share = Callable[[Any], Any]
"""Returns the value of the engine's first rank on all its ranks, because all must add the same requests in the same
order."""


def roll_out(
    conversations: list[Conversation],
    engine: TurnEngine,
    environments: "EnvironmentPool | None",
    share: Share,
    *,
    wait_for_answers: bool,
    seeded: bool = False,
) -> Iterator[int]:
    """Sample all conversations to their end. Yields the index of each when it ends.

    A conversation without an environment ends with its first turn. One that has ended in an earlier step comes first. The
    caller may stop at any of them: each other conversation is then in the engine, waits for its environment, or has ended.

    Args:
        environments: the running environments on the engine's first rank; None on other ranks and without environments.
        wait_for_answers: pause sampling until every outstanding answer has arrived. The composition of a batch, and
            so the last bits of its numbers, then does not depend on timing.
        seeded: give each turn its own seed even without environments.
    """
    in_turns: Collection[int] = share(environments.indices if environments else ())
    # Without environments all requests are added at once, so the batch's draws are repeatable and cost less than seeds.
    seeded = seeded or bool(in_turns)
    asked = 0
    for index, conversation in enumerate(conversations):
        if index in in_turns and (conversation.waits or not conversation.in_turns):
            asked += 1
        elif conversation.finish_reason is None:
            engine.add(index, conversation, seeded=seeded)
    yield from [i for i, one in enumerate(conversations) if one.finish_reason is not None]
    while engine.busy or asked:
        turns = engine.step() if engine.busy else []
        over: list[int] = []
        for sampled in turns:
            index = sampled.conversation_idx
            conversations[index].append_turn(sampled)
            if not conversations[index].in_turns:
                over.append(index)
                continue
            asked += 1
            if environments is not None:
                environments.step_async(index)
        yield from over
        if not asked:
            continue
        with timed("generate/environments"):
            answers: list[Answer] = share(
                environments and environments.answers(wait=not engine.busy, all=wait_for_answers)
            )
        asked -= len(answers)
        for answer in answers:
            conversations[answer.conversation_idx].append_answer(answer)
            if answer.end is None:
                engine.add(
                    answer.conversation_idx, conversations[answer.conversation_idx], seeded=seeded
                )
        yield from [answer.conversation_idx for answer in answers if answer.end is not None]
