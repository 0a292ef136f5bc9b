"""A vLLM scheduler that keeps a turn's tokens until the turn ends, which halves the host's time for a token.

vLLM passes every token of every sequence from its scheduler to its output processor. Training reads whole turns only.
While a sequence only grows, this scheduler appends its token and passes nothing on. Every other sequence of a step goes
through vLLM's own code: the first token, the last, one that begins a block of the KV cache, a preempted sequence, a
prompt's log-probabilities, a stop text. What is scheduled, and so every number that the engine computes, is the same.
"""

import copy
import hashlib
import inspect
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan_rl.core.events import progress

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

KNOWN_SOURCE = "dc8b173bdeec6d49a201eab601a00ac72cd57b868880b018e680ab583ab29982"
"""SHA-256 of the code of vLLM 0.32.0 that `TurnScheduler` anticipates: see `_source`."""


def scheduler_class(*, asynchronous: bool) -> type | None:
    """Returns the class for vLLM's `scheduler_cls`. None if this vLLM's scheduler is another than the known one, which
    one line says.

    Args:
        asynchronous: whether vLLM schedules a step before it has the tokens of the last one, as it does on a GPU.
    """
    try:
        known = hashlib.sha256(_source().encode()).hexdigest() == KNOWN_SOURCE
    except (ImportError, AttributeError, OSError, TypeError):  # moved, or without its source
        known = False
    if not known:
        import vllm

        progress(
            f"generator.scheduler: vLLM {vllm.__version__} has another scheduler than 0.32.0, so its own one is used. The "
            "tokens are the same; decoding takes the host about twice the time."
        )
        return None
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base = AsyncScheduler if asynchronous else Scheduler
    return type("TurnScheduler", (TurnScheduler, base), {"ahead": asynchronous})


def _source() -> str:
    """Returns the source of the methods of vLLM whose effect on a growing sequence `TurnScheduler` has itself."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.core.single_type_kv_cache_manager import (
        FullAttentionManager,
        SingleTypeKVCacheManager,
    )

    parts = (
        Scheduler.update_from_output,
        Scheduler._update_request_with_output,
        AsyncScheduler._update_request_with_output,
        check_stop,
        KVCacheManager.allocate_slots,
        KVCacheManager.cache_blocks,
        SingleTypeKVCacheManager.allocate_new_blocks,
        SingleTypeKVCacheManager.cache_blocks,
        SingleTypeKVCacheManager.remove_skipped_blocks,
        FullAttentionManager.cache_blocks,
    )
    return "".join(map(inspect.getsource, parts))


class _Turn:
    """A request whose tokens may wait for its end."""

    __slots__ = ("ends", "full_length", "logprobs", "ranks", "request", "tokens")

    def __init__(self, request: "Request", max_model_len: int) -> None:
        params = request.sampling_params
        self.request = request
        self.ends = {params.eos_token_id, *(params.stop_token_ids or ())}
        self.full_length = min(max_model_len, request.num_prompt_tokens + request.max_tokens)
        """Tokens of prompt and completion at which vLLM ends the request."""
        self.forget()

    def forget(self) -> None:
        """Forget the tokens that have been passed on."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []

    def complete(self, output: "EngineCoreOutput") -> None:
        """Put the tokens that waited before those of `output`."""
        from vllm.v1.outputs import LogprobsLists

        if not self.tokens:
            return
        waited = LogprobsLists(
            np.asarray(self.tokens)[:, None],  # [L, 1]
            np.asarray(self.logprobs, dtype=np.float32)[:, None],  # [L, 1]
            np.asarray(self.ranks),  # [L]
        )
        new = output.new_logprobs
        if new is not None:
            parts = zip(waited[:3], new[:3], strict=True)
            waited = LogprobsLists(*(np.concatenate(pair) for pair in parts))
        output.new_token_ids = [*self.tokens, *output.new_token_ids]
        output.new_logprobs = waited
        self.forget()


class TurnScheduler:
    """What is put before vLLM's `Scheduler` or `AsyncScheduler`: see `scheduler_class`."""

    ahead: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from vllm.v1.request import RequestStatus

        self._turns: dict[str, _Turn] = {}
        self._running: RequestStatus = RequestStatus.RUNNING
        managers = self.kv_cache_manager.coordinator.single_type_managers
        sizes = {self.block_size, self.hash_block_size, *(one.block_size for one in managers)}
        alone = (self.connector, self.ec_connector, self.aux_output_connector, self.perf_metrics)
        self._keeps = (
            len(sizes) == 1
            and all(part is None for part in alone)
            and not (self.num_spec_tokens or self.return_sampling_mask or self.num_lookahead_tokens)
        )
        if self._keeps:
            _skip_allocation_within_a_block(self.kv_cache_manager, self.block_size)

    def add_request(self, request: "Request") -> None:
        """As vLLM's. A request whose user reads nothing before its end may keep its tokens."""
        if self._keeps and _is_read_at_its_end(request):
            self._turns[request.request_id] = _Turn(request, self.max_model_len)
        super().add_request(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: "RequestStatus"
    ) -> list["Request"]:
        """As vLLM's. Tokens that waited are dropped."""
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._turns.pop(request.request_id, None)
        return ended

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> dict[int, "EngineCoreOutputs"]:
        """As vLLM's, but the outputs have no growing sequence. Another output of it brings the tokens that waited."""
        rest = scheduler_output
        logprobs = model_runner_output.logprobs
        if self._turns and logprobs is not None and logprobs.cu_num_generated_tokens is None:
            rest = copy.copy(scheduler_output)
            rest.num_scheduled_tokens = self._append_growing(
                scheduler_output.num_scheduled_tokens, model_runner_output
            )
        outputs = super().update_from_output(rest, model_runner_output)
        for client in outputs.values():
            for output in client.outputs:
                turn = self._turns.get(output.request_id)
                if turn is not None:
                    turn.complete(output)
                    if output.finish_reason is not None:
                        del self._turns[output.request_id]
        return outputs

    def _append_growing(
        self, scheduled: dict[str, int], sampled: "ModelRunnerOutput"
    ) -> dict[str, int]:
        """Append the token of each sequence that only grows. Returns what was scheduled of the others.

        Same as vLLM's `update_from_output` and `_update_request_with_output` for one token that neither ends the
        request nor fills a block of the KV cache whose entry in the prefix cache would follow.
        """
        tokens_of, row_of = sampled.sampled_token_ids, sampled.req_id_to_index
        logprobs = sampled.logprobs.logprobs[:, 0].tolist()  # [sequences]
        ranks = sampled.logprobs.sampled_token_ranks.tolist()  # [sequences]
        turns, running, size, ahead = self._turns, self._running, self.block_size, self.ahead
        others: dict[str, int] = {}
        for name, number in scheduled.items():
            turn = turns.get(name)
            if turn is None or number != 1:
                others[name] = number
                continue
            request = turn.request
            if (
                request.status is not running
                or request.num_stale_output_tokens
                or request.events  # of its first token, or after a preemption
                or request.prefill_stats is not None
            ):
                others[name] = number
                continue
            row = row_of[name]
            new = tokens_of[row]
            if len(new) != 1:  # the prompt goes on
                others[name] = number
                continue
            token = new[0]
            every = request._all_token_ids
            length = len(every) + 1
            in_flight = request.num_output_placeholders
            if (
                token in turn.ends
                or length >= turn.full_length
                or (ahead and (request.num_computed_tokens - in_flight + 1) % size == 0)
            ):
                others[name] = number
                continue
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(token)
            every.append(token)
            if length % size == 0:
                request.update_block_hashes()
            if ahead:
                request.num_output_placeholders = in_flight - 1
            turn.tokens.append(token)
            turn.logprobs.append(logprobs[row])
            turn.ranks.append(ranks[row])
        return others

    def take_waiting(self) -> list["EngineCoreOutput"]:
        """Returns one output for each unfinished request with tokens that wait, and forgets them."""
        from vllm.v1.engine import EngineCoreOutput

        outputs = []
        for name, turn in self._turns.items():
            if turn.tokens:
                output = EngineCoreOutput(request_id=name, new_token_ids=[])
                turn.complete(output)
                outputs.append(output)
        return outputs


def pass_on_waiting(engine: "LLMEngine") -> None:
    """Give the engine's output processor the tokens that wait, as after each step of vLLM's own scheduler."""
    from vllm.v1.metrics.stats import IterationStats

    scheduler = engine.engine_core.engine_core.scheduler
    if isinstance(scheduler, TurnScheduler):
        engine.output_processor.process_outputs(
            scheduler.take_waiting(), time.monotonic(), IterationStats()
        )


def _is_read_at_its_end(request: "Request") -> bool:
    """Whether the request is a plain turn, of which only the final output is read (`TurnEngine.add`)."""
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize  # a stop text may end it after any token
        and params.num_logprobs == 0
        and params.prompt_logprobs is None
        and params.repetition_detection is None
        and not request.resumable
        and not request.use_structured_output
        and not request.has_encoder_inputs
    )


def _skip_allocation_within_a_block(manager: "KVCacheManager", size: int) -> None:
    """Let a sequence whose next token has a slot get no allocation, which would return no block and change nothing.

    Only with full attention everywhere: with a sliding window the allocation also frees blocks.

    Args:
        size: tokens in a block.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    if any(
        type(one) is not FullAttentionManager for one in manager.coordinator.single_type_managers
    ):
        return
    allocate: Callable[..., KVCacheBlocks | None] = manager.allocate_slots
    nothing = manager.empty_kv_cache_blocks

    def allocate_slots(
        request: "Request", num_new_tokens: int, num_lookahead_tokens: int = 0, **more: Any
    ) -> "KVCacheBlocks | None":
        computed = request.num_computed_tokens
        if (
            num_new_tokens == 1
            and computed % size
            and min(computed + 1, len(request._all_token_ids))
            % size  # else a full block enters the prefix cache
            and not more
            and not num_lookahead_tokens
        ):
            return nothing
        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    manager.allocate_slots = allocate_slots
