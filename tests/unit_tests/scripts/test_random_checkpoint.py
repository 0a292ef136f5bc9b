"""Random checkpoints of each architecture, with the script's own dimensions."""

import pytest

from scripts.make_random_checkpoint import save, small_model
from torchtitan_rl.library.models import spec_from_folder


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_a_run_accepts_a_checkpoint_of_the_default_dimensions(tmp_path, architecture):
    save(small_model(architecture, {}), tmp_path / "made")
    assert spec_from_folder(tmp_path / "made").model.dim == 256
