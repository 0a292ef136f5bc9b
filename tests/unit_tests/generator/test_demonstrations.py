"""Demonstrations: which tokens are learned, and the loss and gradient against a dense reference."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parts.tiny import change_adapters, save_tiny_checkpoint
from tests.parts.tiny_trainer import catch_gradients, tiny_trainer
from torchtitan_rl.algorithm import Algorithm, SeqMeanTokenMean
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.sft import Nll
from torchtitan_rl.errors import UserError
from torchtitan_rl.generator.demonstrations import Demonstrations
from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.trainer.teachers.frozen_models import held_out_measures
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.types import Completion, Group, Prompt, ScoredCompletion

MAX_TOKENS = 24
ROWS = [
    ([5, 9, 3], [7, 8, 2], [True, True, True]),
    ([4, 6], [11, 12, 2, 40, 41, 13, 14, 15, 2], [True, True, True, False, False, True, True, True, True]),
    ([100, 101, 102, 103], [20, 2], [True, True]),
    ([9], [30, 31, 32, 33, 34, 35, 2], [False, True, True, True, True, True, True]),
]
"""Prompt, completion and the tokens to learn."""


def prompts() -> list[Prompt]:
    return [
        Prompt(
            prompt_idx=index, text="", token_ids=prompt, expected_answer="",
            demonstration=Completion(
                sample_idx=0, policy_version=0, token_ids=ids, sampler_logprobs=[0.0] * len(ids), text="", finish_reason="stop",
                loss_mask=mask,
            ),
        )
        for index, (prompt, ids, mask) in enumerate(ROWS)
    ]  # fmt: skip


class Alone:
    """The only replica."""

    replica, num_replicas = 0, 1


def scored_groups() -> list[Group[ScoredCompletion]]:
    with Demonstrations(Alone()).step_groups(prompts(), len(ROWS), step=1) as groups:
        groups = list(groups)
    return [Group(prompt=g.prompt, samples=[ScoredCompletion(completion=g.samples[0], reward=None)]) for g in groups]


@pytest.fixture(scope="module")
def folder(one_rank, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(path)
    return str(path)


def build(folder: str, *, max_tokens: int = 4096, lora_rank: int = 0, **algorithm) -> Trainer:
    settings = {"generator_dtype": "float32", "logprob_chunk_tokens": 7, "max_norm": 1e9}
    settings |= {"lora": LoraConfig(rank=lora_rank), "max_tokens_per_microbatch": max_tokens}
    return tiny_trainer(folder, Algorithm.Config(loss=Nll.Config(), **algorithm), **settings)


def update(trainer: Trainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the loss of an update, and its gradients by their Hugging Face names."""
    caught = {} if trainer.lora else catch_gradients(trainer)
    groups = draft_episodes(scored_groups())
    trainer.algorithm.credit.assign(groups)
    metrics = [one for one in trainer.update(groups).metrics if "loss/total" in one]
    weight = sum(one["loss/total"].weight for one in metrics)
    return sum(one["loss/total"].value * one["loss/total"].weight for one in metrics) / weight, caught


def dense(folder: str, *, by_sequence: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """The same in float64 by transformers, a row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    losses = []  # [learned] of each row
    for prompt, ids, mask in ROWS:
        tokens = torch.tensor([prompt + ids])  # [1, Lp + L]
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]  # [Lp + L - 1]
        losses.append(-logprobs[len(prompt) - 1 :][torch.tensor(mask)])
    loss = torch.stack([row.mean() for row in losses]).mean() if by_sequence else torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient's element, relative to the largest element of all."""
    largest = max(float(grad.abs().max()) for grad in expected.values())
    return max(float((found[name].double() - grad).abs().max()) for name, grad in expected.items()) / largest


@pytest.mark.parametrize("max_tokens", [4096, 1], ids=["packed", "one by one"])
@pytest.mark.parametrize("by_sequence", [False, True])
def test_loss_and_gradient_are_a_dense_float64_references(folder, max_tokens, by_sequence):
    aggregation = {"aggregation": SeqMeanTokenMean.Config()} if by_sequence else {}
    loss, grads = update(build(folder, max_tokens=max_tokens, **aggregation))
    expected, of_dense = dense(folder, by_sequence=by_sequence)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert worst(grads, of_dense) < 1e-6


def test_the_held_out_loss_is_the_mean_over_learned_tokens(folder):
    assert held_out_measures(build(folder), prompts(), {})["evaluation/loss"] == pytest.approx(
        dense(folder)[0], rel=1e-6
    )
    unshown = [Prompt(prompt_idx=0, text="", token_ids=[1], expected_answer="")]
    assert held_out_measures(build(folder), unshown, {}) == {}


def test_adapters_learn_from_demonstrations(folder):
    trainer = build(folder, lora_rank=4)
    change_adapters(trainer.model, 1)
    losses = [update(trainer)[0] for _ in range(8)]
    assert losses[-1] < losses[0]


def test_a_prompt_without_a_demonstration_is_named():
    unshown = Prompt(prompt_idx=0, text="What is 1 + 1?", token_ids=[1], expected_answer="")
    groups = Demonstrations(Alone()).step_groups([unshown], 1, step=1)
    with (
        pytest.raises(UserError, match=r"expected a demonstration of every prompt, but 'What is 1 \+ 1\?' has none"),
        groups,
    ):
        pass
