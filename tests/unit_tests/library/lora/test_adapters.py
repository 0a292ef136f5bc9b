"""LoRA in the trainer: what is trained, what stays, and what the rest of the program sees of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.components.checkpointer.utils import canonical_fqn
from transformers import AutoModelForCausalLM
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from tests.integration.invariance import scored_step
from tests.parts.lora import B
from tests.parts.tiny import change_adapters, save_odd_checkpoint, save_tiny_checkpoint, tiny_spec
from tests.parts.tiny_trainer import tiny_trainer
from torchtitan_rl.core.algorithm import KL, Algorithm
from torchtitan_rl.core.algorithm.episodes import draft_episodes
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.core.trainer.hf import local_shard
from torchtitan_rl.core.trainer.lora import LoraConfig, is_adapter
from torchtitan_rl.core.trainer.optimizer import AdamW
from torchtitan_rl.core.trainer.trainer import Trainer
from torchtitan_rl.core.trainer.trainer_config import LRSchedule
from torchtitan_rl.core.types import flat
from torchtitan_rl.library.frozen_models import Reference
from torchtitan_rl.library.lora.adapters import adapter_rows
from torchtitan_rl.library.lora.folder import write_adapter
from torchtitan_rl.library.models import spec_from_folder
from torchtitan_rl.observability.metrics.efficiency import TokenFlops
from torchtitan_rl.proof.shard_checksums import exported_rows
from torchtitan_rl.resilience.checkpointer import Checkpointer
from torchtitan_rl.resilience.safe_load import SafeReader
from torchtitan_rl.setup import export as export_hf
from torchtitan_rl.setup.registry import load_config
from torchtitan_rl.setup.validation import check_model


@pytest.fixture(scope="module")
def folder(one_rank, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(path)
    return path


@pytest.fixture
def build(folder):
    def trainer(rank: int = 8, algorithm: Algorithm.Config | None = None, start=None, adapter="", **config) -> Trainer:
        targets = config.pop("targets", LoraConfig().targets)
        return tiny_trainer(
            str(start or folder),
            algorithm,
            model_spec=spec_from_folder(start) if start else None,
            lora=LoraConfig(rank=rank, targets=targets, start=str(adapter)),
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


def test_base_has_the_compute_dtype_and_adapters_are_float32(build):
    trainer = build(mixed_precision_param="bfloat16")
    dtypes = {(is_adapter(name), p.dtype) for name, p in trainer.model.named_parameters()}
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}
    assert updated(trainer).optimizer_steps == 1


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


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_exported_adapter_equals_the_change_of_the_merged_weight(build, tmp_path, model_type):
    """B and A by Hugging Face's names make the difference of the merged and the plain weight, in each architecture's order of rows."""
    save_odd_checkpoint(tmp_path, model_type)
    trainer = build(start=tmp_path)
    updated(trainer)
    plain, sent = {}, {}
    for name, tensor in trainer.hf_weights(torch.float32):
        (sent if is_adapter(name) else plain)[name] = tensor.clone()
    scale = trainer.lora.scale
    with torch.no_grad():
        for module in trainer.model.modules():
            if hasattr(module, "lora_a"):
                a, b = local_shard(module.lora_a.weight), local_shard(module.lora_b.weight)
                local_shard(module.weight).add_(scale * b @ a)
    merged = {n: t for n, t in trainer.hf_weights(torch.float32) if not is_adapter(n)}
    changed = {name for name in plain if not torch.equal(plain[name], merged[name])}
    assert changed == {name.replace(".lora_A", "") for name in sent if ".lora_A." in name}
    assert len(changed) == 7 * len(trainer.model.layers)
    for name in changed:
        a, b = (sent[name.replace(".weight", f".lora_{one}.weight")] for one in "AB")
        torch.testing.assert_close(merged[name] - plain[name], scale * b @ a, atol=1e-6, rtol=1e-4)


def test_every_parameter_of_an_adapter_is_exported(build):
    trainer = build()
    both = (
        *exported_rows(trainer.model, trainer.state_dict_adapter),
        *adapter_rows(trainer.model, trainer.state_dict_adapter),
    )
    exported = {id(p) for p, names in both if names}
    assert exported == {id(p) for p in trainer.model.parameters()}


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
    with pytest.raises(
        UserError, match="hf_assets_path = 'a base with digest .*: expected the base of .*step-1, with dig"
    ):
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


def base_of(adapter: Path) -> Path:
    """The folder of the model that an exported adapter belongs to."""
    return Path(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"])


def test_adapter_folder_in_peft_equals_the_policy(run, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install --no-deps peft")
    trainer, folder = run
    export_hf.export(folder, tmp_path / "adapter", None, "float32", merged=False)
    model = AutoModelForCausalLM.from_pretrained(base_of(tmp_path / "adapter"), attn_implementation="eager")
    assert_computes_the_same(peft.PeftModel.from_pretrained(model, tmp_path / "adapter"), trainer)


def test_vllm_reads_the_adapter_folder_like_a_pushed_adapter(run, tmp_path):
    trainer, folder = run
    export_hf.export(folder, tmp_path / "adapter", None, "float32", merged=False)
    helper = PEFTHelper.from_local_dir(str(tmp_path / "adapter"), None)
    modules = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    adapter = LoRAModel.from_local_checkpoint(
        str(tmp_path / "adapter"), modules, helper, lora_model_id=1, device="cpu", dtype=torch.float32
    )
    sent = dict(trainer.lora.weights(torch.float32))
    assert {f"{name}.lora_A.weight" for name in adapter.loras} == {name for name in sent if ".lora_A." in name}
    for name, layer in adapter.loras.items():
        assert layer.scaling == trainer.lora.scale
        assert torch.equal(layer.lora_a, sent[f"{name}.lora_A.weight"])
        assert torch.equal(layer.lora_b, sent[f"{name}.lora_B.weight"])


def test_run_can_start_from_an_adapter_folder(run, build, tmp_path):
    trainer, folder = run
    export_hf.export(folder, tmp_path / "adapter", None, "float32", merged=False)
    second = build(start=base_of(tmp_path / "adapter"), adapter=tmp_path / "adapter")
    ours, theirs = copies(trainer), copies(second)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture
def foreign(build, tmp_path):
    """Writes an adapter folder for the tiny model, after `change` of its tensors and with `fields` in its config."""

    def write(change=lambda tensors: None, **fields) -> Path:
        trainer = build()
        change_adapters(trainer.model, 1)
        tensors = {name: tensor.clone() for name, tensor in trainer.lora.weights(torch.float32)}
        change(tensors)
        write_adapter(tensors, trainer.config.lora, "base", tmp_path / "foreign")
        described = tmp_path / "foreign" / "adapter_config.json"
        described.write_text(json.dumps(json.loads(described.read_text()) | fields))
        return tmp_path / "foreign"

    return write


ATTENTION = "model.layers.1.self_attn"


def with_an_a_of_its_own(tensors):
    tensors[f"{ATTENTION}.k_proj.lora_A.weight"] += 1


def without_k(tensors):
    for letter in "AB":
        del tensors[f"{ATTENTION}.k_proj.lora_{letter}.weight"]


def of_more_columns(tensors):
    tensors[B] = torch.zeros(len(tensors[B]) + 2, 8)


def with_a_head(tensors):
    tensors["lm_head.lora_A.weight"] = torch.zeros(8, 64)


@pytest.mark.parametrize(
    ("change", "fields", "says"),
    [
        (with_an_a_of_its_own, {}, f"one A for {ATTENTION}.q_proj.lora_A.weight, .* but that of .* differs"),
        (without_k, {}, f"{ATTENTION}.k_proj.lora_A.weight with shape .8, 64., but there is none.* q_proj, k_proj and"),
        (of_more_columns, {}, rf"{B} with shape \(64, 8\), but there is \(66, 8\)"),
        (with_a_head, {}, "no lm_head.lora_A.weight, which is of no layer in trainer.lora.targets"),
        (dict, {"r": 4}, "trainer.lora.rank = 8: expected 4, as model.layers.0.mlp.down_proj has in"),
        (dict, {"lora_alpha": 16}, "trainer.lora.alpha = 32.0: expected 16, the scale as"),
        (dict, {"use_rslora": True}, "trainer.lora.alpha = 32.0: expected 90.5"),
        (dict, {"alpha_pattern": {"o_proj": 64}}, "expected 64, the scale as model.layers.0.self_attn.o_proj has"),
        (dict, {"use_dora": True}, "a plain LoRA adapter, but: .*DoRA"),
        (dict, {"init_lora_weights": "pissa"}, "a plain LoRA adapter, but: .*PiSSA"),
    ],
)
def test_incompatible_adapter_folder_is_refused_by_name(build, foreign, change, fields, says):
    start = foreign(change, **fields)
    with pytest.raises(UserError, match=says):
        build(adapter=start)


def test_an_adapter_folder_is_checked_before_anything_starts(foreign, folder):
    config = load_config("debug")
    config.model_spec, config.trainer.lora.start = tiny_spec(), str(foreign(without_k))
    config.trainer.lora.rank = 8
    with pytest.raises(UserError, match="k_proj.lora_A.weight with shape"):
        check_model(config, world_size=1)


@pytest.mark.parametrize("activation_checkpoint", ["selective", "full"])
def test_activation_checkpointing_gives_the_same_lora_update(build, activation_checkpoint):
    plain, recomputed = build(), build(activation_checkpoint=activation_checkpoint)
    for trainer in (plain, recomputed):
        change_adapters(trainer.model, 1)
        updated(trainer)
    ours, theirs = copies(plain), copies(recomputed)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=1e-5)


def test_lora_update_flops_exclude_base_weight_gradients(build):
    """torch counts the same difference, but for the first layer's input, which needs no gradient, and the norms' weights."""
    counted, computed = [], []
    for rank in (0, 8):
        trainer = build(rank)
        change_adapters(trainer.model, 1)
        trainer.batcher.multiple, trainer.batcher.share_prompts_from = 1, 0
        with FlopCounterMode(display=False) as counter:
            report = updated(trainer)
        counted.append(counter.get_total_flops())
        computed.append(TokenFlops.of(tiny_spec().model, trainer.model).total(report.work))
    (tokens, *_), (learning, _, scored) = report.work
    sizes = {name: p.numel() for name, p in trainer.model.named_parameters() if name.startswith(("layers", "norm"))}
    adapters, norms = (sum(size for name, size in sizes.items() if part in name) for part in (".lora_", "norm"))
    base = sum(sizes.values()) - adapters - norms
    first = (
        sizes["layers.0.attention.qkv_linear.wqkv.weight"] + sizes["layers.0.attention.qkv_linear.wqkv.lora_a.weight"]
    )
    saved = 2 * learning * base + 2 * scored * trainer.model.lm_head.weight.numel()
    saved -= (2 * tokens + 4 * learning) * adapters
    assert counted[0] - counted[1] == pytest.approx(saved + 2 * learning * first)
    assert computed[0] - computed[1] == pytest.approx(saved + 2 * learning * norms)
