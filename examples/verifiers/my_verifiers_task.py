"""The task and the config of a run whose conversations are played by verifiers, which has a venv of its own."""

import os
from pathlib import Path

from torchtitan_rl.configs.debug_conversations import debug_guess
from torchtitan_rl.data.tasks import Example, Task
from torchtitan_rl.environments import environment_reward
from torchtitan_rl.environments.agents import AgentEnvironment

FOLDER = Path(__file__).parent
PASSED_ON = ("SSL_CERT_FILE", "UV_INDEX_URL")  # for uv, which downloads the harness's packages once


class WordsByVerifiers(Task):
    def train_example(self, index, *, seed):
        return self.example((index + seed) % 3)

    def held_out_examples(self, num):
        return [self.example(3)][:num]

    def example(self, number):
        messages = [{"role": "user", "content": "The agent's first request takes the place of this."}]
        columns = {"number": number, "low": 20, "high": 26}  # the last two are read by the recipe of the small start
        return Example(text="", messages=messages, expected_answer="23", columns=columns)

    def environment(self, prompt):
        bin = FOLDER / "verifiers_venv" / "bin"
        env = {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(FOLDER)}
        env |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        command = [f"{bin}/python", f"{FOLDER}/my_verifiers_agent.py"]
        return AgentEnvironment(command, task=prompt.columns["number"], env=env)

    def reward_functions(self):
        return (environment_reward,)

    def extract_answer(self, text):
        return None


def words():
    config = debug_guess()
    config.task = WordsByVerifiers.Config(warm_start=config.task.warm_start)
    config.algorithm.credit = "episode"
    config.num_prompts_per_step = config.evaluation.num_prompts = 1
    config.conversations.max_open = 4
    config.conversations.call_seconds = 120
    config.conversations.on_failure = "none"
    return config
