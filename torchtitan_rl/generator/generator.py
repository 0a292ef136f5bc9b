"""Samples with the colocated vLLM engine: one replica per `tensor_parallel_degree` ranks, inside the trainer's processes."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, Configurable

from torchtitan_rl.conversation import Conversation
from torchtitan_rl.data.end_tokens import end_token_ids, hidden_token_ids
from torchtitan_rl.device import ON_CPU
from torchtitan_rl.events import counted, record_metrics
from torchtitan_rl.generator.engine_stats import EngineStats
from torchtitan_rl.generator.generator_config import GeneratorConfig
from torchtitan_rl.generator.patches import (
    Float32Head,
    replace_engine_parts,
    replace_grammar_backend,
    stop_engine,
)
from torchtitan_rl.generator.records import KeptTokens, SlotRecords, output_records
from torchtitan_rl.generator.rollout import roll_out
from torchtitan_rl.generator.start import start_engine
from torchtitan_rl.generator.turn_engine import TurnEngine
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import Completion, FloatArray, Group, IntArray, Prompt, RecordArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import RequestOutput
    from vllm.lora.request import LoRARequest

    from torchtitan_rl.environments.factory import Conversations
    from torchtitan_rl.environments.pool import EnvironmentPool

T = TypeVar("T")


class Generator(Configurable):
    """Samples completions with the weights of the last sync.

    Every rank calls `generate` with the same prompts. Each replica completes its own share of them.
    """

    Config = GeneratorConfig

    def __init__(
        self,
        config: GeneratorConfig,
        *,
        hf_assets_path: str,
        tokenizer: "PreTrainedTokenizerBase",
        sampling: SamplingConfig,
        seed: int,
        environments: "Conversations | None" = None,
        lora_options: Mapping[str, Any] | None = None,
        lora_request: "LoRARequest | None" = None,
        records_kept: bool = False,
        tool_call_parser: str | None = None,
        norms_round_once: bool = False,
    ) -> None:
        """Start an engine with empty weights. `WeightSync.push` must fill them before `generate`.

        Args:
            hf_assets_path: the folder whose config.json describes the model.
            sampling: used if neither `generate` nor the prompt has a sampling config.
            environments: makes the environments that answer the policy; None if every completion is one turn.
            lora_options: further keyword arguments of `vllm.LLM`, if the policy has a LoRA adapter.
            lora_request: names the LoRA adapter that all requests use; None: the engine has none.
            records_kept: record the tokens that the sampler keeps, for completions to learn from.
            tool_call_parser: of the environments' conversations. With records, their agents may ask for grammars.
            norms_round_once: the policy's norms, as PyTorch's, do not round before they multiply by their weight.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.seed = seed
        self.environments = environments
        self.lora_request = lora_request
        self.policy_version = -1
        self.replica, self.rank_in_replica = divmod(dist.get_rank(), config.tensor_parallel_degree)
        self.num_replicas = dist.get_world_size() // config.tensor_parallel_degree
        self.end_token_ids = end_token_ids(hf_assets_path, tokenizer)
        self._hidden_token_ids = hidden_token_ids(tokenizer)
        options = {"seed": seed, **(lora_options or {})}
        self.llm = start_engine(config, hf_assets_path, norms_round_once, **options)
        self._sleeps = self.llm.model_config.enable_sleep_mode
        self.asleep = False
        """Whether weights and KV cache are not in memory."""
        self.stats = EngineStats()
        replace_engine_parts(self.llm, tokenizer, self.stats)
        self.wide_head: Float32Head | None = None
        """The copy of the output head with which the engine computes; None: it computes with its own."""
        if ON_CPU and config.dtype == "bfloat16":
            [self.wide_head] = self.llm.apply_model(Float32Head)
        self.records: Callable[[RequestOutput, str], RecordArray | None] | None = None
        """Returns what the engine recorded of a request, by its output and the engine's name of it."""
        self.make_grammar: Callable[..., str] | None = None
        """See `FittedEnvironment.fit`."""
        if config.router_replay:
            self.records = SlotRecords(self.llm).of if ON_CPU else output_records
        elif records_kept:
            self.records = KeptTokens(self.llm).of
            if environments and environments.may_answer:
                self.make_grammar = self._own_grammars(tool_call_parser)

    def _own_grammars(self, tool_call_parser: str | None) -> Callable[..., str]:
        """Puts our grammars in the place of the engine's, and returns what makes one of a request."""
        from torchtitan_rl.generator.grammars import Grammars  # it imports vLLM

        vocab_size = self.llm.model_config.get_vocab_size()
        grammars = Grammars(self.tokenizer, tool_call_parser, self.end_token_ids, vocab_size)
        replace_grammar_backend(self.llm, grammars)
        return grammars.of

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the engine's weights."""
        return TORCH_DTYPE_MAP[self.config.dtype]

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> Iterator[Group[Completion]]:
        """Complete this replica's share of `prompts`: every num_replicas-th prompt, n completions each, in one turn
        or several.

        Yields each group when its last completion ends, while other groups are still being sampled. The same (seed,
        step, round, replica, prompts, weights, environments' answers) give the same tokens. `settings`: see `begin`.
        """
        yield from self.begin(prompts, **settings).whole_groups()

    def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int = 0,
        round: int = 0,
        sampling_config: SamplingConfig | None = None,
        seeded: bool = False,
        carried: Mapping[int, list[Conversation]] | None = None,
    ) -> "SamplingRound":
        """Returns what `generate` with these arguments samples, before its first token. Sample it before the next
        call.

        Args:
            step: the training step, part of the seed. Tokens of weights older than step - 1 have their version.
            round: the number of the call within the step, part of the seed.
            sampling_config: replaces the prompt's and the configured sampling, for evaluation.
            seeded: give each sample its own seed, which makes the tokens independent of the number of replicas. It is
                slower.
            carried: conversations of earlier steps that go on, by prompt_idx.
        """
        if self.policy_version < 0:
            raise RuntimeError(
                "The generator was called before the first weight sync: the engine's weights are empty."
            )

        seed_of = partial(_stable_seed, self.seed, step, round)
        # What the engine draws from: torch's RNG on a CPU, numpy's on a GPU. All ranks of a replica must draw alike.
        torch.manual_seed(seed_of(self.replica))
        np.random.seed(seed_of(self.replica) % 2**32)
        self.stats.begin()
        mine = prompts[self.replica :: self.num_replicas]
        groups: list[list[Conversation]] = []
        for prompt in mine:
            sampling = sampling_config or prompt.sampling or self.sampling
            before = (carried or {}).get(prompt.prompt_idx)
            groups.append(before or self._conversations(prompt, sampling, seed_of))

        engine = TurnEngine(
            engine=self.llm.llm_engine,
            tokenizer=self.tokenizer,
            end_token_ids=self.end_token_ids,
            hidden_token_ids=self._hidden_token_ids,
            seed=lambda c: seed_of(c.prompt.prompt_idx, c.sample_idx, *c.turn_key),
            lora_request=self.lora_request,
            records=self.records,
        )
        return SamplingRound(self, mine, groups, engine, seeded, step)

    def _conversations(
        self, prompt: Prompt, sampling: SamplingConfig, seed_of: Callable[..., int]
    ) -> list[Conversation]:
        """Returns the prompt's conversations, each without a turn."""
        limits = self.environments.config if self.environments else None
        return [
            Conversation(
                prompt=prompt,
                sample_idx=sample_idx,
                sampling=sampling,
                most_in_turn=(limits and limits.max_turn_tokens) or sampling.max_tokens,
                most_tokens=self.config.max_model_len,
                most_in_rollout=limits and limits.max_rollout_tokens,
                seed=seed_of(prompt.prompt_idx, sample_idx),
            )
            for sample_idx in range(sampling.n)
        ]

    def share(self, value: Any) -> Any:
        """Returns the value of this replica's first rank on all of its ranks."""
        if self.config.tensor_parallel_degree == 1:
            return value
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().broadcast_object(value, src=0)

    def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Returns log mu of token_ids[1:], each given the tokens before it, at temperature 1: [L - 1]. Used by the
        probe."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        tokens = {"prompt_token_ids": token_ids.tolist()}
        output = self.llm.generate(
            [tokens], params, use_tqdm=False, lora_request=self.lora_request
        )[0]
        return np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32)  # [L - 1]

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache. A base is kept on the host. No effect on a CPU."""
        if self._sleeps and not self.asleep:
            self.llm.sleep(level=1 if self.lora_request else 2)
            self.asleep = True

    def wake_weights(self) -> None:
        """Map a sleeping engine's weights, which stay undefined, and restore its buffers. vLLM ignores a second
        call."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])

    def wake(self, policy_version: int) -> None:
        """Allocate a sleeping engine's KV cache, once its weights are there. It samples as this version of the policy."""
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.policy_version = policy_version

    def inspect(self, function: Callable[[nn.Module], T]) -> T:
        """Returns `function`'s result for this rank's part of the engine's model. It wakes a sleeping engine's
        weights."""
        self.wake_weights()
        return self.llm.apply_model(function)[0]

    def close(self) -> None:
        """Close the environments that are left and stop the engine. Must run before the process group is destroyed, or vLLM's
        teardown raises."""
        if self.environments is not None:
            self.environments.close()
        stop_engine(self.llm)


@dataclass(eq=False)
class SamplingRound:
    """The conversations of one `Generator.generate` call. `whole_groups` samples them, and `cut` ends that early."""

    generator: Generator
    prompts: Sequence[Prompt]
    groups: list[list[Conversation]]
    """Each prompt's conversations. A conversation that has tokens already goes on after them."""
    engine: TurnEngine
    seeded: bool
    step: int
    environments: "EnvironmentPool | None" = field(default=None, init=False)

    @property
    def _conversations(self) -> list[Conversation]:
        return list(chain.from_iterable(self.groups))

    def whole_groups(self) -> Iterator[Group[Completion]]:
        """Sample all conversations. Yields each group when its last conversation has ended."""
        if not self.groups:
            return
        generator, factory = self.generator, self.generator.environments
        conversations = self._conversations
        is_first = generator.rank_in_replica == 0  # calls the environments and records statistics
        pool = nullcontext()
        if factory is not None and is_first:
            pool = closing(factory.start(conversations, generator.make_grammar))
        try:
            with closing(self.engine), pool as environments:
                self.environments = environments
                ended = roll_out(
                    conversations,
                    self.engine,
                    environments,
                    generator.share,
                    wait_for_answers=factory is not None and factory.config.wait_for_answers,
                    seeded=self.seeded,
                )
                yield from self._as_they_end(ended)
        finally:
            if is_first:
                record_metrics(generator.stats.metrics())

    def cut(self) -> None:
        """Take every unfinished turn out of the engine. The conversations keep the tokens sampled so far, and their
        environments stay open for a round that has the same conversations."""
        factory, environments = self.generator.environments, self.environments
        conversations = self._conversations
        if factory is not None and factory.config.wait_for_answers:
            for answer in self.generator.share(
                environments.answers(wait=False, all=True) if environments else ()
            ):
                conversations[answer.conversation_idx].append_answer(answer)
        for turn in self.engine.take_back():
            conversations[turn.conversation_idx].append_turn(turn)
        if environments is not None:
            environments.leave()

    def _as_they_end(self, ended: Iterator[int]) -> Iterator[Group[Completion]]:
        groups = [group for group in self.groups for _ in group]  # of each conversation
        unfinished = {id(group): len(group) for group in self.groups}
        for conversation_idx in counted(ended, len(self._conversations)):
            group = groups[conversation_idx]
            unfinished[id(group)] -= 1
            if unfinished[id(group)] == 0:
                version, prompt = self.generator.policy_version, group_prompt(group)
                if version < self.step - 1:  # the weights are one update older than the step's
                    for conversation in group:
                        conversation.end_step(version)
                    version = self.step - 1
                samples = [conversation.completion(version, prompt) for conversation in group]
                yield Group(prompt=prompt, samples=samples)


def group_prompt(group: Sequence[Conversation]) -> Prompt:
    """Returns the prompt of a group: one that was read, as a failed reset leaves it without the environment's messages."""
    read = [conversation.prompt for conversation in group if conversation.num_sampled]
    prompts = read or [conversation.prompt for conversation in group]
    return max(prompts, key=lambda prompt: len(prompt.token_ids))


def _stable_seed(*parts: int) -> int:
    """Returns a 63-bit seed made of integers, the same in every process and version of Python."""
    text = ",".join(map(str, parts))
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
