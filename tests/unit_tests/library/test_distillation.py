"""`Distill` and `Teacher`: a frozen model's log-probabilities of the policy's samples become advantages."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from transformers import AutoModelForCausalLM

from tests.integration.invariance import MAX_TOKENS, scored_step
from tests.parts.algorithm import episodes_of, group, normalizers_of, run_loss
from tests.parts.tiny import save_tiny_checkpoint, tiny_spec
from torchtitan_rl.core.algorithm import Algorithm
from torchtitan_rl.core.algorithm.episodes import draft_episodes
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.core.trainer import packing
from torchtitan_rl.core.trainer.trainer import Trainer
from torchtitan_rl.core.types import flat
from torchtitan_rl.library.distillation import LOGPROBS, Distill, Teacher

TEACHER = [(-0.5, -2.0), (-1.5, -0.1)]
"""Log nu of the tokens of two completions; log mu is -1 for all of them."""


def taught(groups, teacher=TEACHER, **loss):
    """The algorithm, its credited episodes and their packed batch."""
    algorithm = Algorithm.Config(loss=Distill.Config(**loss)).build(max_completion_tokens=MAX_TOKENS)
    drafted = draft_episodes(groups)
    for episode, values in zip(flat(drafted), teacher, strict=True):
        episode.credit.token_columns[LOGPROBS] = np.array(values, dtype=np.float32)
    algorithm.assign_credit(drafted)
    step = episodes_of(Algorithm.Config().build(max_completion_tokens=MAX_TOKENS))
    step.extend(flat(drafted))
    step.groups, step.members = drafted, [m for g in drafted for m in packing.items_of([g], whole_groups=True)[0]]
    columns = algorithm.policy_loss.token_columns
    normalizers = normalizers_of(algorithm, step)
    return algorithm, step, packing.pack(step.members, normalizers=normalizers, multiple=16, token_columns=columns)


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


def test_a_teacher_that_agrees_with_the_sampler_teaches_nothing():
    algorithm, step, batch = taught([group(0, [1.0, 0.0])], teacher=[(-1.0, -1.0)] * 2)
    values = [torch.tensor([-1.0, -1.0], requires_grad=True) for _ in step]
    run_loss(algorithm, step, values, batch)[0].backward()
    assert all(value.grad.abs().max() == 0 for value in values)


@pytest.mark.parametrize("choice", ["drop", "refill"])
def test_equal_rewards_are_not_dropped(choice):
    with pytest.raises(UserError, match="algorithm.zero_variance"):
        Algorithm.Config(loss=Distill.Config(), zero_variance=choice)


def test_one_sample_needs_no_group_unless_rewards_are_added():
    Algorithm.Config(loss=Distill.Config()).build(max_completion_tokens=8).validate_sampling(1)
    with pytest.raises(UserError, match=r"sampling\.n"):
        Algorithm.Config(loss=Distill.Config(rewards=True)).build(max_completion_tokens=8).validate_sampling(1)


def test_the_teacher_scores_the_students_samples_as_transformers_does(tmp_path):
    student, teacher = tmp_path / "student", tmp_path / "teacher"
    student.mkdir(), teacher.mkdir()
    save_tiny_checkpoint(student)
    save_tiny_checkpoint(teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(teacher)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = draft_episodes(scored_step(num_prompts=2))
        Teacher(trainer_of(student), tiny_spec(), teacher).score(groups)
    finally:
        dist.destroy_process_group()
    for one in groups:
        for episode in one.samples:
            ids = torch.tensor([[*one.prompt.token_ids, *episode.completion.token_ids]])  # [1, Lp + L]
            logp = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]  # [Lp + L - 1]
            expected = logp[len(one.prompt.token_ids) - 1 :].detach().numpy() * episode.completion.loss_mask  # [L]
            np.testing.assert_allclose(episode.credit.token_columns[LOGPROBS], expected, rtol=0, atol=1e-5)


def trainer_of(folder: Path) -> Trainer:
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    set_spmd_backend(parallelism.spmd_backend)
    return Trainer.Config(parallelism=parallelism, mixed_precision_param="float32").build(
        model_spec=tiny_spec(),
        hf_assets_path=str(folder),
        parallel_dims=ParallelDims.from_config(parallelism, 1),
        algorithm=Algorithm.Config(loss=Distill.Config()).build(max_completion_tokens=MAX_TOKENS),
        num_steps=10,
        max_model_len=64,
        temperature=1.0,
        generator_dtype="float32",
        dump_folder="",
    )
