"""Properties that every objective must have. tests/unit_tests/test_dense_update.py compares the loss and gradient of random layouts."""

import pytest

from tests.parts.algorithm import (
    built,
    episodes_of,
    group,
    merge,
    normalizers_of,
    pack,
    policy_like,
    run_loss,
)
from torchtitan_rl.algorithm import KL, Algorithm, Clip, Gspo, MaxEnt, SeqMeanTokenMean, TokenTruncate
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo

OBJECTIVES = {
    "dapo": {"loss": Clip.Config(eps_high=0.28, dual_clip=3.0), "seed_grpo": SeedGrpo.Config()},
    "gspo": {"loss": Gspo.Config(eps_low=0.05, eps_high=0.05), "aggregation": SeqMeanTokenMean.Config()},
    "kl": {"kl": KL.Config(coef=0.1), "entropy_coef": 0.01, "mismatch": TokenTruncate.Config(cap=1.01)},
    "maxent": {"loss": MaxEnt.Config(clip_coef=0.5, tau=0.3)},
}


def metrics_of(algorithm: Algorithm, layouts: list[dict], *, on_policy: bool = False) -> dict[str, float]:
    """The merged metrics of a step, cut into the given micro-batches: three groups of 1 to 9 tokens, one without preference."""
    groups = []
    for prompt_idx, row in enumerate([[1.0, 0.0, 0.25], [0.1, 0.1, 0.1], [0.0, 0.0, 1.0]]):
        lengths = [1 + (4 * prompt_idx + 3 * i) % 9 for i in range(3)]
        logprobs = [tuple(-0.5 - 0.1 * ((t + i) % 4) for t in range(n)) for i, n in enumerate(lengths)]
        groups.append(group(prompt_idx, row, logprobs=logprobs, answer=["4", "5", "4"]))
    reference = [[lp - 0.3 for lp in one.completion.sampler_logprobs.tolist()] for g in groups for one in g.samples]
    episodes = episodes_of(algorithm, *groups, reference=reference)
    extra = {"reference": reference}
    if not on_policy:
        extra["old"] = [(episode.completion.sampler_logprobs + 0.1).tolist() for episode in episodes]
    values, normalizers = policy_like(episodes, 0.2), normalizers_of(algorithm, episodes)
    batches = [pack(episodes, normalizers, **layout, **extra) for layout in layouts]
    return merge([run_loss(algorithm, episodes, values, batch).metrics for batch in batches])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_metrics_are_independent_of_row_order_and_micro_batches(name):
    algorithm = built(**OBJECTIVES[name])
    cut = [{"order": [6, 7, 8]}, {"order": [5, 4, 3], "padding": 2}, {"order": [0, 2, 1]}, {"order": [], "padding": 4}]
    assert metrics_of(algorithm, cut) == pytest.approx(metrics_of(algorithm, [{}]), abs=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_update_is_exactly_on_policy(name):
    metrics = metrics_of(built(**OBJECTIVES[name]), [{}], on_policy=True)
    assert [metrics[f"ratio/{part}"] for part in ("mean", "min", "max")] == [1.0, 1.0, 1.0]
    assert [metrics[f"policy/kl_{k}"] for k in ("k1", "k2", "k3")] == [0.0, 0.0, 0.0]
    assert metrics.get("ratio/clip_fraction", 0.0) == 0.0
