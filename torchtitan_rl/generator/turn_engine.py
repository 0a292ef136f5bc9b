"""Adapter to vLLM's engine in this process: requests can be added at any time, and turns are returned when they end."""

import json
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchtitan_rl.conversation import Conversation, Sampled
from torchtitan_rl.events import advanced
from torchtitan_rl.generator.patches import unfinished_outputs
from torchtitan_rl.types import RecordArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import RequestOutput
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine


@dataclass(kw_only=True, eq=False)
class TurnEngine:
    """Samples the turns of one `Generator.generate` call, identically on each rank of the engine."""

    engine: "LLMEngine"
    tokenizer: "PreTrainedTokenizerBase"
    end_token_ids: list[int]
    hidden_token_ids: Set[int]
    """The tokens that a completion's text leaves out."""
    seed: Callable[[Conversation], int]
    """Returns the seed of a conversation's next turn."""
    lora_request: "LoRARequest | None"
    """Names the adapter of every turn."""
    records: "Callable[[RequestOutput, str], RecordArray | None] | None"
    """Returns what the engine recorded of a request, by its output and the engine's name of it."""
    _under_way: dict[str, tuple[Conversation, str]] = field(default_factory=dict, init=False)
    """Conversations and the engine's names of their requests, by request."""

    @property
    def busy(self) -> bool:
        """Whether any requested turn has not ended."""
        return self.engine.has_unfinished_requests()

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
            seed=self.seed(conversation) if seeded else None,
            stop=sampling.stop,
            stop_token_ids=[*self.end_token_ids, *sampling.stop_token_ids],
            logprobs=0,  # only of the sampled token
            flat_logprobs=True,  # one list of numbers per turn instead of an object per token
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        name = self.engine.add_request(
            str(index), tokens_input(conversation.context), params, lora_request=self.lora_request
        )
        self._under_way[str(index)] = conversation, name

    def step(self) -> list[Sampled]:
        """Sample a token of every turn in the batch. Returns the turns that ended."""
        ended = self.engine.step()
        advanced()
        return [self._sampled(output) for output in ended]

    def take_back(self) -> list[Sampled]:
        """End every unfinished turn. Returns the tokens sampled so far, without a finish_reason."""
        cut = unfinished_outputs(self.engine)
        turns = [
            self._sampled(output, ends=("abort",))._replace(finish_reason=None) for output in cut
        ]
        self.engine.abort_request([output.request_id for output in cut])
        self.engine.step()  # a GPU's engine is a batch ahead; nobody gets its tokens, but it must end before a sleep
        return turns

    def close(self) -> None:
        """Abort all unfinished turns, so that the engine is free for the next call."""
        self.engine.abort_request(list(self._under_way))

    def _sampled(
        self, output: "RequestOutput", ends: tuple[str, ...] = ("stop", "length")
    ) -> Sampled:
        [turn] = output.outputs
        if turn.finish_reason not in ends:
            raise RuntimeError(
                f"vLLM ended a turn with {turn.finish_reason!r}; expected {' or '.join(ends)}."
            )
        conversation, name = self._under_way.pop(output.request_id)
        begun = conversation.begun.token_ids if conversation.begun else ()
        whole = [*begun, *turn.token_ids]
        shown = [token for token in whole if token not in self.hidden_token_ids]
        return Sampled(
            conversation_idx=int(output.request_id),
            token_ids=turn.token_ids,
            sampler_logprobs=turn.logprobs.logprobs,
            text=self.tokenizer.decode(shown),
            finish_reason=turn.finish_reason,
            records=self.records and self.records(output, name),
        )
