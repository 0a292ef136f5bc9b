"""Each kind of wrong input is an error that names the field, the value and the remedy."""

import pytest

from torchtitan_rl.command.registry import parse_args
from torchtitan_rl.errors import UserError
from torchtitan_rl.validation import validate


def check(*args: str, world_size: int = 1) -> None:
    validate(parse_args(["--config", "debug", *args])[1], world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_debug_is_valid_on_any_number_of_ranks(world_size):
    assert check(world_size=world_size) is None


def test_a_length_that_does_not_fit_is_named_with_one_that_does():
    with pytest.raises(UserError, match="sampling.max_tokens = 300: .* Use --generator.max-model-len 332.$"):
        check("--sampling.max-tokens", "300")
    fits = ["--sampling.max-tokens", "300", "--generator.max-model-len", "332"]
    with pytest.raises(UserError, match="trainer.max_tokens_per_microbatch = 331: .* Use 332.$"):
        check(*fits, "--trainer.max-tokens-per-microbatch", "331")
    check(*fits, "--trainer.max-tokens-per-microbatch", "332")


def test_internal_error_is_not_reported_as_wrong_input(monkeypatch):
    def bug(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr("torchtitan_rl.algorithm.Algorithm.validate_sampling", bug)
    with pytest.raises(ValueError, match="a bug") as raised:
        check()
    assert not isinstance(raised.value, UserError)
