"""Configuration: composed by small pieces, refused with the reason, and importable without vLLM."""

import re
import subprocess
import sys

import pytest

from torchtitan_rl.algorithm import (
    KL,
    Algorithm,
    BetaController,
    Cispo,
    Clip,
    Grpo,
    MaxEnt,
    SequenceMask,
    TokenTruncate,
)
from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.field_limits import check_fields

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entropy_coef": -0.1}, "entropy_coef = -0.1: expected at least 0. Use 0.0."),
        ({"entropy_coef": NAN}, "entropy_coef = nan"),
        ({"entropy_coef": INF}, "entropy_coef = inf: expected a finite number"),
        ({"old_logprobs": "sampler", "mismatch": TokenTruncate.Config()}, "mismatch = "),
        ({"advantage": Grpo.Config(std_eps=0.0)}, "advantage.std_eps = 0.0: expected more than 0. Use 0.0001."),
        ({"mismatch": SequenceMask.Config(low=2.0, high=1.0)}, "mismatch.high = 1.0: expected more than 2.0 (low)"),
        ({"loss": Clip.Config(eps_low=1.5)}, "loss.eps_low = 1.5: expected more than 0 and at most 1"),
        ({"loss": Clip.Config(eps_high=28.0)}, "loss.eps_high = 28.0: expected more than 0 and at most 10. Use 0.28"),
        ({"loss": Clip.Config(dual_clip=1.0)}, "loss.dual_clip = 1.0: expected more than 1. Use 3"),
        ({"loss": Cispo.Config(cap=1.2, floor=1.3)}, "loss.floor = 1.3: expected at least 0 and at most 1.2 (cap)"),
        *(
            ({"loss": MaxEnt.Config(**{name: -1.0})}, f"loss.{name} = -1.0")
            for name in ("tau", "beta", "q_temperature")
        ),
        ({"loss": MaxEnt.Config(clip=Clip.Config(eps_low=2.0))}, "loss.clip.eps_low = 2.0"),
        ({"kl": KL.Config(estimator="k4")}, "kl.estimator = 'k4': expected 'k1', 'k2' or 'k3'. Use 'k3'."),
        ({"zero_variance": "dorp"}, "zero_variance = 'dorp'"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, message):
    with pytest.raises(UserError, match=re.escape(f"algorithm.{message}")):
        check_fields(Algorithm.Config(**settings), "algorithm")


def test_beta_with_a_controller_must_not_start_at_0():
    with pytest.raises(UserError, match=r"algorithm\.loss\.beta = 0\.0"):
        MaxEnt.Config(beta_controller=BetaController.Config(target=1.0, horizon=1))


def test_importing_needs_neither_vllm_nor_a_process_group():
    code = (
        "import sys; sys.modules['vllm'] = None; import torchtitan_rl.algorithm, torch.distributed as dist; "
        "assert not dist.is_initialized(); print('imported')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "imported"
