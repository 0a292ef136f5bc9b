"""The code of docs/agents.md, run as it is written, with a policy that says what it is told to."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit_tests.docs.test_conversations import talk
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.errors import UserError
from torchtitan_rl.events import WATCH_VARIABLE

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "agents.md").read_text()


@pytest.fixture
def files(files):
    """Beside the page's files, a venv with the `openai` client."""
    (files / "agent_venv").symlink_to(sys.prefix)
    return files


def test_documented_agent_runs_and_its_reward_is_trained_on(files):
    config = load_config(f"{files}/my_agent_task.py:guess_with_agent")
    secret = int(config.task.build().train_example(0, seed=0).expected_answer)
    prompt, scored = talk(config, str(secret + 1), "x", str(secret))
    assert prompt.messages[0]["content"].startswith("Guess my number")
    assert [message["content"] for message in scored.completion.messages] == [
        str(secret + 1), "lower", "x", "higher", str(secret),
    ]  # fmt: skip
    assert (scored.reward, scored.correct, scored.completion.finish_reason) == (1.0, True, "stop")
    assert scored.completion.turns[-1].columns == {"guesses": 3}


def test_reward_function_receives_the_agents_logs(files):
    config = load_config(f"{files}/my_agent_task.py:guess_with_agent")
    config.grader.rewards, config.grader.weights = [f"{files}/my_agent_rewards.py:quick"], {"quick": 0.2}
    secret = config.task.build().train_example(0, seed=0).expected_answer
    _, scored = talk(config, "x", secret)
    assert scored.reward_breakdown == {"environment_reward": 1.0, "quick": 0.5}
    assert scored.reward == pytest.approx(1.1)


PACKAGE = """
import datasets, verifiers as vf

def longer(completion, answer, **kwargs):
    return float(len(completion[-1]["content"]) > len(answer))

def load_environment(words):
    rows = datasets.Dataset.from_dict({"question": words, "answer": words})
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[longer]))
"""


ENDLESS = """
import itertools, verifiers.v1 as vf

__all__ = ["Numbers"]

class Numbers(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        return (vf.Task(vf.TaskData(prompt=str(number))) for number in itertools.count())
"""


def venv(variable):
    """The venv that an environment variable names."""
    return Path(os.environ.get(variable) or pytest.skip(f"needs a venv, {variable}: docs/agents.md"))


def by_name(name, variable, **arguments):
    """The config `verifiers` with an environment of a venv that an environment variable names."""
    config = load_config("verifiers")
    config.task.name, config.task.args = name, json.dumps(arguments)
    config.task.python = str(venv(variable) / "bin" / "python")
    config.conversations.call_seconds = 600  # a busy machine
    return config


def test_taskset_of_verifiers_is_played_by_its_name(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples" / "verifiers"))
    config = by_name("my_words", "VERIFIERS_VENV")
    words = [example.text.split()[1] for example in config.task.build().held_out_examples(9)]
    assert words == ["dragon"]
    word = config.task.build().train_example(0, seed=0).text.split()[1]
    for said, reward in ((word[::-1], 1.0), (word, 0.0)):
        prompt, scored = talk(config, said)
        assert prompt.messages == [{"role": "user", "content": f"Spell {word} backwards."}]
        assert (scored.reward, scored.correct, scored.completion.finish_reason) == (reward, None, "stop")
        assert scored.completion.turns[-1].columns == {"letters": 6.0, "backwards": reward}


def test_taskset_without_end_gives_as_many_rows_as_asked_for(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text(ENDLESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = by_name("endless", "VERIFIERS_VENV")
    config.task.rows = 3
    task = config.task.build()
    assert [task.train_example(index, seed=0).text for index in range(2)] == ["0", "1"]
    assert [example.text for example in task.held_out_examples(9)] == ["2"]


def test_package_with_load_environment_is_played_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "my_package.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = {"words": ["sun", "sun"]}
    prompt, scored = talk(by_name("my-package", "VERIFIERS_0_1_VENV", **arguments), "moon")
    assert prompt.messages == [{"role": "user", "content": "sun"}]
    assert (scored.reward, scored.completion.turns[-1].columns["longer"]) == (1.0, 1.0)
    arguments["sampling"] = {"extra_body": {"guided_choice": ["moon"]}}  # this engine has no grammars
    _, scored = talk(by_name("my-package", "VERIFIERS_0_1_VENV", **arguments), "moon")
    assert "the agent asked for guided_choice ['moon']" in scored.extra["error/environment"]


@contextmanager
def serving(*command, folder, **variables):
    """A server of environments in a folder, once it is ready."""
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=folder, env=os.environ | variables, stdout=log, stderr=log
        )
        try:
            while "startup complete" not in (folder / "log").read_text():
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.2)
            yield
        finally:
            process.kill()
            process.wait()


def test_openenv_server_is_played_by_name(tmp_path):
    from websockets.sync.client import connect  # uvicorn brings it

    config = by_name("openenv", "VERIFIERS_VENV")
    python = Path(config.task.python)
    subprocess.run([python.with_name("openenv"), "init", "my_echo", "--output-dir", tmp_path], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = (python, "-m", "uvicorn", "server.app:app", "--port", port)
    with serving(*command, folder=tmp_path / "my_echo"):
        taskset = {"base_url": f"http://127.0.0.1:{port}"}
        config.task.args = json.dumps({"taskset": taskset, "player": {"max_turns": 2}})
        prompt, scored = talk(config, '{"message": "hello"}', "hi")
        with connect(f"ws://127.0.0.1:{port}/ws") as session:  # the only one that this server has
            session.send('{"type": "reset", "data": {}}')
            session.recv()
            _, refused = talk(config, "hi")
    assert json.loads(prompt.messages[0]["content"])["observation"]["message_length"] == 0
    assert scored.reward == pytest.approx(0.7)  # 0.1 for each letter
    assert "A server at its limit of sessions?" in refused.extra["error/environment"]


def test_nemo_gym_server_is_played_by_name(tmp_path):
    config, gym = by_name("nemo_gym", "VERIFIERS_VENV"), venv("NEMO_GYM_VENV")
    package = "resources_servers/bunsenbench_chemistry_mcq"
    [rows] = gym.glob(f"lib/python3*/site-packages/{package}/data/example.jsonl")
    tasksets = "lib/python3*/site-packages/verifiers/v1/tasksets"
    [program] = Path(config.task.python).parents[1].glob(f"{tasksets}/nemo_gym/server.py")
    server = f"{package.replace('/', '.')}.app:BunsenChemResourcesServer"
    with serving(gym / "bin" / "python", program, folder=tmp_path, NEMO_GYM_RESOURCE_SERVER=server):
        url = f"http://127.0.0.1:{(tmp_path / 'nemo_gym.port').read_text()}"
        config.task.args = json.dumps({"taskset": {"dataset": str(rows), "task": {"resources_url": url}}})
        for said, reward in (("CO2", 1.0), ("CO", 0.0)):
            prompt, scored = talk(config, f"<choice>{said}</choice>")
            assert prompt.messages[0]["content"].startswith("Which formula represents carbon dioxide?")
            assert scored.reward == reward


def test_environment_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv(WATCH_VARIABLE, str(tmp_path))
    config = load_config("verifiers")
    config.task.name = "my_words"  # in the run's own Python
    with pytest.raises(UserError, match=r"(?s)task.name = 'my_words': .*No module named 'verifiers'"):
        config.task.build()
    assert [folder.name[:12] for folder in tmp_path.iterdir()] == ["environment-"]  # the launcher removes it


ONLY_FOR_EVALUATION = """
class Environment:
    def build_dataset(self):
        return None

    def build_eval_dataset(self):
        return [{"prompt": "sun"}]

def load_environment(name):
    return Environment()
"""


def test_environment_without_rows_to_train_on_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "verifiers.py").write_text(ONLY_FOR_EVALUATION)  # in place of verifiers 0.1
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(WATCH_VARIABLE, str(tmp_path))
    config = load_config("verifiers")
    config.task.name = "moons"
    with pytest.raises(UserError, match="task.name = 'moons': expected an environment with rows to train on"):
        config.task.build().train_example(0, seed=0)


@pytest.mark.parametrize("text", ["{bad", "[1]"])
def test_arguments_of_an_environment_that_are_no_object_are_named(text):
    config = load_config("verifiers")
    config.task.args = text
    with pytest.raises(UserError, match="task.args = .*: expected a JSON object"):
        config.task.build()
