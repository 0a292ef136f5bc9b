"""config.json says which classes ran, and code.diff what the commit lacks."""

import json
import subprocess

from torchtitan_rl.command.registry import load_config
from torchtitan_rl.configs.toys.small_models import small_qwen3
from torchtitan_rl.run.identity import described
from torchtitan_rl.run.run_folder import RunFolder

MINE = """
from torchtitan_rl.configs.debug import debug
from torchtitan_rl.algorithm import Advantage


class Centered(Advantage):
    def of_group(self, group):
        return group.rewards


def mine():
    config = debug()
    config.algorithm.advantage = Centered.Config()
    return config
"""


def test_every_part_says_its_class(tmp_path):
    (tmp_path / "my_config.py").write_text(MINE)
    parts = described(load_config(f"{tmp_path / 'my_config.py'}:mine"))
    assert parts["algorithm"]["advantage"] == {"class": "my_config:Centered"}
    assert parts["algorithm"]["loss"]["class"] == "torchtitan_rl.algorithm.losses.clip:Clip"
    assert parts["class"] == "torchtitan_rl.config:RunConfig"
    json.dumps(parts["algorithm"])


def test_a_model_is_described_by_its_entries_and_not_layer_by_layer_with_addresses_of_functions():
    config = load_config("debug")
    config.model_spec = small_qwen3(vocab_size=320, max_seq_len=64)
    text = json.dumps(described(config)["model_spec"])  # plain values alone
    assert '"num_hidden_layers": 4' in text
    assert len(text) < 500


def test_each_start_keeps_the_commit_of_the_users_code_and_what_differs_without_secrets(
    one_rank, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["train", "--task.api-key", "hunter-1"])

    def git(*arguments):
        command = ["git", "-c", "user.name=me", "-c", "user.email=me@here", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    def start(text):
        (tmp_path / "my_config.py").write_text(text)
        folder = RunFolder.claim(str(tmp_path / "run"), "debug")
        folder.begin("debug", load_config("debug"))
        folder._lock_file.close()  # as its process ends
        return folder.path

    git("init")
    (tmp_path / "my_config.py").write_text("lr = 1\n")
    git("add", "my_config.py")
    git("commit", "-m", "first")
    start("lr = 2\n")
    path = start("lr = 3\napi_key = 'hunter-2'\n")
    [mine] = [
        code for code in json.loads((path / "environment.json").read_text())["code"] if code["folder"] == str(tmp_path)
    ]
    assert mine["dirty"]
    assert "+lr = 2" in (path / "code-1.diff").read_text()
    assert "+lr = 3\n+api_key = '***'" in (path / "code.diff").read_text()
    assert json.loads((path / "config.json").read_text())["command"] == ["train", "--task.api-key", "***"]
    monkeypatch.setattr("torchtitan_rl.run.run_folder.DIFF_CHARACTERS", 100)
    assert len((start("lr = 4\n" * 1000) / "code.diff").read_text()) == 100
