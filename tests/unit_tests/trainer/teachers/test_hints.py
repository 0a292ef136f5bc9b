"""Hints: a teacher that reads more than the policy, and the policy that teaches itself by them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parts.algorithm import dense_divergence, group
from tests.parts.tiny import save_tiny_checkpoint
from tests.parts.tiny_trainer import catch_gradients, scored_step
from tests.unit_tests.algorithm.losses.test_distillation import each_layout, trainer_of
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.distillation import DIVERGENCE, Distill, ExactDistill
from torchtitan_rl.algorithm.losses.loss import TEACHER_LOGPROBS
from torchtitan_rl.errors import UserError
from torchtitan_rl.run.checkpointer import policy_state
from torchtitan_rl.trainer.teachers.exact_teacher import ExactTeacher
from torchtitan_rl.trainer.teachers.frozen_models import PolicyAverage
from torchtitan_rl.trainer.teachers.hints import Hints, column, feedback
from torchtitan_rl.trainer.teachers.sampled_teacher import Teacher, Teachers
from torchtitan_rl.types import Episode, Group, Prompt, flat

ASKED = f"{__name__}:some_hints"


def some_hints(group: Group[Episode]) -> list[str | None]:
    """A hint of its own for each sample but the first, and a shared one for the last two."""
    index, count = group.prompt.prompt_idx, len(group.samples)
    return [None, *(f"{index} of {min(i, count - 2)}" for i in range(1, count))]


def told(prompt: Prompt, hint: str) -> Prompt:
    """The prompt after the characters of its hint."""
    return replace(prompt, token_ids=[*map(ord, hint), *prompt.token_ids])


def hints(asked: str = ASKED, max_tokens: int = 4096) -> Hints:
    row = Prompt(prompt_idx=0, text="", token_ids=[1], expected_answer="7", columns={"solution": "so"})
    return Hints(asked, SimpleNamespace(hinted=told, at=lambda index: row), max_tokens)


@pytest.fixture(scope="module")
def folder(one_rank, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(made)
    return made


def dense_places(one: Group, sample, hint: str | None) -> tuple[torch.Tensor, np.ndarray]:
    """[1, Lp + L] the tokens that a teacher reads, and where it predicts those in the loss."""
    prompt = told(one.prompt, hint or "").token_ids
    ids = torch.tensor([[*prompt, *sample.completion.token_ids]])
    return ids, np.flatnonzero(sample.completion.loss_mask) + len(prompt) - 1


@each_layout
@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
def test_the_policy_teaches_itself_as_dense_float64_does(folder, beta, settings):
    """Divergence and gradient, by enumeration of the vocabulary; the teacher's side has no gradient."""
    made = trainer_of(folder, ExactDistill.Config(beta=beta), **settings)
    of_run = hints()
    teacher = ExactTeacher(made, made.model, of_run)
    caught = catch_gradients(made)
    groups = draft_episodes(scored_step(num_prompts=3))
    of_run.add_logprobs(groups)
    made.algorithm.credit.assign(groups)
    made.update(groups, teacher)
    model, total, count = AutoModelForCausalLM.from_pretrained(folder).double(), 0.0, 0
    for one in groups:
        for sample, hint in zip(one.samples, some_hints(one), strict=True):
            (ids, places), (more, theirs) = (dense_places(one, sample, text) for text in (None, hint))
            p, q = (model(i).logits[0, at] / 0.9 for i, at in ((ids, places), (more, theirs)))  # [n, V]
            found = dense_divergence(p.softmax(-1), q.softmax(-1).detach(), beta)  # [n]
            kept = sample.credit.token_columns[DIVERGENCE][sample.completion.loss_mask]
            np.testing.assert_allclose(kept, found.detach(), rtol=5e-6, atol=1e-6)
            assert hint is None or kept.max() > 1e-3
            total, count = total + found.sum(), count + len(places)
    (total / count).backward()
    exact = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in exact.values())
    assert max(float((caught[name].double() - grad).abs().max()) for name, grad in exact.items()) < 2e-6 * largest


def test_log_nu_is_transformers_under_the_hint_and_held_out_samples_have_theirs(folder):
    groups, of_run = draft_episodes(scored_step(num_prompts=2)), hints()
    of_run.add_logprobs(groups)
    trained = trainer_of(folder, Distill.Config())
    Teacher(trained, trained.model, of_run).add_logprobs(groups)
    model, total, count = AutoModelForCausalLM.from_pretrained(folder), 0.0, 0
    for one in groups:
        for sample, hint in zip(one.samples, some_hints(one), strict=True):
            (ids, places), (more, theirs) = (dense_places(one, sample, text) for text in (None, hint))
            log_q = (model(more).logits[0, theirs] / 0.9).log_softmax(-1)  # [n, V]
            expected = log_q.gather(-1, more[0, theirs + 1, None])[:, 0].detach()  # [n]
            mask = sample.completion.loss_mask
            np.testing.assert_allclose(sample.credit.token_columns[TEACHER_LOGPROBS][mask], expected, rtol=0, atol=1e-5)
            p = (model(ids).logits[0, places] / 0.9).softmax(-1)  # [n, V]
            total, count = total + dense_divergence(p, log_q.exp(), 1.0).sum().item(), count + len(places)
    made = trainer_of(folder, ExactDistill.Config())
    teacher = ExactTeacher(made, made.model, hints())
    assert teacher.measure(groups)[DIVERGENCE] == pytest.approx(total / count, rel=1e-5)


def test_the_average_moves_by_its_rate_once_a_step(folder):
    made = trainer_of(folder, Distill.Config())
    average = PolicyAverage(made, rate=0.25)
    before = {name: value.clone() for name, value in average.tensors().items()}
    assert [name.removeprefix("teacher_average.") for name in before] == [*policy_state(made.model)]
    for step in range(2):
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.add_(1.0)
        average.add_logprobs([])
        moved = 0.25 if step == 0 else 0.25 + 0.25 * (2 - 0.25)
        for name, value in average.tensors().items():
            torch.testing.assert_close((value - before[name]).full_tensor().mean().item(), moved, rtol=1e-5, atol=0)
    assert average.model is not made.model


def test_rows_name_their_teacher(folder):
    """The other one has the policy's weights and a hint, and a row that names nobody is refused."""
    groups, of_run = draft_episodes(scored_step(num_prompts=2)), hints()
    groups[1] = replace(groups[1], prompt=replace(groups[1].prompt, columns={"teacher": "told"}))
    of_run.add_logprobs(groups)
    made = trainer_of(folder, Distill.Config())
    plain, told_one = (Teacher(made, made.model, of) for of in (None, of_run))
    Teachers({"": plain, "told": told_one}).add_logprobs(groups)
    found = [episode.credit.token_columns[TEACHER_LOGPROBS] for episode in flat(groups)]
    plain.add_logprobs(groups[:1]), told_one.add_logprobs(groups[1:])
    for one, again in zip(
        found, [episode.credit.token_columns[TEACHER_LOGPROBS] for episode in flat(groups)], strict=True
    ):
        np.testing.assert_allclose(one, again, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match=r"^the column teacher = 'told': expected one of \[''\]"):
        Teachers({"": plain}).add_logprobs(groups)


def test_a_hint_without_room_is_left_out(folder):
    groups = draft_episodes(scored_step(num_prompts=1))
    lengths = [len(told(groups[0].prompt, text or "").token_ids) for text in some_hints(groups[0])]
    longest = max(n + len(e.completion.token_ids) for n, e in zip(lengths, flat(groups), strict=True))
    for max_tokens, all_fit in ((longest, True), (longest - 1, False)):
        of_run = hints(max_tokens=max_tokens)
        of_run.add_logprobs(groups)
        read = [e.completion.prompt.token_ids for e in flat(of_run.groups(groups))]
        assert (sorted(map(len, read)) == sorted(lengths)) == all_fit


def test_a_row_without_the_column_has_no_hint():
    one = group(0, [1.0, 0.0])
    prompt = replace(one.prompt, columns={"solution": " carry the 1 "}, expected_answer="")
    assert column("solution", replace(one, prompt=prompt)) == ["Hint: carry the 1"] * 2
    assert column("other", one) == [None, None]
    assert column("expected_answer", replace(one, prompt=replace(prompt, expected_answer="7"))) == ["Hint: 7"] * 2


def test_feedback_is_the_best_attempt_and_what_rewards_said():
    [one] = draft_episodes([group(0, [1.0, 0.0, None, 1.0])])
    one.samples[0].scored.extra["feedback"] = "too long"
    best = one.samples[0].completion.text.strip()
    assert feedback(one) == [
        f"Your last answer:\n{best}\nFeedback on it: too long", f"A better answer:\n{best}", None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("soluton", r"^teacher_hint = 'soluton': expected a column with text .* They have \['expected_answer'"),
        ("nowhere.py:told", "^teacher_hint = 'nowhere.py:told': expected a file that exists"),
    ],
)
def test_a_hint_that_is_nowhere_is_named(asked, message):
    with pytest.raises(UserError, match=message):
        hints(asked)


def no_list(group: Group[Episode]) -> list[int]:
    return [1 for _ in group.samples]


def test_a_hint_that_is_no_text_is_named():
    with pytest.raises(UserError, match="teacher_hint = .*no_list': expected a text or None for each of the 4 samples"):
        hints(f"{__name__}:no_list").add_logprobs(draft_episodes(scored_step(num_prompts=1)))
