"""The source of OptimalBaseline on a tiny policy: two forwards give the sum of squared probabilities."""

import torch

from tests.parts.tiny import save_tiny_checkpoint
from tests.parts.tiny_trainer import scored_step, tiny_trainer
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.optimal_baseline import LOG_COLLISIONS, LOGPROBS
from torchtitan_rl.models.score import attention_masks
from torchtitan_rl.trainer.teachers.frozen_models import Collisions
from torchtitan_rl.types import SegmentLayout


def test_two_temperatures_give_the_sum_of_squared_probabilities(one_rank, tmp_path):
    save_tiny_checkpoint(tmp_path)
    trainer = tiny_trainer(str(tmp_path))
    groups = draft_episodes(scored_step())
    Collisions(trainer).add_logprobs(groups)
    for group in groups[:2]:
        episode = group.samples[0]
        sampled = episode.completion.loss_mask  # [L]
        tokens = torch.tensor([*group.prompt.token_ids, *episode.completion.token_ids], dtype=torch.int64)
        layout = SegmentLayout.of([len(tokens)], device="cpu")
        model = trainer.model
        with torch.no_grad(), model.lm_head.computing(lambda found: found.hidden @ found.weight.T):
            logits = model(tokens[None], layout.positions[None], attention_masks(model, layout))  # [T, V]
        logp = (logits / trainer.temperature).log_softmax(-1)[len(group.prompt.token_ids) - 1 : -1]  # [L, V]
        taken = logp.gather(1, tokens[len(group.prompt.token_ids) :, None])[:, 0].numpy()  # [L]
        columns = episode.credit.token_columns
        torch.testing.assert_close(
            torch.tensor(columns[LOGPROBS][sampled]), torch.tensor(taken[sampled]), rtol=1e-4, atol=1e-5
        )
        squares = logp.exp().square().sum(1).log()[sampled.tolist()]  # [num_sampled]
        torch.testing.assert_close(torch.tensor(columns[LOG_COLLISIONS][sampled]), squares, rtol=1e-4, atol=1e-4)
