"""What a push and an engine read of a trainer, for a policy without an optimizer; and both in one process."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.parts.tiny import sampled, save_tiny_checkpoint, scale_policy, sharded_policy
from torchtitan_rl import comm
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.score import score
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.sync.in_process import InProcess, begin_sampling, load_base
from torchtitan_rl.sync.lora_engine import lora_options, lora_request
from torchtitan_rl.sync.weight_sync import WeightSync, WeightSyncError
from torchtitan_rl.trainer.model_loader import load_hf_weights
from torchtitan_rl.types import Completion, Prompt, SegmentLayout

MULTIPLE = 8
"""Sequences are padded to this, for tensor parallelism."""

SEQUENCES = [[3, 12, 4, 12, 5, 14, 9, 1], [7, 8, 9], [100, 101, 102, 103, 104, 105], [5, 5, 5, 5, 5]]
PROMPTS = [Prompt(prompt_idx=i, text="", token_ids=s, expected_answer="") for i, s in enumerate(SEQUENCES)]


def fill(generator: Generator, weights: Mapping[str, Tensor], version: int = 0) -> None:
    """Let an engine that is awake sample with these weights."""
    load_base(generator, weights.items())
    begin_sampling(generator, version)


class TokenizerStandIn:
    """The three things the generator asks of one; the tiny model's tokens stand for no text."""

    eos_token_id = 0
    chat_template = None
    added_tokens_decoder: dict = {}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


class Policy:
    """A model that is pushed as a `Trainer`'s is."""

    def __init__(self, model, state_dict_adapter, *, dtype: str = "float32", lora: Lora | None = None) -> None:
        self.model, self.state_dict_adapter, self.lora = model, state_dict_adapter, lora
        self.config = SimpleNamespace(mixed_precision_param=dtype)
        self.parallel_dims = SimpleNamespace(dp_shard=1)

    @torch.no_grad()
    def token_logprobs(self, ids, temperature: float = 1.0) -> np.ndarray:
        """Log pi of ids[1:], [L - 1]."""
        padding = -len(ids) % MULTIPLE
        tokens = torch.tensor([*ids, *[0] * padding], device=DEVICE_TYPE)  # [T]
        layout = SegmentLayout.of([len(tokens)], device=DEVICE_TYPE)
        logprobs = score(self.model, tokens, tokens.roll(-1), layout, temperature).logprobs
        return logprobs[: len(ids) - 1].cpu().float().numpy()


class Pair:
    """A policy and an engine in one process."""

    def __init__(
        self,
        folder: Path,
        save: Callable[[Path], None] = save_tiny_checkpoint,
        policy_dtype: str = "float32",
        *,
        lora: Lora | None = None,
        tp: int = 1,
        records_kept: bool = False,
        tokenizer: Any = None,
        **generator: Any,
    ) -> None:
        """`tp`: of the policy. Further ranks are FSDP's, or engines of their own."""
        save(folder)
        settings = {"seq_len": 384, "dtype": policy_dtype, "lora": lora, "tensor_parallel_degree": tp}
        self.model, self.adapter = sharded_policy(folder, **settings)
        self.policy = Policy(self.model, self.adapter, dtype=policy_dtype, lora=lora)
        self.folder = str(folder)
        settings = {"dtype": "float32", "max_model_len": 384, "sleep": False} | generator
        self.generator = Generator(
            Generator.Config(**settings),
            hf_assets_path=self.folder,
            tokenizer=tokenizer or TokenizerStandIn(),
            sampling=SamplingConfig(n=4, max_tokens=8),
            seed=0,
            lora_options=lora_options(lora.config) if lora else None,
            lora_request=lora_request() if lora else None,
            records_kept=records_kept,
        )
        self.connect = partial(InProcess, self.generator)
        self.begin_anew()
        self.sync()

    def begin_anew(self, check_interval: int = 1) -> None:
        """Let the next push be a run's first. The engine's present constants then count as right."""
        scale_policy(self.model, 1.0)  # back to shards
        config = WeightSync.Config(check_interval=check_interval)
        self.weight_sync = config.build(trainer=self.policy, connect=self.connect, probe=np.array(SEQUENCES[0]))

    def restore(self) -> None:
        scale_policy(self.model, 1.0)  # back to shards
        load_hf_weights(self.model, self.adapter, self.folder)

    def change(self) -> None:
        scale_policy(self.model, 1.5)

    def weights(self):
        return hf_weights(self.model, self.adapter, self.generator.dtype)

    def changed(self, name: str, change=lambda tensor: None) -> dict[str, Tensor]:
        """Copies of the policy's tensors, one of which `change` changes in place."""
        weights = {other: tensor.clone() for other, tensor in self.weights()}
        change(weights[name])
        return weights

    def fault_with(self, other: dict[str, Tensor | None]) -> str:
        """Push the policy with these tensors in place of its own, as a run's first push; None: without. Returns the error."""
        weights = {name: tensor.clone() for name, tensor in self.weights()} | other
        self.begin_anew()
        return self.fault({name: tensor for name, tensor in weights.items() if tensor is not None})

    def change_all(self, version: int, change) -> None:
        """Change each of the start's parameters in place by random numbers of its own."""
        self.restore()
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                shard, random = parameter.to_local(), torch.Generator().manual_seed(100 * version + number)
                change(shard, torch.randn(shard.shape, generator=random))

    def logprobs(self, ids) -> np.ndarray:
        return self.policy.token_logprobs(ids)

    def of_completion(self, prompt: Prompt, completion: Completion) -> np.ndarray:
        """The policy's log-probabilities of a completion's tokens, [L]."""
        whole = np.concatenate([prompt.token_ids, completion.token_ids])
        return self.logprobs(whole)[len(prompt.token_ids) - 1 :]

    def worst_diff(self, step: int = 1) -> float:
        """Largest difference in log-probability of engine and policy, over prompts and all engines' samples of a step."""
        diffs = [self.generator.prompt_logprobs(np.array(ids)) - self.logprobs(ids) for ids in SEQUENCES]
        for group in comm.all_gather_lists(sampled(self.generator, PROMPTS, step=step)):
            for completion in group.samples:
                diffs.append(self.of_completion(group.prompt, completion) - completion.sampler_logprobs)
        return float(np.abs(np.concatenate(diffs)).max())

    def sync(self, weights=None, version: int = 1) -> int:
        """Push the policy, or these weights in place of its own."""
        if weights is not None:
            blocks = [weights] if isinstance(weights, dict) else ({name: tensor} for name, tensor in weights)
            self.weight_sync.base_weights = lambda: blocks
        try:
            return self.weight_sync.push(policy_version=version)
        finally:
            vars(self.weight_sync).pop("base_weights", None)

    def fault(self, weights=None, version: int = 1) -> str:
        """Returns the error of such a push."""
        try:
            self.sync(weights, version)
        except WeightSyncError as error:
            return str(error)
        raise AssertionError("the push was not refused")
