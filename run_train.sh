#!/usr/bin/env bash
# Train. Sets up .venv first where it is missing or stale.
#   ./run_train.sh [--config NAME | --config path/to/file.py:function] [--dotted.overrides VALUE] [--help] [--list-configs]
# Environment: NGPU      processes on this node (default: its visible GPUs, or 1 without one)
#              NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for several nodes, the same command on each; MASTER_ADDR is
#                        node 0's host name or address (docs/node.md has the choice of network interfaces)
#              LOG_RANK  whose output is shown (default 0; the others' is in the run folder's logs/)
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as `sh FILE`
set -euo pipefail
export TORCHTITAN_RL_CALLER_FOLDER=${TORCHTITAN_RL_CALLER_FOLDER:-$PWD} # what relative paths on the command line start from
export TORCHTITAN_RL_PROGRAM=run_train.sh
cd "$(dirname "${BASH_SOURCE[0]}")"
scripts/setup.sh
exec .venv/bin/python -m torchtitan_rl.command.command train "$@"
