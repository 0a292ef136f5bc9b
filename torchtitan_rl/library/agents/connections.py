"""Connections to the gateway without a valid key are few and short. uvicorn has no timeout for headers and no such limit."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.auto import AutoHTTPProtocol

KEY_HEADERS = ("authorization", "x-api-key")
"""Headers with the key: OpenAI's clients send the first, Anthropic's the second."""

HEADER_SECONDS = 30.0
"""Maximum time in which a new connection must have sent a request's headers with a valid key."""

MOST_WAITING = 4096
"""Maximum number of connections that have not shown a valid key yet. One more closes the oldest of them.
Twice the listener's backlog, so that agents that all connect at once fit in."""


def admitting(knows: Callable[[bytes], bool]) -> type[asyncio.Protocol]:
    """Returns a uvicorn protocol that closes connections which do not send a valid key in time.

    Args:
        knows: whether the value of a header with a key is that of an open conversation.
    """
    waiting: dict[asyncio.Protocol, asyncio.TimerHandle] = {}  # oldest first

    class Connection(AutoHTTPProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            waiting[self] = self.loop.call_later(HEADER_SECONDS, transport.abort)
            if len(waiting) > MOST_WAITING:
                oldest = next(iter(waiting))
                waiting.pop(oldest).cancel()
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            has_headers = self in waiting and self.cycle is not None
            if has_headers and any(
                name.decode("latin-1") in KEY_HEADERS and knows(value) for name, value in self.headers
            ):
                waiting.pop(self).cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            if timer := waiting.pop(self, None):
                timer.cancel()
            super().connection_lost(exc)

    return Connection
