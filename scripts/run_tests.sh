#!/usr/bin/env bash
# All tests: unit tests, then whole runs on up to 8 ranks. Sets up .venv first where it is missing or stale.
#   scripts/run_tests.sh            everything (35 to 40 minutes on 2 cores)
#   scripts/run_tests.sh unit       the unit tests only; further arguments go to pytest
#   scripts/run_tests.sh faults     real runs that are killed, stopped, starved and damaged; further arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
if [[ "${1:-}" == unit ]]; then
  shift
  exec .venv/bin/python -m pytest "$@"
fi
if [[ "${1:-}" == faults ]]; then
  shift
  exec .venv/bin/python -m pytest tests/fault_injection "$@"
fi
.venv/bin/python -m pytest
.venv/bin/python -m pytest tests/fault_injection -m quick
.venv/bin/python tests/integration_tests.py
