"""The transport to engines on other ranks, with both ends of the link in one process. `sabotage_own_generators` and
`own_generators*` of the whole runs have real ranks."""

from functools import partial

import pytest

from tests.parts.both_ends import BothEnds
from tests.parts.pushes import Pair
from tests.unit_tests.sync.test_weight_sync import DOWN, module
from torchtitan_rl.sync.in_process import CHANGED, OTHER_VALUES
from torchtitan_rl.sync.other_ranks import OtherRanks


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("tiny"))
    made.link = BothEnds(made.generator)
    made.connect = partial(OtherRanks, made.link)
    made.begin_anew()
    yield made
    made.generator.close()


def test_changed_policy_arrives_and_orders_say_the_step(pair):
    pair.change()
    assert pair.sync(version=3) == sum(tensor.nbytes for _, tensor in pair.weights())
    assert pair.generator.policy_version == 3
    assert {order.step for order in pair.link.orders[-4:]} == {3}
    assert pair.worst_diff(4) < 1e-4


def test_wrong_missing_and_stale_weights_changed_constants_and_another_model_are_named(pair):
    pair.restore()
    assert f"policy's: {DOWN} {OTHER_VALUES}. Nothing" in pair.fault(pair.changed(DOWN, lambda w: w.mul_(2)))
    without_head = {name: tensor.clone() for name, tensor in pair.weights() if name != "lm_head.weight"}
    assert "policy's: lm_head.weight was not sent. Nothing was sampled" in pair.fault(without_head)
    pair.sync()
    assert pair.weight_sync.evidence().startswith("Its weights are the policy's, bit for bit (compared now)")
    rotary = module(pair, "model.layers.0.self_attn.rotary_emb").cos_sin_cache
    rotary[7, 3] += 1e-3
    assert f"model.layers.0.self_attn.rotary_emb.cos_sin_cache {CHANGED}" in pair.weight_sync.evidence()
    rotary[7, 3] -= 1e-3
