"""Imported before any test: the device's adaptations must precede torchtitan and vLLM; events are heard as in a run."""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

if not os.access(Path.home(), os.W_OK):
    # Libraries keep caches there. Processes that tests start inherit the new one.
    os.environ["HOME"] = tempfile.mkdtemp(prefix="home-")
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

from torchtitan_rl import device  # noqa: F401

# isort: split
from tests.parts.only_rank import only_rank
from torchtitan_rl import events
from torchtitan_rl.observe.terminal import Terminal

events.listen(Terminal())


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """This process is the only rank of its run, for all tests of a module."""
    with only_rank():
        yield


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's unfused FlexAttention, with the backward that it refuses on a CPU."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.fixture(scope="module")
def family_folder(tmp_path_factory) -> Callable[[str], Path]:
    """Returns the folder of a family's small random model, made at the first call."""
    from tests.parts.hf_decoders import save_hf_family

    @functools.cache
    def folder(family: str) -> Path:
        made = tmp_path_factory.mktemp(family)
        save_hf_family(made, family)
        return made

    return folder


@pytest.fixture(scope="module")
def made() -> "PreTrainedTokenizerFast":
    """The tokenizer of the policies that talk."""
    from tests.parts.talk import chat_tokenizer

    return chat_tokenizer()
