"""LoRA in transformers' layers, in the engine: pushes are proven, and wrong adapters are named."""

import pytest

from tests.parts.hf_decoders import save_hf_family
from tests.parts.lora import AdapterPair
from tests.parts.only_rank import only_rank
from tests.parts.tiny import change_adapters
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.sync.in_process import OTHER_VALUES

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
    most = 5e-5 if dtype == "float32" else 0.5
    pair = AdapterPair(folder, dtype=dtype, lora=CONFIG)
    try:
        for version in (1, 2, 3):
            change_adapters(pair.model, version)
            pair.sync()
            assert pair.worst_diff(version) < most
        old = pair.sent()
        change_adapters(pair.model, 4)
        attention = [name for name in old if "_proj.lora_A" in name and "self_attn" in name]
        stale = pair.sent() | {attention[0]: old[attention[0]]}
        assert f"policy's: {attention[0]} {OTHER_VALUES}. Nothing" in pair.fault(stale)
        pair.begin_anew()
        if dtype == "float32":  # rounding to 16 bits may hide the factor
            name = attention[-1].replace("lora_A", "lora_B")
            scaled = pair.sent() | {name: pair.sent()[name] * 1.01}
            assert f"policy's: {name} {OTHER_VALUES}. Nothing" in pair.fault(scaled)
            pair.begin_anew()
        pair.sync()
        assert pair.worst_diff(4) < most
    finally:
        pair.generator.close()
