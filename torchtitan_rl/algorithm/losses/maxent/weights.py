"""Target weights of the listwise loss: pure functions of one group's rewards and reference log-probabilities."""

import math

NEUTRAL_SPREAD = 1e-8
"""A group is neutral if max q - min q is at most this."""


def softmax(logits: list[float], temperature: float) -> list[float]:
    """Returns exp(x_i / temperature) / sum for temperature > 0.

    The maximum is subtracted before the division, so a tiny temperature gives the arg-max set instead of inf - inf.
    """
    largest = max(logits)
    masses = [math.exp((logit - largest) / temperature) for logit in logits]
    total = math.fsum(masses)
    return [mass / total for mass in masses]


def reward_distribution(rewards: list[float], temperature: float, floor: float) -> list[float]:
    """Returns q_i = (p_i (1 - G floor) + floor) / sum, with p = softmax(u / max(temperature, 1e-8)) for rewards u."""
    size = len(rewards)
    floored = [p * (1 - size * floor) + floor for p in softmax(rewards, max(temperature, 1e-8))]
    total = math.fsum(floored)
    return [mass / total for mass in floored]


def is_neutral(q: list[float]) -> bool:
    """Returns whether the rewards prefer none of the group's completions."""
    return max(q) - min(q) <= NEUTRAL_SPREAD


def listwise_weights(
    q: list[float], reference: list[float] | None, tau: float, beta: float
) -> list[float]:
    """Returns w = softmax((log q + beta l_ref) / tau), i.e. w ~ q^(1/tau) exp(l_ref)^(beta/tau); uniform if neutral.

    Args:
        q: [G] from `reward_distribution`.
        reference: [G] l_ref, the reference's log-probability of each completion; unused for beta = 0.
        tau: > 0. The weights become uniform as tau goes to infinity, and cover only the arg-max set as it goes to 0.
        beta: >= 0.
    """
    if is_neutral(q):
        return [1 / len(q)] * len(q)
    logits = [math.log(mass) if mass > 0 else -math.inf for mass in q]
    if beta > 0:
        logits = [logit + beta * prior for logit, prior in zip(logits, reference, strict=True)]
    return softmax(logits, tau)


def entropy(weights: list[float]) -> float:
    """Returns H(w) = -sum w log w, in nats."""
    return -math.fsum(weight * math.log(weight) for weight in weights if weight > 0)
