"""Each architecture as torchtitan builds it from a folder: the numbers of transformers, and the same weights back."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.parts.hf_decoders import BOUNDS, YARN, policy_figures, save_hf_family
from tests.parts.tiny import ODD, save_odd_checkpoint, sharded_policy
from torchtitan_rl.errors import UserError
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.hf_decoder import HFDecoder
from torchtitan_rl.models.score import score
from torchtitan_rl.run.start_checkpoint import load_tokenizer
from torchtitan_rl.types import SegmentLayout

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", sorted(ODD))
def test_logprobs_equal_transformers_and_weights_round_trip(tmp_path, architecture, tie):
    save_odd_checkpoint(tmp_path, architecture, tie=tie)
    model, adapter = sharded_policy(tmp_path)
    token_ids = torch.randint(0, 130, (96,), generator=torch.Generator().manual_seed(0))  # [T]
    layout = SegmentLayout.of([96], device="cpu")
    with torch.no_grad():
        ours = score(model, token_ids, token_ids.roll(-1), layout, 1.0).logprobs[:-1]  # [T - 1]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logp = theirs(token_ids[None]).logits[0, :-1].log_softmax(-1)  # [T - 1, V]
    torch.testing.assert_close(ours, logp.gather(-1, token_ids[1:, None])[:, 0], atol=2e-5, rtol=0)

    stored = load_file(tmp_path / "model.safetensors")
    back = dict(hf_weights(model, adapter, torch.float32))
    assert back.keys() == stored.keys() | {"lm_head.weight"}
    assert all(torch.equal(back[name], stored[name]) for name in stored)
    assert torch.equal(back["lm_head.weight"], back["model.embed_tokens.weight"]) is tie


LLAMA_3_2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 16, "intermediate_size": 8192, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip


def test_config_json_without_head_dim_and_with_old_rope_fields_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_2))
    spec = spec_from_folder(tmp_path)
    rope = spec.model.layers[0].attention.rope
    assert (spec.name, spec.flavor, rope.dim, rope.theta, rope.scaling_factor) == ("llama3", "16x2048", 64, 5e5, 32.0)
    assert spec.model.norm.eps == 1e-5


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_scaling": None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "a dense decoder, but .* says GemmaForCausalLM, .* See docs/models.md",
        ),
        ({"hidden_act": "gelu"}, "has hidden_act 'gelu'"),
        ({"sliding_window": 64}, "that vLLM computes as transformers does, but its config.json has sliding_window 64"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, "a linear RoPE's factor 4, which vLLM reads only"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic', which depends on"),
        ({"partial_rotary_factor": 0.5}, "has partial_rotary_factor 0.5"),
        (QWEN3 | {"attention_bias": True}, "has attention_bias True"),
        (QWEN3 | {"use_sliding_window": True, "max_window_layers": 8}, "windows in some layers, but vLLM has them in"),
        ({"model_type": "qwen3"}, "architectures LlamaForCausalLM, .* and model_type 'qwen3', .* model_type 'llama'"),
        ({"model_type": "mistral"}, "one model, but .* architectures LlamaForCausalLM, .* and model_type 'mistral'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "has quantization_config"),
        ({"model_type": "nothing"}, "transformers cannot read its config.json"),
        ({"hidden_size": 2000}, "cannot read its config.json: Class validation .*: ValueError: The hidden size .2000"),
        ({"tie_word_embeddings": "yes"}, "cannot read its config.json: .*'tie_word_embeddings': TypeError: .*"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_scaling": None, "head_dim": 32},
            "has head_dim 32, but vLLM uses hidden_size / num_attention_heads",
        ),
    ],
)
def test_models_that_vllm_computes_differently_are_refused(tmp_path, change, said):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_2, **change}))
    with pytest.raises(UserError, match=f"hf_assets_path = .*{said}"):
        spec_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"rope_parameters": YARN, "hidden_size": 192}),
        ("qwen3", {"rope_parameters": YARN}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0}),
    ],
    ids=["llama-linear", "llama-biases", "qwen2-yarn", "qwen3-yarn", "qwen3-windows"],
)
def test_models_unknown_to_torchtitan_run_with_transformers_layers(tmp_path, family, settings):
    save_hf_family(tmp_path, family, **settings)
    spec = spec_from_folder(tmp_path)
    assert isinstance(spec.model, HFDecoder.Config)
    assert spec.model.windows == (settings.get("sliding_window"),) * 3
    assert policy_figures(tmp_path)["transformers"] <= BOUNDS["transformers"]


def test_advice_to_let_a_checkpoints_code_run_is_not_repeated(tmp_path):
    maps = {"AutoConfig": "mine.Config", "AutoTokenizer": ["mine.Tokenizer", None]}
    own = json.dumps({"model_type": "mine", "architectures": ["Mine"], "auto_map": maps})
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_text(own)
    for read in (spec_from_folder, load_tokenizer):
        with pytest.raises(UserError, match="Code in a checkpoint's folder is not run") as raised:
            read(tmp_path)
        assert "trust_remote_code" not in str(raised.value)
