"""sum_digits: its splits, its examples and its one judgement of answers."""

import itertools

import pytest

from torchtitan_rl.configs.toys.sum_digits import SumDigits, debug_task
from torchtitan_rl.data.tasks.procedural import is_held_out
from torchtitan_rl.errors import UserError


@pytest.fixture
def two_integers() -> SumDigits:
    return SumDigits.Config(max_integers=2).build()


def test_splits_of_two_integers_cover_all_and_never_overlap(two_integers):
    pairs = set(itertools.combinations_with_replacement(range(10, 100), 2))
    held_out_pool = {pair for pair in pairs if is_held_out(two_integers.key(pair))}
    assert len(pairs) == 4095
    held_out = {tuple(sorted(e.columns["operands"])) for e in two_integers.held_out_examples(len(held_out_pool))}
    train = {tuple(sorted(two_integers.train_example(i, seed=0).columns["operands"])) for i in range(30_000)}
    assert held_out == held_out_pool
    assert not train & held_out
    assert len(train) > 0.98 * (len(pairs) - len(held_out_pool))
    assert 0.1 < len(held_out_pool) / len(pairs) < 0.15


def test_too_many_held_out_examples_is_an_error_with_a_remedy(two_integers):
    with pytest.raises(UserError, match="evaluation.num_prompts = 600: expected at most .* a larger task.max_integers"):
        two_integers.held_out_examples(600)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[ANSWER] 132", "132"),
        ("so it is [ANSWER]\n132.", "132"),
        ("[ANSWER] 0132", "132"),
        ("[ANSWER] +132 apples", "132"),
        ("[ANSWER] -132", "-132"),
        ("[ANSWER] 132.5", None),
        ("[ANSWER] 1,320", None),
        ("[ANSWER] 122 or [ANSWER] 132", "132"),
        ("[ANSWER] 132 [ANSWER]", None),
        ("132", None),
        ("[ANSWER] " + "9" * 5000, None),
    ],
)
def test_answer_is_extracted_from_a_completion(two_integers, text, answer):
    assert two_integers.extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "correct", "form"),
    [
        ("[ANSWER] 132", 1.0, 0.2),
        ("[ANSWER] 122", -1.0, 0.2),
        ("132", -1.0, 0.0),
        ("[ANSWER] 132 [ANSWER] 132", 1.0, 0.0),
        ("[ANSWER] 122 [ANSWER] 132", 1.0, 0.0),
    ],
)
def test_rewards_are_equal_for_plain_and_chat_completions(two_integers, text, correct, form):
    for completion in (text, [{"role": "assistant", "content": text}]):
        scores = {
            function.__name__: function(prompts=[""], completions=[completion], expected_answer=["132"])
            for function in two_integers.reward_functions()
        }
        assert scores == {"correct": [correct], "format": [form]}


def test_warm_start_exists_only_for_prompts_without_an_instruction(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torchtitan_rl.configs.toys.warm_start.ensure_checkpoint",
        lambda task, recipe, root: (task.config, recipe.name, root),
    )
    assert SumDigits.Config().start_checkpoint(tmp_path) is None
    harder = SumDigits.Config(max_integers=4, instruction="")
    assert harder.start_checkpoint(tmp_path) == (debug_task(), "sums", tmp_path)
