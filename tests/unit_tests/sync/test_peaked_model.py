"""The probe and a push on a model that is as sharp, and has as many words, as published ones, in bfloat16."""

import numpy as np
import pytest

from tests.parts.pushes import Pair
from tests.parts.tiny import save_peaked_checkpoint, scale_policy
from tests.unit_tests.sync.test_weight_sync import fault_of_another_model, scale_rotary_base
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.sync.in_process import OTHER_VALUES

pytestmark = pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="the engine's float32 head is a CPU's")


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("peaked"), save_peaked_checkpoint, "bfloat16", dtype="bfloat16")
    yield made
    made.generator.close()


PROBE = np.random.default_rng(0).integers(49152, size=128)  # [L]


def test_first_push_of_a_start_a_resume_and_a_fork_passes(pair):
    difference = pair.generator.prompt_logprobs(PROBE) - pair.logprobs(PROBE)  # [L - 1]
    assert np.abs(difference).max() > 0.1  # by rounding alone: a limit that was sized on a model of few words
    for _ in range(3):
        scale_policy(pair.model, 1.02)
        pair.begin_anew()  # a resumed or forked run knows no earlier probe
        pair.sync()
    pair.restore()
    pair.begin_anew()
    pair.sync()


WRONG = {
    "rotary base x 10": lambda engine: scale_rotary_base(engine, 10.0),
    "logits x 1.2": lambda engine: setattr(engine.logits_processor, "scale", 1.2),
    "capped logits": lambda engine: setattr(engine.logits_processor, "soft_cap", 30.0),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_another_model_is_named(pair, wrong):
    assert "They compute different models" in fault_of_another_model(pair, WRONG[wrong])


def test_words_in_another_order_are_named(pair):
    weights = dict(pair.weights())
    rolled = {name: weights[name].roll(1, 0) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    assert OTHER_VALUES in pair.fault_with(rolled)
    pair.begin_anew()
    pair.sync()
