"""Controllers of tau and beta: rules in closed form, warm-up and state."""

import math
from dataclasses import replace

import pytest

from tests.parts.algorithm import built
from torchtitan_rl.algorithm import Algorithm, BetaController, MetaController, TauController, maxent_class_defaults

ENTROPY, KL = "maxent/weight_entropy_with_neutral/mean", "reference/kl_k3"


def algorithm_with(**kwargs) -> Algorithm:
    return built(loss=replace(maxent_class_defaults(), **kwargs))


def values(metrics) -> dict[str, float]:
    return {key: metric.value for key, metric in metrics.items()}


def state(algorithm) -> dict:
    return algorithm.state_dict()["loss"]


def test_tau_follows_the_smoothed_entropy_in_log_space():
    algorithm = algorithm_with(tau=2.0, tau_controller=TauController.Config(target=1.0, learning_rate=0.1))
    algorithm.after_update({ENTROPY: 0.5})  # step 0 is warm-up and moves nothing
    assert state(algorithm) == {"tau": 2.0, "beta": 0.0, "weight_entropy_ema": None, "step": 1}
    first = values(algorithm.after_update({ENTROPY: 0.5}))  # H~ = 0.5: log tau += 0.1 * 0.5
    assert state(algorithm)["tau"] == pytest.approx(2 * math.exp(0.05), abs=1e-12)
    assert (first["maxent/tau_target"], first["maxent/tau_error"]) == (1.0, 0.5)
    second = values(algorithm.after_update({ENTROPY: 1.5}))  # H~ = 0.9 * 0.5 + 0.1 * 1.5 = 0.6
    assert second["maxent/weight_entropy/ema"] == pytest.approx(0.6, abs=1e-12)
    assert state(algorithm)["tau"] == pytest.approx(2 * math.exp(0.05 + 0.04), abs=1e-12)


@pytest.mark.parametrize(("entropy", "expected"), [(0.0, 4.0), (50.0, 0.25)])
def test_tau_stays_within_its_limits(entropy, expected):
    controller = TauController.Config(target=1.0, learning_rate=10.0, min_tau=0.25, max_tau=4.0)
    algorithm = algorithm_with(tau=1.0, tau_controller=controller)
    for _ in range(2):
        algorithm.after_update({ENTROPY: entropy})
    assert state(algorithm)["tau"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("warmup_steps", "first_move"), [(0, 1), (2, 3)])
def test_tau_and_its_entropy_stand_still_during_warm_up(warmup_steps, first_move):
    # As in the authors' trainer: H~ starts at the first entropy after the warm-up.
    algorithm = algorithm_with(tau_controller=TauController.Config(target=1.0, warmup_steps=warmup_steps))
    for step in range(first_move):
        assert algorithm.after_update({ENTROPY: 9.0 + step}) == {}
    metrics = values(algorithm.after_update({ENTROPY: 0.5}))
    assert state(algorithm)["tau"] > 1.0  # H~ is below H*, whatever the warm-up's entropies were
    assert metrics["maxent/weight_entropy/ema"] == 0.5


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.11, 0.5 * (1 + 0.1 / 10)),
        (0.09, 0.5 * (1 - 0.1 / 10)),
        (5.0, 0.5 * (1 + 0.2 / 10)),  # clipped
        (0.0, 0.5 * (1 - 0.2 / 10)),
    ],
)
def test_beta_follows_the_relative_error_of_the_kl(kl, expected):
    algorithm = algorithm_with(beta=0.5, beta_controller=BetaController.Config(target=0.1, horizon=10))
    algorithm.after_update({KL: kl})
    assert state(algorithm)["beta"] == pytest.approx(expected, abs=1e-12)


def test_meta_controller_moves_tau_and_beta_in_place_of_the_others():
    algorithm = algorithm_with(
        tau=1.0,
        beta=0.5,
        tau_controller=TauController.Config(target=9.0),
        beta_controller=BetaController.Config(target=9.0, horizon=1),
        meta_controller=MetaController.Config(target_entropy=1.0, target_kl=0.1, learning_rate=0.5),
    )
    assert algorithm.controller_inputs == (ENTROPY, KL)
    metrics = values(algorithm.after_update({ENTROPY: 0.8, KL: 0.3}))
    assert state(algorithm)["tau"] == pytest.approx(1 - 0.5 * -0.2, abs=1e-12)
    assert state(algorithm)["beta"] == pytest.approx(0.5 + 0.5 * 0.2, abs=1e-12)
    assert [metrics[f"maxent/{name}_target"] for name in ("tau", "beta")] == [1.0, 0.1]


def test_controller_state_dict_restores_everything():
    def make():
        return algorithm_with(
            beta=0.1,
            tau_controller=TauController.Config(target=1.0, warmup_steps=1, start_target=0.2, horizon=5),
            beta_controller=BetaController.Config(target=0.1, horizon=3),
        )

    first, second = make(), make()
    for step in range(3):
        first.after_update({ENTROPY: 0.3 + step, KL: 0.2})
    second.load_state_dict(first.state_dict())
    assert values(first.after_update({ENTROPY: 0.4, KL: 0.3})) == values(second.after_update({ENTROPY: 0.4, KL: 0.3}))
    assert first.state_dict() == second.state_dict()
