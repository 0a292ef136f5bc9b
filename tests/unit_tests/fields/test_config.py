"""Configuration: composed by small pieces, refused with the reason, and importable without vLLM."""

import re
import subprocess
import sys

import pytest

from torchtitan_rl.algorithm import (
    KL,
    Algorithm,
    BetaController,
    Clip,
    MaxEnt,
    SequenceMask,
    TokenTruncate,
)
from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.field_limits import check_fields


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"old_logprobs": "sampler", "mismatch": TokenTruncate.Config()}, "mismatch = "),
        ({"mismatch": SequenceMask.Config(low=2.0, high=1.0)}, "mismatch.high = 1.0: expected more than 2.0 (low)"),
        ({"loss": Clip.Config(eps_high=28.0)}, "loss.eps_high = 28.0: expected more than 0 and at most 10. Use 0.28"),
        ({"loss": MaxEnt.Config(clip=Clip.Config(eps_low=2.0))}, "loss.clip.eps_low = 2.0"),
        ({"kl": KL.Config(estimator="k4")}, "kl.estimator = 'k4': expected 'k1', 'k2' or 'k3'. Use 'k3'."),
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
