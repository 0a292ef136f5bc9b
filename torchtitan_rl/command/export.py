"""Exports a run's checkpoint to a Hugging Face folder for transformers and vLLM. Needs no GPU, and memory for one file."""

import json
import shutil
import tempfile
from ast import literal_eval
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_rl import device  # before torchtitan and vLLM

# isort: split
import torch
from safetensors.torch import save_file
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.errors import expect
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.lora.adapters import Lora, adapter_rows
from torchtitan_rl.models.lora.folder import merged_weights, write_adapter
from torchtitan_rl.models.lora.lora_config import LoraConfig, is_adapter
from torchtitan_rl.models.multimodal import whole_weights
from torchtitan_rl.run import manifest, safe_load
from torchtitan_rl.run.checkpoint_folder import CheckpointFolder
from torchtitan_rl.run.dump_folder import CHECKOUT
from torchtitan_rl.run.manifest import examine
from torchtitan_rl.run.safe_load import stored_hf_weights
from torchtitan_rl.trainer.model_loader import meta_model

WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf")
SHARD_BYTES = 4 * 2**30
"""Maximum bytes of a file and of the memory needed at once, unless a single tensor is larger."""


def export(run: Path, output: Path, step: int | None, dtype: str, *, merged: bool = True) -> Path:
    """Writes checkpoint `step` (None: the last) of `run` to `output`, with LoRA an adapter unless `merged`. Returns its folder.

    Raises UserError if the run, its checkpoint or its starting folder is missing, or `output` is not empty.
    """
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    expect(is_free, "--output", str(output), "a new folder", "Name another.")
    start, checkpoint = start_of(run), find_checkpoint(run, step)
    spec, lora = spec_from_folder(start), lora_of(checkpoint)
    model, of_text = meta_model(spec), bool(getattr(spec.model, "part_of", ""))
    if lora and not merged:
        adapter = stored_adapter(spec, lora, checkpoint)
        write_adapter(adapter, lora.config, str(start.resolve()), output, of_text=of_text)
    else:
        output.mkdir(parents=True, exist_ok=True)
        adapter_of, torch_dtype = spec.state_dict_adapter(spec.model, None), getattr(torch, dtype)
        if lora:
            adapter = stored_adapter(spec, lora, checkpoint)
            weights = merged_weights(start, adapter, lora.scale, torch_dtype)
        else:
            weights = stored_hf_weights(model, adapter_of, checkpoint, torch_dtype)
        if of_text:
            weights = whole_weights(weights, start)
        write_safetensors(weights, model.enable_weight_tying, output)
        copy_assets(start, output, dtype)
    for file in output.glob("*.safetensors"):  # safetensors lets only their owner read them
        file.chmod(output.stat().st_mode & 0o666)
    return checkpoint


@contextmanager
def exported(folder: Path, step: int | None) -> Iterator[Path]:
    """Yields the folder of a model: `folder` itself or, for a run, its checkpoint, exported for the time of the context.

    Raises UserError as `export`, and for a step of a model's folder.
    """
    is_run = "hf_assets_path" in json.loads((folder / "config.json").read_text())
    expected = "a run's checkpoint, as a model's folder has no steps"
    expect(is_run or step is None, "--step", step, expected, "Leave --step out.")
    if not is_run:
        yield folder
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # /tmp may be too small
        model = Path(scratch, "model")
        export(folder, model, step, "float32" if device.ON_CPU else "bfloat16")
        yield model


def start_of(run: Path) -> Path:
    """Returns the folder that a run started from. Raises UserError if the run or that folder is not there."""
    config = run / "config.json"
    expected, remedy = "a run's folder, and no model's", f"{config.resolve()} is not there."
    stored = {}
    if config.is_file():
        stored, remedy = json.loads(config.read_text()), "A model's folder needs no export."
    expect("hf_assets_path" in stored, "RUN", str(run), expected, remedy)
    # An early run's path starts from the checkout or, with an installed package, from where it was called.
    roots = (CHECKOUT, stored.get("folder_of_command", ""), "")
    starts = [Path(root, stored["hf_assets_path"]) for root in roots]
    start = next((folder for folder in starts if folder.exists()), starts[-1])
    there, expected = (start / "config.json").is_file(), "the folder that the run started from"
    remedy = "Put the folder back."
    expect(there, "hf_assets_path", str(start), expected, remedy)
    return start


def lora_of(checkpoint: Path) -> Lora | None:
    """Returns the LoRA that a checkpoint holds the adapters of; None if it holds all weights."""
    fields = manifest.read(checkpoint).get("config", {})
    if not fields.get("trainer.lora.rank"):
        return None
    rank, alpha = fields["trainer.lora.rank"], fields["trainer.lora.alpha"]
    targets = literal_eval(fields["trainer.lora.targets"])
    return Lora(LoraConfig(rank=rank, alpha=alpha, targets=targets))


def stored_adapter(spec: ModelSpec, lora: Lora, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns the adapters of a checkpoint by peft's names without their prefix, in float32."""
    model = meta_model(spec, lora)
    names = {id(p): canonical_fqn(name) for name, p in model.named_parameters() if is_adapter(name)}
    shapes = {names[id(p)]: p.shape for p in model.parameters() if id(p) in names}
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    safe_load.load(state, checkpoint, no_dist=True)
    rows = adapter_rows(model, spec.state_dict_adapter(spec.model, None))
    return {
        name: state[names[id(p)]][own] for p, exported in rows for name, own in exported.items()
    }


def find_checkpoint(run: Path, step: int | None) -> Path:
    """Returns a checkpoint's folder after checking it. Raises UserError if it is missing or damaged."""
    steps = CheckpointFolder(run).steps()
    chosen = max(steps, default=0) if step is None else step
    expected = f"one of {list(steps)}, the checkpoints in {run}/checkpoint"
    expect(chosen in steps, "--step", chosen, expected, "Leave --step out for the last.")
    reason = examine(steps[chosen])
    expected = f"a whole checkpoint, but in {steps[chosen]} {reason}"
    expect(not reason, "--step", chosen, expected, "Name another step.")
    return steps[chosen]


def write_safetensors(
    weights: Iterable[tuple[str, torch.Tensor]], tied: bool, output: Path
) -> None:
    """Writes files of at most SHARD_BYTES and their index. A tied output head is left out."""
    written: list[tuple[Path, list[str]]] = []
    shard: dict[str, torch.Tensor] = {}
    total = held = 0

    def write() -> None:
        file = output / f"unfinished-{len(written) + 1:05d}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        written.append((file, list(shard)))

    for name, tensor in weights:
        if tied and name == "lm_head.weight":
            continue
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > SHARD_BYTES:
            write()
            shard, held = {}, 0
        shard[name] = tensor.contiguous()
        held += size
        total += size
    write()
    weight_map = {}
    for i, (file, names) in enumerate(written):
        final = f"model-{i + 1:05d}-of-{len(written):05d}.safetensors"
        file.rename(output / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_assets(source: Path, output: Path, dtype: str) -> None:
    """Copies the starting folder's files except its weights, and sets the exported dtype in config.json."""
    for file in [*source.iterdir(), *source.glob("additional_chat_templates/*")]:
        if file.is_file() and file.suffix not in WEIGHTS and not file.name.endswith(".index.json"):
            (output / file.relative_to(source)).parent.mkdir(exist_ok=True)
            shutil.copy2(file, output / file.relative_to(source))
    config = json.loads((output / "config.json").read_text())
    config["dtype"] = dtype
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
