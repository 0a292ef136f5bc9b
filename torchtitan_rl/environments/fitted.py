"""An environment that adapts to the run: to its limits, its format of tool calls and its chat template."""

import math
from collections.abc import Callable, Collection
from functools import partial

from torchtitan_rl.conversation import Conversation
from torchtitan_rl.data.tool_calls import CallParser, ToolCall, parse_calls, without_thinking
from torchtitan_rl.data.turns import Environment
from torchtitan_rl.environments.checks import described
from torchtitan_rl.rewards.workers import WorkerPool


class FittedEnvironment(Environment):
    """Base of environments that read the policy's tool calls. A run calls `fit` before the reset."""

    _parser: CallParser | None = None
    _seconds = math.inf
    _most_characters: float = math.inf
    _conversation: Conversation | None = None
    _begins_thinking = False
    _in_order = False
    _make_grammar: Callable[..., str] | None = None
    _workers: WorkerPool | None = None

    def fit(
        self,
        *,
        conversation: Conversation,
        call_seconds: float,
        most_characters: int,
        parser: CallParser,
        begins_thinking: bool,
        in_order: bool = False,
        make_grammar: Callable[..., str] | None = None,
        workers: WorkerPool | None = None,
    ) -> None:
        """Adapt to a run, whose limits lower the environment's own.

        Args:
            conversation: of this environment; it grows while it is played.
            begins_thinking: whether each turn of the policy begins inside a `<think>` block.
            in_order: whether requests that an agent sends at the same time must be answered in an order that does not
                depend on timing.
            make_grammar: `Grammars.of`; None where the engine does not record the tokens that it kept.
            workers: `worker_pool` of `Conversations`.
        """
        self._parser = self._parser or parser
        self._seconds = min(self._seconds, 0.9 * call_seconds)
        self._most_characters = min(self._most_characters, most_characters)
        self._conversation, self._in_order = conversation, in_order
        self._begins_thinking, self._workers = begins_thinking, workers
        self._make_grammar = make_grammar and partial(make_grammar, begins_thinking=begins_thinking)

    def _spoken(self, text: str) -> str:
        """Returns the text without the policy's thoughts."""
        return without_thinking(f"<think>{text}" if self._begins_thinking else text)

    def _calls(self, spoken: str, tools: Collection[str]) -> list[ToolCall]:
        """Returns the tool calls in a text without thoughts; one with an error if they cannot be read."""
        try:
            return (self._parser or parse_calls)(spoken, tools)
        except Exception as error:
            return [ToolCall("", {}, f"the call cannot be read: {described(error)}")]
