"""The launcher is there at once: it imports neither torch nor vLLM, which take seconds."""

import subprocess
import sys


def test_the_launcher_imports_no_torch():
    code = (
        "import sys, torchtitan_rl.run.launch; print([m for m in ('torch', 'torchtitan', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
