"""Qwen3-MoE from a folder: the numbers of transformers, the same weights back, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.parts.tiny import save_odd_checkpoint, sharded_policy
from torchtitan_rl.configs.debug import debug_moe
from torchtitan_rl.configs.toys.answer_recipes import EXPERTS
from torchtitan_rl.configs.toys.small_models import small_qwen3
from torchtitan_rl.errors import UserError
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.mixture_of_experts import check_mixture
from torchtitan_rl.models.score import score
from torchtitan_rl.types import SegmentLayout

LENGTHS = [17, 1, 30, 9]
PADDING = 7


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    "settings",
    [
        {"num_experts": 4, "num_experts_per_tok": 1},
        {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True},
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 8},
        {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "tie_word_embeddings": True},
        {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
        {"num_experts": 8, "num_experts_per_tok": 4, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ],
    ids=lambda settings: ",".join(f"{key}={value}" for key, value in settings.items()),
)
def test_packed_logprobs_equal_transformers_and_weights_round_trip(tmp_path, settings):
    save_odd_checkpoint(tmp_path, "qwen3_moe", **{"tie": False, **settings})
    model, adapter = sharded_policy(tmp_path)
    total = sum(LENGTHS)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 130, (total + PADDING,), generator=random)  # [T]
    layout = SegmentLayout.of([*LENGTHS, PADDING], device="cpu", padding=PADDING)
    ours = score(model, tokens, tokens.roll(-1), layout, 1.0).logprobs  # [T]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    begin = 0
    for length in LENGTHS:
        ids = tokens[begin : begin + length]
        with torch.no_grad():
            logprobs = theirs(ids[None]).logits[0, :-1].log_softmax(-1)  # [L - 1, V]
        expected = logprobs.gather(-1, ids[1:, None])[:, 0]  # [L - 1]
        torch.testing.assert_close(ours[begin : begin + length - 1].detach(), expected, atol=1e-5, rtol=0)
        begin += length

    ours[:total].sum().backward()
    stored = load_file(tmp_path / "model.safetensors")
    back = {name: tensor.clone() for name, tensor in hf_weights(model, adapter, torch.float32)}
    assert back.keys() == stored.keys() | {"lm_head.weight"}
    assert all(torch.equal(back[name], stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, "it is a mixture of experts"),
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "it is a mixture of experts"),
        ({"use_sliding_window": True, "sliding_window": 8}, "it is a mixture of experts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "it is a mixture of experts"),
        ({"attention_bias": True}, "attention_bias True"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(tmp_path, change, said):
    entries = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128}
    (tmp_path / "config.json").write_text(json.dumps({**entries, **change}))
    with pytest.raises(UserError, match=f"hf_assets_path = .*{said}"):
        spec_from_folder(tmp_path)


def moe_config(**changes):
    """The config debug_moe with these fields, by dotted name."""
    config = debug_moe()
    config.model_spec = small_qwen3(**EXPERTS)
    for path, value in changes.items():
        *parents, field = path.split("__")
        part = config
        for name in parents:
            part = getattr(part, name)
        setattr(part, field, value)
    return config


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({"trainer__parallelism__tensor_parallel_degree": 2}, 2, "tensor_parallel_degree = 2: expected 1 for a"),
        ({"trainer__parallelism__expert_parallel_degree": 3}, 3, "expert_parallel_degree = 3: expected a divisor of"),
        ({"trainer__parallelism__expert_parallel_degree": 2}, 1, "expert_parallel_degree = 2: expected a divisor of"),
        ({}, 3, "data_parallel_shard_degree = -1: expected one with which FSDP divides num_experts 8"),
        ({}, 24, "or with more ranks than experts moe_intermediate_size 128, but 24 ranks do not divide 128"),
        ({"trainer__parallelism__data_parallel_replicate_degree": 2}, 4, "data_parallel_replicate_degree = 2"),
        ({"trainer__compile": True}, 1, "trainer.compile = True: expected False for a mixture of experts"),
        ({"trainer__lora__rank": 4}, 1, "trainer.lora.rank = 4: expected 0 for a mixture of experts"),
        ({"generator__tensor_parallel_degree": 3}, 1, "generator.tensor_parallel_degree = 3: expected a divisor of"),
        (
            {"generator__router_replay": True, "model_spec": small_qwen3(vocab_size=320, num_experts=256)},
            1,
            "generator.router_replay = True: expected fewer than 255 experts",
        ),
    ],
)
def test_settings_that_do_not_fit_a_mixture_are_refused(changes, ranks, said):
    config = moe_config(**changes)
    with pytest.raises(UserError, match=said):
        check_mixture(config.model_spec.model, config.trainer, config.generator, world_size=ranks, on_cpu=True)
