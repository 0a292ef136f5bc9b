"""scripts/run_tests.sh goes on after a part that failed."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = """#!/usr/bin/env bash
[[ $1 == -c ]] && echo 24000 && exit  # the megabytes of memory
echo "ran $*"
case "$*" in *$FAILING*) exit 1 ;; esac
"""


@pytest.mark.parametrize(
    ("failing", "code", "named"),
    [("nothing", 0, None), ("--numprocesses", 1, "failed: unit"), ("fault_injection", 1, "failed: faults")],
)
def test_every_part_runs_and_the_failed_one_is_named(tmp_path, failing, code, named):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("bench", "__pycache__"))
    (tmp_path / "scripts/setup.sh").write_text("#!/usr/bin/env bash\n")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    ended = subprocess.run(
        [tmp_path / "scripts/run_tests.sh"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "FAILING": failing},
    )
    assert ended.returncode == code
    ran = [line for line in ended.stdout.splitlines() if line.startswith("ran")]
    assert len(ran) == 3
    assert "integration_tests.py --quick" in ran[2]
    assert (named or "") in ended.stderr
    assert bool(ended.stderr) == bool(named)
