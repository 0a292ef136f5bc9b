"""`Conversations` creates the environments of a batch of samples."""

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan.config import Configurable

from torchtitan_rl.conversation import Conversation
from torchtitan_rl.data.task import Task, may_answer
from torchtitan_rl.data.template import ChatTemplate
from torchtitan_rl.data.tool_schemas import tool_schemas
from torchtitan_rl.data.turns import Environment
from torchtitan_rl.environments.checks import ROLES, described
from torchtitan_rl.environments.conversations_config import ConversationsConfig
from torchtitan_rl.environments.fitted import FittedEnvironment
from torchtitan_rl.environments.pool import EnvironmentPool, EnvironmentSession
from torchtitan_rl.environments.threads import resolve
from torchtitan_rl.environments.tools import ToolEnvironment
from torchtitan_rl.environments.vllm_parsers import call_parser
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.references import correctable
from torchtitan_rl.rewards.workers import WorkerPool
from torchtitan_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Conversations(Configurable):
    """Creates one environment for each sample, and the pool that runs them."""

    Config = ConversationsConfig

    def __init__(
        self,
        config: ConversationsConfig,
        *,
        members: Mapping[str, Task],
        tokenizer: "PreTrainedTokenizerBase",
        end_token_ids: Collection[int],
        template_options: Mapping[str, Any],
        worker_pool: WorkerPool | None = None,
    ) -> None:
        """
        Args:
            members: the tasks that prompts come from, by `Prompt.task`.
            template_options: arguments of the chat template other than messages and tools.
            worker_pool: of `operator.call`, in which tools and checks of agents' schemas run; None: in this process.
        """
        self.config, self._worker_pool = config, worker_pool
        self._members = members
        self._templates, self._parsers = {}, {}
        options = {"end_token_ids": end_token_ids, **template_options}
        for name, task in members.items():
            tools = tool_schemas(task.tools())
            self._templates[name] = ChatTemplate(tokenizer, tools=tools or None, **options)
            self._parsers[name] = call_parser(config.tool_call_parser, tokenizer, tools)
        self.may_answer = any(map(may_answer, members.values()))
        self._left: dict[Conversation, EnvironmentSession] = {}
        """The environments of conversations between two steps."""

    def _environment(self, prompt: Prompt, seed: int) -> Environment | None:
        """A new environment. Raises UserError, which names the task, if the task raises or returns anything else."""
        task = self._members[prompt.task]
        name = f"{type(task).__name__}.environment"
        with correctable(f"on the prompt {prompt.text[-80:]!r}, {name} raised"):
            takes_seed = "seed" in inspect.signature(task.environment).parameters
            environment = task.environment(prompt, **({"seed": seed} if takes_seed else {}))
        is_valid = isinstance(environment, Environment | None)
        expect(is_valid, name, environment, "an Environment or None", "Correct what it returns.")
        if environment is None and task.tools():
            return ToolEnvironment(task.tools())
        return environment

    def _fitted(
        self, conversation: Conversation, make_grammar: Callable[..., str] | None
    ) -> Environment | None:
        prompt = conversation.prompt
        environment = self._environment(prompt, conversation.seed)
        if isinstance(environment, FittedEnvironment):
            environment.fit(
                conversation=conversation,
                call_seconds=self.config.call_seconds or math.inf,
                most_characters=self.config.max_answer_characters,
                parser=self._parsers[prompt.task],
                begins_thinking=self._templates[prompt.task].begins_thinking,
                in_order=self.config.wait_for_answers,
                make_grammar=make_grammar,
                workers=self._worker_pool,
            )
        return environment

    def check(self, prompts: Collection[Prompt]) -> None:
        """Opens an environment of each task that has them. Raises UserError if that fails, or for an unsuitable template."""
        for prompt in {prompt.task: prompt for prompt in prompts}.values():
            environment = self._environment(prompt, seed=0)
            if environment is None:
                continue
            try:
                expected = "examples with messages, rendered by a chat template, for conversations"
                remedy = "Give Example.messages, and leave prompts.apply_chat_template on."
                holds = prompt.messages is not None
                expect(holds, "task", type(self._members[prompt.task]).__name__, expected, remedy)
                name, role = type(environment).__name__, environment.role
                expect(role in ROLES, f"{name}.role", role, f"one of {ROLES}", "Correct it.")
                self._templates[prompt.task].check(role)
            finally:
                try:
                    resolve(environment.close("env_error"))
                except Exception as error:
                    name = type(environment).__name__
                    logger.warning(f"{name}.close failed before any reset: {described(error)}.")

    def start(
        self,
        conversations: Sequence[Conversation],
        make_grammar: Callable[..., str] | None = None,
        *,
        limits: ConversationsConfig | None = None,
    ) -> EnvironmentPool:
        """Returns a pool with the environments that an earlier one has left of these conversations. It makes one for each
        conversation without a turn that has one; the first ones are under way. `limits`: in place of the run's.
        """
        pool = EnvironmentPool(limits or self.config, self._left)
        left_first = sorted(enumerate(conversations), key=lambda one: one[1] not in self._left)
        for index, conversation in left_first:
            is_new = conversation.last is None and conversation.finish_reason is None
            if conversation in self._left:
                pool.take(index, conversation)
            elif is_new and may_answer(self._members[conversation.prompt.task]):
                template = self._templates[conversation.prompt.task]
                if conversation.prompt.tools:
                    template = template.with_tools(conversation.prompt.tools)
                make = partial(self._fitted, conversation, make_grammar)
                pool.add(index, conversation, make, template)
        return pool

    def close(self) -> None:
        """Closes the environments that are left."""
        self.start(list(self._left)).close()
