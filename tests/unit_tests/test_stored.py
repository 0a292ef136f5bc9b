"""Scored groups in a checkpoint: what is read is what was written, and reading it executes nothing."""

import base64
import io
import pickle

import numpy as np
import pytest
import torch

from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.stored import from_text, to_text
from torchtitan_rl.types import Completion, Group, Prompt, ScoredCompletion, Trace, TurnRecord


def group(**extra):
    completion = Completion(
        sample_idx=1, policy_version=4, token_ids=[3, 5], sampler_logprobs=[-0.1, -0.2], text="x", finish_reason="stop",
        loss_mask=[True, False], turns=(TurnRecord(text="x", num_tokens=1, reward=0.5),), sampler_records=np.ones((4, 2), np.uint8),
        traces=(Trace(), Trace(begin=1, reason="compaction")),
    )  # fmt: skip
    prompt = Prompt(
        prompt_idx=2,
        text="?",
        token_ids=[1, 2],
        expected_answer="4",
        columns={"rows": [1, {"a": None}]},
        sampling=SamplingConfig(n=2),
    )
    return Group(prompt=prompt, samples=[ScoredCompletion(completion=completion, reward=0.1, extra=extra)])


def test_groups_are_read_as_they_were_written():
    numbers = [np.dtype(name).type(1) for name in ("f4", "f8", "i4", "i8", "u1", "?")]
    written = group(scores=numbers, words=("a", "b"))
    [read] = from_text(to_text([written]))
    [sample] = read.samples
    assert (read.prompt.columns, read.prompt.sampling) == (written.prompt.columns, written.prompt.sampling)
    assert (sample.reward, sample.extra) == (0.1, written.samples[0].extra)
    assert sample.completion.turns == written.samples[0].completion.turns
    assert sample.completion.traces == written.samples[0].completion.traces
    for name in ("token_ids", "sampler_logprobs", "loss_mask", "sampler_records"):
        mine, theirs = getattr(sample.completion, name), getattr(written.samples[0].completion, name)
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)


class Opens:
    def __reduce__(self):
        return open, ("/tmp/never", "w")


def test_neither_a_value_nor_a_foreign_text_is_executed():
    with pytest.raises(pickle.UnpicklingError):
        to_text([group(bad=Opens())])
    data = io.BytesIO()
    torch.save([Opens()], data)
    with pytest.raises(pickle.UnpicklingError):
        from_text(base64.b64encode(data.getvalue()).decode())
