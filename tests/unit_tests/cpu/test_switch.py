"""TORCHTITAN_RL_CPU: what each value installs."""

import pytest

from torchtitan_rl import cpu
from torchtitan_rl.core import device
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.core.generator.generator import Generator, engine_options
from torchtitan_rl.cpu.shared_memory import unlink_shared_memory

pytestmark = pytest.mark.skipif(not device.ON_CPU, reason="a GPU has no adaptations")

BFLOAT16, FLOAT32 = Generator.Config(dtype="bfloat16"), Generator.Config(dtype="float32")


@pytest.fixture
def installed(monkeypatch):
    """Installs one mode over no hooks, and counts replaced products."""
    monkeypatch.setattr(device, "hooks", device.DeviceHooks())
    replaced = []
    monkeypatch.setattr(cpu, "override_products", lambda: replaced.append("aten::mm"))

    def install(mode: str) -> list[str]:
        monkeypatch.setenv(cpu.SWITCH, mode)
        cpu.install()
        return replaced

    return install


def test_stock_leaves_everything_as_torch_and_vllm_have_it(installed):
    assert installed("stock") == []
    assert device.hooks == device.DeviceHooks(unlink_shared_memory=unlink_shared_memory)
    assert not {"scheduler_cls", "block_size"} & engine_options(FLOAT32).keys()
    assert engine_options(BFLOAT16)["hf_overrides"] == {"head_dtype": "float32"}


def test_fast_is_the_default_and_replaces_products_and_scheduler(installed, monkeypatch):
    assert installed("fast") == ["aten::mm"]
    assert engine_options(FLOAT32)["scheduler_cls"].startswith("torchtitan_rl.cpu")
    monkeypatch.delenv(cpu.SWITCH)
    assert cpu.mode() == "fast"


def test_any_other_value_is_refused_by_name(installed):
    with pytest.raises(UserError, match="TORCHTITAN_RL_CPU = 'slow': expected fast or stock"):
        installed("slow")
