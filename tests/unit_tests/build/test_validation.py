"""Each kind of wrong input is an error that names the field, the value and the remedy."""

import pytest

from torchtitan_rl.build.validation import check_model, validate
from torchtitan_rl.command.registry import load_config, parse_args
from torchtitan_rl.errors import UserError
from torchtitan_rl.models import small_qwen3


def check(*args: str, world_size: int = 1) -> None:
    validate(parse_args(["--config", "debug", *args])[1], world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_debug_is_valid_on_any_number_of_ranks(world_size):
    assert check(world_size=world_size) is None


def test_all_lengths_of_a_small_model_are_named_at_once_and_the_options_fit():
    config = load_config("countdown")
    config.model_spec = small_qwen3(vocab_size=320, max_seq_len=64)
    with pytest.raises(UserError) as raised:
        check_model(config, world_size=1)
    named = ("generator.max_model_len = ", "prompts.max_prompt_tokens = ")
    assert all(field in str(raised.value) for field in named)
    words = str(raised.value).partition(" Use ")[2].rstrip(".").split()
    _, config = parse_args(["--config", "countdown", *words])
    config.model_spec = small_qwen3(vocab_size=320, max_seq_len=64)
    validate(config, world_size=1)


def test_suggested_lengths_are_raised_and_not_cut():
    with pytest.raises(UserError) as raised:
        check("--sampling.max-tokens", "300", "--trainer.max-tokens-per-microbatch", "10")
    assert str(raised.value) == (
        "sampling.max_tokens = 300: expected with prompts.max_prompt_tokens 32 at most generator.max_model_len 64; "
        "trainer.max_tokens_per_microbatch = 10: expected at least 332, the longest sequence (prompts.max_prompt_tokens + "
        "sampling.max_tokens). Use --generator.max-model-len 332 --trainer.max-tokens-per-microbatch 332."
    )


def test_internal_error_is_not_reported_as_wrong_input(monkeypatch):
    def bug(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr("torchtitan_rl.algorithm.Algorithm.validate_sampling", bug)
    with pytest.raises(ValueError, match="a bug") as raised:
        check()
    assert not isinstance(raised.value, UserError)
