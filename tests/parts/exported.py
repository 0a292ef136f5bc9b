"""An exported checkpoint used as anyone would: through transformers alone."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from torchtitan_rl.configs.toys.sum_digits import SumDigits


@torch.no_grad()
def greedy_accuracy(folder: Path, *, num_prompts: int, max_new_tokens: int = 32) -> float:
    """Share of held-out two-integer sums that greedy decoding gets right."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    task = SumDigits.Config(max_integers=2, instruction="").build()
    examples = task.held_out_examples(num_prompts)
    batch = tokenizer([e.text for e in examples], return_tensors="pt", padding=True)
    out = model.generate(**batch, do_sample=False, max_new_tokens=max_new_tokens)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [task.is_correct(task.extract_answer(t), e.expected_answer) for t, e in zip(texts, examples, strict=True)]
    return sum(right) / len(right)
