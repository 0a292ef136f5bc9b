"""The HTTP server between agents and the policy. It listens on 127.0.0.1 only and passes on bytes: nothing is sampled here."""

import asyncio
import json
import queue
import secrets
import socket
import threading
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torchtitan_rl.library.agents.connections import admitting
from torchtitan_rl.library.agents.protocol import MODEL, AgentError, Outcome

MOST_BYTES = 16 * 2**20
"""Maximum size of one request."""

BODY_SECONDS = 30.0
"""Maximum time in which a request must have arrived."""

KEEP_ALIVE_SECONDS = 3600
"""Time for which an idle connection is kept: an agent's tools may take long."""


class Session:
    """One agent's conversation. The agent's side is the server's loop, the policy's side a thread of its own."""

    def __init__(self, gateway: "Gateway") -> None:
        self.key = secrets.token_urlsafe(32)
        self.base_url = gateway.base_url
        self.outcome = Outcome()
        """The outcome that the agent has posted so far."""
        self._gateway = gateway
        self._events: queue.SimpleQueue[bytes | Outcome | AgentError] = queue.SimpleQueue()
        self._failure: AgentError | None = None
        self._response: asyncio.Future[Response] | None = None
        """The answer to the request under way; None if there is none. Only the loop's thread uses it."""

    def next_event(self, seconds: float) -> bytes | Outcome:
        """Waits for the agent's next request, or its outcome if it has ended.

        Raises AgentError if the agent has failed, or neither comes within `seconds`.
        """
        try:
            event = self._events.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except queue.Empty:
            raise AgentError(f"the agent sent no request and did not end within {seconds:g} s") from None
        if isinstance(event, AgentError):
            raise event
        return event

    def reply(self, content: str, *, media_type: str = "application/json", status: int = 200) -> None:
        """Sends the answer to the request under way, if there is one."""
        response = Response(content, status, media_type=media_type)
        self._gateway.loop.call_soon_threadsafe(self._answer, response)

    def end(self, outcome: Outcome | AgentError) -> None:
        """Notes that the agent has ended."""
        self._events.put(outcome)

    def close(self, reason: str) -> None:
        """Makes the key invalid, and refuses the request under way."""
        self._gateway.sessions.pop(self.key, None)
        self.reply(_refusal(reason), status=400)

    async def ask(self, request: Request) -> Response:
        """Passes a request to the policy's side and waits for the answer."""
        if self._response is not None:
            self._fail("the agent sent two requests at once; a conversation has one at a time")
        if self._failure is not None:
            return _refused(409, str(self._failure))
        self._response = response = self._gateway.loop.create_future()
        try:
            self._events.put(await _body(request))
        except AgentError as error:
            self._fail(str(error))
            self._response = None
            return _refused(413, str(error))
        return await response

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

    def _answer(self, response: Response) -> None:
        future, self._response = self._response, None
        if future is not None and not future.done():
            future.set_result(response)


class Gateway:
    """The server and its sessions, by their keys. It runs in a thread of its own until the process ends."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.loop = asyncio.new_event_loop()
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        routes = [
            Route("/v1/chat/completions", self._ask, methods=["POST"]),
            Route("/v1/reward", self._take_outcome, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, log_level="error", access_log=False, lifespan="off", ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS, http=admitting(lambda value: _key(value.decode("latin-1")) in self.sessions),
        )  # fmt: skip
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(uvicorn.Server(config).serve(sockets=[listener]), self.loop)

    def open_session(self) -> Session:
        """Returns a new session. Its key is valid until it is closed."""
        session = Session(self)
        self.sessions[session.key] = session
        return session

    def _session(self, request: Request) -> Session | None:
        return self.sessions.get(_key(request.headers.get("authorization", "")))

    async def _ask(self, request: Request) -> Response:
        session = self._session(request)
        return _unknown() if session is None else await session.ask(request)

    async def _take_outcome(self, request: Request) -> Response:
        session = self._session(request)
        return _unknown() if session is None else await session.take_outcome(request)

    async def _models(self, request: Request) -> Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "torchtitan_rl"}
        return _unknown() if self._session(request) is None else JSONResponse({"object": "list", "data": [model]})


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
    return json.dumps({"error": {"message": reason, "type": "invalid_request_error", **facts}})


def _refused(status: int, reason: str) -> Response:
    return Response(_refusal(reason), status, media_type="application/json")


def _unknown() -> Response:
    return _refused(401, "the key names no open conversation; use OPENAI_API_KEY as it was given")
