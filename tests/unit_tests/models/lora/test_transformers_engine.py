"""LoRA in transformers' layers, in the engine: pushes are proven, and wrong adapters are named."""

import numpy as np
import pytest

from tests.integration.parity import SEQUENCES
from tests.parts.hf_decoders import save_hf_family
from tests.parts.lora import AdapterPair
from tests.parts.only_rank import only_rank
from tests.parts.tiny import change_adapters
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.sync.in_process import OTHER_VALUES
from torchtitan_rl.sync.weight_sync import WeightSyncError

CONFIG = LoraConfig(rank=6, alpha=9.0)

IN_ENGINE = {"phi3": "float32", "qwen3_5_text": "bfloat16"}
"""A family whose query, key and value are one here, and one whose linear layers have no adapters. `lora_sync` has all."""


@pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="vLLM's LoRA on a GPU has no float32")
@pytest.mark.parametrize("family", IN_ENGINE)
def test_three_pushes_are_proven_and_stale_or_scaled_adapters_are_named(tmp_path, family):
    save_hf_family(tmp_path, family, max_position_embeddings=384)
    with only_rank():  # closing the engine ends the process group
        _check(tmp_path, family)


def _check(folder, family):
    dtype = IN_ENGINE[family]
    pair = AdapterPair(folder, dtype=dtype, lora=CONFIG)
    try:
        for version in (1, 2, 3):
            change_adapters(pair.model, version)
            pair.push()
            assert pair.worst_diff(version) < (5e-5 if dtype == "float32" else 0.5)
        old = pair.sent()
        change_adapters(pair.model, 4)
        attention = [name for name in old if "_proj.lora_A" in name and "self_attn" in name]
        with pytest.raises(WeightSyncError, match=f"policy's: {attention[0]} {OTHER_VALUES}. Nothing"):
            pair.push(pair.sent() | {attention[0]: old[attention[0]]})
        pair.begin_anew()
        if dtype == "float32":  # rounding to 16 bits may hide the factor
            name = attention[-1].replace("lora_A", "lora_B")
            with pytest.raises(WeightSyncError, match=f"policy's: {name} {OTHER_VALUES}. Nothing"):
                pair.push(pair.sent() | {name: pair.sent()[name] * 1.01})
            pair.begin_anew()
        pair.push()
        assert np.abs(pair.generator.prompt_logprobs(np.array(SEQUENCES[0])) - pair.logprobs(SEQUENCES[0])).max() < 0.5
    finally:
        pair.generator.close()
