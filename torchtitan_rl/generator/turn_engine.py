"""Adapter to vLLM's engine in this process: requests can be added at any time, and turns are returned when they end."""

import json
from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from torchtitan_rl.conversation import Conversation, Sampled
from torchtitan_rl.events import advanced
from torchtitan_rl.generator.patches import unfinished_outputs
from torchtitan_rl.types import RecordArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM, RequestOutput
    from vllm.lora.request import LoRARequest


class TurnEngine:
    """Samples the turns of one `Generator.generate` call, identically on each rank of the engine."""

    def __init__(
        self,
        llm: "LLM",
        tokenizer: "PreTrainedTokenizerBase",
        end_token_ids: list[int],
        hidden_token_ids: Set[int],
        *,
        seed: Callable[[Conversation], int],
        lora_request: "LoRARequest | None" = None,
        records: "Callable[[RequestOutput, str], RecordArray | None] | None" = None,
    ) -> None:
        """
        Args:
            hidden_token_ids: the tokens that a completion's text leaves out.
            seed: returns the seed of a conversation's next turn.
            lora_request: names the adapter of every turn.
            records: returns what the engine recorded of a request, by its output and the engine's name of it.
        """
        self._engine = llm.llm_engine
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._hidden = hidden_token_ids
        self._seed, self._lora_request = seed, lora_request
        self._records = records
        self._under_way: dict[str, Conversation] = {}
        self._names: dict[str, str] = {}

    @property
    def busy(self) -> bool:
        """Whether any requested turn has not ended."""
        return self._engine.has_unfinished_requests()

    def add(self, index: int, conversation: Conversation, *, seeded: bool) -> None:
        """Request the conversation's next turn. With `seeded` it has its own seed, else it draws from the process's
        RNG."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sampling, grammar = conversation.sampling, conversation.grammar
        if grammar is not None and conversation.begun is not None:
            begun = {"begun": conversation.begun.token_ids}
            grammar = json.dumps(json.loads(grammar) | begun)
        params = SamplingParams(
            max_tokens=conversation.room(),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            structured_outputs=grammar and StructuredOutputsParams(structural_tag=grammar),
            seed=self._seed(conversation) if seeded else None,
            stop=sampling.stop,
            stop_token_ids=[*self._end_token_ids, *sampling.stop_token_ids],
            logprobs=0,  # only of the sampled token
            flat_logprobs=True,  # one list of numbers per turn instead of an object per token
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        self._under_way[str(index)] = conversation
        self._names[str(index)] = self._engine.add_request(
            str(index), tokens_input(conversation.context), params, lora_request=self._lora_request
        )

    def step(self) -> list[Sampled]:
        """Sample a token of every turn in the batch. Returns the turns that ended."""
        ended = self._engine.step()
        advanced()
        return [self._sampled(output) for output in ended]

    def take_back(self) -> list[Sampled]:
        """End every unfinished turn. Returns the tokens sampled so far, without a finish_reason."""
        cut = unfinished_outputs(self._engine)
        turns = [
            self._sampled(output, ends=("abort",))._replace(finish_reason=None) for output in cut
        ]
        self._engine.abort_request([output.request_id for output in cut])
        self._engine.step()  # a GPU's engine is a batch ahead; nobody gets its tokens, but it must end before a sleep
        return turns

    def close(self) -> None:
        """Abort all unfinished turns, so that the engine is free for the next call."""
        self._engine.abort_request(list(self._under_way))

    def _sampled(
        self, output: "RequestOutput", ends: tuple[str, ...] = ("stop", "length")
    ) -> Sampled:
        [turn] = output.outputs
        if turn.finish_reason not in ends:
            raise RuntimeError(
                f"vLLM ended a turn with {turn.finish_reason!r}; expected {' or '.join(ends)}."
            )
        conversation = self._under_way.pop(output.request_id)
        before = conversation.begun.token_ids if conversation.begun else ()
        return Sampled(
            conversation_idx=int(output.request_id),
            token_ids=turn.token_ids,
            sampler_logprobs=turn.logprobs.logprobs,
            text=self._tokenizer.decode(
                [token for token in (*before, *turn.token_ids) if token not in self._hidden]
            ),
            finish_reason=turn.finish_reason,
            records=self._records and self._records(output, self._names[output.request_id]),
        )
