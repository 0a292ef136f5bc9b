"""What several modules of these tests take."""

import pytest

from tests.parts.grading import grader


@pytest.fixture
def build():
    """Graders whose processes end with the test."""
    graders = []

    def built(*functions, **config):
        graders.append(grader(*functions, **config))
        return graders[-1]

    yield built
    for one in graders:
        one.close()
