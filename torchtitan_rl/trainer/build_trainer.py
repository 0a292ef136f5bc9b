"""Builds the trainer of a policy that starts with a folder's weights."""

from typing import Any

from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.trainer.gate import LogprobGate
from torchtitan_rl.trainer.model_loader import ModelLoader
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.trainer.trainer_config import TrainerConfig


def build_trainer(
    config: TrainerConfig,
    *,
    model_spec: ModelSpec,
    hf_assets_path: str,
    parallel_dims: ParallelDims,
    max_model_len: int,
    dump_folder: str = "",
    generator_dtype: str,
    policy_lora: Lora | None = None,
    router_replay: bool = False,
    **others: Any,
) -> Trainer:
    """Returns the trainer of a policy that starts with a folder's weights. Collective. `others`: see `Trainer`.

    Args:
        generator_dtype: the dtype in which the engine computes, for the gate.
    """
    models = ModelLoader(
        config,
        model_spec=model_spec,
        folder=hf_assets_path,
        parallel_dims=parallel_dims,
        max_model_len=max_model_len,
        dump_folder=dump_folder,
        lora=policy_lora,
        router_replay=router_replay,
    )
    dtypes = {config.mixed_precision_param, generator_dtype}
    return config.build(
        models=models,
        parallel_dims=parallel_dims,
        gate=LogprobGate(config.logprob_gate, dtypes=dtypes),
        policy_lora=policy_lora,
        **others,
    )
