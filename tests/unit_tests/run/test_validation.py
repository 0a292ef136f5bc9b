"""Each kind of wrong input is an error that names the field, the value and the remedy."""

import json

import pytest
from transformers import AutoTokenizer

from tests.tiny import save_tiny_checkpoint, tiny_spec
from torchtitan_rl.run.errors import UserError
from torchtitan_rl.run.registry import parse_args
from torchtitan_rl.run.validation import check_tokenizer, validate
from torchtitan_rl.tasks.small_tokenizer import make_small_tokenizer
from torchtitan_rl.trainer.policy import check_hf_folder


def check(*args: str, world_size: int = 1) -> None:
    validate(parse_args(["--config", "debug", *args])[1], world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_debug_is_valid_on_any_number_of_ranks(world_size):
    assert check(world_size=world_size) is None


@pytest.mark.parametrize(
    ("args", "world_size", "message"),
    [
        (
            ["--trainer.parallelism.tensor-parallel-degree", "2"],
            1,
            "world size 1 does not fit .*tensor_parallel_degree 2.*NGPU",
        ),
        (["--trainer.parallelism.data-parallel-shard-degree", "2"], 4, "world size 4 does not fit"),
        (["--trainer.parallelism.tensor-parallel-degree", "0"], 1, "tensor_parallel_degree is 0; expected at least 1"),
        (["--generator.tensor-parallel-degree", "0"], 1, "generator.tensor_parallel_degree is 0; expected at least 1"),
        (["--trainer.parallelism.tensor-parallel-degree", "4"], 4, "does not divide the model's 2 key-value heads"),
        (["--generator.tensor-parallel-degree", "2"], 3, "does not divide the 3 ranks"),
        (
            ["--trainer.parallelism.pipeline-parallel-degree", "2"],
            2,
            "pipeline_parallel_degree is 2; only 1 is supported",
        ),
        (
            ["--num-prompts-per-step", "3"],
            4,
            "num_prompts_per_step is 3, fewer than the 4 generator replicas.*raise it",
        ),
        (["--sampling.n", "1"], 1, "sampling.n = 1: expected at least 2"),
        (["--sampling.max-tokens", "64"], 1, "sampling.max_tokens 64 = 96 exceeds generator.max_model_len 64"),
        (["--evaluation.sampling.max-tokens", "64"], 1, "evaluation.sampling.max_tokens 64 = 96 exceeds"),
        (["--generator.max-model-len", "4096"], 1, "beyond the model's 512 positions"),
        (["--sampling.temperature", "0"], 1, "sampling.temperature is 0.0; training needs more than 0"),
        (["--num-steps", "0"], 1, "num_steps is 0"),
        (["--trainer.max-norm", "0"], 1, "trainer.max_norm is 0"),
        (["--evaluation.num-prompts", "0"], 1, "evaluation.num_prompts is 0"),
        (["--trainer.num-minibatches", "17"], 1, "trainer.num_minibatches 17 is more than num_prompts_per_step 16"),
    ],
)
def test_wrong_values_and_clashes(args, world_size, message):
    with pytest.raises(UserError, match=message):
        check(*args, world_size=world_size)


def test_checkpoint_folder_missing_incomplete_or_of_another_model(tmp_path):
    with pytest.raises(UserError, match="hf_assets_path: no folder at"):
        check_hf_folder(str(tmp_path / "none"), tiny_spec())
    with pytest.raises(UserError, match="no config.json or no"):
        check_hf_folder(str(tmp_path), tiny_spec())
    save_tiny_checkpoint(tmp_path)
    check_hf_folder(str(tmp_path), tiny_spec())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(UserError, match="num_hidden_layers is 3 in the folder but 2 in the config"):
        check_hf_folder(str(tmp_path), tiny_spec())


def test_a_tokenizer_larger_than_the_model_or_without_an_end(tmp_path):
    make_small_tokenizer(["1 + 1"], vocab_size=260).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    check_tokenizer(tokenizer, 320)
    with pytest.raises(UserError, match="vocab_size is 100"):
        check_tokenizer(tokenizer, 100)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no eos_token"):
        check_tokenizer(tokenizer, 320)
