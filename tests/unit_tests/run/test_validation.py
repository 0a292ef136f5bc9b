"""Each kind of wrong input is an error that names the field, the value and the remedy."""

import json

import pytest
from transformers import AutoTokenizer

from tests.tiny import save_tiny_checkpoint, tiny_spec
from torchtitan_rl.run.errors import UserError
from torchtitan_rl.run.registry import load_config, parse_args
from torchtitan_rl.run.validation import check_hf_folder, check_tokenizer, prepare_start, validate
from torchtitan_rl.tasks import SumDigits, Task
from torchtitan_rl.tasks.small_tokenizer import make_small_tokenizer


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


@pytest.mark.parametrize("field", ["model_spec", "task"])
def test_what_the_config_function_must_set_is_named(field):
    config = load_config("debug")
    setattr(config, field, None)
    with pytest.raises(UserError, match=f"{field} = None: expected one, .*The config function must set it"):
        validate(config, world_size=1)


def test_an_error_of_the_code_is_not_taken_for_wrong_input(monkeypatch):
    def bug(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr("torchtitan_rl.algorithm.Algorithm.validate_sampling", bug)
    with pytest.raises(ValueError, match="a bug") as raised:
        check()
    assert not isinstance(raised.value, UserError)


class TestStart:
    @pytest.fixture
    def config(self, tmp_path, monkeypatch):
        """debug with the tiny model, in a folder of its own."""
        monkeypatch.chdir(tmp_path)
        config = load_config("debug")
        config.model_spec = tiny_spec()
        return config

    def test_the_task_makes_one_where_no_folder_is_named(self, config, monkeypatch):
        class WithStart(Task.Config):
            def start_checkpoint(self, cache_root):
                save_tiny_checkpoint(cache_root / "mine")
                (cache_root / "mine" / "tokenizer_config.json").write_text("{}")
                return cache_root / "mine"

        config.task = WithStart()
        prepare_start(config)
        assert config.hf_assets_path == "outputs/start_checkpoints/mine"

    @pytest.mark.parametrize("task", [SumDigits.Config(), Task.Config()])
    def test_without_one_the_error_names_the_field_and_the_remedy(self, config, task):
        config.task = task
        with pytest.raises(UserError, match="hf_assets_path = '': expected a Hugging Face.*--hf-assets-path FOLDER"):
            prepare_start(config)

    def test_debug_has_one(self, config, monkeypatch):
        monkeypatch.setattr("torchtitan_rl.tasks.warm_start.ensure_checkpoint", lambda *_: "here")
        assert config.task.start_checkpoint(None) == "here"


def test_checkpoint_folder_missing_incomplete_or_of_another_model(tmp_path):
    def check_says(message: str, folder=tmp_path) -> None:
        with pytest.raises(UserError, match=f"hf_assets_path = .*{message}"):
            check_hf_folder(folder, tiny_spec())

    check_says("has no such folder", tmp_path / "none")
    check_says("has no config.json")
    save_tiny_checkpoint(tmp_path)
    check_says("has no tokenizer")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    check_hf_folder(tmp_path, tiny_spec())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    check_says("num_hidden_layers is 3 in the folder but 2 in the config")
    (tmp_path / "config.json").write_text("{")
    check_says("no JSON")


def test_a_tokenizer_larger_than_the_model_or_without_an_end(tmp_path):
    make_small_tokenizer(["1 + 1"], vocab_size=260).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    check_tokenizer(tokenizer, 320)
    with pytest.raises(UserError, match="hf_assets_path = .*vocab_size 100, but it has token id 259"):
        check_tokenizer(tokenizer, 100)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="hf_assets_path = .*with an eos_token"):
        check_tokenizer(tokenizer, 320)
