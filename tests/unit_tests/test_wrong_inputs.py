"""Wrong inputs are found before the engine starts; each message names the field, the value, what was expected and the remedy.

Here is what checks of our own find: combinations of fields, files and folders, and parts that users write. Limits and types of single
fields are in fields/test_field_limits.py. The rows of docs/errors.md are among these.
"""

import json
import re
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.parts.grading import build_grader
from tests.parts.tiny import save_tiny_start
from torchtitan_rl.command.registry import load_config, parse_args
from torchtitan_rl.configs.toys.small_models import small_qwen3
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.end_tokens import folder_end_token_ids
from torchtitan_rl.data.task import build_task, start_of
from torchtitan_rl.data.tasks import Example
from torchtitan_rl.environments import ToolEnvironment
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.references import is_users_file
from torchtitan_rl.rewards import Grader
from torchtitan_rl.run.start_checkpoint import check_tokenizer, load_tokenizer, prepare_start
from torchtitan_rl.validation import check_model, longest_sequence, validate

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
TP = "--trainer.parallelism.tensor-parallel-degree"

OPTIONS = [
    ("--num-steps 0", "num_steps = 0: expected at least 1 and at most 1000000000. Use 50 or more."),
    ("--dump-folder /", "dump_folder = '/': expected a folder that is new, empty or a run's own, but it has"),
    ("--dump-folder s3://bucket/run", "dump_folder = 's3://bucket/run': expected a path, no URL"),
    (f"--dump-folder {'a' * 300}", f"dump_folder = '{'a' * 300}': expected names of at most 255 bytes. Shorten it."),
    ("--resume step-4", "resume = 'step-4': expected auto, never, a step such as 40, or the folder of another run"),
    ("--prompts.max-prompt-tokens 100000", "512 positions. It has room for prompts.max_prompt_tokens 100000 and"),
    (
        "--sampling.max-tokens 300 --generator.max-model-len 64",
        "generator.max_model_len 64. To keep that, use --sampling.max-tokens 32 "
        "--evaluation.sampling.max-tokens 32; otherwise --generator.max-model-len auto",
    ),
    (
        "--evaluation.sampling.max-tokens 64 --generator.max-model-len 16",
        "use --sampling.max-tokens 8 --evaluation.sampling.max-tokens 8 --prompts.max-prompt-tokens 8; otherwise",
    ),
    ("--generator.max-model-len 4096", "generator.max_model_len = 4096: expected at most the model's 512 positions"),
    ("--trainer.max-tokens-per-microbatch 63", "= 63: expected at least 64, the longest sequence"),
    ("--trainer.num-minibatches 17", "trainer.num_minibatches = 17: expected at most num_prompts_per_step 16"),
    ("--in-flight.prompts 24", "algorithm.mismatch = 'none': expected a correction with in_flight.prompts"),
    ("--sampling.temperature 0", "sampling.temperature = 0.0: expected more than 0 in training. 1.0 is usual."),
    ("--sampling.temperature 0.001", "sampling.temperature = 0.001: expected at least 0.01: vLLM would sample at"),
    ("--sampling.top-p 0.9 --generator.router-replay", "generator.router_replay = True: expected False with sampling"),
    ("--prompts.demonstrate math:sin", "algorithm.loss = 'Clip.Config': expected one that learns from"),
    (
        "--evaluation.best-by evaluation/sampled/mean@4",
        "evaluation.best_by = 'evaluation/sampled/mean@4': expected a metric",
    ),
    ("--evaluation.best-by=-evaluation/sums/lenght", "Did you mean evaluation/length"),
    ("--evaluation.best-by accuracy", "evaluation.best_by = 'accuracy': expected a metric evaluation/..."),
    ("--evaluation.stop-after 2", "evaluation.best_by = '': expected a metric, as evaluation.stop_after asks"),
    ("--eval-only --evaluation.sampling.n 0", "evaluation.sampling.n = 0: expected 1 or more, here or in evaluation"),
    ("--evaluation.sampling.n 4", "evaluation.sampling.n = 4: expected 1 with temperature 0"),
    (
        "--trainer.optimizer.lr -1",
        "trainer.optimizer.lr = -1.0: expected at least 0 and at most 1. Full fine-tuning usually takes 1e-6.",
    ),
    ("--trainer.attention flex", "trainer.attention = 'flex': expected \"auto\" on a CPU, where FlexAttention has no"),
    ("--trainer.lora.alpha 64", "trainer.lora.rank = 0: expected 1 or more with trainer.lora.alpha or targets"),
    ("--algorithm.truncation.mode penalty --algorithm.truncation.cache-tokens 99", "cache_tokens = 99: expected at"),
    (f"{TP} 2", "trainer.parallelism on 1 ranks (NGPU x NNODES): tensor_parallel_degree 2 x data_parallel"),
    ("--trainer.parallelism.pipeline-parallel-degree 2", "pipeline_parallel_degree = 2: expected 1, as it is not"),
    ("--metrics.sinks consol", "metrics.sinks = 'consol': expected one of console, jsonl"),
    ("--metrics.select tpo:1", "metrics.select = 'tpo:1': expected one of top"),
    (
        "--metrics.filters wandb=x",
        "metrics.filters = 'wandb=x': expected sink=pattern,pattern, once for a sink of this",
    ),
    ("--config debgu", "--config = 'debgu': expected a registered name"),
]
IN_FLIGHT = "--in-flight.prompts 24 --algorithm.old-logprobs sampler"
OPTIONS_OF_RANKS = [
    (2, "--in-flight.prompts 23", "in_flight.prompts = 23: expected a multiple of the 2 generator replicas"),
    (1, f"{IN_FLIGHT} --algorithm.zero-variance refill", 'zero_variance = \'refill\': expected "keep" or "drop" with'),
    (1, f"{IN_FLIGHT} --sampling.stop x", "sampling.stop = ['x']: expected none with in_flight.prompts"),
    (4, "--num-prompts-per-step 3", "one for each generator replica (4 ranks / generator.tensor_parallel_degree 1)"),
    (4, f"{TP} 4", "tensor_parallel_degree = 4: expected a divisor of the model's heads, key-value heads and"),
    (3, "--generator.tensor-parallel-degree 2", "tensor_parallel_degree = 2: expected a divisor of the 3 ranks"),
    (2, "--generator.ranks 2", "generator.ranks = 2: expected fewer than the 2 ranks"),
    (3, "--generator.ranks 1 --generator.tensor-parallel-degree 2", "expected a divisor of the 1 ranks that sample"),
    (4, f"--generator.ranks 1 {TP} 2", "trainer.parallelism on 3 ranks (NGPU x NNODES - generator.ranks)"),
    (2, "--generator.ahead 1", "generator.ahead = 1: expected 0 without generator.ranks"),
    (2, "--generator.ranks 1 --generator.ahead 1", "algorithm.mismatch = 'none': expected a correction with"),
    (2, "--generator.ranks 1 --generator.sleep True", "generator.sleep = True: expected False"),
    (2, "--generator.ranks 1 --generator.router-replay", "generator.router_replay = True: expected False with"),
    (2, "--config debug_sft --generator.ranks 1", "generator.ranks = 1: expected 0 with demonstrations"),
]


def check(options: str, ranks: int = 1) -> None:
    _, config = parse_args(["--config", "debug", *shlex.split(options)])
    config.model_spec = small_qwen3(vocab_size=320)
    validate(config, world_size=ranks)
    config.generator.max_model_len = longest_sequence(config)
    check_model(config, world_size=ranks)


@pytest.mark.parametrize(("ranks", "options", "message"), [*((1, *row) for row in OPTIONS), *OPTIONS_OF_RANKS])
def test_wrong_option_is_refused_by_its_name(ranks, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check(options, ranks)


def test_engine_may_have_more_ranks_than_the_model_has_key_value_heads():
    check("--generator.tensor-parallel-degree 4", 4)
    with pytest.raises(UserError, match="generator.tensor_parallel_degree = 8: expected a divisor"):
        check("--generator.tensor-parallel-degree 8", 8)  # of 4 heads


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_debug_is_valid_on_any_number_of_ranks(ranks):
    check("", ranks)


def test_internal_error_is_not_reported_as_wrong_input(monkeypatch):
    def bug(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr("torchtitan_rl.algorithm.Algorithm.validate_sampling", bug)
    with pytest.raises(ValueError, match="a bug") as raised:
        check("")
    assert not isinstance(raised.value, UserError)


def test_rows_of_the_errors_page_are_tested():
    rows = re.findall(r"^\| [\w ]+ \| `(--.*?)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 5
    assert set(rows) <= set(OPTIONS)


def test_each_fault_of_the_errors_page_names_its_test():
    links = re.findall(r"\]\((\.\./tests/.*?)\) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(links) > 15
    assert [link for link in links if not (PAGE.parent / link).is_file()] == []


# Assignments in a config function, with debug's config `c`


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("del c.num_steps", "num_steps = 'deleted': expected a field of the config. Set it."),
        ("c.task = None", "task = None: expected one, for example task=SumDigits.Config()"),
        (
            "c.algorithm.group_filter = type('M', (GroupFilter,), {}).Config()",
            "algorithm: building its parts raised TypeError: Can't instantiate abstract class M",
        ),
        (
            "c.algorithm.loss = dataclass(kw_only=True, slots=True)"
            "(type('M', (Clip.Config,), {'__annotations__': {'beta': float}, 'beta': 1.0}))()",
            "algorithm.loss = 'M': expected a Config inside the class that it builds, as this one builds Clip",
        ),
    ],
)
def test_wrong_assignment_of_a_config_function_is_refused(line, message, tmp_path):
    imports = "from dataclasses import dataclass\nfrom torchtitan_rl.algorithm import Clip, GroupFilter\n"
    imports += "from torchtitan_rl.configs.debug import debug\n"
    (tmp_path / "mine.py").write_text(f"{imports}def mine():\n    c = debug()\n    {line}\n    return c\n")
    with pytest.raises(UserError, match=re.escape(message)):
        validate(load_config(f"{tmp_path}/mine.py:mine"), world_size=1)


# Tasks, rewards and environments of a user


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            {"train_example": lambda self, i, *, seed: Example(text=str(time.perf_counter_ns()), expected_answer="1")},
            "expected the same example at every call with one index and seed. Draw chance from random.Random",
        ),
        ({"leave_out": lambda self, faults: 1 / 0}, "Mine.leave_out: expected a method that returns, but it raises"),
        ({"held_out_examples": lambda self, num: []}, "Mine.held_out_examples(1) = []: expected a list with an"),
    ],
)
def test_wrong_method_of_a_users_task_is_refused(methods, message):
    task = type("Mine", (SumDigits,), {"__module__": __name__, **methods})
    with pytest.raises(UserError, match=re.escape(message)):
        prompts_of(build_task(task.Config()))


def test_file_beside_the_package_is_the_users():
    package = Path(is_users_file.__code__.co_filename).parents[1]
    assert not is_users_file(f"{package}/types.py")
    assert is_users_file(f"{package}_mine/rewards.py")


def prompts_of(task, **settings):
    tokenizer = make_small_tokenizer(["1 + 1"], vocab_size=258)
    config = replace(load_config("debug").prompts, max_prompt_tokens=512, **settings)
    return config.build(task=task, tokenizer=tokenizer, seed=0)


def test_wrong_setting_of_the_prompts_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def f(example, rng):\n    raise KeyError('x')\n")
    with pytest.raises(UserError, match="expected a function that returns text, but it raises KeyError: 'x'"):
        prompts_of(SumDigits.Config().build(), demonstrate=f"{tmp_path}/mine.py:f")
    with pytest.raises(UserError, match="prompts.enable_thinking = True: expected False, as no chat template with"):
        prompts_of(SumDigits.Config().build(), enable_thinking=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": {"correct": 0, "format": 0}}, "grader.weights = {'correct': 0, 'format': 0}: expected a weight"),
        ({"rewards": ["torchtitan_rl.rewards:length"]}, "give a default, or call a factory: length(...)"),
        ({"weights": {"correkt": 1}}, "Did you mean correct or format? "),
        ({"weights": {"short": 1}}, "of your own in --grader.rewards too: path/to/file.py:short."),
    ],
)
def test_wrong_setting_of_the_grader_is_refused(settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build_grader(Grader.Config(**settings), SumDigits.Config().build())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AgentEnvironment("python agent.py"), "agent = 'python agent.py': expected Sequence[str]"),
        (lambda: type("E", (ToolEnvironment,), {"role": "bot"})([]), "E.role = 'bot': expected one of ('user'"),
    ],
)
def test_wrong_environment_is_refused(make, message):
    task = type("Mine", (SumDigits,), {"environment": lambda self, prompt: make()})
    made = make_small_tokenizer(["1 + 1"], vocab_size=258)
    prompt = prompts_of(task.Config().build()).next_batch(1)[0]
    parts = {"tokenizer": made, "end_token_ids": [0], "template_options": {}}
    conversations = load_config("debug").conversations.build(members={"": task.Config().build()}, **parts)
    with pytest.raises(UserError, match=re.escape(message)):
        conversations.check([replace(prompt, messages=[{}])])


# The start's folder


def test_task_without_a_start_needs_a_folder():
    config = replace(load_config("debug"), task=SumDigits.Config(instruction="Add:"))
    with pytest.raises(UserError, match="this task with task.instruction 'Add:' makes no start itself. Pass"):
        prepare_start(config)


def test_recipe_of_another_task_or_with_a_wrong_number_is_refused(tmp_path):
    recipe = "torchtitan_rl.configs.toys.answer_recipes:arrivals"
    with pytest.raises(UserError, match="arrivals: expected one whose `worked` returns a text for examples of"):
        start_of(SumDigits.Config(instruction="", warm_start=recipe), tmp_path)
    imports = "from torchtitan_rl.configs.toys.warm_start import Recipe\n"
    (tmp_path / "mine.py").write_text(f"{imports}def f():\n    return Recipe(name='r', worked=str, steps=0)\n")
    with pytest.raises(UserError, match="task.warm_start.steps = 0: expected at least 1. Use 280."):
        start_of(SumDigits.Config(warm_start=f"{tmp_path}/mine.py:f"), tmp_path)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "has no such folder"),
        (lambda f: (f / "config.json").unlink(), "has no config.json. Pass --hf-assets-path FOLDER, or a name on the"),
        (lambda f: (f / "model.safetensors").unlink(), r"has no \*.safetensors"),
        (lambda f: cut(f / "tokenizer.json", 100), "expected a tokenizer that transformers can load, but "),
        (lambda f: cut(f / "model.safetensors", 5000), "its model.safetensors cannot be read"),
        (
            lambda f: shutil.copy(f / "model.safetensors", f / "model-00001-of-00001.safetensors"),
            "is in model-00001-of-00001.safetensors and in model.safetensors,",
        ),
        (
            lambda f: change_tensors(f, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            "lm_head.weight is not model.embed_tokens.weight, although config.json has tie_word_embeddings true",
        ),
    ],
)
def test_damaged_start_folder_is_refused(spoil, message, tmp_path):
    folder = tmp_path / "start"
    save_tiny_start(folder)
    spoil(folder)
    config = replace(load_config("debug"), hf_assets_path=str(folder))
    with pytest.raises(UserError, match=message):
        load_tokenizer(prepare_start(config) or config.hf_assets_path)


def test_model_whose_key_value_heads_do_not_divide_its_heads_is_refused(tmp_path):
    save_tiny_start(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_key_value_heads": 3}))
    with pytest.raises(UserError, match="but its config.json has 4 heads and num_key_value_heads 3. Correct it."):
        prepare_start(replace(load_config("debug"), hf_assets_path=str(tmp_path)))


def test_tokenizer_that_does_not_fit_is_refused(tmp_path):
    make_small_tokenizer(["1 + 1"], vocab_size=260).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="vocab_size 100, but it has token id 259"):
        check_tokenizer(tokenizer, 100)
    tokenizer.chat_template = "Hello"
    with pytest.raises(UserError, match="leaves out the user message"):
        load_config("debug").prompts.build(task=SumDigits.Config().build(), tokenizer=tokenizer, seed=0)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="a tokenizer with an eos_token"):
        check_tokenizer(tokenizer, 320)


def test_end_token_that_is_no_id_is_refused(tmp_path):
    save_tiny_start(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [[1]]}')
    with pytest.raises(UserError, match=r"a list of them as eos_token_id, but its generation_config.json has"):
        folder_end_token_ids(tmp_path, load_tokenizer(str(tmp_path)))


def test_torn_file_of_end_tokens_is_named(tmp_path):
    save_tiny_start(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(UserError, match="hf_assets_path = .*: generation_config.json is not JSON: JSONDecodeError"):
        folder_end_token_ids(tmp_path, load_tokenizer(str(tmp_path)))
