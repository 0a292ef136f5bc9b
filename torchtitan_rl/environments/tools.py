"""Python functions as tools: JSON schemas, and the environment that runs the policy's calls."""

import dis
import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_type_hints

from torchtitan_rl.data.tool_calls import CallParser, ToolCall
from torchtitan_rl.data.tool_schemas import Tool
from torchtitan_rl.data.turns import Message, Turn
from torchtitan_rl.environments.checks import described, escaped
from torchtitan_rl.environments.fitted import FittedEnvironment
from torchtitan_rl.environments.threads import call_side_by_side, resolve
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.typed_arguments import check_above_zero, typed
from torchtitan_rl.rewards.workers import CallRaised, WorkerPool
from torchtitan_rl.text import head_and_tail

SIDE_BY_SIDE = 16
"""Calls of one message that run at the same time. The others wait for a free place."""


def in_process(tool: Tool) -> Tool:
    """Decorator of a tool that runs in a thread of the training process, because it keeps state or waits for something
    that has a time limit. No limit ends it there, and it stops the whole rank if it holds the interpreter's lock."""
    tool.in_process = True
    return tool


@typed
class ToolEnvironment(FittedEnvironment):
    """Runs the tool calls in each message of the policy. A message without a call ends the conversation.

    The calls of one message run at the same time, up to `SIDE_BY_SIDE` of them, and share one time limit. Calls inside
    `<think>` are not run. A tool is a function of a module, which a run calls in a worker process that ends at the time
    limit; a coroutine function; or decorated with `in_process`.

    A failed call is reported to the policy in the tool's message and counted as `tool_errors`. A call fails if it
    cannot be parsed, names an unknown tool, has missing arguments or arguments of another type than the tool's
    signature, raises, times out, or returns a value that is not text or JSON.
    """

    role = "tool"
    special_tokens = True  # some formats mark a call with them

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        seconds: float = 10.0,
        most_characters: int = 4000,
        parser: CallParser | None = None,
        side_by_side: int = SIDE_BY_SIDE,
    ) -> None:
        """
        Args:
            seconds: time limit of all calls of one message together. A run lowers it to 0.9 of
                `conversations.call_seconds`.
            most_characters: maximum length of one result; the middle of a longer one is cut out. A run lowers it to
                `conversations.max_answer_characters`.
            parser: finds the calls in a message. None: the run's `conversations.tool_call_parser`.
            side_by_side: calls of a message that run at the same time; 1 runs them in order.

        Raises UserError for a tool that could lose its state in a worker.
        """
        check_above_zero(seconds=seconds, most_characters=most_characters)
        for tool in tools:
            expected = "a function at the top of a module that assigns no global variable, as a worker process would lose its state"
            remedy = "Decorate it with @in_process if it never holds the interpreter's lock for long (docs/conversations.md)."
            holds = _runs_in_process(tool) or not _keeps_state(tool)
            expect(holds, "tools", tool.__qualname__, expected, remedy)
        self._tools = {tool.__name__: tool for tool in tools}
        self._seconds = seconds
        self._most_characters = most_characters
        self._parser = parser
        self._side_by_side = side_by_side

    def step(self, message: Message) -> Turn:
        """Returns the answers of the message's calls; without a call the conversation is done."""
        calls = self._calls(self._spoken(message["content"]), self._tools.keys())
        run = partial(run_call, self._tools, seconds=self._seconds, workers=self._workers)
        runs = [partial(run, call) for call in calls]
        results = call_side_by_side(self._seconds, runs, self._side_by_side)
        answers = [self._message(call, result) for call, result in zip(calls, results, strict=True)]
        errors = sum(isinstance(result, BaseException) for result in results)
        columns = {"tool_calls": len(calls), "tool_errors": errors}
        return Turn(messages=answers, done=not calls, columns=columns)

    def _message(self, call: ToolCall, result: str | BaseException) -> Message:
        if isinstance(result, BaseException):
            result = f"error: {result if isinstance(result, CallRaised) else described(result)}"
        content = head_and_tail(escaped(result), self._most_characters)
        name = call.name if call.name in self._tools else "unknown"
        return {"role": self.role, "name": name, "content": content}


def _runs_in_process(tool: Tool) -> bool:
    return getattr(tool, "in_process", False) or inspect.iscoroutinefunction(tool)


def _keeps_state(tool: Tool) -> bool:
    """Whether a worker does not find the tool by its name, or it assigns a global variable, of which each worker has its own."""
    found = getattr(sys.modules.get(tool.__module__), tool.__qualname__, None)
    body = dis.get_instructions(getattr(inspect.unwrap(tool), "__code__", ""))
    return found is not tool or any(each.opname == "STORE_GLOBAL" for each in body)


def run_call(
    tools: Mapping[str, Tool],
    call: ToolCall,
    seconds: float = math.inf,
    workers: WorkerPool | None = None,
) -> str:
    """Runs one call of the policy, in a worker if there are any, and returns its result as text.

    Raises what the tool raises (a worker: CallRaised, TimeoutError or WorkerDied), ValueError for a call that could not
    be read, LookupError for an unknown tool, and TypeError for arguments that do not suit.
    """
    if call.error is not None:
        raise ValueError(call.error)
    if call.name not in tools:
        raise LookupError(f"there is no tool {call.name!r}; there are {sorted(tools)}")
    tool = tools[call.name]
    inspect.signature(tool).bind(**call.arguments)
    check_types(tool, call.arguments)
    limit = seconds if math.isfinite(seconds) else 0
    if workers is None or _runs_in_process(tool):
        return _run(tool, call.arguments, limit)
    return workers.call(0, _run, tool, call.arguments, seconds=limit)


def _run(tool: Tool, arguments: Mapping[str, Any], seconds: float = 0) -> str:
    return result_text(resolve(tool(**arguments), seconds or None))


def check_types(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Raises TypeError if an argument, as JSON, is not of the type that the tool's signature has for it.

    A float may be given as an integer; nothing else is converted. Arguments without a type hint are not checked.
    """
    from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

    try:
        hints = get_type_hints(tool)
    except (TypeError, NameError):  # no function, or a hint that has no value here
        return
    for name in arguments.keys() & hints.keys():
        try:
            TypeAdapter(hints[name]).validate_json(json.dumps(arguments[name]), strict=True)
        except PydanticSchemaGenerationError:  # a type that JSON cannot have
            continue
        except ValidationError as error:
            reason = error.errors(include_url=False, include_input=False)[0]["msg"]
            shown = f"{json.dumps(arguments[name])}: {reason[:1].lower()}{reason[1:]}"
            raise TypeError(f"argument {name} is {shown}") from None


def result_text(result: Any) -> str:
    """Returns a tool's result as text: a string as it is, anything else as JSON. Raises TypeError if neither is possible."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=lambda array: array.tolist())
    except (TypeError, ValueError, AttributeError, RecursionError):
        kind = type(result).__name__
        raise TypeError(f"the tool returned {kind}, which is neither text nor JSON") from None
