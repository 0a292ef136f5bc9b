"""The small tokenizer: any text round-trips, digits stand alone, and transformers' AutoTokenizer reads it back."""

import pytest
from transformers import AutoTokenizer, Qwen3Config

from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer

TEXTS = [f"What is {a} + {a + 7}?\n[ANSWER] {2 * a + 7}" for a in range(10, 90)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_small_tokenizer(TEXTS, vocab_size=320).save_pretrained(folder)
    # A checkpoint folder's config.json makes AutoTokenizer think of Qwen's own tokenizer class.
    Qwen3Config().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", [TEXTS[0], "h\u00e9 \U0001f600 \x00\t[ANSWER]", "  two  spaces \n\n", "12345.678"])
def test_any_text_round_trips_through_the_tokenizer(loaded, text):
    assert loaded.decode(loaded(text)["input_ids"]) == text
