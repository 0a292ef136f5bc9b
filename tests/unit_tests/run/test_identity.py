"""config.json says which classes ran, and the run folder has the user's sources."""

import json

import pytest

from torchtitan_rl.command.registry import config_file, load_config
from torchtitan_rl.fields.references import load_function
from torchtitan_rl.models import small_qwen3
from torchtitan_rl.run.identity import described
from torchtitan_rl.run.run_folder import RunFolder

MINE = """
from configs.debug import debug
from my_helper import median
from torchtitan_rl.algorithm import Advantage

api_key = "sk-1234567890"


class Median(Advantage):
    def of_group(self, group):
        return [reward - median(group.rewards) for reward in group.rewards]


def mine():
    config = debug()
    config.algorithm.advantage = Median.Config()
    config.grader.rewards = ["my_reward.py:brevity"]
    return config
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A config file with an advantage of its own, which imports a helper and names a reward."""
    (tmp_path / "my_config.py").write_text(MINE)
    (tmp_path / "my_helper.py").write_text("from statistics import median\n")
    (tmp_path / "my_reward.py").write_text("def brevity(completions, **_):\n    return [0.0 for _ in completions]\n")
    monkeypatch.setenv("TORCHTITAN_RL_CALLER_FOLDER", str(tmp_path))
    name = f"{tmp_path / 'my_config.py'}:mine"
    config = load_config(name)
    load_function("my_reward.py:brevity", "grader.rewards")
    return name, config


def test_every_part_says_its_class(mine):
    told = described(mine[1])
    assert told["algorithm"]["advantage"] == {"class": "my_config:Median"}
    assert told["algorithm"]["loss"]["class"] == "torchtitan_rl.algorithm.losses.loss:Clip"
    assert told["task"]["class"] == "torchtitan_rl.data.tasks.sum_digits:SumDigits"
    assert told["prompts"]["class"] == "torchtitan_rl.data.stream:PromptStream"
    assert told["class"] == "torchtitan_rl.config:RunConfig"
    assert set(told["sources"]) == {"my_config.py", "my_helper.py", "my_reward.py"}
    json.dumps(told["algorithm"])


def test_a_model_is_told_by_its_entries_and_not_layer_by_layer_with_addresses_of_functions():
    config = load_config("debug")
    config.model_spec = small_qwen3(vocab_size=320, max_seq_len=64)
    told = json.dumps(described(config)["model_spec"])  # plain values alone
    assert '"num_hidden_layers": 4' in told
    assert len(told) < 500


def test_the_run_folder_has_the_sources_without_secrets(one_rank, mine, tmp_path):
    name, config = mine
    path = tmp_path / "run"
    first = RunFolder.find(str(path), "mine")
    first.claim()
    first.begin(name, config, config_file(name))
    first._lock.close()
    (tmp_path / "my_reward.py").write_text("def brevity(completions, **_):\n    return [1.0 for _ in completions]\n")
    folder = RunFolder.find(str(path), "mine")
    folder.claim()
    folder.begin(name, config, config_file(name))
    sources = json.loads((folder.path / "config.json").read_text())["sources"]
    assert sources["my_config.py"]["file"] == str(tmp_path / "my_config.py")
    copy = (folder.path / sources["my_config.py"]["copy"]).read_text()
    assert copy == MINE.replace("sk-1234567890", "***")
    before = json.loads((folder.path / "config-1.json").read_text())["sources"]["my_reward.py"]
    assert before["sha256"] != sources["my_reward.py"]["sha256"]
    assert "0.0" in (folder.path / before["copy"]).read_text()
    assert "1.0" in (folder.path / sources["my_reward.py"]["copy"]).read_text()
