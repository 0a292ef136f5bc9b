"""The rows of wrong_inputs.py that need a file or a folder."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from tests.parts.algorithm import algorithm_of
from tests.parts.tiny import save_tiny_checkpoint
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.task import start_of
from torchtitan_rl.data.tasks import Rows, Task
from torchtitan_rl.fields.field_limits import check_fields
from torchtitan_rl.fields.references import load_class
from torchtitan_rl.rewards import Grader
from torchtitan_rl.rewards.build_grader import build_grader, find_scorers
from torchtitan_rl.run import teacher_folder
from torchtitan_rl.run.dump_folder import check_dump_folder, lock
from torchtitan_rl.run.start_checkpoint import check_tokenizer, load_tokenizer, prepare_start
from torchtitan_rl.run.teacher_folder import prepare_teacher
from torchtitan_rl.types import Prompt
from torchtitan_rl.validation import validate

Cause = Callable[[Path], object]


_LIBRARY = "torchtitan_rl.rewards"
_ROW = '{"prompt": "a", "answer": "1"}\n'


def _checkpoint(folder: Path) -> Path:
    """A whole one, of the tiny model."""
    save_tiny_checkpoint(folder)
    make_small_tokenizer(["1 + 1"], vocab_size=258).save_pretrained(folder)
    return folder


def _start(folder: Path) -> None:
    config = load_config("debug")
    config.hf_assets_path = str(folder)
    prepare_start(config)
    load_tokenizer(config.hf_assets_path)


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


def _entry(name: str, value: Any) -> Cause:
    """A checkpoint whose config.json has another value of an entry."""

    def cause(folder: Path) -> None:
        file = _checkpoint(folder) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
        _start(folder)

    return cause


def _with_code(folder: Path) -> None:
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (_checkpoint(folder) / "config.json").write_text(json.dumps(own))
    (folder / "mine.py").write_text("raise RuntimeError")
    _start(folder)


def _with_tensors(change: Callable[[dict[str, Tensor]], object]) -> Cause:
    """A checkpoint with other tensors in its file."""

    def cause(folder: Path) -> None:
        file = _checkpoint(folder) / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        _start(folder)

    return cause


def _q_norm(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_norm_2.weight"] = torch.ones(32)


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


def _assigned(line: str) -> Cause:
    """A config function that assigns this to debug's config `c`."""
    before = "from torchtitan_rl.configs.debug import debug\nfrom torchtitan_rl.algorithm import GroupMean\n"

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
        "from torchtitan_rl.environments.agents import AgentEnvironment\nfrom torchtitan_rl.environments import ToolEnvironment\n"
        "from torchtitan_rl.environments.python_tool import ProgramLimits, python_tool\n"
        "from torchtitan_rl.configs.toys.sum_digits import SumDigits\nclass Mine(SumDigits):\n    def environment(self, prompt):\n"
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


def _grader(**settings: Any) -> Cause:
    def cause(_: Path) -> object:
        config = Grader.Config(**settings)
        check_fields(config, "grader")
        return build_grader(config, SumDigits.Config().build())

    return cause


def _recipe(start: Cause, worked: str = "5", **settings: Any) -> Cause:
    """A start, beside a recipe that writes numbers, or `worked`, with these settings."""

    settings = {"name": "five"} | settings

    def cause(folder: Path) -> None:
        recipe = "from torchtitan_rl.configs.toys.warm_start import Recipe\n"
        (folder / "mine.py").write_text(
            f"{recipe}def f():\n    return Recipe(worked=lambda *_: {worked}, **{settings!r})\n"
        )
        start(folder)

    return cause


def _other_vocabulary(folder: Path) -> None:
    config = replace(load_config("debug_distill"), teacher=f"{folder}/mine.py:f")
    with mock.patch.object(teacher_folder, "START_CHECKPOINTS", folder):
        prepare_teacher(config, algorithm_of(config), make_small_tokenizer(["1 + 1"], vocab_size=258))


def _instructed(_: Path) -> None:
    config = load_config("debug")
    config.task.instruction = "Add:"
    prepare_start(config)


def _no_start(_: Path) -> None:
    config = load_config("debug")
    config.task = SumDigits.Config()
    prepare_start(config)


def _prompts(**settings: Any) -> Cause:
    """The prompts of debug's task, with these settings."""

    def cause(_: Path) -> None:
        config, tokenizer = load_config("debug"), make_small_tokenizer(["1"], vocab_size=258)
        replace(config.prompts, **settings).build(task=SumDigits.Config().build(), tokenizer=tokenizer, seed=0)

    return cause


def _claimed(name: str) -> Cause:
    def cause(folder: Path) -> None:
        (folder / "file").touch()
        (folder / "spoiled").mkdir()
        (folder / "spoiled" / "checkpoint").touch()
        lock(folder / name)

    return cause


def _no_task(_: Path) -> None:
    config = load_config("debug")
    config.task = None
    validate(config, world_size=1)


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
        row("--config nowhere.py:mine", "expected a file that exists", lambda _: load_config("nowhere.py:mine")),
        row("del c.num_steps in a config function", "num_steps: expected a field of the config, but:",
            _assigned("del c.num_steps")),
        row("--dump-folder of a file", "dump_folder: cannot write to", _claimed("file")),
        row("--dump-folder s3://bucket/run", "'s3://bucket/run': expected a path, no URL", lambda _: check_dump_folder("s3://bucket/run")),
        row("a config without a task", "task = None: expected one, for example task=SumDigits.Config()", _no_task),
        row("a task without a start of its own, no --hf-assets-path", "hf_assets_path = '': expected a Hugging Face", _no_start),
        row("--hf-assets-path of a folder that is not there", "has no such folder", lambda f: _start(f / "none")),
        row("--hf-assets-path of a run's folder", "has no config.json. Pass --hf-assets-path FOLDER, or a name on the hub",
            _with_file("run_id")),
        row("config.json is no JSON", "transformers cannot read its config.json", _spoiled("config.json", "{")),
        row("num_key_value_heads 3 of 4 heads", "but its config.json has 4 heads and num_key_value_heads 3. Correct it.",
            _entry("num_key_value_heads", 3)),
        row("a config.json with code for the model", "Code in a checkpoint's folder is not run. Correct it.", _with_code),
        row("tokenizer.json is cut off", "expected a tokenizer that transformers can load, but ", _spoiled("tokenizer.json", 100)),
        row("model.safetensors is cut off", "its model.safetensors cannot be read", _spoiled("model.safetensors", 5000)),
        row("a tensor that no part of the model loads", "model.layers.0.self_attn.q_norm_2.weight is loaded by no part of that model",
            _with_tensors(_q_norm)),
        row("weights in two files", "is in model-00001-of-00001.safetensors and in model.safetensors,",
            _stored_twice),
        row("an output head that is stored and not the embedding, with tie_word_embeddings true",
            "lm_head.weight is not model.embed_tokens.weight, although config.json has tie_word_embeddings true", _with_tensors(_other_head)),
        row("a chat template without the user's message", "a prompt of which the chat template leaves out the user message.", _template("Hello")),
        row("a tokenizer larger than the model", "vocab_size 100, but it has token id 259", _tokenizer(vocab_size=100, eos="<eos>")),
        row("a tokenizer without an end", "a tokenizer with an eos_token", _tokenizer(vocab_size=320, eos=None)),
        row("weights that are all 0", "grader.weights = {'correct': 0, 'format': 0}: expected a weight other than 0",
            _grader(weights={"correct": 0, "format": 0})),
        row("grader.rewards of a factory that is not called", "give a default, or call a factory: length(...)",
            _grader(rewards=[f"{_LIBRARY}:length"])),
        row("rows without an answer", "left out: 1 without an answer (row 1). Correct the rows", _rows('{"prompt": "a", "answer": ""}\n')),
        row("prompts.demonstrate of a function that raises", "expected a function that returns text, but it raises KeyError: 'x' (",
            _demonstrated("raise KeyError('x')")),
        row("--prompts.enable-thinking without a template", "prompts.enable_thinking = True: expected False, as no chat template with",
            _prompts(enable_thinking=True)),
        row("--task.warm-start of another task's recipe", "the recipe arrivals: expected one whose `worked` returns a text for examples of",
            lambda path: start_of(SumDigits.Config(instruction="", warm_start="torchtitan_rl.configs.toys.answer_recipes:arrivals"), path)),
        row("a group filter without left_out", "algorithm: building its parts raised TypeError: Can't instantiate abstract class M with abstract method left_out. Correct it.",
            _assigned("from torchtitan_rl.algorithm import GroupFilter; c.algorithm.group_filter = type('M', (GroupFilter,), {}).Config()")),
        row("--teacher of a recipe with another vocabulary", "expected the policy's vocabulary, but token ",
            _recipe(_other_vocabulary, worked="'5'", steps=1, batch_size=1, dimensions={"vocab_size": 512})),
        row("c.task.instruction = 'Add:'", "as this task with task.instruction 'Add:' makes no start itself. Pass --hf-assets-path", _instructed),
        *(
            row(made, says, _own_environment(made))
            for made, says in (
                ("AgentEnvironment('python agent.py')", "TypeError: agent = 'python agent.py': expected Sequence[str] | Callable[..., "),
                ("AgentEnvironment(['true'], env={'A': 1})", "TypeError: env = {'A': 1}: expected a valid string ("),
                ("type('E', (ToolEnvironment,), {'role': 'bot'})([])", "E.role = 'bot': expected one of ('user', 'tool', 'system'). Correct it."),
                ("ToolEnvironment([python_tool(ProgramLimits(seconds='5'))])", "UserError: ProgramLimits.seconds = '5': expected a valid number. Use 5.0."),
            )
        ),
        row("a loss whose Config is not inside its class", "algorithm.loss = 'M': expected a Config inside the class that it builds, as this one builds Clip",
            _assigned("from torchtitan_rl.algorithm import Clip; from dataclasses import dataclass; "
                      "c.algorithm.loss = dataclass(kw_only=True, slots=True)(type('M', (Clip.Config,), {'__annotations__': {'beta': float}, 'beta': 1.0}))()")),
        row("rows whose answers are in a column Answer", "expected a reward function, as the task has none. Name one or more, or for rows with an answer task.answer_column",
            _unanswered),
    ]  # fmt: skip
