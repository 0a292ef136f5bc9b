"""Reads a checkpoint folder's config.json with transformers."""

from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_config(folder: Path) -> "PretrainedConfig":
    """Reads config.json with transformers, which fills in missing entries of an older or shorter file.

    Raises:
        UserError: naming `hf_assets_path`, if transformers cannot read it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many types, for unknown model types and for wrong types of values
        said = " ".join(str(error).strip().split("\n\n")[0].split()) or type(error).__name__
        raise UserError(
            f"hf_assets_path = {str(folder)!r}: transformers cannot read its config.json: {said.rstrip('.')}. Correct it."
        ) from error
