"""Prepares and checks the teacher's checkpoint: a folder, a download, or made by a recipe; with the policy's vocabulary."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.data.task import recipe_of
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.run.hub import folder_of, is_hub_name
from torchtitan_rl.run.memory import teacher_spec
from torchtitan_rl.run.start_checkpoint import START_CHECKPOINTS, check_complete, load_tokenizer

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.algorithm import Algorithm
    from torchtitan_rl.algorithm.losses.loss import Loss
    from torchtitan_rl.config import RunConfig


def check_asked(config: "RunConfig", loss: "Loss") -> None:
    """Check that a run has a teacher if and only if its loss learns from one, and that the engine's records, which are of the policy's
    prompt, are not asked of another prompt. Raises UserError, naming the field."""
    name = type(loss).__qualname__
    if loss.needs_teacher:
        remedy = "Name its folder, or a model on the hub, or a teacher_hint for the policy to teach itself."
        named = bool(config.teacher or config.teacher_hint)
        expect(named, "teacher", "", f"a model, from which the loss {name} learns", remedy)
        records = config.truncates or config.generator.router_replay
        alike = "none with sampling.top_p, top_k, min_p or generator.router_replay, which record each token of the policy's prompt"
        expect(
            not (records and config.teacher_hint),
            "teacher_hint",
            config.teacher_hint,
            alike,
            "Leave one out.",
        )
        several = config.more_teachers and (loss.divergence_beta is not None or not config.teacher)
        one = "none without teacher, which the other rows have, and none with the exact divergence, whose packs have one teacher"
        expect(
            not several,
            "more_teachers",
            config.more_teachers,
            one,
            "Use the loss Distill, and name a teacher.",
        )
        return
    for field in ("teacher", "teacher_hint", "more_teachers"):
        learns = f"none, as the loss {name} learns from no teacher"
        remedy = "Use the loss Distill or ExactDistill, or leave it out."
        expect(not getattr(config, field), field, getattr(config, field), learns, remedy)


def prepare_teacher(
    config: "RunConfig", algorithm: "Algorithm", student: "PreTrainedTokenizerBase"
) -> None:
    """Set `teacher` to its folder: a recipe's is made, a hub's is downloaded. Check its files and its vocabulary.

    Args:
        student: the policy's tokenizer.

    Raises:
        UserError: naming `teacher`.
    """
    for name, more in config.more_teachers.items():
        alone = replace(config, teacher=more, more_teachers={})
        prepare_teacher(alone, algorithm, student)
        config.more_teachers[name] = alone.teacher
    from torchtitan_rl.trainer.weight_files import check_tensors

    try:
        if is_recipe(config.teacher):
            config.teacher = str(_made(config))
        elif is_hub_name(config.teacher):
            config.teacher = str(folder_of(config.teacher))
        folder = Path(config.teacher)
        check_complete(folder)
        spec = teacher_spec(config)
        check_tensors(folder, spec)
        teacher = load_tokenizer(config.teacher)
    except UserError as error:  # the checks are those of the start
        raise UserError(
            str(error).replace("hf_assets_path", "teacher").replace("--hf-assets-path", "--teacher")
        ) from error
    check_same_vocabulary(student, teacher, config.teacher)
    degree = config.trainer.parallelism.tensor_parallel_degree
    attention = spec.model.layers[0].attention
    for size in (
        attention.n_heads,
        attention.n_kv_heads or attention.n_heads,
        spec.model.vocab_size,
    ):
        divided = f"trainer.parallelism.tensor_parallel_degree {degree} divides, but it has {size}"
        expected = f"a model whose heads and vocabulary {divided}"
        expect(size % degree == 0, "teacher", config.teacher, expected, "Use another degree.")
    ours, theirs = config.model_spec.model.vocab_size, spec.model.vocab_size
    if algorithm.policy_loss.divergence_beta is not None:
        _check_exact(config, spec)
    elif config.truncates:
        same = f"a head of the policy's {ours} rows with sampling.top_p, top_k or min_p, but it has {theirs}"
        expect(ours == theirs, "teacher", config.teacher, same, "Sample from the whole vocabulary.")


def _check_exact(config: "RunConfig", spec: "ModelSpec") -> None:
    """Check what the exact divergence needs of the teacher: other weights than LoRA's base, and the same rows on each rank."""
    is_base = config.trainer.lora.rank > 0 and Path(config.teacher).samefile(config.hf_assets_path)
    other = "another model than the base of trainer.lora, from which the loss ExactDistill has nothing to learn"
    expect(
        not is_base,
        "teacher",
        config.teacher,
        other,
        "Use a teacher, or algorithm.kl to stay near the base.",
    )
    ours, theirs = config.model_spec.model.vocab_size, spec.model.vocab_size
    whole = config.trainer.parallelism.tensor_parallel_degree == 1
    same = f"a head of the policy's {ours} rows with trainer.parallelism.tensor_parallel_degree, but it has {theirs}"
    expect(
        whole or ours == theirs,
        "teacher",
        config.teacher,
        same,
        "Use degree 1, or the loss Distill.",
    )


def is_recipe(text: str) -> bool:
    """Whether it names a function that makes a start. Example: is_recipe("my_recipes.py:right_sums")"""
    return ":" in text and "://" not in text and not Path(text).exists()


def _made(config: "RunConfig") -> Path:
    """The folder of the teacher that a recipe makes on the run's task. It is made first if it is missing."""
    return recipe_of(config.teacher, "teacher").checkpoint(config.task.build(), START_CHECKPOINTS)


def check_same_vocabulary(
    student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase", name: str
) -> None:
    """Raise UserError, naming the first token that differs, unless every token id stands for the same text in both."""
    ours, theirs = (
        {token: text for text, token in one.get_vocab().items()} for one in (student, teacher)
    )
    for token in sorted(ours.keys() | theirs.keys()):
        own, other = ours.get(token), theirs.get(token)
        expected = f"the policy's vocabulary, but token {token} is {other!r} for the teacher and {own!r} for the policy"
        expect(own == other, "teacher", name, expected, "Use a teacher of the policy's family.")
