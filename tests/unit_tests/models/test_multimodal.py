"""The text of multimodal checkpoints: read, trained, pushed, and exported with everything else as it was."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.parts.hf_decoders import BOUNDS, engine, logprobs_of, sequences, transformers_logprobs
from tests.parts.multimodal import MULTIMODAL, save_multimodal
from tests.parts.tiny import scale_policy, sharded_policy
from tests.unit_tests.models.lora.test_adapters import saver, updated
from tests.unit_tests.models.test_hf_decoder import trainer_of
from torchtitan_rl.command.export import export
from torchtitan_rl.errors import UserError
from torchtitan_rl.models.hf_config import hf_architecture, spec_from_folder
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.lora.folder import write_adapter
from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.models.multimodal import engine_folder, is_text
from torchtitan_rl.trainer.weight_files import check_tensors

pytestmark = pytest.mark.usefixtures("one_rank")

CASES = [*((architecture, False) for architecture in MULTIMODAL), ("Qwen3_5ForConditionalGeneration", True)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def folder(architecture: str, older_names: bool = False):
        key = architecture, older_names
        if key not in made:
            made[key] = tmp_path_factory.mktemp(architecture)
            save_multimodal(made[key], architecture, older_names=older_names)
        return made[key]

    return folder


@pytest.mark.parametrize(("architecture", "older_names"), CASES)
def test_policy_is_the_text_of_transformers_model(folder_of, architecture, older_names):
    folder, ids = folder_of(architecture, older_names), sequences()[0]
    check_tensors(folder, spec_from_folder(folder))
    model, _ = sharded_policy(folder)
    expected, _ = transformers_logprobs(folder_of(architecture), [ids])
    assert abs(logprobs_of(model, ids) - expected.numpy()).max() <= BOUNDS["transformers"]


@pytest.mark.parametrize(("architecture", "older_names"), CASES)
def test_export_is_the_whole_checkpoint_with_its_vision_unchanged(folder_of, tmp_path, architecture, older_names):
    start, run = folder_of(architecture, older_names), tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"hf_assets_path": str(start)}))
    trainer = trainer_of(start)
    updated(trainer)
    saver(trainer, run).save(1)
    export(run, tmp_path / "exported", None, "float32")
    stored = load_file(start / "model.safetensors")
    found = {}
    for file in (tmp_path / "exported").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == stored.keys()
    moved = {name for name in found if not torch.equal(found[name], stored[name])}
    assert moved == {name for name in stored if is_text(name)}
    assert moved < stored.keys()
    ids = sequences()[0]
    if not older_names:
        exported, _ = transformers_logprobs(tmp_path / "exported", [ids])
        assert abs(trainer.token_logprobs(ids.numpy()) - exported.numpy()).max() <= BOUNDS["transformers"]


def test_adapter_has_the_layers_names_in_the_whole_model(folder_of, tmp_path):
    architecture, config = "Gemma3ForConditionalGeneration", LoraConfig(rank=6, alpha=9.0)
    lora = Lora(config)
    sharded_policy(folder_of(architecture), lora=lora)
    sent = dict(lora.weights(torch.float32))
    write_adapter(sent, config, "base", tmp_path, of_text=True)
    whole = getattr(transformers, architecture).from_pretrained(folder_of(architecture))
    stored = load_file(tmp_path / "adapter_model.safetensors")
    layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in stored}
    assert len(stored) == 2 * len({whole.get_submodule(layer) for layer in layers}) == len(sent)


def test_text_is_pushed_to_an_engine_of_its_own(folder_of):
    folder = folder_of("Gemma3ForConditionalGeneration")
    model, adapter = sharded_policy(folder)
    with engine(folder) as made:
        assert made.generator.llm.llm_engine.model_config.hf_config.architectures == ["Gemma3ForCausalLM"]
        assert made.push(model, adapter) <= BOUNDS["engine"]
        scale_policy(model, 1.1)
        assert made.push(model, adapter) <= BOUNDS["engine"]


def test_engine_folder_has_the_texts_config_and_the_checkpoints_other_files(folder_of, tmp_path):
    folder = tmp_path / "start"
    shutil.copytree(folder_of("Mistral3ForConditionalGeneration"), folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    with engine_folder(str(folder), spec_from_folder(folder).model.hf) as made:
        assert hf_architecture(spec_from_folder(Path(made)).model) == hf_architecture(spec_from_folder(folder).model)
        assert transformers.GenerationConfig.from_pretrained(made).eos_token_id == 7
    with engine_folder(str(folder), None) as made:
        assert made == str(folder)


def test_missing_tensor_of_the_text_is_named(folder_of, tmp_path):
    folder = tmp_path / "start"
    shutil.copytree(folder_of("Gemma3ForConditionalGeneration"), folder)
    entries = json.loads((folder / "config.json").read_text())
    entries["text_config"]["num_hidden_layers"] = 4
    entries["text_config"]["layer_types"] += ["full_attention"]
    (folder / "config.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match="model.layers.3.* is missing"):
        check_tensors(folder, spec_from_folder(folder))


def test_file_that_was_cut_off_is_named(folder_of, tmp_path):
    shutil.copytree(folder_of("Mistral3ForConditionalGeneration"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match="hf_assets_path = .*its model.safetensors cannot be read"):
        spec_from_folder(tmp_path)


def test_quantized_checkpoint_is_refused(folder_of, tmp_path):
    """Ministral 3's published ones have the entry beside the text's config."""
    entries = json.loads((folder_of("Mistral3ForConditionalGeneration") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(entries | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match="hf_assets_path = .*it is quantized"):
        spec_from_folder(tmp_path)
