"""vLLM's scheduler, except that all but the last token of a prompt are computed once for all of its completions.

vLLM shares only whole blocks of its cache, which have at least 32 tokens on a CPU. It shares nothing of a prompt of 13 tokens.
"""

from collections import defaultdict
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request, RequestStatus


class SharedPrompts(Scheduler):
    """A prompt's first completion starts one step before the others, which then copy its part of the KV cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_prompt: dict[tuple[int, ...], list[Request]] = defaultdict(list)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._whole_cache = all(isinstance(one, FullAttentionManager) for one in managers)

    def add_request(self, request: Request) -> None:
        """Add a request, and remember it by its prompt."""
        self._by_prompt[tuple(request.prompt_token_ids)].append(request)
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        twin = self._twin(request)
        under_way = twin is not None and twin.num_computed_tokens < twin.num_prompt_tokens
        return not under_way and super()._handle_blocked_waiting_request(request)

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        found = super()._get_local_prefix_cache_hit(request)
        twin = self._twin(request)
        shared = min(
            request.num_prompt_tokens, request.num_tokens - 1
        )  # the last token must be computed: it predicts the next one
        if twin is None or shared <= found[1]:
            return found
        blocks = self.kv_cache_manager.get_blocks(twin.request_id).blocks
        # vLLM copies a partly shared last block before this step's computation.
        return KVCacheBlocks(tuple(group[: cdiv(shared, self.block_size)] for group in blocks)), shared, 0, False

    def _twin(self, request: Request) -> Request | None:
        """Returns a running request with the same prompt, or None."""
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
