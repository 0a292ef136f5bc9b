"""For modules with a `pair` of a policy and an engine."""

import pytest


@pytest.fixture
def restored(pair):
    """After the test both are as at the start."""
    yield
    pair.restore()
    pair.begin_anew()
    pair.sync()
