"""The HTTP server between agents and the policy. It listens on 127.0.0.1 only and passes on bytes: nothing is sampled here."""

import asyncio
import itertools
import json
import queue
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from torchtitan_rl.environments.agents.protocol import MODEL, OTHER_APIS, AgentError, Outcome

KEY_HEADERS = ("authorization", "x-api-key")
"""Headers with the key: OpenAI's clients send the first, Anthropic's the second."""

MOST_BYTES = 16 * 2**20
"""Maximum size of one request."""

BODY_SECONDS = 30.0
"""Maximum time in which a request must have arrived."""

QUIET_SECONDS = 60.0
"""Time after which a waiting client gets the first bytes of its answer, and then more. Node's clients give up after 300 s."""

TOGETHER_SECONDS = 0.02
"""Requests count as sent together if each arrives within this time of the one before."""

MOST_OPEN = 64
"""Maximum number of requests of one agent that wait for an answer."""

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]

KEEP_ALIVE_SECONDS = 3600
"""Time for which an idle connection is kept: an agent's tools may take long."""


class Asked(NamedTuple):
    """A request that the policy is to answer."""

    path: str
    body: bytes
    number: int
    """Names it in `Session.reply`."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request without an answer, and the connections that wait for it."""

    asked: Asked
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
        self._events: queue.SimpleQueue[Asked | Outcome | AgentError] = queue.SimpleQueue()
        self._arrived: list[Asked | Outcome | AgentError] = []
        """Events that have been taken from the queue together. Only the policy's thread uses it."""
        self._failure: AgentError | None = None
        # Only the loop's thread uses these.
        self._numbers = itertools.count()
        self._open: dict[int, _Open] = {}
        self._undelivered: dict[tuple[str, bytes], Response] = {}
        """Answers whose connections were gone when they came: a repeated request gets them."""

    def next_event(self, seconds: float, *, in_order: bool = False) -> Asked | Outcome:
        """Waits for the agent's next request, or its outcome if it has ended.

        Raises AgentError if the agent has failed, or neither comes within `seconds`.

        Args:
            in_order: put requests that arrive together into the order of their texts, so that it does not depend on timing.
        """
        if self._failure is not None:  # before the requests that came earlier
            raise self._failure
        if not self._arrived:
            try:
                self._arrived.append(self._events.get(timeout=min(seconds, threading.TIMEOUT_MAX)))
            except queue.Empty:
                raise AgentError(
                    f"the agent sent no request and did not end within {seconds:g} s"
                ) from None
            while in_order and isinstance(self._arrived[-1], Asked):
                try:
                    self._arrived.append(self._events.get(timeout=TOGETHER_SECONDS))
                except queue.Empty:
                    break
            self._arrived.sort(key=lambda event: (0, *event) if isinstance(event, Asked) else (1,))
        event = self._arrived.pop(0)
        if isinstance(event, AgentError):
            raise event
        return event

    def reply(
        self, number: int, content: str, *, media_type: str = "application/json", status: int = 200
    ) -> None:
        """Sends the answer to a request, if it still waits."""
        response = Response(content, status, media_type=media_type)
        asyncio.run_coroutine_threadsafe(self._answer(number, response), self._gateway.loop)

    def refuse(self, number: int, reason: str, *, field: str | None = None) -> None:
        """Refuses a request, which does not end the conversation."""
        self.reply(number, _refusal(reason, param=field), status=400)

    def end(self, outcome: Outcome | AgentError) -> None:
        """Notes that the agent has ended."""
        self._events.put(outcome)

    def close(self, reason: str) -> None:
        """Makes the key invalid, and refuses the requests that wait."""
        self._gateway.sessions.pop(self.key, None)
        asyncio.run_coroutine_threadsafe(self._refuse_all(reason), self._gateway.loop)

    async def ask(self, request: Request) -> Response:
        """Passes a request to the policy's side and waits for the answer."""
        if self._failure is not None:
            return _refused(409, str(self._failure))
        try:
            body = await _body(request)
        except AgentError as error:
            self._fail(str(error))
            return _refused(413, str(error))
        path = request.scope["path"]
        if kept := self._undelivered.pop((path, body), None):
            return kept
        one = await self._joined(request, path, body)
        if one is None:
            if len(self._open) >= MOST_OPEN:
                self._fail(f"the agent has more than {MOST_OPEN} requests at once")
                return _refused(409, str(self._failure))
            asked = Asked(path, body, next(self._numbers))
            one = self._open[asked.number] = _Open(asked, self._gateway.loop.create_future(), [])
            self._events.put(asked)
        one.waiting.append(request)
        await asyncio.wait([one.response], timeout=QUIET_SECONDS)
        return one.response.result() if one.response.done() else _late(one)

    async def _joined(self, request: Request, path: str, body: bytes) -> _Open | None:
        """The open request that this one repeats: its connections are gone, or the client says that it tries again."""
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        for one in list(self._open.values()):
            if (one.asked.path, one.asked.body) == (path, body) and (
                is_retry or await _all_gone(one.waiting)
            ):
                return one
        return None

    async def take_outcome(self, request: Request) -> Response:
        """Keeps the outcome that the agent posts; a later one replaces it."""
        try:
            self.outcome = Outcome.read(await _body(request))
        except AgentError as error:
            self._fail(str(error))
            return _refused(400, str(error))
        return JSONResponse({})

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = AgentError(reason)
            self._events.put(self._failure)

    async def _answer(self, number: int, response: Response) -> None:
        one = self._open.get(number)
        if one is None:
            return
        waiting = len(one.waiting)
        all_gone = await _all_gone(one.waiting)
        del self._open[number]
        if all_gone and waiting == len(one.waiting):  # none has joined meanwhile
            self._undelivered[one.asked.path, one.asked.body] = response
        one.response.set_result(response)

    async def _refuse_all(self, reason: str) -> None:
        for number in list(self._open):
            await self._answer(number, _refused(400, reason))


async def _all_gone(requests: list[Request]) -> bool:
    """Whether the clients of all of these requests have closed their connections."""
    return all([await request.is_disconnected() for request in requests])


def _late(one: _Open) -> Response:
    """A response that begins before its answer is there. Clients give up on a connection that is silent for long."""
    try:
        streams = bool(json.loads(one.asked.body).get("stream"))
    except (ValueError, AttributeError, RecursionError):
        streams = False
    silence, media_type = (
        (": waiting\n\n", "text/event-stream") if streams else (" ", "application/json")
    )

    async def parts() -> AsyncIterator[bytes | str]:
        while not one.response.done():
            yield silence
            await asyncio.wait([one.response], timeout=QUIET_SECONDS)
        yield one.response.result().body

    return StreamingResponse(parts(), media_type=media_type)


class Gateway:
    """The server and its sessions, by their keys. It runs in a thread of its own until the process ends."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.loop = asyncio.new_event_loop()
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        routes = [
            Route("/v1/chat/completions", self._ask, methods=["POST"]),
            *(Route(path, self._ask, methods=["POST"]) for path in OTHER_APIS),
            Route("/v1/reward", self._take_outcome, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/{path:path}", self._elsewhere, methods=METHODS),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, log_level="error", access_log=False, lifespan="off", ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )  # fmt: skip
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(
            uvicorn.Server(config).serve(sockets=[listener]), self.loop
        )

    def open_session(self) -> Session:
        """Returns a new session. Its key is valid until it is closed."""
        session = Session(self)
        self.sessions[session.key] = session
        return session

    def _session(self, request: Request) -> Session | None:
        named = (request.headers.get(name) for name in KEY_HEADERS)
        return next(
            (
                self.sessions[_key(value)]
                for value in named
                if value and _key(value) in self.sessions
            ),
            None,
        )

    async def _ask(self, request: Request) -> Response:
        session = self._session(request)
        return _unknown() if session is None else await session.ask(request)

    async def _take_outcome(self, request: Request) -> Response:
        session = self._session(request)
        return _unknown() if session is None else await session.take_outcome(request)

    async def _elsewhere(self, request: Request) -> Response:
        if self._session(request) is None:
            return _unknown()
        return _refused(
            404,
            f"{request.method} {request.url.path} is no address of the policy; it answers POST /v1/chat/completions, "
            "POST /v1/responses, POST /v1/messages, POST /v1/reward and GET /v1/models",
        )

    async def _models(self, request: Request) -> Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "torchtitan_rl"}
        return (
            _unknown()
            if self._session(request) is None
            else JSONResponse({"object": "list", "data": [model]})
        )


_gateway: Gateway | None = None
_lock = threading.Lock()


def gateway() -> Gateway:
    """Returns the one gateway of this process, and starts it at the first call."""
    global _gateway
    with _lock:
        _gateway = _gateway or Gateway()
        return _gateway


def _key(authorization: str) -> str:
    return authorization.removeprefix("Bearer ")


async def _body(request: Request) -> bytes:
    """Returns the request's body. Raises AgentError if it is too large, too slow or broken off."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise AgentError(f"the agent sent a request of more than {MOST_BYTES:,} bytes")
    except ClientDisconnect:
        raise AgentError("the agent broke off a request") from None
    except TimeoutError:
        raise AgentError(f"the agent's request did not arrive within {BODY_SECONDS:g} s") from None
    return bytes(body)


def _refusal(reason: str, **facts: Any) -> str:
    return json.dumps(
        {"type": "error", "error": {"message": reason, "type": "invalid_request_error", **facts}}
    )


def _refused(status: int, reason: str) -> Response:
    return Response(_refusal(reason), status, media_type="application/json")


def _unknown() -> Response:
    return _refused(
        401,
        "the key names no open conversation; use OPENAI_API_KEY or ANTHROPIC_API_KEY as it was given",
    )
