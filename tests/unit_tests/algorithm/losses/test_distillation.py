"""`Distill` and `Teacher`: a frozen model's log-probabilities of the policy's samples become advantages."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parts.algorithm import built, dense_divergence, episodes_of, group, normalizers_of, run_loss
from tests.parts.tiny import DIMENSIONS, save_tiny_checkpoint, tiny_spec
from tests.parts.tiny_trainer import catch_gradients, scored_step, tiny_trainer
from torchtitan_rl.algorithm import Algorithm, Loss
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.distillation import DIVERGENCE, Distill, ExactDistill
from torchtitan_rl.algorithm.losses.loss import TEACHER_LOGPROBS, TEACHER_TOKEN
from torchtitan_rl.configs.toys.small_models import new_hf_model, small_qwen3
from torchtitan_rl.errors import UserError
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.trainer import minibatches, packing
from torchtitan_rl.trainer.teachers.exact_teacher import ExactTeacher
from torchtitan_rl.trainer.teachers.sampled_teacher import Teacher
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.types import flat

TEACHER = [(-0.5, -2.0), (-1.5, -0.1)]
"""Log nu of the tokens of two completions; log mu is -1 for all of them."""


def taught(groups, teacher=TEACHER, **loss):
    """The algorithm, its credited episodes and their packed batch."""
    algorithm = built(loss=Distill.Config(**loss))
    drafted = draft_episodes(groups)
    for episode, values in zip(flat(drafted), teacher, strict=True):
        episode.credit.token_columns[TEACHER_LOGPROBS] = np.array(values, dtype=np.float32)
    algorithm.credit.assign(drafted)
    step = episodes_of(built())
    step.extend(flat(drafted))
    step.groups, step.members = drafted, [m for g in drafted for m in minibatches.items_of([g], whole_groups=True)[0]]
    normalizers = normalizers_of(algorithm, step)
    columns = algorithm.policy_loss.reads
    batch = packing.pack(step.members, normalizers=normalizers, multiple=16, columns=columns)
    return algorithm, step, batch


def gradients(groups, **loss):
    """The gradient of the mean token loss to log pi of each token; pi is mu. And the metrics."""
    algorithm, step, batch = taught(groups, **loss)
    values = [torch.tensor([-1.0, -1.0], requires_grad=True) for _ in step]
    share, metrics = run_loss(algorithm, step, values, batch)
    share.backward()
    return torch.stack([value.grad for value in values]), metrics


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [None, None]])
def test_equal_rewards_and_none_learn_from_the_teacher(rewards):
    found, metrics = gradients([group(0, rewards)])
    log_ratios = -1.0 - torch.tensor(TEACHER)  # log mu - log nu
    torch.testing.assert_close(found, log_ratios / 4)
    assert metrics["teacher/kl_k1"].value == pytest.approx(log_ratios.mean().item())
    assert metrics["teacher/prefers_fraction"].value == 0.5


def test_rewards_are_added_on_request_alone():
    alone, _ = gradients([group(0, [1.0, 0.0])], coef=0.5)
    both, _ = gradients([group(0, [1.0, 0.0])], coef=0.5, rewards=True)
    advantages = torch.tensor([[1.0], [-1.0]]) * 0.5**0.5  # of GRPO
    torch.testing.assert_close(alone, 0.5 * (-1.0 - torch.tensor(TEACHER)) / 4)
    torch.testing.assert_close(both, alone - advantages / 4, rtol=1e-3, atol=0)


def test_the_teacher_scores_the_students_samples_as_transformers_does(one_rank, tmp_path):
    student, teacher = tmp_path / "student", tmp_path / "teacher"
    student.mkdir(), teacher.mkdir()
    save_tiny_checkpoint(student)
    save_tiny_checkpoint(teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(teacher)
    groups = draft_episodes(scored_step(num_prompts=2))
    Teacher.of_folder(trainer_of(student), tiny_spec(), teacher).add_logprobs(groups)
    for one in groups:
        for episode in one.samples:
            ids = torch.tensor([[*one.prompt.token_ids, *episode.completion.token_ids]])  # [1, Lp + L]
            logp = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]  # [Lp + L - 1]
            expected = logp[len(one.prompt.token_ids) - 1 :].detach().numpy() * episode.completion.loss_mask  # [L]
            np.testing.assert_allclose(episode.credit.token_columns[TEACHER_LOGPROBS], expected, rtol=0, atol=1e-5)


def test_the_teacher_is_normalised_over_the_tokens_that_the_sampler_kept(one_rank, tmp_path):
    save_tiny_checkpoint(tmp_path)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    groups = draft_episodes(scored_step(num_prompts=1))
    rng = np.random.default_rng(0)
    for episode in groups[0].samples:
        completion = episode.completion
        kept = rng.random((len(completion.token_ids), model.config.vocab_size)) < 0.5  # [L, V]
        kept[np.arange(len(kept)), completion.token_ids] = True
        before, after = np.ones((len(groups[0].prompt.token_ids) - 1, kept.shape[1])), np.ones((1, kept.shape[1]))
        records = np.packbits(np.concatenate([before, kept, after]).astype(bool), axis=1, bitorder="little")
        object.__setattr__(completion, "sampler_records", records)  # [Lp + L, V / 8]
        ids = torch.tensor([[*groups[0].prompt.token_ids, *completion.token_ids]])
        logits = model(ids).logits[0, len(groups[0].prompt.token_ids) - 1 : -1] / 0.9  # [L, V]
        logp = logits.masked_fill(~torch.from_numpy(kept), -torch.inf).log_softmax(-1)
        expected = logp.gather(-1, ids[0, -len(kept) :, None])[:, 0].detach().numpy()  # [L]
        episode.credit.token_columns["expected"] = expected * completion.loss_mask
    Teacher.of_folder(trainer_of(tmp_path, Distill.Config()), tiny_spec(), tmp_path).add_logprobs(groups)
    for episode in groups[0].samples:
        columns = episode.credit.token_columns
        np.testing.assert_allclose(columns[TEACHER_LOGPROBS], columns["expected"], rtol=0, atol=1e-5)


each_layout = pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens_per_microbatch": 4096},
        {"max_tokens_per_microbatch": 40},
        {"max_tokens_per_microbatch": 40, "parallelism": "always"},
        {"max_tokens_per_microbatch": 40, "parallelism": "never"},
    ],
    ids=["packed", "micro-batches", "always", "never"],
)


@pytest.fixture(scope="module")
def folders(one_rank, tmp_path_factory):
    """A student and a teacher of other sizes, whose head has 8 rows more."""
    student, teacher = (tmp_path_factory.mktemp(name) for name in ("student", "teacher"))
    save_tiny_checkpoint(student)
    torch.manual_seed(1)
    sizes = small_qwen3(**DIMENSIONS | {"vocab_size": 136, "dim": 32, "n_layers": 3})
    new_hf_model(sizes, tie_word_embeddings=False, initializer_range=0.3).save_pretrained(teacher)
    return student, teacher, spec_from_folder(teacher)


def exact_update(folders, beta, **trainer) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, mean divergence and gradients, by their Hugging Face names, of one update over a step of 12 samples."""
    student, teacher, spec = folders
    made = trainer_of(student, ExactDistill.Config(beta=beta), **trainer)
    exact = ExactTeacher(made, made.loader.frozen(spec, teacher))
    caught = catch_gradients(made)
    groups = draft_episodes(scored_step(num_prompts=3))
    made.algorithm.credit.assign(groups)
    found = [one for one in made.update(groups, exact).metrics if "teacher/divergence" in one]
    means = []
    for key in ("loss/total", "teacher/divergence"):
        weight = sum(one[key].weight for one in found)
        means.append(sum(one[key].value * one[key].weight for one in found) / weight)
    kept = np.concatenate([e.credit.token_columns[DIVERGENCE][e.completion.loss_mask] for e in flat(groups)])
    assert kept.mean() == pytest.approx(means[1], rel=1e-5)
    return *means, caught


def dense_exact(folders, beta) -> tuple[float, dict[str, torch.Tensor]]:
    """The same in float64 by transformers, one sample at a time, by the divergences' definitions."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder).double() for folder in folders[:2])
    total, count = 0.0, 0
    for one in scored_step(num_prompts=3):
        for sample in one.samples:
            ids = torch.tensor([[*one.prompt.token_ids, *sample.completion.token_ids]])  # [1, Lp + L]
            places = np.flatnonzero(sample.completion.loss_mask) + len(one.prompt.token_ids) - 1
            p, q = ((m(ids).logits[0, places, :128] / 0.9).softmax(-1) for m in (student, teacher))  # [n, V] each
            total = total + dense_divergence(p, q.detach(), beta).sum()
            count += len(places)
    (total / count).backward()
    return (total / count).item(), {name: p.grad for name, p in student.named_parameters()}


@each_layout
@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
def test_the_exact_loss_and_gradient_are_a_dense_float64_references(folders, beta, settings):
    loss, mean, grads = exact_update(folders, beta, **settings)
    expected, exact = dense_exact(folders, beta)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert mean == pytest.approx(expected, rel=1e-6)
    largest = max(float(grad.abs().max()) for grad in exact.values())
    assert max(float((grads[name].double() - grad).abs().max()) for name, grad in exact.items()) < 1e-6 * largest


def test_samples_keep_the_divergence_of_each_token_and_their_mean_is_that_of_held_out_samples(folders):
    student, teacher, spec = folders
    made = trainer_of(student, ExactDistill.Config(), max_tokens_per_microbatch=40)
    exact = ExactTeacher(made, made.loader.frozen(spec, teacher))
    groups = draft_episodes(scored_step(num_prompts=3))
    found = exact.measure(groups)[DIVERGENCE]
    assert found == pytest.approx(dense_exact(folders, 1.0)[0], rel=1e-6)
    model, total, count = AutoModelForCausalLM.from_pretrained(teacher).double(), 0.0, 0
    for one in groups:
        for episode in one.samples:
            ids = torch.tensor([[*one.prompt.token_ids, *episode.completion.token_ids]])  # [1, Lp + L]
            best = model(ids).logits[0, len(one.prompt.token_ids) - 1 : -1, :128].argmax(-1).numpy()  # [L]
            mask, columns = episode.completion.loss_mask, episode.credit.token_columns
            np.testing.assert_array_equal(columns[TEACHER_TOKEN][mask], best[mask])
            total += columns[DIVERGENCE][mask].sum()
            count += mask.sum()
    assert found == pytest.approx(total / count, rel=1e-6)


def test_off_policy_distillation_has_the_datas_completions():
    algorithm = built(loss=ExactDistill.Config(demonstrations=True))
    assert not algorithm.policy_loss.from_engine
    algorithm.validate_sampling(1)
    with pytest.raises(UserError, match=r"^sampling.n = 2: expected 1 with a loss of demonstrations"):
        algorithm.validate_sampling(2)


def trainer_of(folder: Path, loss: Loss.Config | None = None, *, parallelism: str = "default", **settings) -> Trainer:
    """Without a loss its samples are the policy's own."""
    made_up = {"temperature": 0.9} if loss else {"generator_dtype": "float32"}
    settings = {"logprob_chunk_tokens": 7, "max_norm": 1e9} | made_up | settings
    return tiny_trainer(str(folder), Algorithm.Config(loss=loss or Distill.Config()), parallelism, **settings)
