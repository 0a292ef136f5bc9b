"""`AgentEnvironment`: an agent that speaks to the policy over HTTP is the environment of a rollout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_rl.data.tool_calls import CallParser, ToolCall, suits
from torchtitan_rl.data.turns import Message, Turn
from torchtitan_rl.environments.agents.history import compared, message_key
from torchtitan_rl.environments.agents.protocol import (
    AgentError,
    AgentFailed,
    ChatRequest,
    Outcome,
    answer_to,
    heard,
    policy_message,
)
from torchtitan_rl.environments.agents.running import Coroutine, RunningCommand, RunningCoroutine
from torchtitan_rl.environments.agents.settings import NotFollowed
from torchtitan_rl.environments.checks import Context
from torchtitan_rl.environments.fitted import FittedEnvironment
from torchtitan_rl.fields.typed_arguments import check_above_zero, typed
from torchtitan_rl.rewards.workers import WorkerDied
from torchtitan_rl.types import FinishReason

Agent = Sequence[str] | Coroutine
"""A command, or a coroutine function."""


@dataclass(slots=True)
class _Trace:
    """What the agent knows of one trace."""

    tools: list[dict[str, Any]]
    history: list[Message]
    broken: bool = False
    """Whether the agent cannot use the policy's last turn in it, and has not gone on from there."""


@typed
class AgentEnvironment(FittedEnvironment):
    """Starts an agent, and turns its requests for chat completions into the turns of a conversation.

    The policy's turn is the response to a request. What the next request has appended to a trace of the rollout is the
    environment's answer; a request that appends to none of them opens a trace. The conversation is done when the agent
    has ended.
    """

    prompts_may_differ = True

    def __init__(
        self,
        agent: Agent,
        *,
        task: Any = None,
        role: str = "user",
        env: Mapping[str, str] | None = None,
        same_path: bool = True,
        seconds: float = 600.0,
        parser: CallParser | None = None,
        broken_call_reward: float | None = 0.0,
    ) -> None:
        """
        Args:
            task: what the agent is told, such as a question. A command finds it as JSON in the file $AGENT_TASK.
            role: role of the messages that the agent appends; the chat template is tested with it before training.
            env: further environment variables of a command.
            same_path: whether a command sees its folder at the path that all agents have, so that their first requests are
                equal. False for a command that needs its user's own namespace, as rootless podman does.
            seconds: maximum time between a turn of the policy and the agent's next request or end. A run lowers it to 0.9 of
                `conversations.call_seconds`.
            parser: finds the calls in a message. None: the run's `conversations.tool_call_parser`.
            broken_call_reward: the reward if the agent fails right after a turn that it cannot use (a broken call, a call
                that does not suit the tools, an empty turn), unless it has posted one. None: no reward.
        """
        check_above_zero(seconds=seconds)
        self._parser = parser
        self.role = role
        self._agent, self._task, self._env, self._seconds = agent, task, dict(env or {}), seconds
        self._broken_call_reward, self._same_path = broken_call_reward, same_path
        self._session, self._running = None, None
        self._has_ended = False
        self._event, self._request = None, None
        """The agent's last request, as it came and as it was read."""
        self._refusal = ""
        """The reason for which the agent's last request was refused, if it was."""
        self._traces: list[_Trace] = []
        self._current = 0
        self._texts: dict[str, str] = {}
        """{a message of the policy, as agents repeat it: its text as it was sampled, without thoughts}"""
        self._turns = 0

    def reset(self) -> Context:
        """Starts the agent. Returns the messages and tools of its first request, which are the whole prompt."""
        from torchtitan_rl.environments.agents.gateway import gateway  # vLLM brings its server

        self._session = gateway().open_session()
        if callable(self._agent):
            self._running = RunningCoroutine(self._agent, self._session, task=self._task)
        else:
            options = {"env": self._env, "same_path": self._same_path}
            self._running = RunningCommand(self._agent, self._session, task=self._task, **options)
        return self._listen().messages

    def step(self, message: Message) -> Turn:
        """Answers the agent's request with the policy's message. Returns what its next request asks, or its end."""
        self._turns += 1
        trace = self._traces[self._current]
        spoken = self._spoken(message["content"])
        calls = self._calls(spoken, self._request.tools_by_name) if trace.tools else []
        reply = policy_message(self._turns, spoken, calls)
        repeated = heard(reply, calls)
        trace.history.append(repeated)
        self._texts[message_key(repeated)] = spoken
        self._reply(reply)
        wrong = sum(not self._is_usable(call) for call in calls)
        trace.broken = wrong > 0 or not spoken.strip()
        columns = {"tool_calls": len(calls), "tool_errors": wrong} if trace.tools else {}
        try:
            follows = self._listen()
        except AgentFailed:
            if not any(trace.broken for trace in self._traces):
                raise
            columns["tool_errors"] = max(wrong, int(trace.broken))
            self._has_ended = True
            posted = self._session.outcome.reward
            reward = self._broken_call_reward if posted is None else posted
            return Turn(done=True, finish_reason="broken_call", reward=reward, columns=columns)
        if isinstance(follows, Outcome):
            return Turn(done=True, reward=follows.reward, columns={**columns, **follows.columns})
        return replace(follows, columns={**columns, **self._request.columns})

    def close(self, finish_reason: FinishReason) -> float | None:
        """Ends the agent. Returns the reward that it has posted, unless the last turn already returned it."""
        if self._session is None:
            return None
        self._session.close(f"the conversation has ended: {finish_reason}")
        if self._running is not None:
            self._running.stop()
        return None if self._has_ended else self._session.outcome.reward

    def _listen(self) -> Turn | Outcome:
        """Waits for the agent. Returns what its next request appends, or its outcome if it has ended."""
        try:
            while True:
                in_order = self._in_order or not self._traces
                event = self._session.next_event(self._seconds, in_order=in_order)
                if isinstance(event, Outcome):
                    self._has_ended = True
                    if not self._traces:
                        raise AgentError("the agent ended without a request")
                    return event
                self._event = event
                try:
                    request = ChatRequest.read(event.path, event.body, self._make_grammar)
                except NotFollowed as refused:
                    self._refusal = str(refused)
                    self._session.refuse(event, self._refusal, field=refused.field)
                    continue
                return self._placed(request)
        except AgentError as error:
            if self._refusal:
                error.args = (f"{error}; its last request was refused: {self._refusal}",)
            raise

    def _placed(self, request: ChatRequest) -> Turn:
        """Finds the trace that the request continues, the longest one, or opens one. Returns the messages for it."""
        self._request, self.grammar = request, request.grammar
        self._refusal = ""
        # Some formats mark a call with special tokens; without tools they are no part of a message.
        self.special_tokens = bool(request.tools)
        names = _tool_names(request)
        compared_with: list[tuple[int, str]] = []
        for trace in self._traces:
            num_repeated, reason = compared(trace.history, request.messages)
            if not reason and trace.tools != request.tools:
                reason = "has other tools"
            compared_with.append((num_repeated, reason))
        continued = [i for i, (_, reason) in enumerate(compared_with) if not reason]
        if continued:
            self._current = max(continued, key=lambda i: (len(self._traces[i].history), i))
            trace = self._traces[self._current]
            num_repeated, _ = compared_with[self._current]
            added = request.messages[num_repeated:]
            trace.history, trace.broken = request.messages, False
            answers = [self._as_rendered(message, names) for message in added]
            return Turn(messages=answers, trace=self._current)
        parent, reason = None, ""
        if self._traces:
            places = range(len(self._traces))
            parent = max(places, key=lambda i: (compared_with[i][0], i == self._current))
            num_repeated, reason = compared_with[parent]
            if num_repeated > 0:
                self._traces[parent].broken = False
        context = [self._as_rendered(message, names) for message in request.messages]
        self._traces.append(_Trace(request.tools, request.messages))
        self._current = len(self._traces) - 1
        return Turn(messages=Context(context, tools=request.tools, parent=parent, reason=reason))

    def _as_rendered(self, message: Message, names: Mapping[str, str]) -> Message:
        """The message as the chat template renders it: a tool's has the tool's name instead of the call's id."""
        if message["role"] == "tool":
            if message["tool_call_id"] not in names:
                raise AgentError(
                    f"the agent answered the tool call {message['tool_call_id']!r}, which the policy did not make"
                )
            name = names[message["tool_call_id"]]
            return {"role": "tool", "name": name, "content": message["content"]}
        if message["role"] != "assistant":
            return message
        if (text := self._texts.get(message_key(message))) is not None:
            return {"role": "assistant", "content": text}
        shown = {field: value for field, value in message.items() if field != "tool_calls"}
        if calls := message["tool_calls"]:
            functions = [{name: call[name] for name in ("name", "arguments")} for call in calls]
            shown["tool_calls"] = [{"type": "function", "function": each} for each in functions]
        return shown

    def _is_usable(self, call: ToolCall) -> bool:
        """Whether an agent can run the call: it was read, names a tool, and has arguments as the tool's schema asks."""
        tool = self._request.tools_by_name.get(call.name)
        if call.error is not None or tool is None:
            return False
        return self._suits(call.arguments, tool["function"]["parameters"])

    def _suits(self, arguments: dict[str, Any], schema: Any) -> bool:
        """Whether the arguments suit the schema, or it cannot be told in a second: a pattern may take for ever."""
        if self._workers is None:
            return suits(arguments, schema)
        try:
            return self._workers.call(0, suits, arguments, schema, seconds=1.0)
        except (TimeoutError, WorkerDied):
            return True

    def _reply(self, message: Message) -> None:
        read, sampled = len(self._conversation.context), len(self._conversation.last.token_ids)
        counts = {"prompt": read - sampled, "sampled": sampled}
        content, media_type = answer_to(self._request, self._turns, message, **counts)
        self._session.reply(self._event, content, media_type=media_type)


def _tool_names(request: ChatRequest) -> dict[str, str]:
    """{id of a tool call in the request's messages: its tool, or "unknown"}"""
    names: dict[str, str] = {}
    known = list(request.tools_by_name)  # an agent may write a name that has no hash
    for message in request.messages:
        for call in message.get("tool_calls", ()):
            names[str(call["id"])] = call["name"] if call["name"] in known else "unknown"
    return names
