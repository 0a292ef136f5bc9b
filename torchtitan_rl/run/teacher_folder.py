"""Prepares and checks the teachers' checkpoints: folders, downloads, or made by a recipe; with the policy's vocabulary."""

from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.data.task import recipe_of
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.models.hf_decoder import check_attention
from torchtitan_rl.run.hub import is_hub_name
from torchtitan_rl.run.start_checkpoint import (
    START_CHECKPOINTS,
    load_tokenizer,
    local_folder,
    model_in,
)

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.algorithm import Algorithm
    from torchtitan_rl.algorithm.losses.loss import Loss
    from torchtitan_rl.config import RunConfig


def prepare_teachers(
    config: "RunConfig", algorithm: "Algorithm", student: "PreTrainedTokenizerBase"
) -> None:
    """Set `teacher` and `more_teachers` to their folders: a recipe's is made, a hub's is downloaded. Check files and vocabularies.

    Raises UserError, naming `teacher`.
    """
    for name, teacher in config.more_teachers.items():
        config.more_teachers[name] = _prepared(teacher, config, algorithm, student)
    config.teacher = _prepared(config.teacher, config, algorithm, student)


def _prepared(
    teacher: str, config: "RunConfig", algorithm: "Algorithm", student: "PreTrainedTokenizerBase"
) -> str:
    try:
        is_model = is_hub_name(teacher) or "://" in teacher or Path(teacher).exists()
        if ":" in teacher and not is_model:
            recipe = recipe_of(teacher, "teacher")
            teacher = str(recipe.checkpoint(config.task.build(), START_CHECKPOINTS))
        teacher = str(local_folder(teacher))
        spec, tokenizer = model_in(Path(teacher)), load_tokenizer(teacher)
        check_attention(spec.model, config.trainer.attention)
    except UserError as error:
        raise UserError(f"teacher, which is checked like a start: {error}") from error
    check_same_vocabulary(student, tokenizer, teacher)
    _check_model(teacher, spec, config, algorithm.policy_loss)
    return teacher


def _check_model(teacher: str, spec: "ModelSpec", config: "RunConfig", loss: "Loss") -> None:
    """Check that the teacher can be sharded and compared with the policy."""
    degree = config.trainer.parallelism.tensor_parallel_degree
    attention, rows = spec.model.layers[0].attention, spec.model.vocab_size
    sizes = (attention.n_heads, attention.n_kv_heads or attention.n_heads, rows)
    divided = f"trainer.parallelism.tensor_parallel_degree {degree} divides, but it has {sizes}"
    expected = f"a model whose heads, key-value heads and vocabulary {divided}"
    divides = not any(size % degree for size in sizes)
    expect(divides, "teacher", teacher, expected, "Use another degree.")
    same_rows = rows == config.model_spec.model.vocab_size
    if loss.divergence_beta is None:
        why, fits = "sampling.top_p, top_k or min_p", same_rows or not config.truncates
    else:
        why, fits = "trainer.parallelism.tensor_parallel_degree", same_rows or degree == 1
        lora = config.trainer.lora.rank > 0
        differs = not (lora and Path(teacher).samefile(config.hf_assets_path))
        expected = "another model than the base of trainer.lora, from which the loss ExactDistill has nothing to learn"
        remedy = "Use a teacher, or algorithm.kl to stay near the base."
        expect(differs, "teacher", teacher, expected, remedy)
    expected = f"a head of the policy's {config.model_spec.model.vocab_size} rows with {why}, but it has {rows}"
    remedy = "Use a teacher of the same size, or leave that out."
    expect(fits, "teacher", teacher, expected, remedy)


def check_same_vocabulary(
    student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase", name: str
) -> None:
    """Raise UserError, naming the first token that differs, unless every token id stands for the same text in both."""
    ours = {token: text for text, token in student.get_vocab().items()}
    theirs = {token: text for text, token in teacher.get_vocab().items()}
    for token in sorted(ours.keys() | theirs.keys()):
        own, other = ours.get(token), theirs.get(token)
        expected = f"the policy's vocabulary, but token {token} is {other!r} for the teacher and {own!r} for the policy"
        expect(own == other, "teacher", name, expected, "Use a teacher of the policy's family.")
