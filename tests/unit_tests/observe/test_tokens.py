"""Tokens of the rows that are shown: in the store, and nowhere else."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from tests.parts.observability import group, rows_of, sample
from torchtitan_rl.observe import Reduce, read_rows, record_metric
from torchtitan_rl.observe.tokens import TokenPayload, pieces
from torchtitan_rl.types import LogprobDiff


def decode(ids):
    """Token 9 is the first half of a character that 10 completes."""
    texts = {5: "4", 6: "+", 7: "\n", 9: "\ufffd", 10: "\b", 11: "<|end|>"}
    return "".join(texts[i] for i in ids).replace("\ufffd\b", "é")


@pytest.fixture
def stored(recorder, tmp_path):
    """The rows in the store of a run that recorded these groups."""

    def make(*groups, **config):
        run = recorder(select=["top:1"], decode=decode, **config)
        record_metric("rollout/samples", rows_of(*groups), Reduce.TABLE)
        run.flush(1)
        run.close()
        return list(read_rows(tmp_path))

    return make


def test_store_has_the_numbers_of_every_token_of_a_shown_row(stored):
    numbers = {"diff": np.float32([1.234e-5, -2e-7]), "entropy": np.float32([0.25, 1.2345])}
    diff = LogprobDiff(mean=6e-6, max=1.234e-5, tokens=numbers)
    best = sample(1, 2.0, loss_mask=[True, False, True], advantage=0.70004, logprob_diff=diff)
    best.credit.token_columns["teacher_log_ratios"] = np.float32([-0.5, 9, 3.25])  # [L]
    row, sibling = stored(group(0, sample(0, 1.0), best))
    assert "tokens" not in sibling
    assert row["tokens"] == {
        "text": ["4", "+", "\n"], "logprob": [-0.5, None, -0.5], "diff": [1.2e-05, None, -2e-07], "advantage": 0.7,
        "entropy": [0.25, None, 1.23], "teacher_log_ratios": [-0.5, None, 3.25],
    }  # fmt: skip


def test_tokens_of_groups_in_flight_have_their_staleness(stored):
    (row,) = stored(group(0, sample(token_versions=[1, 3, 3])))
    assert row["tokens"]["age"] == [2, 0, 0]
    assert (row["staleness"], row["carried_tokens"]) == (2, 1)


@pytest.mark.parametrize(
    ("token_ids", "text", "shown"),
    [
        ((5, 6, 11), "4+", "4+"),  # it ended
        ((5, 6, 5), "4+4", "4+4"),  # it was cut
        ((5, 11, 6), "4+", "4<|end|>+"),
        ((5, 11, 11), "4", "4<|end|><|end|>"),
        ((11,), "", ""),
    ],
)
def test_special_tokens_inside_a_sample_are_visible(stored, token_ids, text, shown):
    """The text of rewards leaves them out."""
    (row,) = stored(group(0, sample(token_ids=token_ids, text=text)))
    assert row["response"] == shown


def test_multi_token_character_is_shown_at_its_last_token():
    payload = TokenPayload(sample(token_ids=(5, 9, 10, 9)), False)
    assert payload.written(decode)["text"] == ["4", "", "é", "\ufffd"]
    assert set(payload.written(decode)) == {"text", "logprob"}


def test_tokens_keep_the_space_that_a_tokenizer_leaves_out_before_a_text():
    """As those of Llama 2, Mistral and Phi-3."""
    vocabulary = {"<unk>": 0, "▁one": 1, "▁and": 2, "<0xC3>": 3, "<0xA9>": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = [1, 2, 3, 4, 2, 1]
    assert tokenizer.decode(ids) == "one andé and one"
    assert pieces(ids, tokenizer.decode) == ["one", " and", "", "é", " and", " one"]
