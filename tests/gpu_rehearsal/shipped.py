"""A shipped config with the model that a run of it finds at its start."""

from torchtitan.protocols.model_spec import ModelSpec
from transformers import AutoConfig

from scripts.make_random_checkpoint import qwen3
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.toys.answer_recipes import EXPERTS
from torchtitan_rl.configs.toys.small_models import small_qwen3
from torchtitan_rl.models.families import FAMILIES
from torchtitan_rl.models.hf_config import hf_architecture
from torchtitan_rl.run.auto_dtype import set_dtypes
from torchtitan_rl.validation import longest_sequence


def shipped(name: str) -> RunConfig:
    """Returns the config. One for any model gets Qwen3-1.7B."""
    config = load_config(name)
    set_dtypes(config)
    config.generator.max_model_len = longest_sequence(config)
    if name.startswith("debug"):
        experts = EXPERTS if name == "debug_moe" else {}
        config.model_spec = small_qwen3(**{"vocab_size": 320, **experts})
    else:
        size = config.hf_assets_path.partition("Qwen3-")[2]
        config.model_spec = qwen3(size or "1.7B")
    return config


def model_folder(spec: ModelSpec, at: str) -> str:
    """Returns the folder `at` with the config.json of a model of torchtitan's layers."""
    [(architecture, family)] = [pair for pair in FAMILIES.items() if pair[1].name == spec.name]
    entries = {"max_position_embeddings": max(4096, spec.model.max_seq_len), **hf_architecture(spec.model)}
    config = AutoConfig.for_model(family.model_type, **entries)
    config.architectures = [architecture]
    config.save_pretrained(at)
    return at
