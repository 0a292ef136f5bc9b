"""Demonstration: trains a small starting checkpoint, a Qwen3 that knows a task's format and has one bad habit.

The model is trained on worked answers to the task's training examples. A share of these answers makes the same mistake,
the habit. So the starting policy knows the right way and the wrong way, and prefers the wrong one. RL then has a habit
to unlearn instead of a skill to discover, and rewards differ between samples from the first step. Held-out examples are
never part of the text. The recipes are in answer_recipes.py and conversation_recipes.py.
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
from typing import IO, TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging as transformers_logging

from torchtitan_rl.configs.toys.muon import Muon
from torchtitan_rl.configs.toys.small_models import new_hf_model, small_qwen3
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.data.renderer import PromptRenderer
from torchtitan_rl.data.task import Example, StartRecipe, Task
from torchtitan_rl.errors import UserError
from torchtitan_rl.events import phase, progress, timed
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.references import explained
from torchtitan_rl.models.hf_config import hf_architecture

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

_NUM_TOKENIZER_TEXTS = 2000
_PROGRESS_EVERY_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(StartRecipe):
    """Everything that determines a starting checkpoint, except the task's examples."""

    name: str
    """Name in messages and in the checkpoint's folder."""
    worked: Callable[[Example, random.Random], str]
    """Returns the completion to train on for an example: the right one or, for a share of them, the habit's."""
    version: int = number(4, least=0)
    """Increase it when the training procedure changes, to invalidate cached checkpoints."""
    steps: int = number(280, least=1)
    batch_size: int = number(64, least=1)
    """Examples per batch."""
    muon_lr: float = number(0.02, least=0, most=1)
    """Learning rate of the layers' matrices."""
    adamw_lr: float = number(2e-3, least=0, most=1)
    """Learning rate of the embedding and the norms."""
    warm_up_steps: int = number(20, least=1)
    """Steps in which both learning rates rise linearly."""
    decay_share: float = number(0.5, above=0, most=1)
    """Share of the steps, the last ones, in which both learning rates fall linearly to zero."""
    lone_characters: str = "[0-9]"
    """A regular expression. Each matching character is a token of its own."""
    chat: bool = False
    """Whether the tokenizer has small_tokenizer.py's chat template."""
    dimensions: dict[str, int] = field(default_factory=lambda: {"vocab_size": 320})
    """Arguments of `small_qwen3`. The vocabulary must be a multiple of 64, for tensor parallelism."""

    @property
    def model_spec(self) -> "ModelSpec":
        """The model that the recipe trains, without weights."""
        return small_qwen3(**self.dimensions)

    def checkpoint(self, task: Task, cache_root: Path) -> Path:
        """Returns the folder of `ensure_checkpoint`."""
        return ensure_checkpoint(task, self, cache_root)


def ensure_checkpoint(task: Task, recipe: Recipe, cache_root: Path, *, seed: int = 0) -> Path:
    """Returns the starting checkpoint's folder under `cache_root`, and trains it first if it is missing (a minute).

    Safe to call from every rank and from several runs at once: local rank 0 trains it under a file lock, others wait.

    Raises:
        UserError: if `cache_root` is not writable or does not support locks.
    """
    folder = cache_root / f"{recipe.name}-{_key(task, recipe, seed)}"
    if folder.is_dir():
        return folder
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        with timed("warm start"):
            while not folder.is_dir():  # if local rank 0 fails, torchrun ends this rank too
                time.sleep(0.2)
        return folder
    try:
        cache_root.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_suffix(".lock"), "a")  # noqa: SIM115  (closed below, or when its process dies)
        _lock(lock, folder)
    except OSError as error:
        raise UserError(
            f"hf_assets_path is empty, and the task's starting checkpoint cannot be written to {cache_root}: "
            f"{error.strerror}. Run in a writable folder, or pass --hf-assets-path FOLDER."
        ) from error
    with lock:
        if not folder.is_dir():
            with timed("warm start"):
                make_checkpoint(folder, task, seed, recipe)
    return folder


def _lock(file: IO[str], folder: Path) -> None:
    """Takes the lock, and shows a progress line while another run holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with phase(f"warm start: wait for another run that makes {folder}"):
            fcntl.flock(file, fcntl.LOCK_EX)


def make_checkpoint(folder: Path, task: Task, seed: int, recipe: Recipe) -> None:
    """Trains the starting policy and writes it to `folder` in Hugging Face's format, with its tokenizer.

    Deterministic on one machine. The folder must not exist; it appears only when it is complete.
    """
    tokenizer = _make_tokenizer(task, recipe, seed)
    model = _train(task, tokenizer, recipe, seed)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    transformers_logging.disable_progress_bar()  # not needed for one 10 MB shard
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    progress(f"warm start: wrote {folder}")


def _train(
    task: Task, tokenizer: "PreTrainedTokenizerFast", recipe: Recipe, seed: int
) -> "Qwen3ForCausalLM":
    """Returns a model trained on `steps` batches of worked answers. Restores torch's RNG state and thread count."""
    threads = torch.get_num_threads()
    # torchrun sets one thread per process, but the other ranks wait for this one. More than 8 threads are not faster.
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    torch.set_num_threads(min(cores, 8))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            special = {
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
            }
            model = new_hf_model(recipe.model_spec, **special)
            pairs = _tokenize(task, recipe, seed, recipe.steps * recipe.batch_size, tokenizer)
            token_ids, labels = _pad(pairs, tokenizer.pad_token_id)
            optimizers = _build_optimizers(model, recipe)
            progress(
                f"warm start: making the starting checkpoint {recipe.name}, {recipe.steps} steps"
            )
            start = said = time.monotonic()
            for step, batch in enumerate(torch.arange(len(token_ids)).split(recipe.batch_size)):
                left_share = 1 - step / recipe.steps
                scale = min((step + 1) / recipe.warm_up_steps, 1.0, left_share / recipe.decay_share)
                loss = _train_step(model, optimizers, scale, token_ids[batch], labels[batch])
                now = time.monotonic()
                if now - said > _PROGRESS_EVERY_S or step + 1 == recipe.steps:
                    said = now
                    left = (now - start) * (recipe.steps / (step + 1) - 1)
                    done = 100 * (step + 1) // recipe.steps
                    progress(f"warm start: {done:3d} %  loss {loss:.3f}  about {left:.0f} s left")
    finally:
        torch.set_num_threads(threads)
    return model


def _train_step(
    model: "Qwen3ForCausalLM",
    optimizers: list[torch.optim.Optimizer],
    lr_scale: float,
    token_ids: Tensor,  # [B, L]
    labels: Tensor,  # [B, L], -100 at ignored positions
) -> float:
    """Runs one step on the mean loss over completion tokens and returns that loss."""
    length = (
        int((labels != -100).any(0).nonzero().max()) + 1
    )  # of this batch, without what is padding in every row
    hidden = model.model(token_ids[:, :length]).last_hidden_state  # [B, length, hidden]
    labels = labels[:, :length]  # [B, length]
    learned = labels != -100  # [B, length]
    logits = model.lm_head(hidden[learned])  # [tokens, vocab]
    loss = F.cross_entropy(logits, labels[learned])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_scale
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _build_optimizers(model: "Qwen3ForCausalLM", recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Returns Muon for the layers' matrices and AdamW for the rest. Muon needs two thirds of the steps AdamW would."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        Muon(matrices, lr=recipe.muon_lr),
        torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.99), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _worked(task: Task, recipe: Recipe, seed: int, num: int) -> list[tuple[Example, str]]:
    """Returns `num` training examples of the task, each with the completion to train on.

    Raises:
        UserError: if the recipe is not one of such examples.
    """
    rng = random.Random(f"warm_start/{seed}")
    examples = [task.train_example(index, seed=seed) for index in range(num)]
    try:
        return [(example, _text(recipe.worked(example, rng))) for example in examples]
    except (
        Exception,
        SystemExit,
    ) as error:  # of any kind: the recipe may be of another task, or the user's
        raise UserError(
            f"the recipe {recipe.name}: expected one whose `worked` returns a text for examples of {type(task).__qualname__}, but "
            f"it raises {explained(error)}. A small start is made by the recipe of its own examples: for others pass "
            "--hf-assets-path FOLDER, or name another recipe in task.warm_start or teacher."
        ) from error


def _text(completion: str) -> str:
    if not isinstance(completion, str):
        raise TypeError(f"it returned {completion!r:.80}")
    return completion


def _make_tokenizer(task: Task, recipe: Recipe, seed: int) -> "PreTrainedTokenizerFast":
    texts = [
        "".join(
            [example.text, *(message["content"] for message in example.messages or ()), completion]
        )
        for example, completion in _worked(task, recipe, seed, _NUM_TOKENIZER_TEXTS)
    ]
    size = recipe.dimensions["vocab_size"]
    return make_small_tokenizer(
        texts, vocab_size=size, lone_characters=recipe.lone_characters, chat=recipe.chat
    )


def _tokenize(
    task: Task, recipe: Recipe, seed: int, num: int, tokenizer: "PreTrainedTokenizerFast"
) -> list[tuple[list[int], list[int]]]:
    """Returns token ids of `num` prompts, rendered as in a run, and of their completions including the end token."""
    longest = recipe.model_spec.model.max_seq_len
    renderer = PromptRenderer.Config(max_prompt_tokens=longest).build(
        task=task, tokenizer=tokenizer
    )
    return [
        (
            renderer.prompt(example).token_ids.tolist(),
            tokenizer(completion + tokenizer.eos_token)["input_ids"],
        )
        for example, completion in _worked(task, recipe, seed, num)
    ]


def _pad(pairs: list[tuple[list[int], list[int]]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Returns token ids [N, L] and next-token labels [N, L], which are -100 on the prompt and after the end token."""
    length = max(len(prompt) + len(completion) for prompt, completion in pairs) - 1
    token_ids = torch.full((len(pairs), length), pad_token_id)
    labels = torch.full((len(pairs), length), -100)
    for row, (prompt, completion) in enumerate(pairs):
        whole = torch.tensor(prompt + completion)
        token_ids[row, : len(whole) - 1] = whole[:-1]
        labels[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return token_ids, labels


def _key(task: Task, recipe: Recipe, seed: int) -> str:
    """Returns a hash of everything the checkpoint depends on: the recipe, the seed and the text."""
    texts = [
        (example.text, example.messages, completion)
        for example, completion in _worked(task, recipe, seed, 64)
    ]
    settings = asdict(replace(recipe, worked=None))
    content = json.dumps([settings, hf_architecture(recipe.model_spec.model), seed, texts])
    return hashlib.sha256(content.encode()).hexdigest()[:12]
