"""The program of a rank that only samples: it carries out the trainers' orders."""

from collections.abc import Callable, Mapping
from typing import Any

from torchtitan_rl import comm
from torchtitan_rl.events import heartbeat
from torchtitan_rl.link import Link
from torchtitan_rl.sampler import Sampler


class GeneratorRank:
    """Owns the parts of a generator's rank."""

    def __init__(
        self,
        link: Link,
        parts: Mapping[str, Any],
        sampler: Sampler,
        write_unfinished: Callable[[], None],
        stop_requested: Callable[[], int],
    ) -> None:
        """
        Args:
            parts: what carries out orders, by `Order.part`.
            sampler: closed at the end, with its engine.
            write_unfinished: writes what was sampled and not yet answered. Called if sampling fails.
            stop_requested: see `Controller`.
        """
        self._link, self._parts, self._sampler = link, parts, sampler
        self._write_unfinished, self._stop_requested = write_unfinished, stop_requested

    def run(self) -> int:
        """Carry out orders until the trainers have none left. Returns the number of the signal by which they stopped, or 0."""
        self._stop_requested()
        try:
            order = self._link.order()
            while order is not None:
                with heartbeat(f"step {order.step}"):
                    method = getattr(self._parts[order.part], order.method)
                    value = method(**order.arguments)
                    self._link.answer(value, stopped=comm.largest(self._stop_requested()))
                    order = self._link.order()  # a rank that is stopped here is late in a step
        except BaseException:
            self._write_unfinished()
            if self._sampler.generator.environments is not None:
                self._sampler.generator.environments.close()  # a command of theirs would outlive the run
            raise
        return self._link.stopped

    def close(self) -> None:
        """Stop the reward functions and the engine, then the process group that it uses."""
        self._sampler.close()
        self._sampler.generator.close()
        comm.close_process_group()
