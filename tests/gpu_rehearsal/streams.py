"""Streams and events with vector clocks: whether one stream has waited for the work of another."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Event:
    """Stands for torch.cuda.Event. Knows what had been enqueued where it was recorded."""

    def __init__(self, *_: object, **__: object) -> None:
        self.clock: dict[int, int] = {}

    def record(self, stream: "Stream | None" = None) -> None:
        self.clock = dict((stream or current()).clock)

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or current()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        host_waits()


class Stream:
    """Stands for torch.cuda.Stream. `clock` has for each stream the last of its operators that this one has waited for."""

    count = 0

    def __init__(self, *_: object, **__: object) -> None:
        Stream.count += 1
        self.number = Stream.count
        self.clock = {self.number: 0}
        self.device, self.cuda_stream = torch.device("cuda", 0), 0

    def tick(self) -> int:
        """Enqueue one operator. Returns its time on this stream."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def has_seen(self, number: int, time: int) -> bool:
        """Whether the operator at `time` on stream `number` ends before what is enqueued here from now on."""
        return self.clock.get(number, 0) >= time

    def wait_event(self, event: Event) -> None:
        for number, time in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), time)

    wait_stream = wait_event

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        host_waits()

    def is_capturing(self) -> bool:
        return False


_stack = [Stream()]


def current() -> Stream:
    """Returns the stream that operators are enqueued on now."""
    return _stack[-1]


@contextmanager
def stream(one: Stream | None) -> Iterator[None]:
    """Stands for torch.cuda.stream."""
    _stack.append(one or current())
    try:
        yield
    finally:
        _stack.pop()


def host_waits() -> None:
    """Called where the host waits for a stream. `device.Device` replaces it."""
