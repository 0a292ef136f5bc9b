"""The program of a rank that only samples: it carries out the trainers' orders."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan_rl import comm
from torchtitan_rl.events import heartbeat
from torchtitan_rl.generator.in_flight import Carried
from torchtitan_rl.link import Link, Order
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.sampler import Answered, Sampler
from torchtitan_rl.sync.engine_weights import Shapes
from torchtitan_rl.sync.in_process import InProcess

if TYPE_CHECKING:
    from torchtitan_rl.observe.observer import RankObserver


class GeneratorRank:
    """Owns the parts of a generator's rank. An order calls one of the methods below `close`, and its answer is what this returns."""

    def __init__(
        self,
        link: Link,
        sampler: Sampler,
        lora: Lora | None,
        observer: "RankObserver",
        stop_requested: Callable[[], int],
    ) -> None:
        """`observer`: keeps what is recorded and sampled until it is answered. `stop_requested`: see `Controller`."""
        self._link, self._sampler, self._lora = link, sampler, lora
        self.generator, self.observer = sampler.generator, observer
        self._stop_requested = stop_requested

    def run(self) -> int:
        """Carry out orders until the trainers have none left. Returns the number of the signal by which they stopped, or 0."""
        self._stop_requested()
        order = self._link.order()
        while isinstance(order, Order):
            with heartbeat(f"step {order.step}"):
                value = getattr(self, order.method)(**order.arguments)
                self._link.answer(value, stopped=comm.largest(self._stop_requested()))
                order = self._link.order()  # a rank that is stopped here is late in a step
        return order

    def close(self) -> None:
        """Stop the reward functions and the engine, then the process group that it uses."""
        self._sampler.grader.close()
        self.generator.close()
        comm.close_process_group()

    def sample(
        self, groups: str, asked: Sequence[Any], state: TrainerState, carried: dict[int, Carried]
    ) -> Answered:
        """Returns the groups of a method of `Sampler`. For reward functions the first generator is rank 0."""
        first = dist.get_rank() == 0
        is_local = first or os.environ.get("LOCAL_RANK", "0") == "0"
        state = replace(state, is_world_process_zero=first, is_local_process_zero=is_local)
        sampler, in_flight = self._sampler, self._sampler.step_sampler
        in_flight.carried = carried
        scored = getattr(sampler, groups)(*asked, state=state)
        recorded = comm.all_gather_lists([self.observer.hand_over()])
        return Answered(scored, in_flight.carried, recorded)

    def connect(self, shapes: Shapes) -> torch.dtype:
        self._engine = InProcess(self.generator, self._lora, shapes)
        return self._engine.dtype

    def receive(self, *, sends_base: bool, policy_version: int) -> dict[str, int]:
        base = self._link.receive() if sends_base else None
        adapter = self._link.receive() if self._lora else ()
        return self._engine.send(base, adapter, policy_version=policy_version)

    def ask(self, question: str, **arguments: Any) -> Any:
        """Returns what this method of `InProcess` returns."""
        return getattr(self._engine, question)(**arguments)
