"""debug with other algorithms, each composed of small parts. docs/papers.md has the equations.

All start from debug's checkpoint. They differ from debug in `algorithm` and, where the method needs several optimizer
steps per batch, in `num_minibatches`.
"""

from configs.debug import debug
from torchtitan_rl.core.algorithm import (
    Algorithm,
    Clip,
    GroupMean,
    Grpo,
    SeqMeanTokenMean,
    SeqSumConst,
    TokenMean,
    Truncation,
)
from torchtitan_rl.library.distillation import ExactDistill
from torchtitan_rl.library.maxent import MaxEnt, TauController
from torchtitan_rl.library.objectives import Cispo, Gspo, Rloo
from torchtitan_rl.library.seed_grpo import SeedGrpo
from torchtitan_rl.setup.run_config import RunConfig


def _debug_with(algorithm: Algorithm.Config, *, num_minibatches: int = 1) -> RunConfig:
    config = debug()
    config.algorithm = algorithm
    config.trainer.num_minibatches = num_minibatches
    return config


def debug_dapo() -> RunConfig:
    """DAPO: clip-higher, token mean, soft length penalty, dynamic sampling; 2 optimizer steps per batch."""
    return _debug_with(
        Algorithm.Config(
            advantage=Grpo.Config(),
            loss=Clip.Config(eps_low=0.2, eps_high=0.28),
            aggregation=TokenMean.Config(),
            truncation=Truncation.Config(mode="penalty"),
            zero_variance="refill",
        ),
        num_minibatches=2,
    )


def debug_dr_grpo() -> RunConfig:
    """Dr.GRPO: advantages are not divided by the std, and the loss is a token sum with a constant divisor."""
    return _debug_with(Algorithm.Config(advantage=GroupMean.Config(), aggregation=SeqSumConst.Config()))


def debug_rloo() -> RunConfig:
    """RLOO: the baseline of a completion is the mean reward of the others in its group."""
    return _debug_with(Algorithm.Config(advantage=Rloo.Config()))


def debug_gspo() -> RunConfig:
    """GSPO: one ratio per sequence, clipped tightly; 4 optimizer steps per batch, so that the ratio differs from 1."""
    return _debug_with(
        Algorithm.Config(advantage=Grpo.Config(), loss=Gspo.Config(), aggregation=SeqMeanTokenMean.Config()),
        num_minibatches=4,
    )


def debug_cispo() -> RunConfig:
    """CISPO: the clipped ratio is a weight without gradient, so no token drops out; 4 optimizer steps per batch."""
    return _debug_with(Algorithm.Config(advantage=Grpo.Config(), loss=Cispo.Config()), num_minibatches=4)


def debug_maxent() -> RunConfig:
    """MaxEnt-GRPO: the loss pulls the policy's distribution over a group towards weights with a controlled entropy."""
    return _debug_with(
        Algorithm.Config(loss=MaxEnt.Config(tau=0.5, beta=0.05, tau_controller=TauController.Config(target=1.5)))
    )


def debug_seed_grpo() -> RunConfig:
    """SEED-GRPO: advantages are scaled down in groups whose answers disagree."""
    return _debug_with(Algorithm.Config(advantage=Grpo.Config(), seed_grpo=SeedGrpo.Config()))


def debug_distill() -> RunConfig:
    """A teacher that only makes right sums instead of rewards: the divergence from it over the whole vocabulary. docs/imitation.md.

    The first run makes the teacher, as it makes the policy's start.
    """
    config = _debug_with(Algorithm.Config(loss=ExactDistill.Config()))
    config.teacher = "torchtitan_rl.library.starts.answer_recipes:right_sums"
    config.num_prompts_per_step = 128
    config.sampling.n = 1  # nothing is compared within a group: as many samples of more prompts teach more
    config.num_steps = 8
    config.trainer.optimizer.lr = 3e-4
    config.trainer.lr_scheduler.warmup_steps = 1
    config.evaluation.every = 2
    return config
