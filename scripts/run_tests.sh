#!/usr/bin/env bash
# The tests. Sets up .venv first where it is missing or stale.
#   scripts/run_tests.sh            the default: unit tests but for the long ones, the quick fault tests, the quick whole runs
#   scripts/run_tests.sh unit       all unit tests, and nothing else; further arguments go to pytest
#   scripts/run_tests.sh runs       whole runs on up to 8 ranks; further arguments go to tests/integration_tests.py
#   scripts/run_tests.sh faults     real runs that are killed, stopped, starved and damaged; further arguments go to pytest
#   scripts/run_tests.sh rehearsal  what GPUs run, on a pretended device (docs/measured/gpu.md); further arguments are configs
#   scripts/run_tests.sh real       a published model from PyPI: trained, killed, resumed, forked, exported
#   scripts/run_tests.sh all        all five, each whole
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as `sh FILE`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh

part=${1:-default}
(($#)) && shift
# How many processes share the unit tests: one more than the cores, as many tests wait, if each has 3 GB of what is free and
# of a container's limit; 1 to 4.
processes() {
  local most=$(($(nproc) + 1)) megabytes
  for megabytes in $({
    awk '/^MemAvailable/ { print $2 "000" }' /proc/meminfo
    cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null
  } | awk '/^[0-9]+$/ { printf "%d\n", $1 / 1e6 }'); do
    ((megabytes / 3000 < most)) && most=$((megabytes / 3000))
  done
  ((most > 4)) && most=4
  echo $((most > 1 ? most : 1))
}
# One thread for each process: with more, their threads wait for each other.
unit() { OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest --numprocesses "$(processes)" --dist loadfile "$@"; }
faults() { .venv/bin/python -m pytest tests/fault_injection "$@"; }
rehearsal() { .venv/bin/python -m tests.gpu_rehearsal long "$@"; }
real() { .venv/bin/python -m pytest tests/real_model "$@"; }
runs() { .venv/bin/python tests/integration_tests.py "$@"; }
# With the instructions that most users' CPUs have, whatever this one has. vLLM asks the CPU itself for AMX and then calls oneDNN's
# AMX kernels, which abort under the limit.
quick_runs() (
  export ATEN_CPU_CAPABILITY=avx2
  grep -q amx_tile /proc/cpuinfo || export ONEDNN_MAX_CPU_ISA=AVX2
  runs --quick "$@"
)

trap 'exit 130' INT
failed=()
# Run a part; the parts after one that failed run all the same.
try() { "$@" || failed+=("$1"); }

case $part in
  default) try unit -m "not long"; try faults -m quick; try quick_runs ;;
  unit | runs | faults | rehearsal | real) try "$part" "$@" ;;
  all) try unit; try faults; try runs; try rehearsal; try real ;;
  *) echo "run_tests.sh: no part '$part': unit, runs, faults, rehearsal, real, all, or nothing for the default" >&2 && exit 2 ;;
esac
if ((${#failed[@]})); then
  echo "run_tests.sh: failed: ${failed[*]}" >&2
  exit 1
fi
