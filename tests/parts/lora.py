"""A policy with adapters and an engine in one process, for tests of the push."""

from pathlib import Path

import numpy as np
import torch
from torchtitan.config import TORCH_DTYPE_MAP

from tests.integration.parity import SEQUENCES, TokenizerStandIn, packed
from tests.parts.tiny import sampled, sharded_policy
from torchtitan_rl import comm
from torchtitan_rl.fields.lora_config import LoraConfig
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.generator.start import start_generator
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.score import score
from torchtitan_rl.models.shard_checksums import ShardChecksums
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.sync.lora_engine import EngineAdapter
from torchtitan_rl.sync.weight_proof import WeightProof
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
        self.lora, self.policy_shards = lora, ShardChecksums(self.model, self.names)
        self.generator = start_generator(
            Generator.Config(dtype=dtype, max_model_len=384, sleep=False, tensor_parallel_degree=generator_tp),
            hf_assets_path=str(folder),
            tokenizer=TokenizerStandIn(),
            sampling=SamplingConfig(n=2, max_tokens=8),
            seed=0,
            lora=EngineAdapter(lora, tp_size=generator_tp, dtype=TORCH_DTYPE_MAP[dtype]),
        )
        self.most_diff = 1e-4 if dtype == "float32" else 1.0
        self.begin_anew()
        self.push({**self.base(), **self.sent()})

    def begin_anew(self) -> None:
        """Let the next push be a run's first, which is proven in full."""
        self.weight_sync = WeightSync.Config(check_interval=1, max_diff=self.most_diff).build(
            proof=WeightProof.of(self.generator, self.policy_shards),
            policy=self.model,
            dtypes={self.generator.config.dtype},
        )

    def base(self) -> dict[str, torch.Tensor]:
        return dict(hf_weights(self.model, self.names, self.generator.dtype))

    def sent(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.lora.weights(self.generator.dtype)}

    def logprobs(self, ids) -> np.ndarray:
        """The policy's log-probabilities of ids[1:] at temperature 1, [L - 1]."""
        tokens, layout, labels, _ = packed([list(ids)], 8)
        with torch.no_grad():
            return score(self.model, tokens, labels, layout, 1.0).logprobs[: len(ids) - 1].cpu().float().numpy()

    def worst_diff(self, step: int) -> float:
        """Largest difference in log-probability of engine and policy, over prompts and this rank's engine's samples."""
        diffs = [self.generator.prompt_logprobs(np.array(s)) - self.logprobs(s) for s in SEQUENCES]
        for group in comm.all_gather_lists(sampled(self.generator, PROMPTS, step=step)):
            for completion in group.samples:
                whole = np.concatenate([group.prompt.token_ids, completion.token_ids])
                diffs.append(self.logprobs(whole)[len(group.prompt.token_ids) - 1 :] - completion.sampler_logprobs)
        return float(np.abs(np.concatenate(diffs)).max())

    def push(self, weights: dict[str, torch.Tensor] | None = None) -> int:
        return self.weight_sync.push(
            (self.sent() if weights is None else weights).items(),
            self.generator,
            policy_version=1,
            probe=np.array(SEQUENCES[0]),
            trainer_logprobs=self.logprobs,
        )
