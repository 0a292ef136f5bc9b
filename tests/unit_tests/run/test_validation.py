"""Each kind of wrong input is an error that names the field, the value and the remedy."""

import pytest

from torchtitan_rl.models import small_qwen3
from torchtitan_rl.run.errors import UserError
from torchtitan_rl.run.registry import load_config, parse_args
from torchtitan_rl.run.validation import check_model, validate


def check(*args: str, world_size: int = 1) -> None:
    validate(parse_args(["--config", "debug", *args])[1], world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_debug_is_valid_on_any_number_of_ranks(world_size):
    assert check(world_size=world_size) is None


TP, SHARD = "--trainer.parallelism.tensor-parallel-degree", "--trainer.parallelism.data-parallel-shard-degree"


@pytest.mark.parametrize(
    ("args", "world_size", "message"),
    [
        ([TP, "2"], 1, r"world size \(NGPU x NNODES\) = 1: expected a multiple of 2.*tensor_parallel_degree 2"),
        ([SHARD, "2"], 4, "world size .* = 4: expected 2"),
        ([SHARD, "0"], 4, "data_parallel_shard_degree = 0: expected -1 or at least 1"),
        ([TP, "0"], 1, "trainer.parallelism.tensor_parallel_degree = 0: expected 1 or more"),
        (["--generator.tensor-parallel-degree", "0"], 1, "generator.tensor_parallel_degree = 0: expected 1 or more"),
        ([TP, "4"], 4, "tensor_parallel_degree = 4: expected a divisor of the model's 2 key-value heads"),
        (["--generator.tensor-parallel-degree", "2"], 3, "generator.tensor_parallel_degree = 2: expected .*3 ranks"),
        (
            ["--trainer.parallelism.pipeline-parallel-degree", "2"],
            2,
            "pipeline_parallel_degree = 2: expected 1, as it is",
        ),
        (["--comm.mode", "fake_backend"], 1, "comm.mode = 'fake_backend': expected 'default'"),
        (["--num-prompts-per-step", "3"], 4, "num_prompts_per_step = 3: expected at least 4, one for each"),
        (["--sampling.n", "1"], 1, "sampling.n = 1: expected at least 2"),
        (["--sampling.n", "0"], 1, "sampling.n = 0: expected at least 1"),
        (["--sampling.max-tokens", "64"], 1, "sampling.max_tokens = 64: .*max_prompt_tokens 32 .*max_model_len 64"),
        (["--evaluation.sampling.max-tokens", "64"], 1, "evaluation.sampling.max_tokens = 64: expected"),
        (["--evaluation.sampling.n", "4"], 1, "evaluation.sampling.n = 4: expected 1 with temperature 0"),
        (["--evaluation.sampling.top-p", "2"], 1, "evaluation.sampling.top_p = 2.0: expected more than 0"),
        (["--generator.max-model-len", "4096"], 1, "max_model_len = 4096: expected at most the model's 512 positions"),
        (["--generator.gpu-memory-utilization", "5"], 1, "gpu_memory_utilization = 5.0: expected between 0.01 and 1"),
        (["--sampling.temperature", "0"], 1, "sampling.temperature = 0.0: expected more than 0 in training"),
        (["--sampling.temperature", "nan"], 1, "sampling.temperature = nan"),
        (
            ["--sampling.top-p", "0.9"],
            1,
            "sampling.top_p = 0.9: expected 1, as .*biases ratios. Set it for evaluation.sampling",
        ),
        (
            ["--sampling.top-k", "20"],
            1,
            "sampling.top_k = 20: expected 0, as .*biases ratios. Set it for evaluation.sampling",
        ),
        (["--sampling.stop", ""], 1, "sampling.stop = .*: expected texts of at least one character"),
        (["--conversations.max-turns", "0"], 1, "conversations.max_turns = 0: expected 1 or more"),
        (["--conversations.call-seconds", "nan"], 1, "conversations.call_seconds = nan: expected 0 or more"),
        (["--num-steps", "0"], 1, "num_steps = 0: expected 1 or more"),
        (["--seed", "-1"], 1, "seed = -1: expected 0 or more"),
        (["--prompts.max-prompt-tokens", "0"], 1, "prompts.max_prompt_tokens = 0"),
        (["--trainer.max-norm", "0"], 1, "trainer.max_norm = 0.0: expected more than 0"),
        (["--trainer.optimizer.lr", "-1"], 1, "trainer.optimizer.lr = -1.0: expected 0 or more"),
        (["--trainer.optimizer.lr", "nan"], 1, "trainer.optimizer.lr = nan"),
        (["--trainer.optimizer.betas", "2", "3"], 1, r"trainer.optimizer.betas = \(2.0, 3.0\)"),
        (["--trainer.lr-scheduler.warmup-steps", "-5"], 1, "trainer.lr_scheduler.warmup_steps = -5"),
        (
            ["--trainer.lr-scheduler.decay-ratio", "7"],
            1,
            "trainer.lr_scheduler.decay_ratio = 7.0: expected between 0 and 1",
        ),
        (["--evaluation.every", "-1"], 1, "evaluation.every = -1: expected 0 or more"),
        (["--evaluation.num-prompts", "0"], 1, "evaluation.num_prompts = 0: expected 1 or more"),
        (
            ["--trainer.num-minibatches", "17"],
            1,
            "trainer.num_minibatches = 17: expected at most num_prompts_per_step 16",
        ),
    ],
)
def test_wrong_values_and_clashes(args, world_size, message):
    with pytest.raises(UserError, match=message):
        check(*args, world_size=world_size)


@pytest.mark.parametrize("args", [["top-p", "0.9"], ["top-k", "20"]])
def test_evaluation_may_truncate(args):
    assert check(f"--evaluation.sampling.{args[0]}", args[1]) is None


def test_what_the_config_function_must_set_is_named():
    config = load_config("debug")
    config.task = None
    with pytest.raises(UserError, match="task = None: expected one, .*The config function must set it"):
        validate(config, world_size=1)


def test_a_model_read_from_its_folder_is_checked_once_it_is_known():
    config = load_config("qwen3")
    validate(config, world_size=1)
    config.model_spec = small_qwen3(vocab_size=320, head_dim=16, max_seq_len=4096)
    with pytest.raises(UserError, match="head_dim is one of .* but it is 16"):
        check_model(config, world_size=1)
    config.model_spec = small_qwen3(vocab_size=320)
    with pytest.raises(UserError, match="max_model_len = 768: expected at most the model's 512 positions"):
        check_model(config, world_size=1)


def test_an_error_of_the_code_is_not_taken_for_wrong_input(monkeypatch):
    def bug(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr("torchtitan_rl.algorithm.Algorithm.validate_sampling", bug)
    with pytest.raises(ValueError, match="a bug") as raised:
        check()
    assert not isinstance(raised.value, UserError)
