"""Makes small starting checkpoints: a Qwen3 that knows a task's form and has one bad habit.

A policy learns from generated text, worked answers to a task's training examples. In a share of them the text goes wrong in
one and the same way. So the start knows both the right way and the wrong one, prefers the wrong one, and answers right
wherever the habit does no harm: a reward can tell its samples apart from the first step on, and RL has a habit to unlearn
instead of a skill to discover. Held-out examples are never part of the text. tasks/starts.py has the recipes.
"""

import fcntl
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.protocols.model_spec import ModelSpec
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from torchtitan_rl.core.errors import UserError
from torchtitan_rl.core.events import phase, progress
from torchtitan_rl.library.models import hf_architecture, new_hf_model, small_qwen3
from torchtitan_rl.library.prompts.renderer import PromptRenderer
from torchtitan_rl.library.references import load_function
from torchtitan_rl.library.starts.small_tokenizer import make_small_tokenizer
from torchtitan_rl.library.task import Example, Task

_NUM_TOKENIZER_TEXTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that decides about a checkpoint, besides the task's examples."""

    name: str
    """Of its folder, and in messages."""
    worked: Callable[[Example, random.Random], str]
    """The completion that the text shows for an example: the right one or, in a share of them, the habit's."""
    version: int = 3
    """Raise it when the way of training changes, so that cached checkpoints are made anew."""
    steps: int = 280
    batch_size: int = 64
    """Examples in a batch."""
    muon_lr: float = 0.02
    """Of the matrices inside the layers."""
    adamw_lr: float = 2e-3
    """Of the embedding and the norms."""
    lone_characters: str = "[0-9]"
    """A regular expression: each of these is a token by itself."""
    chat: bool = False
    """Whether the tokenizer has a chat template (small_tokenizer.py's)."""
    dimensions: dict[str, int] = field(default_factory=lambda: {"vocab_size": 320})
    """Of `small_qwen3`, where they are not its defaults. The vocabulary is a multiple of 64, for tensor parallelism."""

    @property
    def model_spec(self) -> ModelSpec:
        return small_qwen3(**self.dimensions)


def start_of(task: Task.Config, cache_root: Path) -> Path | None:
    """The folder that a task's policy starts from when the run names none: its own, or the one its warm start makes."""
    if (own := task.start_checkpoint(cache_root)) is not None or not task.warm_start:
        return own
    return ensure_checkpoint(task.build(), load_function(task.warm_start, "task.warm_start")(), cache_root)


def ensure_checkpoint(task: Task, recipe: Recipe, cache_root: Path, *, seed: int = 0) -> Path:
    """The folder of the starting checkpoint under `cache_root`, made first where it is missing (about a minute).

    Safe to call from every rank and from several runs at once: local rank 0 makes it under a file lock, others wait.

    Raises:
        UserError: when `cache_root` cannot be written or has no locks.
    """
    folder = cache_root / f"{recipe.name}-{_key(task, recipe, seed)}"
    if folder.is_dir():
        return folder
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        while not folder.is_dir():  # torchrun ends this rank too, should that one fail
            time.sleep(0.2)
        return folder
    try:
        cache_root.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_suffix(".lock"), "a")  # noqa: SIM115  (closed below, or when its process dies)
        _lock(lock, folder)
    except OSError as error:
        raise UserError(
            f"hf_assets_path is empty, and {cache_root} cannot take the start that the task makes: {error.strerror}. Start "
            "where it can be written, or pass --hf-assets-path FOLDER."
        ) from error
    with lock:
        if not folder.is_dir():
            make_checkpoint(folder, task, seed, recipe)
    return folder


def _lock(file: IO[str], folder: Path) -> None:
    """Take the lock, saying so while another run has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with phase(f"warm start: wait for another run that makes {folder}"):
            fcntl.flock(file, fcntl.LOCK_EX)


def make_checkpoint(folder: Path, task: Task, seed: int, recipe: Recipe) -> None:
    """Train the starting policy and write it to `folder` in Hugging Face's format, with its tokenizer.

    Deterministic on one machine. The folder, which must not exist, appears complete or not at all.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = _make_tokenizer(task, recipe, seed)
    model = _train(task, tokenizer, recipe, seed)
    transformers_logging.disable_progress_bar()  # one shard of 10 MB needs none
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    progress(f"warm start: wrote {folder}")


def _train(task: Task, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, seed: int) -> Qwen3ForCausalLM:
    """A model trained on `steps` batches of worked sums; leaves the caller's random state and threads as they were."""
    threads = torch.get_num_threads()
    # torchrun sets one thread a process, but the other ranks are waiting for this one. More than 8 gain nothing here.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(min(cores, 8))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            model = new_hf_model(recipe.model_spec, **special)
            pairs = _tokenize(task, recipe, seed, recipe.steps * recipe.batch_size, tokenizer)
            token_ids, labels = _pad(pairs, tokenizer.pad_token_id)
            optimizers = _build_optimizers(model, recipe)
            progress(f"warm start: making the starting checkpoint {recipe.name}, {recipe.steps} steps")
            start = time.monotonic()
            for step, batch in enumerate(torch.arange(len(token_ids)).split(recipe.batch_size)):
                # A short rise, then straight down to zero over the second half.
                scale = min((step + 1) / 20, 1.0, 2 * (recipe.steps - step) / recipe.steps)
                loss = _train_step(model, optimizers, scale, token_ids[batch], labels[batch])
                if (step + 1) % max(recipe.steps // 20, 1) == 0:
                    left = (time.monotonic() - start) * (recipe.steps / (step + 1) - 1)
                    done = 100 * (step + 1) // recipe.steps
                    progress(f"warm start: {done:3d} %  loss {loss:.3f}  about {left:.0f} s left")
    finally:
        torch.set_num_threads(threads)
    return model


def _train_step(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    lr_scale: float,
    token_ids: Tensor,  # [B, L]
    labels: Tensor,  # [B, L], -100 where nothing is to be learned
) -> float:
    """One step on the mean loss over completion tokens; returns that loss."""
    # Where the CPU multiplies bfloat16 natively this halves the time; elsewhere it would multiply it.
    cpu = torch.cpu.get_capabilities()
    native_bfloat16 = bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))
    with torch.autocast("cpu", torch.bfloat16, enabled=native_bfloat16):
        hidden = model.model(token_ids).last_hidden_state  # [B, L, hidden]
        learned = labels != -100
        logits = model.lm_head(hidden[learned])  # [tokens, vocab]
    loss = F.cross_entropy(logits.float(), labels[learned])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_scale
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _build_optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, which needs about two thirds of AdamW's steps here; AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        # Three steps of orthogonalisation instead of five: its cost does not shrink with the batch, and learns as well.
        torch.optim.Muon(matrices, lr=recipe.muon_lr, momentum=0.9, ns_steps=3, weight_decay=0.0),
        torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.99), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _worked(task: Task, recipe: Recipe, seed: int, num: int) -> list[tuple[Example, str]]:
    """`num` of the task's training examples, each with the completion that the text shows."""
    rng = random.Random(f"warm_start/{seed}")
    examples = (task.train_example(index, seed=seed) for index in range(num))
    return [(example, recipe.worked(example, rng)) for example in examples]


def _make_tokenizer(task: Task, recipe: Recipe, seed: int) -> PreTrainedTokenizerFast:
    texts = [
        "".join([example.text, *(message["content"] for message in example.messages or ()), completion])
        for example, completion in _worked(task, recipe, seed, _NUM_TOKENIZER_TEXTS)
    ]
    size = recipe.dimensions["vocab_size"]
    return make_small_tokenizer(texts, vocab_size=size, lone_characters=recipe.lone_characters, chat=recipe.chat)


def _tokenize(
    task: Task, recipe: Recipe, seed: int, num: int, tokenizer: PreTrainedTokenizerFast
) -> list[tuple[list[int], list[int]]]:
    """Token ids of `num` prompts, rendered as a run's are, and of their completions with the end of sequence."""
    longest = recipe.model_spec.model.max_seq_len
    renderer = PromptRenderer.Config(max_prompt_tokens=longest).build(task=task, tokenizer=tokenizer)
    return [
        (renderer.prompt(example).token_ids.tolist(), tokenizer(completion + tokenizer.eos_token)["input_ids"])
        for example, completion in _worked(task, recipe, seed, num)
    ]


def _pad(pairs: list[tuple[list[int], list[int]]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids [N, L] and next-token labels [N, L], which are -100 on the prompt and behind the end of sequence."""
    length = max(len(prompt) + len(completion) for prompt, completion in pairs) - 1
    token_ids = torch.full((len(pairs), length), pad_token_id)
    labels = torch.full((len(pairs), length), -100)
    for row, (prompt, completion) in enumerate(pairs):
        whole = torch.tensor(prompt + completion)
        token_ids[row, : len(whole) - 1] = whole[:-1]
        labels[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return token_ids, labels


def _key(task: Task, recipe: Recipe, seed: int) -> str:
    """A hash that changes with whatever the checkpoint depends on: the recipe, the seed and the text."""
    texts = [(example.text, example.messages, completion) for example, completion in _worked(task, recipe, seed, 64)]
    settings = asdict(replace(recipe, worked=None))
    content = json.dumps([settings, hf_architecture(recipe.model_spec.model), seed, texts])
    return hashlib.sha256(content.encode()).hexdigest()[:12]
