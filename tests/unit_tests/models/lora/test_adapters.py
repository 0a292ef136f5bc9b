"""LoRA in the trainer: what is trained, what stays, and what the rest of the program sees of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torchtitan.components.checkpointer.utils import canonical_fqn
from transformers import AutoModelForCausalLM

from tests.parts.tiny import save_odd_checkpoint, save_tiny_checkpoint
from tests.parts.tiny_trainer import scored_step, tiny_trainer
from torchtitan_rl.algorithm import KL, Algorithm
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.command import export as export_hf
from torchtitan_rl.errors import UserError
from torchtitan_rl.models.hf import local_shard
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.lora.lora_config import LoraConfig, is_adapter
from torchtitan_rl.run.checkpointer import Checkpointer
from torchtitan_rl.run.safe_load import SafeReader
from torchtitan_rl.trainer.optimizer import AdamW
from torchtitan_rl.trainer.teachers.frozen_models import PolicyAverage, Reference
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.trainer.trainer_config import LRSchedule
from torchtitan_rl.types import flat


@pytest.fixture(scope="module")
def folder(one_rank, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(path)
    return path


@pytest.fixture
def build(folder):
    def trainer(rank: int = 8, algorithm: Algorithm.Config | None = None, start=None, **config) -> Trainer:
        targets = config.pop("targets", LoraConfig().targets)
        return tiny_trainer(
            str(start or folder),
            algorithm,
            model_spec=spec_from_folder(start) if start else None,
            lora=LoraConfig(rank=rank, targets=targets),
            optimizer=AdamW.Config(lr=1e-2),
            lr_scheduler=LRSchedule(warmup_steps=0),
            **config,
        )

    return trainer


def updated(trainer: Trainer):
    groups = draft_episodes(scored_step())
    if trainer.algorithm.needs_reference:
        Reference(trainer).add_logprobs(groups)
    trainer.algorithm.credit.assign(groups)
    return trainer.update(groups)


def copies(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {canonical_fqn(name): local_shard(p).clone() for name, p in trainer.model.named_parameters()}


def test_update_changes_only_the_adapters(build):
    trainer = build()
    before = copies(trainer)
    report = updated(trainer)
    assert report.optimizer_steps == 1
    assert report.grad_norm > 0
    moved = {name for name, old in copies(trainer).items() if not torch.equal(old, before[name])}
    assert moved == {name for name in before if ".lora_b." in name}  # A's gradient is 0 while B is
    updated(trainer)
    moved = {name for name, old in copies(trainer).items() if not torch.equal(old, before[name])}
    assert moved == {name for name in before if is_adapter(name)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initial_lora_policy_equals_the_full_fine_tuning_start(build, dtype):
    ids = np.arange(1, 30)
    logprobs = [build(rank, mixed_precision_param=dtype).token_logprobs(ids) for rank in (0, 8)]
    np.testing.assert_array_equal(*logprobs)


def test_disabled_adapters_give_the_initial_policy(build):
    trainer, ids = build(), np.arange(1, 30)
    start = trainer.token_logprobs(ids)
    updated(trainer)
    assert np.abs(trainer.token_logprobs(ids) - start).max() > 1e-3
    with trainer.lora.off(trainer.model):
        np.testing.assert_array_equal(trainer.token_logprobs(ids), start)
    assert np.abs(trainer.token_logprobs(ids) - start).max() > 1e-3


def test_reference_is_the_base_without_a_second_copy(build):
    kl = Algorithm.Config(kl=KL.Config(coef=0.1))
    lora, full = build(8, kl), build(0, kl)
    updated(lora)
    assert Reference(lora).model is lora.model
    groups = [draft_episodes(scored_step()) for _ in range(2)]
    for trainer, step in zip((lora, full), groups, strict=True):
        Reference(trainer).add_logprobs(step)
    for ours, theirs in zip(*map(flat, groups), strict=True):
        np.testing.assert_allclose(ours.reference_logprobs, theirs.reference_logprobs, atol=1e-6)


def test_average_is_of_the_adapters_alone(build):
    trainer, rate = build(), 0.25
    updated(trainer)
    average = PolicyAverage(trainer, rate)
    start = {name: value.clone() for name, value in copies(trainer).items() if is_adapter(name)}
    updated(trainer)
    average.add_logprobs([])
    now = copies(trainer)
    found = {name.removeprefix("teacher_average."): local_shard(t) for name, t in average.tensors().items()}
    assert found.keys() == start.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, start[name] + rate * (now[name] - start[name]))


class Nothing:
    """A state without content."""

    def state_dict(self):
        return {"nothing": 0}

    def load_state_dict(self, state):
        pass


def saver(trainer: Trainer, folder) -> Checkpointer:
    return Checkpointer.Config(interval=1).build(
        trainer=trainer, prompts=Nothing(), run_state=Nothing(), run_folder=folder
    )


def test_lora_checkpoint_contains_only_adapters_and_resumes_bitwise(build, tmp_path):
    first = build()
    updated(first)
    checkpoints = saver(first, tmp_path)
    checkpoints.save(1)
    updated(first)
    second = build()
    saver(second, tmp_path).load(checkpoints.folder.steps()[1])
    updated(second)
    ours, theirs = copies(first), copies(second)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    stored = SafeReader(str(checkpoints.folder.steps()[1])).read_metadata().state_dict_metadata
    weights = {name for name in ours if name in stored}
    assert weights == {name for name in ours if is_adapter(name)}


def test_resuming_an_adapter_on_another_base_is_refused(build, folder, tmp_path):
    (tmp_path / "run").mkdir()
    first = saver(build(), tmp_path / "run")
    first.save(1)
    save_tiny_checkpoint(tmp_path / "other", seed=1)
    other = build(start=tmp_path / "other")
    with pytest.raises(UserError, match="hf_assets_path = 'a base with digest .*: expected the base of .*step-1, with"):
        saver(other, tmp_path / "run").load(first.folder.steps()[1])


@pytest.fixture(params=["qwen3", "llama"])
def run(request, build, tmp_path):
    """A run with a checkpoint of a trained adapter: (its trainer, its folder)."""
    start, run = tmp_path / "start", tmp_path / "run"
    for path in (start, run):
        path.mkdir()
    save_odd_checkpoint(start, request.param)
    (run / "config.json").write_text(json.dumps({"hf_assets_path": str(start)}))
    trainer = build(start=start)
    updated(trainer)
    updated(trainer)
    checkpoints = saver(trainer, run)
    config = trainer.config.lora
    checkpoints.config_fields = {
        "trainer.lora.rank": config.rank, "trainer.lora.alpha": config.alpha, "trainer.lora.targets": repr(config.targets)
    }  # fmt: skip
    checkpoints.save(1)
    return trainer, run


def assert_computes_the_same(model, trainer: Trainer) -> None:
    """A model of transformers or peft gives the policy's log-probabilities."""
    ids = torch.arange(1, 30)
    with torch.no_grad():
        logits = model(ids[None]).logits
    found = logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(found, trainer.token_logprobs(ids.numpy()), atol=2e-5)
    with trainer.lora.off(trainer.model):
        assert np.abs(found - trainer.token_logprobs(ids.numpy())).max() > 1e-3


def test_merged_export_equals_the_policy(run, tmp_path):
    trainer, folder = run
    export_hf.export(folder, tmp_path / "merged", None, "float32", merged=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert_computes_the_same(model, trainer)


def test_exported_weights_may_be_read_by_whom_the_umask_lets(run, tmp_path):
    export_hf.export(run[1], tmp_path / "merged", None, "float32")
    modes = {file.stat().st_mode for file in (tmp_path / "merged").glob("model*")}
    assert modes == {(tmp_path / "merged" / "config.json").stat().st_mode}


def base_of(adapter: Path) -> Path:
    """The folder of the model that an exported adapter belongs to."""
    return Path(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"])


def test_adapter_folder_in_peft_equals_the_policy(run, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install --no-deps peft")
    trainer, folder = run
    export_hf.export(folder, tmp_path / "adapter", None, "float32", merged=False)
    model = AutoModelForCausalLM.from_pretrained(base_of(tmp_path / "adapter"), attn_implementation="eager")
    assert_computes_the_same(peft.PeftModel.from_pretrained(model, tmp_path / "adapter"), trainer)
