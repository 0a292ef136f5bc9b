"""Configuration: composed by small pieces, refused with the reason, and importable without vLLM."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import tyro

from torchtitan_rl.algorithm import (
    KL,
    Algorithm,
    Clip,
    Gspo,
    NoCorrection,
    SeqMeanTokenMean,
    SequenceMask,
    TokenMask,
    TokenTruncate,
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Algorithm.Config(entropy_coef=-0.1), r"algorithm\.entropy_coef = -0\.1: expected a number >= 0"),
        (lambda: Algorithm.Config(entropy_coef=float("nan")), r"algorithm\.entropy_coef = nan"),
        (lambda: Algorithm.Config(refill_rounds=0), r"algorithm\.refill_rounds = 0: expected at least 1 round"),
        (
            lambda: Algorithm.Config(old_logprobs="sampler", mismatch=TokenTruncate.Config()),
            r'algorithm\.mismatch = .*expected no correction with old_logprobs "sampler"',
        ),
        (lambda: KL.Config(coef=float("inf")), r"algorithm\.kl\.coef = inf"),
        (lambda: TokenTruncate.Config(cap=0.0), r"algorithm\.mismatch\.cap = 0"),
        (lambda: TokenMask.Config(low=-1.0), r"algorithm\.mismatch\.low = -1"),
        (
            lambda: SequenceMask.Config(low=2.0, high=1.0),
            r"algorithm\.mismatch\.high = 1\.0: expected a number > low \(2",
        ),
    ],
)
def test_illegal_settings_name_the_field_the_value_and_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_building_twice_gives_independent_algorithms():
    config = Algorithm.Config(
        old_logprobs="sampler", mismatch=NoCorrection.Config(), aggregation=SeqMeanTokenMean.Config()
    )
    first, second = config.build(), config.build()
    assert first.config == second.config
    assert first.policy_loss is not second.policy_loss


@dataclass(kw_only=True)
class Job:
    algorithm: Algorithm.Config


def test_dotted_overrides_reach_the_pieces_that_the_config_function_chose():
    default = Job(algorithm=Algorithm.Config(loss=Gspo.Config()))
    arguments = [
        "--algorithm.loss.eps-low",
        "0.01",
        "--algorithm.kl.estimator",
        "k2",
        "--algorithm.zero-variance",
        "drop",
    ]
    job = tyro.cli(Job, args=arguments, default=default, config=(tyro.conf.AvoidSubcommands,))
    assert isinstance(job.algorithm.loss, Gspo.Config)
    assert (job.algorithm.loss.eps_low, job.algorithm.loss.eps_high) == (0.01, 4e-4)
    assert (job.algorithm.kl.estimator, job.algorithm.zero_variance) == ("k2", "drop")


def test_an_impossible_override_is_refused(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(
            Job,
            args=["--algorithm.loss.eps-low", "-3"],
            default=Job(algorithm=Algorithm.Config(loss=Clip.Config())),
            config=(tyro.conf.AvoidSubcommands,),
        )
    assert "algorithm.loss.eps_low = -3.0" in "".join(capsys.readouterr())


def test_importing_needs_neither_vllm_nor_a_process_group():
    code = (
        "import sys; sys.modules['vllm'] = None; import torchtitan_rl.algorithm, torch.distributed as dist; "
        "assert not dist.is_initialized(); print('imported')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "imported"
