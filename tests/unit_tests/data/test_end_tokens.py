"""Which tokens end a turn: for the engine, masks, demonstrations and conversations."""

import json
from importlib.resources import files

import pytest
from vllm import SamplingParams
from vllm.config import ModelConfig

from tests.parts.talk import chat_tokenizer, save_talker
from tests.parts.tiny import DIMENSIONS
from torchtitan_rl.data.end_tokens import end_token_ids

NAMES = [
    "<|im_start|>", "<|im_end|>", "<|end|>", "<|start|>", "<|return|>", "<|END_RESPONSE|>",
    "<|END_OF_TURN_TOKEN|>", "<|eot_id|>", "<|user|>", "<|observation|>",
]  # fmt: skip


def chat(template: str):
    """The small tokenizer, which ends with <|endoftext|>, with the names of these models' tokens and a template of TRL's."""
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": NAMES})
    path = files("trl") / "chat_templates" / f"{template}.jinja"
    tokenizer.chat_template = path.read_text() if template.islower() else template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "config", "generation_config", "ends"),
    [
        ("qwen3", None, None, ["<|endoftext|>", "<|im_end|>"]),
        ("qwen3", None, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
        ("qwen3", ["<|end|>", "<|eot_id|>"], None, ["<|endoftext|>", "<|end|>", "<|eot_id|>", "<|im_end|>"]),
        # As in transformers and vLLM, config.json counts where generation_config.json names none.
        ("llama3", "<|im_end|>", ["<|eot_id|>"], ["<|endoftext|>", "<|eot_id|>"]),
        ("phi3", None, None, ["<|endoftext|>", "<|end|>"]),
        ("cohere2", None, "<|END_OF_TURN_TOKEN|>", ["<|endoftext|>", "<|END_OF_TURN_TOKEN|>"]),
        # <|end|> ends its thinking too.
        ("gptoss", None, "<|return|>", ["<|endoftext|>", "<|return|>"]),
        ("glm4moe", None, ["<|user|>", "<|observation|>"], ["<|endoftext|>", "<|user|>", "<|observation|>"]),
        ("glm4moe", None, None, ["<|endoftext|>", "<|user|>"]),
        ("{{ messages[-1].content }}\n### End", None, None, ["<|endoftext|>"]),
        ("{{ RAISES", None, None, ["<|endoftext|>"]),
    ],
)
def test_a_turn_ends_with_the_tokens_of_folder_and_chat_template(tmp_path, template, config, generation_config, ends):
    tokenizer = chat(template)
    for name, found in (("config", config), ("generation_config", generation_config)):
        if found is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids(found)}))
    assert set(end_token_ids(tmp_path, tokenizer)) == set(tokenizer.convert_tokens_to_ids(ends))


def test_the_ends_of_config_json_alone_are_those_of_the_engine(tmp_path):
    tokenizer = chat_tokenizer()
    folder = save_talker(tmp_path, **DIMENSIONS)
    (folder / "generation_config.json").unlink()
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"eos_token_id": [257, 263]}))
    params = SamplingParams()
    params.update_from_generation_config(ModelConfig(str(folder)).try_get_generation_config())
    assert {*end_token_ids(folder, tokenizer)} == {tokenizer.eos_token_id, *params.all_stop_token_ids} == {0, 257, 263}
