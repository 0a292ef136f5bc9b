"""The push of an adapter to a real engine: what arrives, and how each wrong adapter is named."""

from functools import partial

import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest

from tests.parts.both_ends import BothEnds
from tests.parts.lora import A, AdapterPair, B
from tests.parts.pushes import SEQUENCES
from tests.parts.tiny import change_adapters, save_tiny_checkpoint
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.models.hf import local_shard
from torchtitan_rl.models.lora.folder import write_adapter
from torchtitan_rl.sync.in_process import OTHER_VALUES
from torchtitan_rl.sync.other_ranks import OtherRanks
from torchtitan_rl.sync.weight_sync import NOT_SENT

pytestmark = pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="vLLM's LoRA on a GPU has no float32")


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(folder)
    made = AdapterPair(folder)
    yield made
    made.generator.close()


@pytest.fixture(autouse=True)
def _clean(pair):
    change_adapters(pair.model, 0)
    pair.begin_anew()
    pair.sync()
    change_adapters(pair.model, 1)


def test_engine_and_policy_agree_within_1e_5_after_three_pushes(pair):
    for version in range(1, 4):
        change_adapters(pair.model, version)
        assert pair.sync() == sum(t.nbytes for t in pair.sent().values())  # adapters alone
        assert pair.worst_diff(version) < 1e-5


def test_adapter_changes_the_logprobs(pair):
    before = pair.generator.prompt_logprobs(np.array(SEQUENCES[0]))
    pair.sync()
    assert np.abs(pair.generator.prompt_logprobs(np.array(SEQUENCES[0])) - before).max() > 1e-2


def test_vllm_with_the_exported_folder_equals_the_policy(pair, tmp_path, monkeypatch):
    write_adapter(dict(pair.lora.weights(torch.float32)), pair.lora.config, "base", tmp_path)
    monkeypatch.setattr(pair.generator, "lora_request", LoRARequest("exported", 2, str(tmp_path)))
    diffs = [pair.generator.prompt_logprobs(np.array(ids)) - pair.logprobs(ids) for ids in SEQUENCES]
    assert np.abs(np.concatenate(diffs)).max() < 2e-5


def test_adapters_alone_go_to_an_engine_on_another_rank_and_a_wrong_one_is_named(pair, monkeypatch):
    monkeypatch.setattr(pair, "connect", partial(OtherRanks, BothEnds(pair.generator, pair.lora)))
    pair.begin_anew()
    assert pair.sync() == sum(t.nbytes for t in (dict(pair.weights()) | pair.sent()).values())
    change_adapters(pair.model, 2)
    assert pair.sync() == sum(t.nbytes for t in pair.sent().values())
    assert pair.worst_diff(2) < 1e-5
    assert f"policy's: {A} {OTHER_VALUES}. Nothing" in pair.fault(pair.sent() | {A: 1.01 * pair.sent()[A]})


K, OTHER_B = "model.layers.0.self_attn.k_proj.lora_B.weight", B.replace("layers.1", "layers.0")
WRONG = {
    "A of a wrong scale": (lambda sent: sent[A].mul_(1.01), f"policy's: {A} {OTHER_VALUES}. Nothing"),
    "B of a slice of a wrong scale": (lambda sent: sent[K].mul_(1.01), f"policy's: {K} {OTHER_VALUES}. Nothing"),
    "another layer's B": (
        lambda sent: sent.update({B: sent[OTHER_B], OTHER_B: sent[B]}),
        f"policy's: {OTHER_B} {OTHER_VALUES}; {B} {OTHER_VALUES}. Nothing",
    ),
    "a dropped tensor": (lambda sent: sent.pop(A), f"{A} {NOT_SENT}"),
    "a dropped adapter": (dict.clear, f"q_proj.lora_A.weight {NOT_SENT}"),
}
"""What is sent in place of the policy's adapter, and what the error says. `lora_sync` of the whole runs has more on each layout."""


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_adapter_is_named(pair, wrong):
    (change, message), sent = WRONG[wrong], pair.sent()
    change(sent)
    assert message in pair.fault(sent)


def test_changed_base_weights_are_named(pair):
    name = "model.layers.1.mlp.down_proj.weight"
    shard = local_shard(dict(pair.model.named_parameters())["layers.1.feed_forward.w2.weight"])
    shard[3, 5] += 0.5  # the policy's; to the proof it is the same as a change of the engine's
    message = pair.fault()
    shard[3, 5] -= 0.5
    assert f"policy's: {name} {OTHER_VALUES}. Nothing" in message
