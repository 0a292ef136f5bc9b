"""A run that needs no warm start: a random small policy plays a guessing game badly, in turns, and the run is all there is to see.

.venv/bin/python -m torchtitan_rl.launch --standalone --nproc_per_node=1 -m torchtitan_rl.train --config tests/talk.py:talk
"""

import json
import tempfile
from pathlib import Path

import torch

from configs.debug_conversations import debug_guess
from torchtitan_rl.models import new_hf_model, small_qwen3
from torchtitan_rl.tasks.small_tokenizer import make_small_tokenizer

END_TOKENS = list(range(40, 90))
"""Besides the tokenizer's: so many that a random policy ends its turns."""


def chat_tokenizer():
    """As the small policies of configs/debug_conversations.py have it."""
    return make_small_tokenizer(["higher", "lower", "a number"], vocab_size=320, chat=True)


def save_talker(folder: Path, **dimensions: int) -> Path:
    """A Hugging Face folder with random weights, a chat template, and a generation_config.json with many end tokens."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    spec = small_qwen3(**{**dimensions, "vocab_size": 320})
    new_hf_model(spec, tie_word_embeddings=False, initializer_range=0.05).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_TOKENS}))
    return folder


def talk():
    config = debug_guess()
    config.hf_assets_path = str(save_talker(Path(tempfile.mkdtemp())))
    config.model_spec.model.enable_weight_tying = False
    config.task.warm_start = ""
    config.num_prompts_per_step = 4
    config.sampling.n = 4
    config.evaluation.num_prompts = 8
    config.evaluation.every = 2
    config.checkpoint.interval = 2
    return config
