"""The recorders and simulated ranks of the observability room."""

from tests.unit_tests.observe.conftest import fresh_collector, ranks, recorder  # noqa: F401
