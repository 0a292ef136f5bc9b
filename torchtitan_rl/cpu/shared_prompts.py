"""vLLM's scheduler, but a prompt is computed once for all of its completions, to its last token but one.

vLLM shares whole blocks of its cache alone, and on a CPU they have at least 32 tokens: of a prompt of 13 it shares nothing.
"""

from collections import defaultdict
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request, RequestStatus


class SharedPrompts(Scheduler):
    """A prompt's first completion goes a step ahead; the others begin with a copy of what it left in the cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_prompt: dict[tuple[int, ...], list[Request]] = defaultdict(list)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._whole_cache = all(isinstance(one, FullAttentionManager) for one in managers)

    def add_request(self, request: Request) -> None:
        """See Scheduler."""
        self._by_prompt[tuple(request.prompt_token_ids)].append(request)
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        twin = self._twin(request)
        under_way = twin is not None and twin.num_computed_tokens < twin.num_prompt_tokens
        return not under_way and super()._handle_blocked_waiting_request(request)

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        found = super()._get_local_prefix_cache_hit(request)
        twin = self._twin(request)
        shared = min(request.num_prompt_tokens, request.num_tokens - 1)  # the last gives the next token's distribution
        if twin is None or shared <= found[1]:
            return found
        blocks = self.kv_cache_manager.get_blocks(twin.request_id).blocks
        # vLLM copies a last block of which a part is shared, before this step computes anything.
        return KVCacheBlocks(tuple(group[: cdiv(shared, self.block_size)] for group in blocks)), shared, 0, False

    def _twin(self, request: Request) -> Request | None:
        """One that runs with the same prompt."""
        if not (self._whole_cache and self.kv_cache_manager.prefix_cache_lookup_enabled(request)):
            return None
        same = self._by_prompt[tuple(request.prompt_token_ids)]
        return next((one for one in same if one.status == RequestStatus.RUNNING), None)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        prompt = tuple(request.prompt_token_ids)
        self._by_prompt[prompt].remove(request)
        if not self._by_prompt[prompt]:
            del self._by_prompt[prompt]
        return super()._free_request(request, *args, **kwargs)
