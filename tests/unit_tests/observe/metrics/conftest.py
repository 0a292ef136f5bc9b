"""The recorders and simulated ranks of the observability room."""

from tests.unit_tests.observe.conftest import logs_reach_pytest, ranks, recorder  # noqa: F401
