"""The computed memory of the shipped configs: their docstrings are true, and what cannot fit says so."""

import re
from pathlib import Path

import pytest

import torchtitan_rl.configs.qwen3 as qwen3_configs
from scripts.make_random_checkpoint import qwen3
from tests.gpu_rehearsal.shipped import shipped
from tests.parts.algorithm import algorithm_of
from tests.parts.tiny import save_tiny_checkpoint
from torchtitan_rl import device
from torchtitan_rl.configs.tasks import sums
from torchtitan_rl.errors import UserError
from torchtitan_rl.run import auto_dtype
from torchtitan_rl.run.memory import (
    GIB,
    ROOMY,
    STATE,
    checkpoint_bytes,
    choose_by_memory,
    describe_memory,
    memory_need,
    parameter_count,
    teacher_spec,
)
from torchtitan_rl.trainer.model_loader import meta_model
from torchtitan_rl.trainer.optimizer import AdamW
from torchtitan_rl.validation import check_model, longest_sequence

H100 = int(79.2 * GIB)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Configs are sized for a GPU."""
    monkeypatch.setattr(device, "FOR_CPU", False)
    monkeypatch.setattr(auto_dtype, "FOR_CPU", False)


def sized(size, *, rank=0):
    """sums for a model of that size, and with LoRA if `rank` is not 0."""
    config = sums()
    config.model_spec = qwen3(size)
    config.trainer.lora.rank = rank
    config.generator.max_model_len = longest_sequence(config)
    return config


class OtherOptimizer(AdamW):
    """An optimizer of a user's own."""


GPUS = {"qwen3_0_6b": 1, "qwen3_1_7b": 1, "qwen3_4b": 2, "qwen3_8b": 4, "qwen3_14b": 8, "qwen3_30b_a3b": 8}


@pytest.mark.parametrize(("name", "gpus"), GPUS.items())
def test_each_shipped_config_fits_where_its_docstring_says_and_needs_what_it_says(name, gpus):
    function, config = getattr(qwen3_configs, name), shipped(name)
    on = {"algorithm": algorithm_of(config), "world_size": gpus, "gpu_bytes": H100}
    choose_by_memory(config, **on)
    assert not config.trainer.optimizer.on_host
    assert "warning" not in describe_memory(config, **on)
    need = memory_need(config, **on)
    stated = re.search(r"(\d+) GiB awake, (\d+) in an update", function.__doc__)
    assert stated is not None
    assert [int(part) for part in stated.groups()] == [
        round(sum(parts.values()) / GIB) for parts in (need.awake, need.updating)
    ]


@pytest.mark.parametrize(
    ("size", "gpus", "gib", "on_host", "checkpointing", "sleep"),
    [
        ("0.6B", 1, 79.2, False, "none", False),
        ("0.6B", 1, 24, False, "full", True),
        ("1.7B", 1, 24, True, "full", True),
        ("1.7B", 1, 79.2, False, "none", True),
        ("1.7B", 8, 79.2, False, "none", True),
    ],
)
def test_memory_chooses_and_the_choice_fits(size, gpus, gib, on_host, checkpointing, sleep):
    config = sized(size)
    on = {"algorithm": algorithm_of(config), "world_size": gpus, "gpu_bytes": int(gib * GIB)}
    choose_by_memory(config, **on)
    chosen = config.trainer.optimizer.on_host, config.trainer.activation_checkpoint, config.generator.sleep
    assert chosen == (on_host, checkpointing, sleep)
    line = describe_memory(config, **on)
    assert f"trainer.activation_checkpoint {checkpointing}, generator.sleep {sleep}; the KV cache holds" in line
    assert f"an engine's {256 if gpus == 1 else 32} sequences of a step need" in line
    assert memory_need(config, **on).peak <= (1 if on_host else ROOMY) * gib * GIB


@pytest.mark.parametrize(("rank", "sleep", "host"), [(32, True, True), (32, False, False), (0, True, False)])
def test_a_sleeping_engine_with_lora_needs_the_host_s_memory(rank, sleep, host):
    config = sized("8B", rank=rank)
    config.generator.sleep = sleep
    line = describe_memory(config, algorithm_of(config), world_size=8, gpu_bytes=H100)
    assert (
        re.search(r"host's memory for each GPU: 15\.\d GiB \(the engine's weights asleep", line) is not None
    ) == host


def test_moments_on_the_host_are_none_of_the_gpu_s_and_those_of_another_optimizer_stay():
    config = sized("1.7B")
    on = {"algorithm": algorithm_of(config), "world_size": 2}
    both, config.trainer.optimizer.on_host = memory_need(config, **on, gpu_bytes=H100), True
    moved, moments = memory_need(config, **on, gpu_bytes=H100), 8 * parameter_count(config.model_spec) / 2
    for before, after in ((both.awake, moved.awake), (both.updating, moved.updating)):
        assert before[STATE] - after[STATE] == moments
    assert (both.on_host["moments"], moved.on_host["moments"]) == (0, moments)
    assert (
        memory_need(config, **on, gpu_bytes=0).updating[STATE] == both.updating[STATE]
    )  # a CPU's memory is the host's
    config.trainer.optimizer = OtherOptimizer.Config()
    choose_by_memory(config, **on, gpu_bytes=10 * GIB)
    assert config.trainer.optimizer.on_host is False
    config.trainer.optimizer.on_host = True
    with pytest.raises(
        UserError, match='trainer.optimizer.on_host = True: expected False or "auto" with an optimizer of your own'
    ):
        check_model(config, world_size=2)


def test_a_teacher_takes_two_bytes_a_parameter_over_the_ranks_and_none_as_loras_base(tmp_path):
    save_tiny_checkpoint(tmp_path)
    config = shipped("qwen3_0_6b")
    on = {"algorithm": algorithm_of(config), "world_size": 2, "gpu_bytes": H100}
    alone = memory_need(config, **on)
    config.teacher = str(tmp_path)
    parameters = sum(p.numel() for p in meta_model(teacher_spec(config)).parameters())
    with_teacher = memory_need(config, **on)
    assert with_teacher.updating[STATE] - alone.updating[STATE] == pytest.approx(2 * parameters / 2)
    assert with_teacher.peak - alone.peak == pytest.approx(2 * parameters / 2)
    config.trainer.lora.rank, config.hf_assets_path = 16, str(tmp_path)
    shared = memory_need(config, **on)
    config.teacher = ""
    assert shared == memory_need(config, **on)


def test_a_float32_state_larger_than_the_gpu_is_refused():
    config = shipped("qwen3_8b")
    on = {"algorithm": algorithm_of(config), "world_size": 1, "gpu_bytes": H100}
    with pytest.raises(
        UserError, match=r"qwen3 8B on 1 GPUs of 79 GiB cannot fit: .* with the moments take 122\.1 GiB on each.*NGPU"
    ):
        describe_memory(config, **on)
    config.generator.tensor_parallel_degree = 1
    choose_by_memory(config, **on)
    assert config.trainer.optimizer.on_host
    describe_memory(config, **on)
    config.model_spec = qwen3("14B")
    with pytest.raises(UserError, match=r"qwen3 14B .*: its weights and gradients take 110\.0 GiB on each.*lora"):
        describe_memory(config, **on)
    describe_memory(config, algorithm_of(config), world_size=2, gpu_bytes=H100)


def test_a_run_that_needs_more_than_a_machine_without_gpus_has_says_so():
    warning = "warning: that is more than this machine has. Use a smaller model"
    for name, ranks, warned in (("debug", 1, False), ("qwen3_8b", 1024, True)):
        config = shipped(name)
        line = describe_memory(config, algorithm_of(config), world_size=ranks, gpu_bytes=None)
        assert (warning in line) == warned


def test_a_checkpoint_holds_the_policys_average_if_that_teaches_it():
    config = sized("0.6B")
    parameters = parameter_count(config.model_spec)
    for hint, rate, width in (("", 0.05, 12), ("expected_answer", 0.05, 16), ("expected_answer", 0.0, 12)):
        config.teacher_hint, config.teacher_rate = hint, rate
        assert checkpoint_bytes(config) == width * parameters


LORA_PAGE = (Path(__file__).parents[3] / "docs/lora.md").read_text()


@pytest.mark.parametrize(
    ("size", "full", "lora", "full_state", "lora_state"),
    re.findall(r"^\| ([\d.]+B) \| (\d+ / \d+).* \| (\d+ / \d+) \| ([\d.]+) \| ([\d.]+) \|$", LORA_PAGE, re.MULTILINE),
)
def test_the_memory_table_of_lora_is_computed(size, full, lora, full_state, lora_state):
    for config, stated, state in ((sized(size), full, full_state), (sized(size, rank=32), lora, lora_state)):
        need = memory_need(config, algorithm_of(config), world_size=1, gpu_bytes=80 * GIB)
        assert stated == " / ".join(f"{sum(parts.values()) / GIB:.0f}" for parts in (need.awake, need.updating))
        assert state == f"{need.updating[STATE] / GIB:.1f}"
