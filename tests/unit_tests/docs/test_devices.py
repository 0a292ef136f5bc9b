"""docs/gpu.md names every file in which what a run computes depends on the device."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "torchtitan_rl"
ASKS = re.compile(r"\bON_CPU\b|DEVICE_TYPE [!=]=|\.is_cuda\b|\.type == \"c(pu|uda)\"|cuda\.is_available")


def test_files_with_device_specific_code_are_listed():
    files = [file for part in ("core", "proof", "library") for file in (PACKAGE / part).rglob("*.py")]
    asking = {file.relative_to(ROOT).as_posix() for file in files if ASKS.search(file.read_text())}
    assert "torchtitan_rl/core/device.py" in asking
    named = set(re.findall(r"\]\(\.\./(torchtitan_rl/[\w/]+\.py)\)", (ROOT / "docs" / "gpu.md").read_text()))
    assert asking - named == set()
