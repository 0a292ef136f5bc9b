#!/usr/bin/env bash
# Train. Sets up .venv first where it is missing or stale.
#   ./run_train.sh [--config NAME | --config path/to/file.py:function] [--dotted.overrides VALUE] [--help] [--list-configs]
# Environment: NGPU      processes on this node (default: its GPUs, or 1 without one)
#              NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for several nodes, the same command on each; MASTER_ADDR is
#                        node 0's host name or address (docs/gpu.md has the choice of network interfaces)
#              LOG_RANK  whose output is shown (default 0; the others' is in the run folder's logs/)
set -euo pipefail
export TORCHTITAN_RL_CALLER_FOLDER=${TORCHTITAN_RL_CALLER_FOLDER:-$PWD} # what relative paths on the command line start from
cd "$(dirname "${BASH_SOURCE[0]}")"
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if ((GPUS == 0)) && [[ $PWD == *[[:space:]]* ]]; then # LD_PRELOAD and the C++ compiler's command line split it
  echo "error: the checkout is in '$PWD': expected a path without spaces, on a machine without a GPU. Move it." >&2
  exit 2
fi
NGPU=${NGPU:-$((GPUS > 0 ? GPUS : 1))}
NNODES=${NNODES:-1}
for name in NGPU NNODES; do
  [[ ${!name} =~ ^[1-9][0-9]*$ ]] || { echo "error: $name = '${!name}': expected a number, 1 or more." >&2 && exit 2; }
done
scripts/setup.sh

if ((GPUS == 0)); then # ranks on one CPU share its cores
  CORES=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES > NGPU ? CORES / NGPU : 1))}
fi
export LOG_RANK=${LOG_RANK:-0} PYTHONUNBUFFERED=1 TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

if ((NNODES > 1)); then
  RENDEZVOUS=(--nnodes="$NNODES" --node_rank="${NODE_RANK:?set NODE_RANK, 0 to NNODES-1}" \
    --master_addr="${MASTER_ADDR:?set MASTER_ADDR, the host name or address of node 0}" --master_port="${MASTER_PORT:-29500}")
else
  RENDEZVOUS=(--standalone)
fi
exec .venv/bin/python -m torchtitan_rl.resilience.launch "${RENDEZVOUS[@]}" --nproc_per_node="$NGPU" -m torchtitan_rl.train "$@"
