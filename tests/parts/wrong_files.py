"""The rows of wrong_inputs.py that need a file or a folder."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

import configs
from tests.parts.tiny import save_tiny_checkpoint, tiny_spec
from torchtitan_rl.common.field_limits import check_fields
from torchtitan_rl.core.algorithm import Loss
from torchtitan_rl.core.grading import Grader
from torchtitan_rl.core.types import Prompt
from torchtitan_rl.library.models import small_qwen3
from torchtitan_rl.library.references import load_class, load_function
from torchtitan_rl.library.starts.small_tokenizer import make_small_tokenizer
from torchtitan_rl.library.starts.warm_start import start_of
from torchtitan_rl.library.tasks import Rows, SumDigits, Task
from torchtitan_rl.resilience import manifest
from torchtitan_rl.resilience.checkpoint_folder import find_resume
from torchtitan_rl.setup.build_grader import build_grader, find_scorers
from torchtitan_rl.setup.dump_folder import check_dump_folder, create
from torchtitan_rl.setup.own_sinks import load_own_sinks
from torchtitan_rl.setup.rank_variables import be_only_rank
from torchtitan_rl.setup.registry import load_config
from torchtitan_rl.setup.start_checkpoint import check_tokenizer, load_tokenizer, prepare_start
from torchtitan_rl.setup.teacher_folder import prepare_teacher
from torchtitan_rl.setup.validation import check_model, check_task, validate

Cause = Callable[[Path], object]


_LIBRARY = "torchtitan_rl.library.rewards"
_ROW = '{"prompt": "a", "answer": "1"}\n'


def _checkpoint(folder: Path) -> Path:
    """A whole one, of the tiny model."""
    save_tiny_checkpoint(folder)
    make_small_tokenizer(["1 + 1"], vocab_size=258).save_pretrained(folder)
    return folder


def _start(folder: Path) -> None:
    config = load_config("debug")
    config.model_spec, config.hf_assets_path = tiny_spec(), str(folder)
    prepare_start(config)


def _spoiled(file: str, content: str | int | None) -> Cause:
    """A checkpoint with one file replaced by a text, cut to so many bytes, or removed."""

    def cause(folder: Path) -> None:
        path = _checkpoint(folder) / file
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else path.read_bytes()[:content])
        _start(folder)

    return cause


def _as_bin(folder: Path) -> None:
    checkpoint = _checkpoint(folder)
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    _start(folder)


def _changed(**entries: Any) -> Cause:
    """A checkpoint whose config.json says something else."""

    def cause(folder: Path, *, remake: bool = True) -> None:
        path = (_checkpoint(folder) if remake else folder) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
        _start(folder)

    return cause


def _with_tensors(change: Callable[[dict[str, Tensor]], object], **entries: Any) -> Cause:
    """A checkpoint with other tensors in its file, and other entries in its config.json."""

    def cause(folder: Path) -> None:
        file = _checkpoint(folder) / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        _changed(**entries)(folder, remake=False)

    return cause


def _q_norm(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_norm_2.weight"] = torch.ones(32)


def _quantized(dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)

    return change


def _other_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def _with_file(name: str) -> Cause:
    """A folder with only this file."""

    def cause(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        _start(folder)

    return cause


def _stored_twice(folder: Path) -> None:
    shutil.copy(_checkpoint(folder) / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    _start(folder)


def _end_token(folder: Path) -> None:
    (_checkpoint(folder) / "generation_config.json").write_text('{"eos_token_id": [2, 99999]}')
    _start(folder)


def _tokenizer_files(content: dict[str, str | None]) -> Cause:
    """A checkpoint's tokenizer with other files; None: without the file."""

    def cause(folder: Path) -> None:
        _checkpoint(folder)
        for name, text in content.items():
            (folder / name).unlink() if text is None else (folder / name).write_text(text)
        load_tokenizer(str(folder))

    return cause


def _template(text: str) -> Cause:
    def cause(folder: Path) -> None:
        make_small_tokenizer(["1 + 1"], vocab_size=260).save_pretrained(folder)
        tokenizer = load_tokenizer(str(folder))
        tokenizer.chat_template = text
        load_config("debug").prompts.build(task=SumDigits.Config().build(), tokenizer=tokenizer, seed=0)

    return cause


def _rows(text: str, name: str = "rows.jsonl", **settings: Any) -> Cause:
    """A task of rows from a file with this text."""

    def cause(folder: Path) -> None:
        (folder / name).write_text(text)
        Rows.Config(path=str(folder / name), **settings).build()

    return cause


def _demonstrated(body: str) -> Cause:
    """A function for prompts.demonstrate with this body."""

    def cause(folder: Path) -> None:
        (folder / "mine.py").write_text(f"def f(example, rng):\n    {body}\n")
        config = load_config("debug_sft").prompts
        config.demonstrate = f"{folder}/mine.py:f"
        config.build(task=SumDigits.Config().build(), tokenizer=make_small_tokenizer(["1"], vocab_size=258), seed=0)

    return cause


def _config_file(text: str) -> Cause:
    def cause(folder: Path) -> None:
        (folder / "my_configs.py").write_text(text)
        load_config(f"{folder}/my_configs.py:mine")

    return cause


def _assigned(line: str) -> Cause:
    """A config function that assigns this to debug's config `c`."""
    before = "from configs.debug import debug\nfrom torchtitan_rl.library.objectives import GroupMean\n"

    def cause(folder: Path) -> None:
        file = folder / "my_configs.py"
        file.write_text(f"{before}def mine():\n    c = debug()\n    {line}\n    return c\n")
        validate(load_config(f"{file}:mine"), world_size=1)

    return cause


def _unanswered(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "Answer": "1"}}\n' for i in range(9)))
    find_scorers(Grader.Config(), Rows.Config(path=str(folder / "rows.jsonl")).build())


def _own_environment(made: str) -> Cause:
    """A user's task with this environment."""
    text = (
        "from torchtitan_rl.library.agents import AgentEnvironment\nfrom torchtitan_rl.library.environments import ToolEnvironment\n"
        "from torchtitan_rl.library.environments.python_tool import ProgramLimits, python_tool\n"
        "from torchtitan_rl.library.tasks import SumDigits\nclass Mine(SumDigits):\n    def environment(self, prompt):\n"
        f"        return {made}\n"
    )

    def cause(folder: Path) -> None:
        (folder / "mine.py").write_text(text)
        task = load_class(f"{folder}/mine.py:Mine", "task", Task).Config().build()
        options = {
            "tokenizer": make_small_tokenizer(["1"], vocab_size=258),
            "end_token_ids": [0],
            "template_options": {},
        }
        prompt = Prompt(prompt_idx=0, text="1 + 1 =", token_ids=[1], expected_answer="2", messages=[{}])
        load_config("debug").conversations.build(members={"": task}, **options).check([prompt])

    return cause


def _reward_without_self(folder: Path) -> None:
    class Mine(SumDigits):
        def reward_functions(self):
            return [self.words]

        def words(*, completions, **_):
            return [0.0 for _ in completions]

    build_grader(Grader.Config(), Mine(SumDigits.Config()))


def _own_number(name: str, declared: str) -> Cause:
    """A user's loss with this field."""

    def cause(folder: Path) -> None:
        (folder / "mine.py").write_text(
            "from dataclasses import dataclass\nfrom torchtitan_rl.core.algorithm import Clip, number\nclass Mine(Clip):\n"
            f"    @dataclass(kw_only=True, slots=True)\n    class Config(Clip.Config):\n        {name}: float = {declared}\n"
        )
        loss = load_class(f"{folder}/mine.py:Mine", "algorithm.loss", Loss)
        check_fields(replace(load_config("debug").algorithm, loss=loss.Config()), "algorithm")

    return cause


def _assigned_grader(line: str) -> Cause:
    """A config function that assigns this to debug's grader."""

    def cause(_: Path) -> None:
        exec(line, {"c": (config := load_config("debug"))})
        find_scorers(config.grader, config.task.build())

    return cause


def _grader(**settings: Any) -> Cause:
    def cause(_: Path) -> object:
        config = Grader.Config(**settings)
        check_fields(config, "grader")
        return build_grader(config, SumDigits.Config().build())

    return cause


def _reward(text: str) -> Cause:
    """A reward function of this text."""

    def cause(folder: Path) -> None:
        (folder / "mine.py").write_text(text)
        _grader(rewards=[f"{folder}/mine.py:f"])(folder)

    return cause


def _recipe(start: Cause, worked: str = "5", **settings: Any) -> Cause:
    """A start, beside a recipe that writes numbers, or `worked`, with these settings."""

    settings = {"name": "five"} | settings

    def cause(folder: Path) -> None:
        recipe = "from torchtitan_rl.library.starts.warm_start import Recipe\n"
        (folder / "mine.py").write_text(
            f"{recipe}def f():\n    return Recipe(worked=lambda *_: {worked}, **{settings!r})\n"
        )
        start(folder)

    return cause


def _other_vocabulary(folder: Path) -> None:
    config = replace(load_config("debug_distill"), teacher=f"{folder}/mine.py:f")
    prepare_teacher(config, make_small_tokenizer(["1 + 1"], vocab_size=258))


def _instructed(_: Path) -> None:
    config = load_config("debug")
    config.task.instruction = "Add:"
    prepare_start(config)


def _with_variable(name: str, value: str) -> Cause:
    """An environment variable, and then the checks of a rank's start."""

    def cause(_: Path) -> None:
        with mock.patch.dict(os.environ, {name: value}):
            be_only_rank()
            validate(load_config("debug"), world_size=1)

    return cause


def _saved_splits(folder: Path) -> None:
    rows = Dataset.from_list([json.loads(_ROW)])
    DatasetDict(train=rows, test=rows).save_to_disk(folder)
    Rows.Config(path=str(folder), split="dev").build()


def _no_start(_: Path) -> None:
    config = load_config("debug")
    config.task = SumDigits.Config()
    prepare_start(config)


def _best_by(metric: str, task: Task.Config) -> Cause:
    def cause(_: Path) -> None:
        config = load_config("debug")
        config.evaluation.best_by, config.task = metric, task
        check_task(config, task.build())

    return cause


def _no_conversation(_: Path) -> None:
    config = load_config("debug")
    config.conversations.max_turns = 5
    check_task(config, config.task.build())


def _prompts(**settings: Any) -> Cause:
    """The prompts of debug's task, with these settings."""

    def cause(_: Path) -> None:
        config, tokenizer = load_config("debug"), make_small_tokenizer(["1"], vocab_size=258)
        replace(config.prompts, **settings).build(task=SumDigits.Config().build(), tokenizer=tokenizer, seed=0)

    return cause


def _checkpoints(name: str, step: int) -> Cause:
    """A run with one checkpoint of this step under another name."""

    def cause(folder: Path) -> None:
        (folder / "checkpoint" / name).mkdir(parents=True)
        manifest.write(folder / "checkpoint" / name, {}, step=step)
        find_resume("auto", folder)

    return cause


def _in_configs(text: str) -> Cause:
    """A module of the user's in configs/."""

    def cause(folder: Path) -> None:
        (folder / "new.py").write_text(text)
        configs.__path__.append(str(folder))
        try:
            load_config("debug")
        finally:
            configs.__path__.remove(str(folder))
            sys.modules.pop("configs.new", None)

    return cause


def _cpu_cache(given: str) -> Cause:
    def cause(_: Path) -> None:
        with mock.patch.dict(os.environ, VLLM_CPU_KVCACHE_SPACE=given):
            validate(load_config("debug"), world_size=1)

    return cause


def _claimed(name: str) -> Cause:
    def cause(folder: Path) -> None:
        (folder / "file").touch()
        (folder / "spoiled").mkdir()
        (folder / "spoiled" / "checkpoint").touch()
        create(folder / name)

    return cause


def _in_model(folder: Path) -> None:
    check_dump_folder(str(_checkpoint(folder)))


def _yaml(folder: Path) -> None:
    (folder / "mine.yaml").touch()
    with chdir(folder):
        load_function("mine.yaml:mine", "--config")


def _no_task(_: Path) -> None:
    config = load_config("debug")
    config.task = None
    validate(config, world_size=1)


def _small_heads(_: Path) -> None:
    config = load_config("debug")
    config.model_spec = small_qwen3(vocab_size=320, head_dim=16)
    check_model(config, world_size=1)


def _tokenizer(*, vocab_size: int, eos: str | None) -> Cause:
    def cause(folder: Path) -> None:
        make_small_tokenizer(["1 + 1"], vocab_size=260).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.eos_token = eos
        check_tokenizer(tokenizer, vocab_size)

    return cause


def ROWS(row: Callable[..., Any]) -> list[Any]:  # noqa: N802
    """The rows, made by the class of wrong_inputs.py."""
    return [
        row("--config debgu", "--config = 'debgu': expected a registered name", lambda _: load_config("debgu")),
        row("--config DEBUG", "Did you mean debug or ", lambda _: load_config("DEBUG")),
        row("--config /absolute/mine.json:mine", "package.module:function. /",
            lambda folder: (folder / "mine.json").write_text("{}") and load_config(f"{folder}/mine.json:mine")),
        row("--help trianer", "--help = 'trianer': expected all, run or a group of fields. Did you mean trainer"),
        row("--config nowhere.py:mine", "expected a file that exists", lambda _: load_config("nowhere.py:mine")),
        row("a config function that returns None", "expected a function that returns a RunConfig. It returned None",
            _config_file("def mine():\n    pass\n")),
        row("a config file without that function", "expected a function of", _config_file("def other():\n    pass\n")),
        row("a config file that is no Python", "that can be imported, but: invalid syntax", _config_file("def mine(:\n")),
        row("a config function that raises", "but it raises AttributeError: 'SamplingConfig' object has no attribute 'm' (",
            _assigned("c.sampling.m = 3")),
        row("c.sampling = None in a config function", "sampling = None: expected SamplingConfig. Use SamplingConfig().",
            _assigned("c.sampling = None")),
        row("a text in the place of a loss", "algorithm.loss = 'dapo': expected Loss.Config. Use Clip.Config().",
            _assigned("c.algorithm.loss = 'dapo'")),
        row("a text in the place of a task", "task = 'gsm8k': expected Task.Config or None", _assigned("c.task = 'gsm8k'")),
        row("a text in the place of a model", "model_spec = 'qwen3': expected a NamedModel or a ModelSpec",
            _assigned("c.model_spec = 'qwen3'")),
        row("small_qwen3(vocab_size=320, n_layers=0)", "model_spec = 'small_qwen3': expected a model, but it has num_hidden_layers 0,",
            _assigned("from torchtitan_rl.library.named_models import small_qwen3 as s; c.model_spec = s(vocab_size=320, n_layers=0)")),
        row("c.num_steps = 50.0", "num_steps = 50.0: expected a whole number. Use 50 or more.", _assigned("c.num_steps = 50.0")),
        row("a config that is not written with def", "expected a function. It is functools.partial",
            _config_file("import functools\nmine = functools.partial(dict)\n")),
        row("--task.warm-start of a function that returns no recipe", "'builtins:print': expected a function that returns a Recipe. It",
            lambda f: start_of(SumDigits.Config(instruction="", warm_start="builtins:print"), f)),
        row("grader.rewards of functions", ": expected list[str]. Name each in a text, as \"path/to/file.py:function\".",
            _assigned("c.grader.rewards = [len]")),
        row("grader.rewards of one text", "grader.rewards = 'my.py:f': expected list[str]. Use ['my.py:f'].",
            _assigned("c.grader.rewards = 'my.py:f'")),
        row("prompts.few_shot of three texts", "expected list[tuple[str, str]]",
            _assigned("c.prompts.few_shot = [('1', '2', '3')]")),
        row("a module of configs/ that is no Python", "configs/ = 'configs.new': expected Python that can be imported, but: invalid",
            _in_configs("def mine(:\n")),
        row("two configs of one name in configs/", "--config = 'debug': expected one name for one config, but configs.debug and",
            _in_configs("def debug():\n    pass\n")),
        row("VLLM_CPU_KVCACHE_SPACE=0.5, on a CPU", "VLLM_CPU_KVCACHE_SPACE = '0.5': expected a whole number of GiB", _cpu_cache("0.5")),
        row("--dump-folder of a file", "dump_folder: cannot write to", _claimed("file")),
        row("--dump-folder /proc/run", "dump_folder: cannot write to /proc/run: The kernel has no files of yours",
            lambda _: check_dump_folder("/proc/run")),
        row("--dump-folder s3://bucket/run", "'s3://bucket/run': expected a path, no URL", lambda _: check_dump_folder("s3://bucket/run")),
        row("--dump-folder of a name that is no UTF-8", "expected a name in UTF-8, as", _claimed(os.fsdecode(b"caf\xe9"))),
        row("--dump-folder of a model's folder", "new, empty or a run's own, but it is a model's folder, with", _in_model),
        row("--dump-folder of your home folder", "but it is your home folder", lambda _: check_dump_folder(str(Path.home()))),
        row("a config without a task", "task = None: expected one, for example task=SumDigits.Config()", _no_task),
        row("a task without a start of its own, no --hf-assets-path", "hf_assets_path = '': expected a Hugging Face", _no_start),
        row("--hf-assets-path of a folder that is not there", "has no such folder", lambda f: _start(f / "none")),
        *(row(f"--hf-assets-path of {given}", says, _with_file(file)) for given, says, file in (
            ("a run's folder", "it is a run's folder. Export its model (torchtitan-rl export", "run_id"),
            ("a run's checkpoint", "it is a run's checkpoint. Export its model (torchtitan-rl export", ".metadata"),
            ("an adapter", "it is a LoRA adapter. Pass the folder of its base model.", "adapter_config.json"),
            ("the hub's cache", "snapshots/5e0f. Pass that folder.", "snapshots/5e0f/config.json"))),
        row("a checkpoint without config.json", "it has no config.json", _spoiled("config.json", None)),
        row("a checkpoint without safetensors", "it has no *.safetensors", _spoiled("model.safetensors", None)),
        row("config.json is no JSON", "its config.json cannot be read", _spoiled("config.json", "{")),
        row("config.json is of another model", "intermediate_size is 128 in the folder but 96 in the config",
            _changed(intermediate_size=128)),
        row("config.json with fewer positions than generator.max_model_len", "generator.max_model_len = 64: expected at most the 16 pos",
            _changed(max_position_embeddings=16)),
        row("config.json is of an architecture that is not implemented", "but its config.json says GPT2LMHeadModel",
            _changed(architectures=["GPT2LMHeadModel"])),
        row("config.json whose architectures and model_type are of two models",
            "architectures LlamaForCausalLM, by which vLLM goes, and model_type 'qwen3', by which transformers goes",
            _changed(architectures=["LlamaForCausalLM"])),
        row("config.json without architectures", "has architectures None, which must be a list with the model's class",
            _changed(architectures=None)),
        row("config.json with a RoPE whose factor is left out", "Missing required keys in `rope_parameters`",
            _changed(rope_parameters={"rope_type": "linear", "rope_theta": 1e4})),
        row("config.json with YaRN, for a config that names a model", "with torchtitan's modules, but its config.json has rope_type 'yarn'",
            _changed(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})),
        row("tokenizer.json is cut off", "its tokenizer.json cannot be read", _spoiled("tokenizer.json", 100)),
        row("model.safetensors is cut off", "its model.safetensors cannot be read", _spoiled("model.safetensors", 5000)),
        row("--hf-assets-path .", "hf_assets_path = '.': expected a Hugging Face checkpoint folder",
            lambda _: prepare_start(replace(load_config("debug"), hf_assets_path="."))),
        row("weights in the format .bin alone", "it has no *.safetensors: its weights are in the older format .bin. Load it with",
            _as_bin),
        row("a task's reward without self", "reward function words: expected parameters that start with self, as it is a method.",
            _reward_without_self),
        row("a tensor that no part of the model loads", "model.layers.0.self_attn.q_norm_2.weight, which no part of that model loads",
            _with_tensors(_q_norm)),
        row("int8 weights without scales", "BF16'), but its files hold model.norm.weight as I8", _with_tensors(_quantized(torch.int8))),
        row("weights in two files", "in model-00001-of-00001.safetensors and in model.safetensors and",
            _stored_twice),
        row("an output head that is stored and not the embedding, with tie_word_embeddings true",
            "tie_word_embeddings false, as lm_head.weight is stored and is not model.embed_tokens.weight", _with_tensors(_other_head)),
        row("eos_token_id 99999 in generation_config.json", "its generation_config.json has eos_token_id 99999", _end_token),
        row("no tokenizer.json", "a tokenizer that transformers can load, but it has no tokenizer.json",
            _tokenizer_files({"tokenizer.json": None})),
        row("a chat template that is no template", "a template that renders, but: TemplateSyntaxError: unexpected '}'",
            _template("{{ messages[0]['content' }}")),
        row("a chat template without the user's message", "renders the user's message, but every prompt is 'Hello'", _template("Hello")),
        row("a chat template without the assistant's turn", "renders the assistant's turn, but a question with its answer is",
            _template("{{ messages[0]['content'] }}")),
        row("a tokenizer larger than the model", "vocab_size 100, but it has token id 259", _tokenizer(vocab_size=100, eos="<eos>")),
        row("a tokenizer without an end", "a tokenizer with an eos_token", _tokenizer(vocab_size=320, eos=None)),
        row("a model whose head_dim is 16, on a CPU", "a model whose head_dim is one of", _small_heads),
        row("a time limit of a function in process",
            "functions that run in a worker, and boxed runs in_process without a limit. Leave out one of the two.",
            _grader(rewards=[f"{_LIBRARY}:boxed"], in_process=["boxed"], time_limit_seconds_of={"boxed": 5.0})),
        row("grader.rewards of a file that is not there", "expected a file that exists", _grader(rewards=["no.py:f"])),
        row("grader.rewards of a call that returns no function", "a call that returns one, but: 5 is not a callable object",
            _grader(rewards=["operator:add(2, 3)"])),
        row("weights that are all 0", "grader.weights = {'correct': 0, 'format': 0}: expected a weight other than 0",
            _grader(weights={"correct": 0, "format": 0})),
        row("overlong(10, 20)", "cache 20 is not from 1 to max_tokens 10", _grader(rewards=[f"{_LIBRARY}:overlong(10, 20)"])),
        row("tags([])", "tags takes at least one name such as 'think', without brackets, not []", _grader(rewards=[f"{_LIBRARY}:tags([])"])),
        row("environment_reward without an environment", "expected no environment_reward, as the task has no environment",
            _grader(rewards=["torchtitan_rl.library.environments:environment_reward"])),
        row("grader.rewards of a name with a hyphen", "'my-f=operator:add': expected a name of letters, digits and _ before the =",
            _grader(rewards=["my-f=operator:add"])),
        row("grader.rewards of a factory that is not called", "give a default, or call a factory: length(...)",
            _grader(rewards=[f"{_LIBRARY}:length"])),
        row("RANK=one", "RANK = 'one': expected a number from 0 up", _with_variable("RANK", "one")),
        row("a saved data set without the split", "expected the split 'dev', but it has ['test', 'train']", _saved_splits),
        row("JSON that is nested 5,000-fold", "row 2: nested too deeply", _rows(f'{_ROW}{{"x": {"[" * 5000}{"]" * 5000}}}\n')),
        row("messages without a question", "row 1: no message of the user's before the assistant's turn",
            _rows('{"messages": [{"role": "assistant", "content": "a"}]}\n', demonstrations="last")),
        row("one JSON object on several lines of .jsonl", "not valid JSON; expected one object on each line",
            _rows('{\n"prompt": "a"\n}\n')),
        row("an answer with a lone surrogate", "row 2: 'answer' has characters that UTF-8 cannot encode",
            _rows(_ROW + '{"prompt": "b", "answer": "\\ud800"}\n')),
        *(row(given, says, _rows(text, **settings)) for given, says, text, settings in (
            ("rows without an answer", "left out: 1 without an answer (row 1). Set task.answer_column to the column that has it (rows.jsonl has",
             '{"prompt": "a", "answer": ""}\n', {}),
            ("demonstrations without a completion", "a completion (row 1). Set task.completion_column to the column that has it (rows.jsonl has ['prompt', 'answer']), or fill it",
             _ROW, {"demonstrations": "last"}),
            ("the rows of task.path held out", "1 also held out (row 1). Hold out other rows", _ROW, {"held_out_split": "train"}))),
        row("an answer of 1e400", "row 2: 'answer' is infinite", _rows(_ROW + '{"prompt": "b", "answer": 1e400}\n')),
        row("--task.split test of one file", "the split 'test' of task.path = ", _rows(_ROW * 9, split="test")),
        row("messages of a role that is none", "row 1: a message with the role 'human', which is none of system, developer, user,",
            _rows('{"messages": [{"role": "human", "content": "a"}], "answer": "1"}\n')),
        row("answer_kind tag, and an answer with the tag itself", "row 1: 'answer' has <answer> tags itself; write what is between",
            _rows('{"prompt": "a", "answer": "<answer>1</answer>"}\n', answer_kind="tag")),
        row("prompts.demonstrate of a function that raises", "expected a function that returns text, but it raises KeyError: 'x' (",
            _demonstrated("raise KeyError('x')")),
        row("--task.held-out-share 0.9999", "task.held_out_share = 0.9999: expected a share that leaves some of the 3 rows",
            _rows("".join(_ROW.replace('"a"', one) for one in ('"a"', '"b"', '"c"')), held_out_share=0.9999)),
        row("--evaluation.best-by evaluation/pass@4", "pass@k needs evaluation.sampled.n of at least k, and is then evaluation/sampled/pass@k.",
            _best_by("evaluation/pass@4", SumDigits.Config())),
        row("--evaluation.best-by -evaluation/accuracy", "best_by = '-evaluation/accuracy': expected one of ['evaluation/accuracy'",
            _best_by("-evaluation/accuracy", SumDigits.Config())),
        row("--conversations.max-turns 5 of a task without any", "conversations.max_turns = 5: expected 8, as the task has neither tools",
            _no_conversation),
        row("--prompts.enable-thinking without a template", "prompts.enable_thinking = True: expected False, as no chat template with",
            _prompts(enable_thinking=True)),
        row("--prompts.system-prompt prompts/system.txt", "'prompts/system.txt': expected the text, not a file's name. Pass what is in it",
            _prompts(system_prompt="prompts/system.txt")),
        row("--task.completion-column prompt", "task.completion_column = 'prompt': expected another column than that of the prompt",
            _rows(_ROW, demonstrations="last", completion_column="prompt")),
        row("a checkpoint folder that was renamed", "step-30: it is the checkpoint of step 20: name it step-20", _checkpoints("step-30", 20)),
        row("super() in a Config with slots", "TypeError: super(type, obj): obj must be an instance or subtype of type (",
            _assigned("""from torchtitan_rl.core.algorithm import Clip
    from dataclasses import dataclass
    class Mine(Clip):
        @dataclass(slots=True, kw_only=True)
        class Config(Clip.Config):
            def __post_init__(self):
                super().__post_init__()
    c.algorithm.loss = Mine.Config()""")),
        row("a loss with `forward`", "expected a class that overrides something of its base, but its ['forward'] are none",
            _assigned("""from torchtitan_rl.core.algorithm import Clip
    class Mine(Clip):
        def forward(self, inputs):
            return inputs
    c.algorithm.loss = Mine.Config()""")),
        row("--task.subset main of a file", "task.subset = 'main': expected none for the files", _rows(_ROW * 9, subset="main")),
        row("a .csv file separated by semicolons", "columns separated by ';'; expected ',' in a .csv file",
            _rows("prompt;answer\na;1\n", "rows.csv")),
        row("a list of all rows in .jsonl", "not a JSON object; name a file with one list of all rows .json", _rows(f"[{_ROW.strip()}]")),
        row("answer_kind number, and an answer without one", "no answer that can be read in 'answer': expected a number alone",
            _rows(_ROW + '{"prompt": "b", "answer": "c"}\n', answer_kind="number")),
        row("--grader.rewards torchtitan_rl.library.rewards:boxed()", "boxed is one itself: leave out the parentheses.",
            _grader(rewards=[f"{_LIBRARY}:boxed()"])),
        row("grader.rewards of a factory with a text that has no quotes", "literal values that add takes, but: judge is none; a text needs",
            _grader(rewards=["operator:add(judge, 3)"])),
        row("c.task.answer_kind = 'numeric'", "task.answer_kind = 'numeric': expected one of ('text', 'tag', 'number'). Use 'text'.",
            _assigned("from torchtitan_rl.library.tasks import Rows; c.task = Rows.Config(answer_kind='numeric')")),
        row("--task.warm-start of another task's recipe", "the recipe arrivals: expected one whose `worked` returns a text for examples of",
            lambda path: start_of(SumDigits.Config(instruction="", warm_start="torchtitan_rl.library.starts.answer_recipes:arrivals"), path)),
        row("--task.warm-start of a recipe that writes numbers", "but it raises TypeError: it returned 5",
            _recipe(lambda path: start_of(SumDigits.Config(warm_start=f"{path}/mine.py:f"), path))),
        row("--grader.rewards f", "= ['f']: expected references, not letters. Write path/to/file.py:function.",
            _assigned_grader("c.grader.rewards = ['f']")),
        row("--config mine.yaml:mine", "expected path/to/file.py:function or package.module:function. mine.yaml is no Python file.",
            _yaml),
        row("a group filter without left_out", "algorithm: building its parts raised TypeError: Can't instantiate abstract class M with abstract method left_out. Correct it.",
            _assigned("from torchtitan_rl.core.algorithm import GroupFilter; c.algorithm.group_filter = type('M', (GroupFilter,), {}).Config()")),
        row("a reward f(*completions)", "reward function f = '(*completions)': expected parameters that are given by name. Declare",
            _reward("def f(*completions):\n    return [1.0] * len(completions)\n")),
        row("--teacher https://huggingface.co/Qwen/Qwen3-8B", "Pass the model's name on the hub, Qwen/Qwen3-8B.",
            lambda _: prepare_teacher(replace(load_config("debug_distill"), teacher="https://huggingface.co/Qwen/Qwen3-8B"), None)),
        *(
            row(f"--task.warm-start of a recipe with {name}={value!r}", f"task.warm_start.{name} = {value!r}: expected {says}",
                _recipe(lambda path: start_of(SumDigits.Config(warm_start=f"{path}/mine.py:f"), path), **{name: value}))
            for name, value, says in (
                ("steps", 0, "at least 1. Use 280."),
                ("name", "a/b", "letters, digits, _, - and ., as it names a folder. Rename it."),
            )
        ),
        row("--teacher of a recipe with another vocabulary", "expected the policy's vocabulary, but token ",
            _recipe(_other_vocabulary, worked="'5'", dimensions={"vocab_size": 512})),
        row("c.task.instruction = 'Add:'", "as this task with task.instruction 'Add:' makes no start itself. Pass --hf-assets-path", _instructed),
        row("c.prompts.system_prompt = '\\udc80'", "prompts.system_prompt = '\\udc80': expected text that UTF-8 can encode, without",
            _assigned("c.prompts.system_prompt = '\\udc80'")),
        row("task.template = '{prompt} {answer}'", "but ['answer'] is task.answer_column, which the prompt would show.",
            _rows(_ROW * 9, template="{prompt} {answer}")),
        row("a last message without text", "row 1: a last message without text. Correct or delete them.",
            _rows('{"prompt": [{"role": "user", "content": " "}], "answer": "1"}\n')),
        row("c.algorithm.loss.fraction = number(2.0, above=0, most=1)", "loss.fraction = 2.0: expected more than 0 and at most 1. Use 1.",
            _own_number("fraction", "number(2.0, above=0, most=1)")),
        row("task.min_numbers = 5 of countdown", "task.max_numbers = 4: expected at least 5 (min_numbers) and at most 6. Use 5.",
            _assigned("from torchtitan_rl.library.tasks.countdown import Countdown; c.task = Countdown.Config(min_numbers=5)")),
        *(
            row(made, says, _own_environment(made))
            for made, says in (
                ("AgentEnvironment('python agent.py')", "TypeError: agent = 'python agent.py': expected Sequence[str] or Callable[..., "
                    "Awaitable[Any]]. Use ['python', 'agent.py'] ("),
                ("AgentEnvironment([])", "ValueError: agent = []: expected a program that can be run here, by name or absolute path ("),
                ("AgentEnvironment(['true'], env={'A': 1})", "TypeError: env = {'A': 1}: expected Mapping[str, str] or None"),
                ("type('E', (ToolEnvironment,), {'role': 'bot'})([])", "E.role = 'bot': expected one of ('user', 'tool', 'system'). Correct it."),
                ("ToolEnvironment([python_tool(ProgramLimits(seconds='5'))])", "UserError: ProgramLimits.seconds = '5': expected a number. Use 5.0."),
            )
        ),
        row("AgentEnvironment(lambda task: 1.0)", "(task, *, base_url, api_key), or a command with a task in JSON values, but: got an",
            _own_environment("AgentEnvironment(lambda task: 1.0)")),
        row("c.algorithm.loss = Clip(eps_low=0.1)", "TypeError: Clip is built by its config. Use Clip.Config(eps_low) (",
            _assigned("from torchtitan_rl.core.algorithm import Clip; c.algorithm.loss = Clip(eps_low=0.1)")),
        row("a sink in a mode that is none", "expected a mode after the class that is one of ('global_reduce', ",
            lambda _: load_own_sinks(["my.py:Mine:fast"])),
        row("a loss whose __init__ asks for more", "building its parts raised TypeError: ",
            _assigned("from torchtitan_rl.core.algorithm import Clip; c.algorithm.loss = type('M', (Clip,), {'__init__': lambda self, config, beta: None}).Config()")),
        row("a loss whose __init__ reads a field that is none", "building its parts raised AttributeError: 'Config' object has no attribute 'beta' (",
            _assigned("from torchtitan_rl.core.algorithm import Clip; c.algorithm.loss = type('M', (Clip,), {'__init__': lambda self, config: config.beta}).Config()")),
        row("a loss whose Config is not inside its class", "algorithm.loss = 'M': expected a Config inside the class that it builds, as this one builds Clip",
            _assigned("from torchtitan_rl.core.algorithm import Clip; from dataclasses import dataclass; "
                      "c.algorithm.loss = dataclass(kw_only=True, slots=True)(type('M', (Clip.Config,), {'__annotations__': {'beta': float}, 'beta': 1.0}))()")),
        row("rows whose answers are in a column Answer", "expected a reward function, as the task has none: its rows have no answer column. Name one",
            _unanswered),
    ]  # fmt: skip
