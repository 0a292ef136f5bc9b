#!/usr/bin/env bash
# All tests: unit tests, then whole runs on up to 8 ranks. Sets up .venv first where it is missing or stale.
#   scripts/run_tests.sh            everything (about 15 minutes on 2 cores)
#   scripts/run_tests.sh unit       the unit tests only; further arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
if [[ "${1:-}" == unit ]]; then
  shift
  exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/python -m pytest
.venv/bin/python tests/integration_tests.py
