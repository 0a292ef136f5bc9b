"""One replica's share of a step's prompts while it is sampled."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from itertools import chain
from typing import TYPE_CHECKING

from torchtitan_rl.conversation import Conversation
from torchtitan_rl.events import record_metrics
from torchtitan_rl.generator.engine_stats import EngineStats
from torchtitan_rl.generator.rollout import Share, roll_out
from torchtitan_rl.generator.turn_engine import TurnEngine
from torchtitan_rl.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from torchtitan_rl.environments.factory import Conversations


class SamplingRound:
    """The conversations of one `Generator.generate` call. `whole_groups` samples them, and `cut` ends that early."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        groups: list[list[Conversation]],
        engine: TurnEngine,
        *,
        environments: "Conversations | None",
        make_grammar: Callable[..., str] | None,
        stats: EngineStats | None,
        share: Share,
        is_first: bool,
        policy_version: int,
        seeded: bool,
    ) -> None:
        """
        Args:
            make_grammar: see `FittedEnvironment.fit`.
            is_first: whether this is the engine's first rank, which calls the environments and records the statistics.
            policy_version: of the engine's weights.
        """
        self.prompts = prompts
        self.groups = groups
        """Each prompt's conversations. A conversation that has tokens already goes on after them."""
        self._conversations = list(chain.from_iterable(groups))
        self._engine = engine
        self._environments = environments
        self._make_grammar = make_grammar
        self._stats = stats
        self._share = share
        self._is_first = is_first
        self._policy_version = policy_version
        self._seeded = seeded

    def whole_groups(self) -> Iterator[Group[Completion]]:
        """Sample all conversations. Yields each group when its last conversation has ended."""
        if not self.groups:
            return
        factory = self._environments
        if factory is None or not self._is_first:
            pool = nullcontext()
        else:
            pool = closing(factory.start(self._conversations, self._make_grammar))
        try:
            with closing(self._engine), pool as environments:
                wait = factory is not None and factory.wait_for_answers
                ended = roll_out(
                    self._conversations,
                    self._engine,
                    environments,
                    self._share,
                    wait_for_answers=wait,
                    seeded=self._seeded,
                )
                yield from self._as_they_end(ended)
        finally:
            if self._stats is not None and self._is_first:
                record_metrics(self._stats.metrics(self._engine.outputs))

    def cut(self) -> None:
        """Take every unfinished turn out of the engine. The conversations keep the tokens sampled so far."""
        for turn in self._engine.take_back():
            self._conversations[turn.conversation_idx].append_turn(turn)

    def _as_they_end(self, ended: Iterator[int]) -> Iterator[Group[Completion]]:
        group_idx: list[int] = []  # [conversations]
        for i, group in enumerate(self.groups):
            group_idx += [i] * len(group)
        unfinished = [len(group) for group in self.groups]
        for conversation_idx in ended:
            i = group_idx[conversation_idx]
            unfinished[i] -= 1
            if unfinished[i] > 0:
                continue
            conversations = self.groups[i]
            # A failed reset leaves a prompt without the environment's first messages.
            prompts = [conversation.prompt for conversation in conversations]
            prompt = max(prompts, key=lambda prompt: len(prompt.token_ids))
            samples = [c.completion(self._policy_version) for c in conversations]
            yield Group(prompt=prompt, samples=samples)
