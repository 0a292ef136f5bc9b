"""`Conversations`: which prompts have an environment, and what limits a conversation."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torchtitan.config import Configurable

from torchtitan_rl.core.errors import expect
from torchtitan_rl.core.generator.conversation import Conversation
from torchtitan_rl.core.generator.environment import Environment
from torchtitan_rl.core.types import Prompt
from torchtitan_rl.library.environments.pool import ConversationError, EnvironmentPool, Limits
from torchtitan_rl.library.environments.template import ChatTemplate
from torchtitan_rl.library.environments.tools import ToolEnvironment, tool_schemas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.library.tasks import Task


class Conversations(Configurable):
    """Makes each sample's environment, and the pool that asks them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        max_turns: int = 8
        """Turns of the policy in one conversation; one more is cut, with finish_reason "max_turns"."""

        max_turn_tokens: int | None = None
        """Tokens of one turn; a longer one ends the conversation with "max_tokens", as sampling.max_tokens does over all
        turns and generator.max_model_len over all that is said. None: only these two."""

        time_limit_seconds: float = 0.0
        """Of a whole conversation, looked at where an environment is asked; it ends with "time". 0: no limit."""

        call_seconds: float = 60.0
        """Longest time of one answer of an environment; a longer one has failed. 0: no limit."""

        max_answer_characters: int = 20_000
        """Longest message of an environment; a longer one has failed."""

        on_failure: Literal["raise", "none"] = "raise"
        """When an environment raises, takes too long or returns no answer: raise ends the run; none ends the conversation
        with "env_error" and no reward (it takes no part in the baseline, is counted and shown)."""

        rewrites: Literal["refuse", "append"] = "refuse"
        """A chat template that shows earlier turns otherwise than they were sampled (dropped thinking, for example): an
        error before training, or go on with every turn as it was sampled."""

        wait_for_answers: bool = False
        """Sample nothing while an environment is asked. What is sampled together then does not depend on time, so a run is
        repeatable to the last bit; for tools that answer at once. Without it the tokens are the same, but for ties that
        the last bit of a log-probability breaks."""

        def check(self) -> None:
            """Raise UserError for impossible values."""
            least = {"max_turns": 1, "max_turn_tokens": 1, "time_limit_seconds": 0, "call_seconds": 0}
            for name, smallest in {**least, "max_answer_characters": 1}.items():
                value = getattr(self, name)
                holds = value is None or (math.isfinite(value) and value >= smallest)
                expect(holds, f"conversations.{name}", value, f"{smallest} or more", "Correct the value.")

    def __init__(
        self,
        config: Config,
        *,
        members: "Mapping[str, Task]",
        tokenizer: "PreTrainedTokenizerBase",
        end_token_ids: Collection[int],
        template_options: Mapping[str, Any],
    ) -> None:
        """
        Args:
            members: the tasks that prompts come from, by `Prompt.task`.
            template_options: what the chat template is told besides messages and tools.
        """
        self.config = config
        self.max_turn_tokens = config.max_turn_tokens
        self.wait_for_answers = config.wait_for_answers
        self._members = members
        self._templates = {
            name: ChatTemplate(
                tokenizer, end_token_ids=end_token_ids, tools=tool_schemas(task.tools()) or None, **template_options
            )
            for name, task in members.items()
        }

    def _environment(self, prompt: Prompt) -> Environment | None:
        task = self._members[prompt.task]
        try:
            environment = task.environment(prompt)
            return ToolEnvironment(task.tools()) if environment is None and task.tools() else environment
        except Exception as error:
            told = f"{type(task).__name__}.environment failed on prompt {prompt.text[-80:]!r}"
            raise ConversationError(f"{told}: {type(error).__name__}: {error}. Correct it.") from error

    def check(self, prompts: Collection[Prompt]) -> None:
        """Try the chat template of each task that has environments. Raises UserError."""
        for prompt in {prompt.task: prompt for prompt in prompts}.values():
            if (environment := self._environment(prompt)) is not None:
                expect(
                    prompt.messages is not None, "task", type(self._members[prompt.task]).__name__,
                    "examples with messages, rendered by a chat template, for conversations",
                    "Give Example.messages, and leave prompts.apply_chat_template on.",
                )  # fmt: skip
                self._templates[prompt.task].check(environment.role, self.config.rewrites)

    def start(self, conversations: Sequence[Conversation]) -> EnvironmentPool:
        """Of the environments of these conversations, each new and being reset."""
        config = self.config
        limits = Limits(
            turns=config.max_turns,
            seconds=config.time_limit_seconds or math.inf,
            call_seconds=config.call_seconds or math.inf,
            answer_characters=config.max_answer_characters,
        )
        pool = EnvironmentPool(limits, on_failure=config.on_failure)
        for place, one in enumerate(conversations):
            if (environment := self._environment(one.prompt)) is not None:
                pool.add(place, one, environment, self._templates[one.prompt.task])
        return pool
