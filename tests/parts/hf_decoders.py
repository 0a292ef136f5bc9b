"""Families that run with transformers' layers: an odd-shaped random folder of each, and what must hold of it."""

from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig

from tests.parts.pushes import Policy, TokenizerStandIn
from tests.parts.tiny import ODD_DIMENSIONS, save_odd_checkpoint, scale_policy, sharded_policy
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.models.hf import gather
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.multimodal import engine_folder
from torchtitan_rl.models.score import forget_forwards, score
from torchtitan_rl.run import safe_load
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.sync.in_process import InProcess
from torchtitan_rl.sync.weight_sync import WeightSync
from torchtitan_rl.trainer.model_loader import meta_model, model_config
from torchtitan_rl.trainer.trainer_config import TrainerConfig
from torchtitan_rl.types import SegmentLayout

WINDOW = 12
"""Shorter than the longest of LENGTHS."""

BOUNDS = {"transformers": 2e-5, "sharded gradients": 1e-6, "engine": 1e-4, "engine after a change": 1e-4}
"""The largest allowed differences: in log-probability, and of the mean log-probability's gradients."""

IN_BFLOAT16 = {"engine": 0.5, "engine after a change": 0.5}
"""Those of an engine in bfloat16, whose pushes are compared with the rounding noise besides."""

LENGTHS = [31, 5, 17, 24]
PADDING = 3

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_MINISTRAL_YARN = {
    **YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_SPLIT = {"hidden_size": 192, "head_dim": 32}
"""For families that ignore head_dim, or whose engine does."""

_LAYER_NORM = {"rms_norm_eps": None, "layer_norm_eps": 1e-5}
"""vLLM reads rms_norm_eps of a Cohere, and transformers does not."""

HF_FAMILIES = {
    "gemma3_text": {
        **_MIXED,
        "query_pre_attn_scalar": 48,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    },
    "mistral": {"rope_parameters": _ROPE, "sliding_window": WINDOW},
    "ministral": {"rope_parameters": _ROPE, **_MIXED},
    "ministral3": {"rope_parameters": _MINISTRAL_YARN, "sliding_window": None},
    "olmo2": {"rope_parameters": _ROPE},
    "olmo3": {"rope_parameters": _ROPE, **_MIXED},
    "phi3": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.75}, "sliding_window": None},
    "smollm3": {"rope_parameters": _ROPE, "no_rope_layers": [1, 0, 1]},
    "granite": {
        "rope_parameters": _ROPE, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.11,
        "logits_scaling": 3.0,
    },
    "cohere": {"rope_parameters": _ROPE, "logit_scale": 0.3, "use_qk_norm": True, **_LAYER_NORM},
    "cohere2": {"rope_parameters": _ROPE, "logit_scale": 0.3, **_MIXED, **_SPLIT, **_LAYER_NORM},
    "glm4": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}, "eos_token_id": 2},
    "qwen3_5_text": {
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
}  # fmt: skip
"""What each family has besides ODD_DIMENSIONS."""

FOR_ENGINE = {"cohere2": {"sliding_window": 64}}
"""What an engine's test has besides: vLLM's windows of Cohere 2 are one token longer, so only one that is never full agrees."""

TIED = {"gemma3_text", "smollm3", "granite", "cohere", "cohere2", "qwen3_5_text"}
"""Families whose published models mostly tie the output head to the embedding."""


def save_hf_family(folder: Path, family: str, **settings: object) -> None:
    """Write a random model of a family, with random norms and biases too."""
    entries = {"initializer_range": 0.15, **HF_FAMILIES.get(family, {}), **settings}
    save_odd_checkpoint(folder, family, **{"tie": family in TIED, **entries})


def sequences() -> list[Tensor]:
    """Random token ids, [L] each, some longer than WINDOW."""
    random = torch.Generator().manual_seed(0)
    return [torch.randint(0, ODD_DIMENSIONS["vocab_size"], (n,), generator=random) for n in LENGTHS]


def packed(
    parts: list[Tensor], padding: int = PADDING, device: str = "cpu"
) -> tuple[Tensor, Tensor, SegmentLayout, Tensor]:
    """Sequences in one pack with padding: token ids, labels, layout and mask (1 where a label is a sequence's), [T] each."""
    tokens = torch.cat([*parts, torch.zeros(padding, dtype=torch.int64)]).to(device)
    mask = torch.cat([torch.ones(len(tokens) - padding), torch.zeros(padding)]).to(device)
    mask[torch.tensor([len(p) for p in parts]).cumsum(0) - 1] = 0
    lengths = [*map(len, parts), padding] if padding else list(map(len, parts))
    return tokens, tokens.roll(-1), SegmentLayout.of(lengths, device=device, padding=padding), mask


def shared_and_alone(model: nn.Module, prompt: Tensor, *rests: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The log-probabilities of two sequences' own labels with one copy of their prompt in a pack, and each in a pack of its own."""
    wholes = [torch.cat([prompt, rest]) for rest in rests]
    alone = []
    for ids in wholes:
        tokens, labels, layout, _ = packed([ids])
        alone.append(score(model, tokens, labels, layout, 1.0).logprobs[: len(ids) - 1])
    first, kept = len(wholes[0]), len(prompt) - 1
    tokens = torch.cat([wholes[0], wholes[1][kept:]])  # the second begins with the prompt's last token
    layout = SegmentLayout.of([first, len(wholes[1]) - kept], {1: (0, kept)}, device="cpu")
    shared = score(model, tokens, tokens.roll(-1), layout, 1.0).logprobs
    return [(shared[: first - 1], alone[0]), (shared[first:-1], alone[1][kept:])]


def transformers_logprobs(folder: Path, parts: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """transformers' log-probabilities of the sequences, one by one with its eager attention, and the gradients of their mean.

    The model is of the folder's own class, so a multimodal one is whole. Every stored tensor must be one of its own.
    """
    own = getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])
    model, loaded = own.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not loaded["unexpected_keys"] | loaded["missing_keys"], loaded
    rows = []
    for ids in parts:
        logp = model(ids[None]).logits[0, :-1].log_softmax(-1)  # [L - 1, V]
        rows.append(logp.gather(-1, ids[1:, None])[:, 0])
    logprobs = torch.cat(rows)
    logprobs.mean().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters()}


def unsharded_policy(folder: Path) -> nn.Module:
    """Returns the policy of a folder as one process has it without FSDP."""
    spec = spec_from_folder(folder)
    config = TrainerConfig(mixed_precision_param="float32", logprob_chunk_tokens=32, compile_head=False)
    with torch.device("meta"):
        model = model_config(spec, config, 128).build()
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=None)
    stored = spec.state_dict_adapter(spec.model, None).from_hf(load_file(folder / "model.safetensors"))
    assert set(model.load_state_dict(stored, strict=False).missing_keys) <= {"lm_head.weight"}
    return model


def stored_policy(folder: Path, checkpoint: Path) -> nn.Module:
    """Returns the policy of a starting folder with the weights of a run's checkpoint, by the run's own names, without FSDP."""
    model = meta_model(spec_from_folder(folder)).to_empty(device="cpu")
    model.init_weights(buffer_device=None)
    stored = safe_load.SafeReader(str(checkpoint)).read_metadata().state_dict_metadata
    state = {name: tensor for name, tensor in model.state_dict().items() if name in stored}
    assert {t.data_ptr() for t in state.values()} == {p.data_ptr() for p in model.parameters()}
    safe_load.load(state, checkpoint, no_dist=True)
    return model


def backward(model: nn.Module, parts: list[Tensor], total: int) -> Tensor:
    """Add the gradients of Σ log π / total over the sequences. Returns their log-probabilities, [labels]."""
    tokens, labels, layout, mask = packed(parts)
    logprobs = score(model, tokens, labels, layout, 1.0).logprobs  # [T]
    (logprobs * mask).sum().div(total).backward()
    return logprobs.detach()[mask.bool()]


def largest_difference(sharded: nn.Module, whole: nn.Module) -> float:
    """The largest difference of two models' gradients. Collective."""
    grads = {name: p.grad for name, p in whole.named_parameters()}
    pairs = [(gather(p.grad, torch.float32), grads[name]) for name, p in sharded.named_parameters()]
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def policy_figures(folder: Path, replicate: int = 1, experts: int = 1) -> dict[str, float]:
    """Compares policy, transformers and an unsharded policy. Each rank of the process group takes a share of the sequences.

    Args:
        experts: the degree of expert parallelism.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = sequences() * -(-size // len(LENGTHS))  # at least one for each rank
    total = sum(len(ids) - 1 for ids in parts)
    model, _ = sharded_policy(folder, data_parallel_replicate_degree=replicate, expert_parallel_degree=experts)
    mine = backward(model, parts[rank::size], total)
    whole = unsharded_policy(folder)
    backward(whole, parts, total)
    expected, _ = transformers_logprobs(folder, parts[rank::size])
    return {"transformers": float((mine - expected).abs().max()), "sharded gradients": largest_difference(model, whole)}


class Engine:
    """An engine of a folder, to be pushed to."""

    def __init__(self, folder: Path, degree: int = 1) -> None:
        model = spec_from_folder(folder).model
        dtype = "bfloat16" if getattr(model, "linear", 0) else "float32"
        config = Generator.Config(dtype=dtype, max_model_len=64, sleep=False, tensor_parallel_degree=degree)
        with engine_folder(str(folder), model.hf if getattr(model, "part_of", "") else None) as own:
            self.generator = Generator(
                config,
                hf_assets_path=own,
                tokenizer=TokenizerStandIn(),
                sampling=SamplingConfig(n=1, max_tokens=4),
                seed=0,
            )

    def push(self, model: nn.Module, adapter) -> float:
        """Push with a probe. Returns the largest difference in log-probability over `sequences`."""
        policy, parts = Policy(model, adapter), sequences()
        scale_policy(model, 1.0)  # back to shards
        connect = partial(InProcess, self.generator)
        sync = WeightSync(WeightSync.Config(), trainer=policy, connect=connect, probe=parts[0].numpy())
        sync.push(policy_version=1)
        return max(
            float(np.abs(self.generator.prompt_logprobs(ids.numpy()) - logprobs_of(model, ids)).max()) for ids in parts
        )


@contextmanager
def engine(folder: Path, degree: int = 1):
    """An engine that is closed at the end."""
    made = Engine(folder, degree)
    try:
        yield made
    finally:
        made.generator.close()


@torch.no_grad()
def logprobs_of(model: nn.Module, ids: Tensor) -> np.ndarray:
    """The policy's log-probabilities of ids[1:], [L - 1]."""
    layout = SegmentLayout.of([len(ids)], device="cpu")
    logprobs = score(model, ids, ids.roll(-1), layout, 1.0).logprobs
    forget_forwards(model)
    return logprobs[:-1].numpy()


def engine_figures(folder: Path, degree: int = 1, experts: int = 1) -> dict[str, float]:
    """Compares engine and policy after the first push, and after the policy has changed."""
    model, adapter = sharded_policy(folder, expert_parallel_degree=experts)
    with engine(folder, degree) as made:
        first = made.push(model, adapter)
        scale_policy(model, 1.1)
        return {"engine": first, "engine after a change": made.push(model, adapter)}
