"""The HTTP server between agents and the policy. It listens on 127.0.0.1 only and passes on bytes: nothing is sampled here."""

import asyncio
import json
import queue
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from torchtitan_rl.environments.agents.protocol import MODEL, OTHER_APIS, AgentError, Outcome

KEY_HEADERS = ("authorization", "x-api-key", "api-key")
"""Headers with the key: OpenAI's clients send the first, Anthropic's the second, Azure's the third."""

ERROR_CODES = {"thread": "thread_unsupported_request"}
"""{field that is refused: the code by which clients know that they must do without it}"""

QUIET_SECONDS = 60.0
"""Time after which a waiting client gets the first bytes of its answer, and then more. Node's clients give up after 300 s."""

TOGETHER_SECONDS = 0.02
"""Requests count as sent together if each arrives within this time of the one before."""

KEEP_ALIVE_SECONDS = 3600
"""Time for which an idle connection is kept: an agent's tools may take long."""


MOST_BYTES, MOST_OPEN = 16 * 2**20, 64
"""Limits of a request's body and of the requests of one agent that wait: more would fill the rank's memory."""


@dataclass(slots=True, eq=False)
class AgentRequest:
    """A request that the policy is to answer, and the connections that wait for it."""

    path: str
    body: bytes
    response: asyncio.Future[Response]
    waiting: list[Request]


class Session:
    """One agent's rollout. The agent's side is the server's loop, the policy's side a thread of its own.

    Requests that are sent at the same time wait for each other: the policy answers one after another.
    """

    def __init__(self, gateway: "Gateway") -> None:
        self.key = secrets.token_urlsafe(32)
        self.base_url = gateway.base_url
        self.outcome = Outcome()
        """The outcome that the agent has posted so far."""
        self._gateway = gateway
        self._events: queue.SimpleQueue[AgentRequest | Outcome | Exception] = queue.SimpleQueue()
        self._arrived: list[AgentRequest | Outcome | Exception] = []
        """Events that have been taken from the queue together. Only the policy's thread uses it."""
        # Only the loop's thread uses these.
        self._open: list[AgentRequest] = []
        """Requests without an answer."""
        self._undelivered: dict[tuple[str, bytes], Response] = {}
        """Answers whose connections were gone when they came: a repeated request gets them."""

    def next_event(self, seconds: float, *, in_order: bool = False) -> AgentRequest | Outcome:
        """Waits for the agent's next request, or its outcome if it has ended.

        Raises AgentError if neither comes within `seconds`, and the agent's own error if it has failed.

        Args:
            in_order: put requests that arrive together into the order of their texts, so that it does not depend on timing.
        """
        if not self._arrived:
            try:
                self._arrived.append(self._events.get(timeout=min(seconds, threading.TIMEOUT_MAX)))
            except queue.Empty:
                raise AgentError(
                    f"the agent sent no request and did not end within {seconds:g} s"
                ) from None
            while in_order and isinstance(self._arrived[-1], AgentRequest):
                try:
                    self._arrived.append(self._events.get(timeout=TOGETHER_SECONDS))
                except queue.Empty:
                    break
            self._arrived.sort(key=_order)
        event = self._arrived.pop(0)
        if isinstance(event, Exception):
            raise event
        return event

    def reply(self, request: AgentRequest, content: str, *, media_type: str) -> None:
        """Sends the answer to a request, if it still waits."""
        self._send(request, Response(content, media_type=media_type))

    def refuse(self, request: AgentRequest, reason: str, *, field: str) -> None:
        """Refuses a request, which does not end the conversation."""
        facts = {"details": {"error_code": ERROR_CODES[field]}} if field in ERROR_CODES else {}
        self._send(request, _refusal(400, reason, param=field, **facts))

    def _send(self, request: AgentRequest, response: Response) -> None:
        asyncio.run_coroutine_threadsafe(self._answer(request, response), self._gateway.loop)

    def end(self, outcome: Outcome | Exception) -> None:
        """Notes that the agent has ended, or failed."""
        self._events.put(outcome)

    def close(self, reason: str) -> None:
        """Makes the key invalid, and refuses the requests that wait."""
        self._gateway.sessions.pop(self.key, None)
        asyncio.run_coroutine_threadsafe(self._refuse_all(reason), self._gateway.loop)

    async def ask(self, request: Request) -> Response:
        """Passes a request to the policy's side and waits for the answer."""
        path, body = request.scope["path"], await _body(request)
        if kept := self._undelivered.pop((path, body), None):
            return kept
        pending = await self._joined(request, path, body)
        if pending is None:
            if self.key not in self._gateway.sessions:
                raise HTTPException(401, "the conversation ended before the request was whole")
            if len(self._open) >= MOST_OPEN:
                raise HTTPException(429, f"more than {MOST_OPEN} requests at once")
            pending = AgentRequest(path, body, self._gateway.loop.create_future(), [])
            self._open.append(pending)
            self._events.put(pending)
        pending.waiting.append(request)
        await asyncio.wait([pending.response], timeout=QUIET_SECONDS)
        return pending.response.result() if pending.response.done() else _late(pending)

    async def _joined(self, request: Request, path: str, body: bytes) -> AgentRequest | None:
        """The open request that this one repeats: its connections are gone, or the client says that it tries again."""
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        for pending in list(self._open):
            same = (pending.path, pending.body) == (path, body)
            if same and (is_retry or await _all_gone(pending.waiting)):
                return pending
        return None

    async def take_outcome(self, request: Request) -> Response:
        """Keeps the outcome that the agent posts; a later one replaces it."""
        try:
            self.outcome = Outcome.read(await _body(request))
        except AgentError as error:
            self.end(error)
            raise HTTPException(400, str(error)) from None
        return JSONResponse({})

    async def _answer(self, pending: AgentRequest, response: Response) -> None:
        waiting = len(pending.waiting)
        all_gone = await _all_gone(pending.waiting)
        if pending.response.done():
            return
        self._open.remove(pending)
        if all_gone and waiting == len(pending.waiting):  # none has joined meanwhile
            self._undelivered[pending.path, pending.body] = response
        pending.response.set_result(response)

    async def _refuse_all(self, reason: str) -> None:
        for pending in list(self._open):
            await self._answer(pending, _refusal(400, reason))


def _order(event: AgentRequest | Outcome | Exception) -> tuple[Any, ...]:
    """Requests come in the order of their texts, and after them the end of the agent."""
    return (0, event.path, event.body) if isinstance(event, AgentRequest) else (1,)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"a body of more than {MOST_BYTES:,} bytes")
    return bytes(body)


async def _all_gone(requests: list[Request]) -> bool:
    """Whether the clients of all of these requests have closed their connections."""
    return all([await request.is_disconnected() for request in requests])


def _late(pending: AgentRequest) -> Response:
    """A response that begins before its answer is there. Clients give up on a connection that is silent for long."""
    try:
        streams = bool(json.loads(pending.body).get("stream"))
    except (ValueError, AttributeError, RecursionError):
        streams = False
    silence = ": waiting\n\n" if streams else " "
    media_type = "text/event-stream" if streams else "application/json"

    async def parts() -> AsyncIterator[bytes | str]:
        while not pending.response.done():
            yield silence
            await asyncio.wait([pending.response], timeout=QUIET_SECONDS)
        yield pending.response.result().body

    return StreamingResponse(parts(), media_type=media_type)


class Gateway:
    """The server and its sessions, by their keys. It runs in a thread of its own until the process ends."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.loop = asyncio.new_event_loop()
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        paths = ("/v1/chat/completions", *OTHER_APIS)
        routes = [
            *(Route(path, self._ask, methods=["POST"]) for path in paths),
            Route("/v1/reward", self._take_outcome, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        handlers = {HTTPException: _as_response, ClientDisconnect: lambda *_: Response()}
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers=handlers), log_config=None, log_level="error",
            access_log=False, lifespan="off", ws="none", timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )  # fmt: skip
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        serving = uvicorn.Server(config).serve(sockets=[listener])
        asyncio.run_coroutine_threadsafe(serving, self.loop)

    def open_session(self) -> Session:
        """Returns a new session. Its key is valid until it is closed."""
        session = Session(self)
        self.sessions[session.key] = session
        return session

    def _session(self, request: Request) -> Session:
        for header in KEY_HEADERS:
            words = request.headers.get(header, "").split()
            key = words[-1] if words else ""
            if key in self.sessions:
                return self.sessions[key]
        given = "OPENAI_API_KEY or ANTHROPIC_API_KEY as it was given"
        raise HTTPException(401, f"the key names no open conversation; use {given}")

    async def _ask(self, request: Request) -> Response:
        return await self._session(request).ask(request)

    async def _take_outcome(self, request: Request) -> Response:
        return await self._session(request).take_outcome(request)

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "torchtitan_rl"}
        return JSONResponse({"object": "list", "data": [model]})


_gateway: Gateway | None = None
_lock = threading.Lock()


def gateway() -> Gateway:
    """Returns the one gateway of this process, and starts it at the first call."""
    global _gateway
    with _lock:
        _gateway = _gateway or Gateway()
        return _gateway


def _refusal(status: int, reason: str, **facts: Any) -> Response:
    error = {"message": reason, "type": "invalid_request_error", **facts}
    return JSONResponse({"type": "error", "error": error}, status)


async def _as_response(request: Request, refused: HTTPException) -> Response:
    return _refusal(refused.status_code, refused.detail)
