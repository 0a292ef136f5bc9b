"""Scored groups in a checkpoint: what is read is what was written, and reading it executes nothing."""

import base64
import io
import pickle
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch

from torchtitan_rl.stored import from_text, to_text
from torchtitan_rl.text import plain
from torchtitan_rl.types import Completion, ScoredCompletion, Trace, TurnRecord


def scored(**extra):
    completion = Completion(
        sample_idx=1, policy_version=4, token_ids=[3, 5], sampler_logprobs=[-0.1, -0.2], text="x", finish_reason="stop",
        loss_mask=[True, False], turns=(TurnRecord(text="x", num_tokens=1, reward=0.5),), sampler_records=np.ones((4, 2), np.uint8),
        traces=(Trace(), Trace(begin=1, reason="compaction")),
    )  # fmt: skip
    return ScoredCompletion(completion=completion, reward=0.1, extra=extra)


def test_completions_are_read_as_they_were_written():
    numbers = [np.dtype(name).type(1) for name in ("f4", "f8", "i4", "i8", "u1", "?")]
    written = scored(scores=numbers, words=("a", "b"))
    [sample] = from_text(to_text([written]))
    assert (sample.reward, sample.extra) == (0.1, written.extra)
    assert sample.completion.turns == written.completion.turns
    assert sample.completion.traces == written.completion.traces
    for name in ("token_ids", "sampler_logprobs", "loss_mask", "sampler_records"):
        mine, theirs = getattr(sample.completion, name), getattr(written.completion, name)
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)


def test_what_a_reward_has_logged_is_stored_whatever_it_is():
    logged = {"day": date(2026, 1, 2), "n": np.int16(3), "xs": np.array([1.5]), "deep": {"a": (Path("b"), None, True)}}
    assert from_text(to_text(plain(logged))) == {
        "day": "2026-01-02",
        "n": 3,
        "xs": [1.5],
        "deep": {"a": ["b", None, True]},
    }


class Opens:
    def __reduce__(self):
        return open, ("/tmp/never", "w")


def test_neither_a_value_nor_a_foreign_text_is_executed():
    with pytest.raises(pickle.UnpicklingError):
        to_text([scored(bad=Opens())])
    data = io.BytesIO()
    torch.save([Opens()], data)
    with pytest.raises(pickle.UnpicklingError):
        from_text(base64.b64encode(data.getvalue()).decode())
