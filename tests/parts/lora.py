"""A policy with adapters and an engine in one process, for tests of the push."""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from tests.parts.pushes import SEQUENCES, Policy, TokenizerStandIn
from tests.parts.tiny import sampled, scale_policy, sharded_policy
from torchtitan_rl import comm
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.sync.in_process import InProcess
from torchtitan_rl.sync.lora_engine import lora_options, lora_request
from torchtitan_rl.sync.weight_sync import WeightSync
from torchtitan_rl.types import Prompt

PROMPTS = [Prompt(prompt_idx=i, text="", token_ids=s, expected_answer="") for i, s in enumerate(SEQUENCES)]
LORA = LoraConfig(rank=6, alpha=9.0)  # vLLM pads it to 8
A, B = (f"model.layers.1.mlp.down_proj.lora_{one}.weight" for one in "AB")


class AdapterPair:
    """A policy with adapters and an engine in one process."""

    def __init__(
        self, folder: Path, *, dtype: str = "float32", tp: int = 1, generator_tp: int = 1, lora: LoraConfig = LORA
    ) -> None:
        """The other ranks are FSDP's, or engines of their own."""
        lora = Lora(lora)
        degrees = {"tensor_parallel_degree": tp}
        self.model, self.names = sharded_policy(folder, dtype=dtype, seq_len=384, chunk_tokens=64, lora=lora, **degrees)
        self.lora, self.policy = lora, Policy(self.model, self.names, dtype=dtype, lora=lora)
        self.generator = Generator(
            Generator.Config(dtype=dtype, max_model_len=384, sleep=False, tensor_parallel_degree=generator_tp),
            hf_assets_path=str(folder),
            tokenizer=TokenizerStandIn(),
            sampling=SamplingConfig(n=2, max_tokens=8),
            seed=0,
            lora_options=lora_options(lora.config),
            lora_request=lora_request(),
        )
        self.most_diff = 1e-4 if dtype == "float32" else 1.0
        self.begin_anew()
        self.push()

    def begin_anew(self, connect=None) -> None:
        """Let the next push be a run's first, with the base."""
        scale_policy(self.model, 1.0)  # back to shards
        config = WeightSync.Config(check_interval=1, max_diff=self.most_diff)
        self.weight_sync = config.build(
            trainer=self.policy, connect=connect or partial(InProcess, self.generator), probe=np.array(SEQUENCES[0])
        )

    def base(self) -> dict[str, torch.Tensor]:
        return dict(hf_weights(self.model, self.names, self.generator.dtype))

    def sent(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.lora.weights(self.generator.dtype)}

    def logprobs(self, ids) -> np.ndarray:
        """The policy's log-probabilities of ids[1:] at temperature 1, [L - 1]."""
        return self.policy.token_logprobs(ids)

    def worst_diff(self, step: int) -> float:
        """Largest difference in log-probability of engine and policy, over prompts and this rank's engine's samples."""
        diffs = [self.generator.prompt_logprobs(np.array(s)) - self.logprobs(s) for s in SEQUENCES]
        for group in comm.all_gather_lists(sampled(self.generator, PROMPTS, step=step)):
            for completion in group.samples:
                whole = np.concatenate([group.prompt.token_ids, completion.token_ids])
                diffs.append(self.logprobs(whole)[len(group.prompt.token_ids) - 1 :] - completion.sampler_logprobs)
        return float(np.abs(np.concatenate(diffs)).max())

    def push(self, adapter: dict[str, torch.Tensor] | None = None) -> int:
        """Push the policy's adapter, or this one in its place."""
        if adapter is not None:
            self.lora.weights = lambda _: iter(adapter.items())
        try:
            return self.weight_sync.push(policy_version=1)
        finally:
            vars(self.lora).pop("weights", None)
