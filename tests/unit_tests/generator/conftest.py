"""A small policy that talks, and its engine, for each module that takes them."""

import pytest

from tests.parts.conversations import engine
from tests.parts.talk import save_talker
from tests.parts.tiny import DIMENSIONS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_talker(tmp_path_factory.mktemp("policy"), **DIMENSIONS)


@pytest.fixture(scope="module")
def generator(folder, made):
    with engine(folder, made) as generator:
        yield generator
