"""The configs of `scripts/results.py`: one function for each cell. All have the task and the start of `debug_in_flight`, or
those of the config that it is given.

Counting tells objectives apart, where the sums do not: it begins at about 20 % and most reach 50 to 58 % in 20 steps.
"""

import os

from torchtitan_rl.algorithm import (
    KL,
    Algorithm,
    Cispo,
    Clip,
    Dppo,
    Gdpo,
    GroupMean,
    Grpo,
    Gspo,
    MaxEnt,
    MaxRl,
    Rloo,
    Sapo,
    SeqMeanTokenMean,
    SeqSumConst,
    SquaredLogRatio,
    TokenMean,
    TokenTruncate,
    maxent_class_defaults,
)
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.debug_tasks import debug_in_flight


def _with(**objective) -> RunConfig:
    """Returns the grid's base with another algorithm: counting, or the config that `results.py --config` names, whose
    mismatch correction stays."""
    name = os.environ.get("RESULTS_CONFIG")
    config = load_config(name) if name else _counting()
    kept = {"mismatch": config.algorithm.mismatch} if name else {}
    config.algorithm = Algorithm.Config(**kept, **objective)
    return config


def _counting() -> RunConfig:
    config = debug_in_flight()
    config.in_flight.prompts = 0
    config.num_steps = 20
    config.evaluation.every = 5
    return config


def grpo() -> RunConfig:
    """GRPO without a KL term."""
    return _with(advantage=Grpo.Config(), aggregation=SeqMeanTokenMean.Config())


def grpo_kl() -> RunConfig:
    """GRPO with a KL term of 0.04."""
    return _with(advantage=Grpo.Config(), aggregation=SeqMeanTokenMean.Config(), kl=KL.Config(coef=0.04))


def dr_grpo() -> RunConfig:
    """Dr. GRPO."""
    return _with(advantage=GroupMean.Config(), aggregation=SeqSumConst.Config())


def dapo() -> RunConfig:
    """DAPO's loss and dynamic sampling, two optimizer steps a batch."""
    config = _with(loss=Clip.Config(eps_high=0.28), aggregation=TokenMean.Config(), zero_variance="refill")
    config.trainer.num_minibatches = 2
    return config


def gspo() -> RunConfig:
    """GSPO, four optimizer steps a batch."""
    config = _with(loss=Gspo.Config(), aggregation=SeqMeanTokenMean.Config())
    config.trainer.num_minibatches = 4
    return config


def cispo() -> RunConfig:
    """CISPO, two optimizer steps a batch."""
    config = _with(loss=Cispo.Config())
    config.trainer.num_minibatches = 2
    return config


def rloo() -> RunConfig:
    """RLOO."""
    return _with(advantage=Rloo.Config())


def dppo() -> RunConfig:
    """DPPO with Kimi K2.5's squared log ratio, as prime-rl's defaults, two optimizer steps a batch."""
    loss = SquaredLogRatio.Config(loss=Dppo.Config())
    config = _with(advantage=GroupMean.Config(), loss=loss, old_logprobs="sampler")
    config.trainer.num_minibatches = 2
    return config


def maxrl() -> RunConfig:
    """MaxRL. A wrong answer gets -1 in counting and in `smollm2`."""
    return _with(advantage=MaxRl.Config(lowest=-1.0))


def gdpo() -> RunConfig:
    """GDPO over the task's reward functions."""
    config = _with(advantage=Gdpo.Config())
    config.algorithm.advantage.weights = dict(config.grader.weights)
    return config


def sapo() -> RunConfig:
    """SAPO, two optimizer steps a batch."""
    config = _with(loss=Sapo.Config(), aggregation=SeqMeanTokenMean.Config())
    config.trainer.num_minibatches = 2
    return config


def maxent() -> RunConfig:
    """MaxEnt-GRPO with the authors' recipe for mathematics."""
    return _with(loss=MaxEnt.Config())


def maxent_plain() -> RunConfig:
    """MaxEnt-GRPO with the defaults of the authors' class: no normalisation, no clip."""
    return _with(loss=maxent_class_defaults())


def seed_grpo() -> RunConfig:
    """SEED-GRPO."""
    return _with(seed_grpo=SeedGrpo.Config(alpha=1.0))


def lora() -> RunConfig:
    """GRPO with LoRA of rank 16, at ten times the learning rate of all weights, but at most 1e-3."""
    config = grpo()
    config.trainer.lora.rank = 16
    config.trainer.optimizer.lr = min(1e-3, 10 * config.trainer.optimizer.lr)
    return config


def in_flight() -> RunConfig:
    """GRPO with half as many groups again in flight, and truncated importance sampling."""
    config = grpo()
    config.in_flight.prompts = config.num_prompts_per_step * 3 // 2
    config.algorithm.mismatch = TokenTruncate.Config()
    return config


def _age(max_age: int) -> RunConfig:
    config = in_flight()
    config.in_flight.prompts = 2 * config.num_prompts_per_step
    config.in_flight.max_age = max_age
    return config


def age_1() -> RunConfig:
    """Two steps' groups in flight, none older than one update."""
    return _age(1)


def age_2() -> RunConfig:
    """Two steps' groups in flight, none older than two updates."""
    return _age(2)


def age_4() -> RunConfig:
    """Two steps' groups in flight, none older than four updates."""
    return _age(4)


def ahead_1() -> RunConfig:
    """GRPO on two ranks, of which one samples one step ahead of the other, and truncated importance sampling."""
    config = grpo()
    config.generator.ranks = config.generator.ahead = 1
    config.algorithm.mismatch = TokenTruncate.Config()
    return config


def ahead_1_in_flight() -> RunConfig:
    """The same with half as many groups again in flight."""
    config = in_flight()
    config.generator.ranks = config.generator.ahead = 1
    return config


def bfloat16() -> RunConfig:
    """GRPO with engine and trainer in bfloat16."""
    config = grpo()
    config.generator.dtype = config.trainer.mixed_precision_param = "bfloat16"
    config.trainer.logprob_gate.max_diff = None
    return config


def ranks_2() -> RunConfig:
    """GRPO on two ranks."""
    return grpo()


def ranks_4() -> RunConfig:
    """GRPO on four ranks."""
    return grpo()
