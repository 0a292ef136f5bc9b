"""Prepares and checks the teacher's checkpoint: a folder, a download, or made by a recipe; with the policy's vocabulary."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.data.task import recipe_of
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.run.hub import folder_of, is_hub_name
from torchtitan_rl.run.start_checkpoint import START_CHECKPOINTS, load_tokenizer, model_in

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.algorithm import Algorithm
    from torchtitan_rl.algorithm.losses.loss import Loss
    from torchtitan_rl.config import RunConfig


def check_asked(config: "RunConfig", loss: "Loss") -> None:
    """Check that a run has a teacher if and only if its loss learns from one, and that the engine's records, which are of the policy's
    prompt, are not asked of another prompt. Raises UserError, naming the field."""
    name, named = type(loss).__qualname__, config.teacher or config.teacher_hint
    if not loss.needs_teacher:
        expected = f"none, as the loss {name} learns from no teacher"
        remedy = "Use the loss Distill or ExactDistill, or leave it out."
        for field in ("teacher", "teacher_hint", "more_teachers"):
            value = getattr(config, field)
            expect(not value, field, value, expected, remedy)
        return
    expected = f"a model, from which the loss {name} learns"
    remedy = (
        "Name its folder, or a model on the hub, or a teacher_hint for the policy to teach itself."
    )
    expect(bool(named), "teacher", "", expected, remedy)
    records = config.truncates or config.generator.router_replay
    expected = "none with sampling.top_p, top_k, min_p or generator.router_replay, which record each token of the policy's prompt"
    hinted = bool(records and config.teacher_hint)
    expect(not hinted, "teacher_hint", config.teacher_hint, expected, "Leave one out.")
    fits = not config.more_teachers or (loss.divergence_beta is None and bool(config.teacher))
    expected = "none without teacher, which the other rows have, and none with the exact divergence, whose packs have one teacher"
    remedy = "Use the loss Distill, and name a teacher."
    expect(fits, "more_teachers", config.more_teachers, expected, remedy)


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
    try:
        if is_recipe(config.teacher):
            recipe = recipe_of(config.teacher, "teacher")
            config.teacher = str(recipe.checkpoint(config.task.build(), START_CHECKPOINTS))
        elif is_hub_name(config.teacher):
            config.teacher = str(folder_of(config.teacher))
        spec, teacher = model_in(Path(config.teacher)), load_tokenizer(config.teacher)
    except UserError as error:
        raise UserError(f"teacher, which is checked like a start: {error}") from error
    check_same_vocabulary(student, teacher, config.teacher)
    _check_model(config, algorithm, spec)


def _check_model(config: "RunConfig", algorithm: "Algorithm", spec: "ModelSpec") -> None:
    """Check that the teacher can be sharded and compared with the policy."""

    def check(holds: bool, expected: str, remedy: str) -> None:
        expect(holds, "teacher", config.teacher, expected, remedy)

    degree = config.trainer.parallelism.tensor_parallel_degree
    attention, rows = spec.model.layers[0].attention, spec.model.vocab_size
    sizes = (attention.n_heads, attention.n_kv_heads or attention.n_heads, rows)
    divided = f"trainer.parallelism.tensor_parallel_degree {degree} divides, but it has {sizes}"
    expected = f"a model whose heads, key-value heads and vocabulary {divided}"
    check(not any(size % degree for size in sizes), expected, "Use another degree.")
    ours, exact = (
        config.model_spec.model.vocab_size,
        algorithm.policy_loss.divergence_beta is not None,
    )
    if exact:
        is_base = config.trainer.lora.rank > 0 and Path(config.teacher).samefile(
            config.hf_assets_path
        )
        expected = "another model than the base of trainer.lora, from which the loss ExactDistill has nothing to learn"
        check(not is_base, expected, "Use a teacher, or algorithm.kl to stay near the base.")
    if (exact and degree > 1) or (config.truncates and not exact):
        why = (
            "trainer.parallelism.tensor_parallel_degree"
            if exact
            else "sampling.top_p, top_k or min_p"
        )
        expected = f"a head of the policy's {ours} rows with {why}, but it has {rows}"
        check(ours == rows, expected, "Use a teacher of the same size, or leave that out.")


def is_recipe(text: str) -> bool:
    """Whether it names a function that makes a start. Example: is_recipe("my_recipes.py:right_sums")"""
    return ":" in text and "://" not in text and not Path(text).exists()


def check_same_vocabulary(
    student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase", name: str
) -> None:
    """Raise UserError, naming the first token that differs, unless every token id stands for the same text in both."""
    ours, theirs = (
        {token: text for text, token in tokenizer.get_vocab().items()}
        for tokenizer in (student, teacher)
    )
    for token in sorted(ours.keys() | theirs.keys()):
        own, other = ours.get(token), theirs.get(token)
        expected = f"the policy's vocabulary, but token {token} is {other!r} for the teacher and {own!r} for the policy"
        expect(own == other, "teacher", name, expected, "Use a teacher of the policy's family.")
