"""`AgentEnvironment`: an agent that speaks to the policy over HTTP is the environment of a conversation."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from torchtitan_rl.core.generator.conversation import Conversation
from torchtitan_rl.core.types import FinishReason
from torchtitan_rl.library.agents.protocol import (
    AgentError,
    ChatRequest,
    Outcome,
    appended_messages,
    completion,
    heard,
    policy_message,
    streamed,
)
from torchtitan_rl.library.agents.running import Running, RunningCommand, RunningCoroutine
from torchtitan_rl.library.environments.checks import WholePrompt
from torchtitan_rl.library.environments.fitted import FittedEnvironment
from torchtitan_rl.library.environments.interface import Message, Turn
from torchtitan_rl.library.environments.tool_calls import CallParser

Agent = Sequence[str] | Callable[..., Awaitable[Any]]
"""A command, or a coroutine function `agent(task, *, base_url, api_key)`."""


class AgentEnvironment(FittedEnvironment):
    """Starts an agent, and turns its requests for chat completions into the turns of a conversation.

    The policy's turn is the response to a request. What the next request has appended is the environment's answer. The
    conversation is done when the agent has ended.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        task: Any = None,
        role: str = "user",
        env: Mapping[str, str] | None = None,
        seconds: float = 600.0,
        parser: CallParser | None = None,
    ) -> None:
        """
        Args:
            task: what the agent is told, such as a question. A command finds it as JSON in the file $AGENT_TASK.
            role: role of the messages that the agent appends; the chat template is tested with it before training.
            env: further environment variables of a command.
            seconds: maximum time between a turn of the policy and the agent's next request or end. A run lowers it to 0.9 of
                `conversations.call_seconds`.
            parser: finds the calls in a message. None: the run's `conversations.tool_call_parser`.
        """
        self._parser = parser
        self.role = role
        self._agent, self._task, self._env, self._seconds = agent, task, dict(env or {}), seconds
        self._conversation: Conversation | None = None
        self._session, self._running = None, None
        self._has_ended = False
        self._request: ChatRequest | None = None
        self._history: list[Message] = []
        self._names: dict[str, str] = {}
        """{id of a tool call: its tool}"""
        self._turns = 0

    def fit(self, *, conversation: Conversation, call_seconds: float, **facts: Any) -> None:
        """Adapt to a run, which calls this before the reset."""
        super().fit(conversation=conversation, call_seconds=call_seconds, **facts)
        self._conversation = conversation
        self._seconds = min(self._seconds, 0.9 * call_seconds)

    def reset(self) -> WholePrompt:
        """Starts the agent. Returns the messages and tools of its first request, which are the whole prompt."""
        from torchtitan_rl.library.agents.gateway import gateway  # vLLM brings its server

        self._session = gateway().open_session()
        if callable(self._agent):
            self._running: Running = RunningCoroutine(self._agent, self._session, task=self._task)
        else:
            self._running = RunningCommand(self._agent, self._session, task=self._task, env=self._env)
        appended, _ = self._listen()
        if appended is None:
            raise AgentError("the agent ended without a request")
        # Some formats mark a call with special tokens; without tools they are no part of a message.
        self.special_tokens = bool(self._request.tools)
        return WholePrompt(appended, tools=self._request.tools)

    def step(self, message: Message) -> Turn:
        """Answers the agent's request with the policy's message. Returns the messages of its next request, or its end."""
        self._turns += 1
        tools = self._request.tool_names
        spoken = self._spoken(message["content"])
        calls = self._calls(spoken, tools) if tools else []
        said = policy_message(self._turns, spoken, calls)
        for listed, call in zip(said.get("tool_calls", ()), calls, strict=True):
            self._names[listed["id"]] = call.name if call.name in tools else "unknown"
        self._history.append(heard(said))
        self._reply(said)
        wrong = sum(call.error is not None or call.name not in tools for call in calls)
        columns = {"tool_calls": len(calls), "tool_errors": wrong} if tools else {}
        appended, outcome = self._listen()
        if appended is None:
            return Turn(done=True, reward=outcome.reward, columns={**columns, **outcome.columns})
        return Turn(messages=appended, columns={**columns, **self._request.columns})

    def close(self, finish_reason: FinishReason) -> float | None:
        """Ends the agent. Returns the reward that it has posted, unless the last turn already returned it."""
        if self._session is None:
            return None
        self._session.close(f"the conversation has ended: {finish_reason}")
        if self._running is not None:
            self._running.stop()
        return None if self._has_ended else self._session.outcome.reward

    def _listen(self) -> tuple[list[Message] | None, Outcome]:
        """Waits for the agent. Returns the messages that it appends, or None and its outcome if it has ended."""
        try:
            event = self._session.next_event(self._seconds)
            if isinstance(event, Outcome):
                self._has_ended = True
                return None, event
            request = ChatRequest.read(event, self._conversation)
            appended = appended_messages(self._history, request.messages)
            if self._request is not None and request.tools != self._request.tools:
                raise AgentError("the agent changed its tools, which are a part of the prompt")
            answers = [self._as_answer(message) for message in appended]
        except AgentError as error:
            self._session.close(str(error))
            raise
        self._request, self._history = request, request.messages
        return answers, Outcome()

    def _as_answer(self, message: Message) -> Message:
        """The message as the chat template renders it: a tool's has the tool's name instead of the call's id."""
        if message["role"] != "tool":
            return message
        if message["tool_call_id"] not in self._names:
            raise AgentError(
                f"the agent answered the tool call {message['tool_call_id']!r}, which the policy did not make"
            )
        return {"role": "tool", "name": self._names[message["tool_call_id"]], "content": message["content"]}

    def _reply(self, said: Message) -> None:
        context, turn = len(self._conversation.context), len(self._conversation.last.token_ids)
        response = completion(self._turns, said, prompt_tokens=context - turn, completion_tokens=turn)
        if self._request.stream:
            events = streamed(response, with_usage=self._request.stream_usage)
            self._session.reply(events, media_type="text/event-stream")
        else:
            self._session.reply(json.dumps(response))
