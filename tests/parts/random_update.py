"""Random updates: their settings and samples as plain values, and what the project makes of them.

`dense_update` computes the same from the same values. The policy is a tiny model of tokens and positions, so that a token, a
label or a position that the packer puts in the wrong place shows in the gradient. The project's rollouts are cut into traces.
"""

import math
import random
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import torch

from tests.parts.dense_update import Tensors, dense_updates, logits_of
from torchtitan_rl.algorithm import (
    KL,
    Algorithm,
    BatchStd,
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    GroupMean,
    Grpo,
    Gspo,
    MaxEnt,
    MaxRl,
    NoCorrection,
    OffPolicyMask,
    Reinforce,
    Rloo,
    Sapo,
    SeqMeanTokenMean,
    SeqSumConst,
    SequenceMask,
    SequenceTruncate,
    SquaredLogRatio,
    TargetEntropy,
    TokenMask,
    TokenMean,
    TokenTruncate,
    Truncation,
    Vespo,
)
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.models.logprobs import chunked_logprobs
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.trainer import minibatches
from torchtitan_rl.trainer.minibatches import Batcher, split_groups
from torchtitan_rl.types import Completion, Group, Prompt, ScoredCompletion, Trace, TrainBatch, TurnRecord

VOCABULARY, WIDTH, LONGEST = 11, 6, 12
"""Tokens of the vocabulary, size of the hidden state, longest completion."""
BOUND = 1e-5
"""Largest difference of a gradient's element from the reference, relative to the gradient's largest."""
MARGIN = 1e-5
"""A case closer than this to a bound of a clip or mask is not compared: rounding decides on which side it is."""


def random_settings(rng: random.Random) -> dict:
    """The settings of one update, without those that the config refuses together."""
    loss = rng.choice(["clip", "clip", "gspo", "cispo", "reinforce", "maxent", "gmpo", "dppo", "sapo", "vespo"])
    token = loss != "maxent"
    around = rng.choice(["none", "none", "squared", "off_policy", "target_entropy"]) if token else "none"
    clip_coef = rng.choice([0.0, 0.5])
    old = rng.choice(["policy", "policy", "sampler"])
    corrects = old == "policy" and (token or clip_coef > 0)
    kl = token and rng.random() < 0.5
    advantage = rng.choice(["group_mean", "grpo", "batch_std", "rloo", "max_rl"]) if token else "grpo"
    places = ["loss"] if advantage == "max_rl" else ["loss", "reward"]
    return {
        "loss": loss,
        "around": around,
        "advantage": advantage,
        "credit": rng.choice(["episode", "turn"]) if token else "episode",
        "aggregation": rng.choice(["token_mean", "seq_mean", "seq_sum"]),
        "mismatch": rng.choice(["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
        if corrects
        else "none",
        "cap": rng.choice([1.02, 2.0]), "low": rng.choice([0.5, 0.97]), "high": rng.choice([1.03, 5.0]),
        "kl": rng.choice(["k1", "k2", "k3"]),
        "kl_coef": rng.choice([0.04, 0.5]) if kl else 0.0,
        "kl_place": rng.choice(places) if kl else "none",
        "entropy_coef": 0.0 if around == "target_entropy" else rng.choice([0.0, 0.0, 0.01]),
        "truncation": rng.choice(["keep", "mask", "penalty"]),
        "cut_reward": rng.choice([0.0, -0.25]), "cache": rng.choice([None, 3]),
        "zero_variance": rng.choice(["keep", "keep", "drop"]),
        "seed_alpha": rng.choice([None, 0.5]) if token else None,
        "old_logprobs": old,
        "first_update": rng.random() < 0.4,
        "num_minibatches": rng.choice([1, 1, 2]),
        "eps_low": rng.choice([0.05, 0.2]), "eps_high": rng.choice([0.05, 0.28]), "dual": rng.choice([None, 1.5]),
        "floor": rng.choice([None, 0.9]), "cispo_cap": rng.choice([1.1, 5.0]), "delta": rng.choice([0.003, 0.02]),
        "lowest": rng.choice([-5.0, -9.0]),
        "tau": rng.choice([0.3, 1.0]), "beta": rng.choice([0.0, 0.2]), "q_temperature": rng.choice([0.5, 1.0]),
        "q_floor": rng.choice([1e-6, 0.02]), "normalize_reference": rng.random() < 0.5, "normalize_policy": rng.random() < 0.5,
        "neutral": rng.choice(["skip", "uniform"]), "clip_coef": clip_coef,
        "clip_ratio": rng.choice(["token", "sequence"]),
    }  # fmt: skip


def random_case(seed: int) -> tuple[dict, Tensors, Tensors]:
    """One update, the policy, and the policy before it. The sampler is close to the latter, as bfloat16 would be."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = {"tokens": (VOCABULARY, WIDTH), "positions": (32, WIDTH), "head": (VOCABULARY, WIDTH)}

    def model(near: Tensors | None, spread: float) -> Tensors:
        noise = {name: spread * torch.randn(shape, generator=torch_rng).double() for name, shape in shapes.items()}
        return noise if near is None else {name: near[name] + noise[name] for name in shapes}

    policy = model(None, 0.7)
    old, reference = model(policy, 0.05), model(policy, 0.2)
    case = {
        "settings": random_settings(rng),
        "temperature": rng.choice([1.0, 0.7]),
        "limit": LONGEST,
        "groups": [random_group(rng) for _ in range(rng.randint(1, 5))],
    }
    draw_prompts(case["groups"], random.Random(f"prompts of {seed}"))
    sampler = policy if case["settings"]["first_update"] else old
    for group in case["groups"]:
        for sample in group["samples"]:
            for name, of, noise in (("mu", sampler, 0.03), ("reference", reference, 0.0)):
                tokens = torch.tensor([[*sample["prompt"], *sample["tokens"]]])
                log_p = torch.log_softmax(logits_of(of, tokens, case["temperature"]), -1)[0]  # [L, V]
                begin = len(sample["prompt"]) - 1
                found = [
                    log_p[begin + t, token].item() + rng.gauss(0, noise) for t, token in enumerate(sample["tokens"])
                ]
                # The sampler reports 0 for a token that it did not sample; the reference scores every token.
                kept = sample["mask"] if name == "mu" else [True] * len(found)
                sample[name] = [float(np.float32(value)) * keep for value, keep in zip(found, kept)]
    return case, policy, old


def random_group(rng: random.Random) -> dict:
    """A prompt and 2 to 5 samples: of one turn or more, without a reward or tokens, cut, or all with one reward."""
    rewards = rng.choice([[0.0, 1.0], [0.0, 0.5, 1.0], [0.0, 0.3, 1.0], [1.0], [0.1 + 0.2, 0.3], [-2.0, 0.5, None]])
    turns = rng.choice(["none", "none", "none", "random", "pairs"])
    samples = [random_sample(rng, rng.choice(rewards), turns) for _ in range(rng.randint(2, 5))]
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
    return {"prompt": prompt, "limit": rng.choice([LONGEST, LONGEST, 8]), "samples": samples}


def draw_prompts(groups: list[dict], rng: random.Random) -> None:
    """Give each sample its prompt. In a third of the groups some have another one, which may begin as the group's does."""
    for group in groups:
        differs = rng.random() < 0.33
        for sample in group["samples"]:
            sample["prompt"] = group["prompt"]
            if differs and rng.random() < 0.6:
                kept = group["prompt"][: rng.randint(0, len(group["prompt"]))]
                sample["prompt"] = [*kept, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 3)))]


def random_sample(rng: random.Random, reward: float | None, kind: str) -> dict:
    """One completion; a conversation's turns are sampled tokens, each followed by one to three that it only reads.

    Two turns of equal length ("pairs") may have advantages that cancel out in their mean.
    """
    talks = kind != "none"
    turns = [2, 2] if kind == "pairs" else [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    turns = turns if talks else [rng.choice([0, 1, 3, 8, LONGEST])]
    mask: list[bool] = []
    for length in turns:
        mask += [True] * length + [False] * (rng.randint(1, 3) if talks else 0)
    return {
        "tokens": [rng.randrange(VOCABULARY) for _ in mask],
        "mask": mask,
        "turns": turns if talks else [],
        "turn_rewards": [rng.choice([0.0, 0.25, 0.5]) for _ in turns] if talks and reward is not None else [],
        "reward": reward,
        "finish": rng.choice(["stop", "stop", "length", "max_turns"]),
        "answer": rng.choice([None, "4", "5"]),
    }


# The same through the project


def algorithm_of(s: dict) -> Algorithm:
    """The project's objective with these settings."""
    clip = {"eps_low": s["eps_low"], "eps_high": s["eps_high"], "dual_clip": s["dual"]}
    listwise = ("tau", "beta", "q_temperature", "q_floor", "normalize_reference", "normalize_policy", "neutral")
    losses = {
        "clip": lambda: Clip.Config(**clip),
        "gspo": lambda: Gspo.Config(**clip),
        "cispo": lambda: Cispo.Config(cap=s["cispo_cap"], floor=s["floor"]),
        "gmpo": lambda: Gmpo.Config(eps_low=s["eps_low"], eps_high=s["eps_high"]),
        "dppo": lambda: Dppo.Config(cap=s["cispo_cap"], delta_low=s["delta"], delta_high=2 * s["delta"]),
        "sapo": lambda: Sapo.Config(tau_pos=s["tau"], tau_neg=2 * s["tau"]),
        "vespo": lambda: Vespo.Config(k_pos=s["tau"]),
        "reinforce": lambda: Reinforce.Config(),
        "maxent": lambda: MaxEnt.Config(
            **{name: s[name] for name in (*listwise, "clip_coef", "clip_ratio")}, clip=Clip.Config(**clip)
        ),
    }
    around = {
        "none": lambda loss: loss,
        "squared": lambda loss: SquaredLogRatio.Config(loss=loss, coef=0.3),
        "off_policy": lambda loss: OffPolicyMask.Config(loss=loss, delta=s["delta"]),
        "target_entropy": lambda loss: TargetEntropy.Config(loss=loss, target=9.0, step=0.07),
    }
    advantages = {
        "group_mean": GroupMean.Config(), "grpo": Grpo.Config(),
        "batch_std": BatchStd.Config(), "rloo": Rloo.Config(), "max_rl": MaxRl.Config(lowest=s["lowest"]),
    }  # fmt: skip
    aggregates = s["loss"] != "maxent" or s["clip_coef"] > 0  # refused where it has no effect
    aggregations = {"token_mean": TokenMean, "seq_mean": SeqMeanTokenMean, "seq_sum": SeqSumConst}
    cap, band = {"cap": s["cap"]}, {"low": s["low"], "high": s["high"]}
    mismatches = {
        "none": NoCorrection.Config(),
        "token_truncate": TokenTruncate.Config(**cap),
        "token_mask": TokenMask.Config(**band),
        "sequence_truncate": SequenceTruncate.Config(**cap),
        "sequence_mask": SequenceMask.Config(**band),
    }
    place = {} if s["kl_place"] == "none" else {"placement": s["kl_place"]}
    return Algorithm.Config(
        loss=around[s["around"]](losses[s["loss"]]()),
        advantage=advantages[s["advantage"]],
        credit=s["credit"],
        aggregation=aggregations[s["aggregation"] if aggregates else "token_mean"].Config(),
        mismatch=mismatches[s["mismatch"]],
        kl=KL.Config(coef=s["kl_coef"], estimator=s["kl"] if place else "k3", **place),
        entropy_coef=s["entropy_coef"],
        truncation=Truncation.Config(mode=s["truncation"], cut_reward=s["cut_reward"], cache_tokens=s["cache"]),
        zero_variance=s["zero_variance"],
        seed_grpo=None if s["seed_alpha"] is None else SeedGrpo.Config(alpha=s["seed_alpha"]),
        old_logprobs=s["old_logprobs"],
    ).build(max_completion_tokens=LONGEST)


def cut_into_traces(case: dict, rng: random.Random) -> None:
    """Begin a new trace before some turns, with all tokens so far as its context. `dense_updates` has the whole rollouts."""
    for group in case["groups"]:
        for sample in group["samples"]:
            mask = sample["mask"]
            turns = [place for place, is_sampled in enumerate(mask) if is_sampled and not any(mask[place - 1 : place])]
            cuts = [begin for begin in turns[1:] if rng.random() < 0.7]
            sample["trace_of_turns"] = [sum(cut <= begin for cut in cuts) for begin in turns]
            whole = {name: sample[name] for name in ("tokens", "mask", "mu", "reference")}
            sample |= {name: [] for name in whole} | {"traces": []}
            for begin, end in zip([0, *cuts], [*cuts, len(mask)]):
                context = [*sample["prompt"], *whole["tokens"][:begin]] if begin else []
                sample["traces"].append(Trace(begin=len(sample["tokens"]), context_tokens=len(context)))
                for name, values in whole.items():
                    sample[name] += [*(context if name == "tokens" else [0] * len(context)), *values[begin:end]]


def own_prompt(g: int, group: dict, sample: dict) -> Prompt | None:
    if sample["prompt"] == group["prompt"]:
        return None
    return Prompt(prompt_idx=g, text="", token_ids=sample["prompt"], expected_answer="")


def groups_of(case: dict) -> list[Group[ScoredCompletion]]:
    """The case's groups, cut into traces, in the project's types. A group with a limit of its own comes from a mixture's member."""
    return [
        Group(
            prompt=Prompt(
                prompt_idx=g, text="", token_ids=group["prompt"], expected_answer="",
                sampling=None if group["limit"] == LONGEST else SamplingConfig(max_tokens=group["limit"]),
            ),
            samples=[
                ScoredCompletion(
                    completion=Completion(
                        sample_idx=i, policy_version=0, token_ids=sample["tokens"], sampler_logprobs=sample["mu"], text="",
                        loss_mask=sample["mask"], finish_reason=sample["finish"],
                        turns=tuple(
                            TurnRecord(text="", num_tokens=length, trace=trace)
                            for length, trace in zip(sample["turns"], sample["trace_of_turns"])
                        ),
                        traces=tuple(sample["traces"]), prompt=own_prompt(g, group, sample),
                    ),
                    reward=sample["reward"], answer=sample["answer"], turn_rewards=tuple(sample["turn_rewards"]),
                )
                for i, sample in enumerate(group["samples"])
            ],
        )
        for g, group in enumerate(case["groups"])
    ]  # fmt: skip


def random_batcher(algorithm: Algorithm, rng: random.Random) -> Batcher:
    """The trainer's planning and packing, for the first of several ranks."""
    share, read_once = rng.choice([(False, False), (True, False), (True, True)])
    return Batcher(
        algorithm=algorithm,
        max_tokens=rng.choice([24, 60, 1000]),
        num_ranks=rng.choice([1, 1, 2, 3]),
        multiple=rng.choice([1, 8]),
        share_prompts=share,
        read_prompts_once=read_once,
        attention_cost=0.01,
        rank=0,
    )


def score(model: Tensors, batch: TrainBatch, temperature: float, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy [T] of a batch's labels under the tiny model, by the trainer's head."""
    hidden = torch.tanh(model["tokens"][batch.token_ids] + model["positions"][batch.layout.positions])  # [T, D]
    at = batch.loss_mask.nonzero()[:, 0]  # [M]
    found = chunked_logprobs(
        hidden[at], model["head"], batch.labels[at], temperature=temperature, chunk_tokens=chunk, chunk_rows=6
    )
    return tuple(one.new_zeros(len(batch.labels)).index_copy(0, at, one) for one in found)


def project_updates(case: dict, policy: Tensors, old: Tensors, rng: random.Random) -> Iterator[float]:
    """Yields the loss of each mini-batch, whose gradient has just been added to the policy's `grad`."""
    algorithm, settings = algorithm_of(case["settings"]), case["settings"]
    cut_into_traces(case, rng)
    groups = draft_episodes(groups_of(case))
    for group, plain in zip(groups, case["groups"]):
        for episode, sample in zip(group.samples, plain["samples"]):
            episode.reference_logprobs = np.array(sample["reference"], dtype=np.float32)
    if settings["around"] == "target_entropy":
        algorithm.after_update({"policy/entropy": 0.0})
    algorithm.credit.assign(groups)
    batcher, chunk = random_batcher(algorithm, rng), rng.choice([7, 1024])
    for minibatch in split_groups(groups, settings["num_minibatches"]):
        loss = 0.0
        for rank in range(batcher.num_ranks):
            batcher.rank = rank
            with patch.object(minibatches, "LEAST_TOKENS", 1):
                work = batcher.minibatch(minibatch, score_all=False)
            for place, batch in enumerate(work.batches):
                if not settings["first_update"]:
                    batch.pi_old_logprobs = score(old, batch, case["temperature"], chunk)[0].detach()
                with torch.set_grad_enabled(place >= work.num_forward_only):
                    out = algorithm.loss(batch, *score(policy, batch, case["temperature"], chunk))
                if place >= work.num_forward_only:
                    out.loss.backward()
                loss += out.loss.item()
        yield loss


def differences(seed: int) -> list[tuple[float, float]] | None:
    """(loss, gradient): the largest relative differences of each mini-batch of a case; None if it is too close to a bound."""
    case, policy, old = random_case(seed)
    ours = {name: value.to(DEVICE_TYPE).requires_grad_() for name, value in policy.items()}
    theirs = {name: value.clone().requires_grad_() for name, value in policy.items()}
    before = {name: value.to(DEVICE_TYPE) for name, value in old.items()}
    dense = dense_updates(case, theirs, old)
    if min((margin for _, margin in dense), default=math.inf) < MARGIN:
        return None
    found = []
    for loss, (expected, _) in zip(project_updates(case, ours, before, random.Random(seed)), dense, strict=True):
        wanted = torch.autograd.grad(expected, list(theirs.values()), allow_unused=True)
        wanted = torch.cat([torch.zeros(0) if g is None else g.flatten() for g in wanted])
        got = torch.cat([p.grad.cpu().flatten() for p in ours.values()])
        for parameter in ours.values():
            parameter.grad = None
        largest = max(wanted.abs().max().item(), 1e-3)
        of_loss = abs(loss - expected.item()) / max(abs(expected.item()), 1e-2)
        found.append((of_loss, (got - wanted).abs().max().item() / largest))
    return found
