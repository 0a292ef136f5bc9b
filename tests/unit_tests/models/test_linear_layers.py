"""Qwen3.5's linear layers in a pack: each sequence is computed as if it were alone."""

import pytest
import torch
from torchtitan.models.common.attention import VarlenMetadata

from tests.parts.hf_decoders import backward, save_hf_family, shared_and_alone, transformers_logprobs
from tests.parts.tiny import ODD_DIMENSIONS, sharded_policy
from torchtitan_rl.errors import UserError
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.models import linear_layers
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.hf_decoder import check_other_parts
from torchtitan_rl.trainer.trainer_config import TrainerConfig

pytestmark = pytest.mark.usefixtures("one_rank")

LENGTHS = (1, 3, 63, 64, 65, 200)
"""transformers computes a linear layer in chunks of 64 tokens, after a convolution over 4."""

MOST = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("qwen3_5")
    save_hf_family(made, "qwen3_5_text")
    return made


@pytest.fixture(scope="module")
def parts():
    random = torch.Generator().manual_seed(1)
    return [torch.randint(0, ODD_DIMENSIONS["vocab_size"], (n,), generator=random) for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(folder, parts):
    """transformers' log-probabilities of the sequences, one by one, and the gradients of their mean."""
    return transformers_logprobs(folder, parts)


def differences(model, adapter, parts, expected) -> tuple[float, float]:
    """The largest differences of log-probabilities and of gradients from transformers', for the sequences in one pack."""
    found = backward(model, parts, sum(len(ids) - 1 for ids in parts))
    named = {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad.full_tensor() for name, p in model.named_parameters()
    }
    gradients, theirs = adapter.to_hf(named), expected[1]
    assert gradients.keys() == theirs.keys()
    of_gradients = max(float((grad - theirs[name]).abs().max()) for name, grad in gradients.items())
    return float((found - expected[0]).abs().max()), of_gradients


@pytest.mark.parametrize("activation_checkpoint", ["none", "full"])
def test_pack_equals_its_sequences_one_by_one(folder, parts, expected, activation_checkpoint):
    model, adapter = sharded_policy(folder, activation_checkpoint=activation_checkpoint)
    assert max(differences(model, adapter, parts, expected)) <= MOST


def test_shared_prompt_gives_its_state_to_each_completion(folder, parts):
    model, _ = sharded_policy(folder)
    for shared, alone in shared_and_alone(model, parts[2], parts[3][:9], parts[4][:20]):
        torch.testing.assert_close(shared, alone, atol=MOST, rtol=0)


def test_kernels_of_a_gpu_are_told_where_sequences_begin():
    told = {}
    ends = torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    hidden = torch.zeros(1, 6, 8)
    linear_layers.each_sequence(lambda **given: told.update(given), hidden, VarlenMetadata(ends, ends, 3, 3))
    assert told["hidden_states"] is hidden
    assert told["cu_seq_lens_q"] is ends
    assert told["seq_idx"].tolist() == [[0, 1, 1, 1, 2, 2]]
    assert told["seq_idx"].dtype == torch.int32


@pytest.mark.parametrize(
    ("on_cpu", "trainer", "generator", "said"),
    [
        (True, {}, {"dtype": "float32"}, "generator.dtype = 'float32': expected bfloat16 .*no other"),
        (True, {"compile": True}, {}, "trainer.compile = True: expected False for qwen3_5_text"),
        (False, {}, {}, "trainer.mixed_precision_param = 'bfloat16': .*fla and causal_conv1d cannot be imported"),
        (True, {}, {"tensor_parallel_degree": 2}, "generator.tensor_parallel_degree = 2: .*in_proj_qkv cannot be"),
    ],
)
def test_settings_that_linear_layers_lack_are_refused(folder, on_cpu, trainer, generator, said):
    model = spec_from_folder(folder).model
    with pytest.raises(UserError, match=said):
        check_other_parts(model, TrainerConfig(**trainer), Generator.Config(**generator), on_cpu=on_cpu)
