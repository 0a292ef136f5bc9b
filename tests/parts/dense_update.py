"""One whole update's loss and gradient, written again in float64 over dense padded rows [N, L].

It imports nothing of the project and shares no formula with it: each is written from docs/papers.md, docs/credit.md and the papers. It
reads the plain values that tests/parts/random_update.py makes.
"""

import math

import torch

Tensors = dict[str, torch.Tensor]


def logits_of(model: Tensors, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """[N, L] tokens -> [N, L, V]: a policy that sees a token and its position."""
    hidden = torch.tanh(model["tokens"][tokens] + model["positions"][: tokens.shape[1]])
    return hidden @ model["head"].T / temperature


def dense_updates(case: dict, model: Tensors, old_model: Tensors) -> list[tuple[torch.Tensor, float]]:
    """The loss of each mini-batch, and its distance from the nearest bound at which its gradient jumps (0-d, float)."""
    settings = case["settings"]
    credit = assign_credit(case)
    learning = [g for g, group in enumerate(credit) if any(sample["in_loss"] for sample in group)]
    parts = min(settings["num_minibatches"], len(learning))
    return [mini_batch(case, credit, learning[part::parts], model, old_model) for part in range(parts)]


# Rewards to advantages


def same(values: list[float]) -> bool:
    """Whether numbers are equal but for rounding."""
    return not values or max(values) - min(values) <= max(1e-8 * max(map(abs, values)), 1e-14)


def returns_of(sample: dict, total: float | None, by_turn: bool) -> list[float | None]:
    """The reward from each turn on; by episode, the total alone."""
    if not by_turn:
        return [total]
    if total is None or not sample["turn_rewards"]:
        return [total] * max(1, len(sample["turns"]))
    return [total - sum(sample["turn_rewards"][:k]) for k in range(len(sample["turn_rewards"]))]


def undecided(rows: list[list[float | None]]) -> bool:
    """Whether a group's returns are equal at every turn."""
    longest = max(map(len, rows), default=0)
    return all(same([row[k] for row in rows if k < len(row) and row[k] is not None]) for k in range(longest))


def assign_credit(case: dict) -> list[list[dict]]:
    """For each sample of each group: in_loss, and the advantage of each of its tokens or its weight."""
    settings, by_turn = case["settings"], case["settings"]["credit"] == "turn"
    credit = []
    for group in case["groups"]:
        found = [shaped(sample, settings, group["limit"]) for sample in group["samples"]]
        raw = [returns_of(s, s["reward"], by_turn) for s in group["samples"]]
        if settings["zero_variance"] != "keep" and undecided(raw):
            for one in found:
                one["in_loss"] = False
        for sample, one in zip(group["samples"], found):
            if one["reward"] is not None and settings["kl_place"] == "reward":
                terms = [estimate(m - r, settings["kl"]) for m, r in sampled(sample, "mu", "reference")]
                one["reward"] -= settings["kl_coef"] * sum(terms)
        credit.append(found)
    (weigh if settings["loss"] == "maxent" else compare)(case, credit)
    return credit


def shaped(sample: dict, settings: dict, limit: int) -> dict:
    """The reward with the penalties for length and cut, and whether the sample is in the loss."""
    length, cut = sum(sample["mask"]), sample["finish"] in ("length", "max_tokens", "max_turns", "time")
    if sample["reward"] is None:
        return {"reward": None, "in_loss": False}
    reward = sample["reward"] + (settings["cut_reward"] if cut else 0.0)
    if settings["truncation"] == "penalty":
        cache = settings["cache"] or max(1, limit // 5)
        over = length - (limit - cache)
        reward -= 0.0 if over <= 0 else min(1.0, over / cache)
    return {"reward": reward, "in_loss": length > 0 and not (cut and settings["truncation"] == "mask")}


def sampled(sample: dict, *names: str) -> list[tuple[float, ...]]:
    """The values of a sample's sampled tokens."""
    return [values for *values, mask in zip(*(sample[name] for name in names), sample["mask"]) if mask]


def estimate(d: float, kind: str) -> float:
    """Schulman's estimators of a divergence, for d = log p - log q of a token from p."""
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def compare(case: dict, credit: list[list[dict]]) -> None:
    """Set each token's advantage: those of the sample's returns among the group's, turn by turn."""
    settings, by_turn = case["settings"], case["settings"]["credit"] == "turn"
    returns = [
        [returns_of(sample, one["reward"], by_turn) for sample, one in zip(group["samples"], found)]
        for group, found in zip(case["groups"], credit)
    ]
    for g, (group, found) in enumerate(zip(case["groups"], credit)):
        factor = 1.0 if settings["seed_alpha"] is None else seed_factor(group["samples"], found, settings["seed_alpha"])
        for i, (sample, one) in enumerate(zip(group["samples"], found)):
            of_turns = [factor * advantage(returns, g, i, k, settings) for k in range(len(returns[g][i]))]
            lengths = [sum(sample["mask"])] if len(of_turns) == 1 else sample["turns"]
            spread = iter([value for value, length in zip(of_turns, lengths) for _ in range(length)])
            one["advantages"] = [next(spread) if mask else 0.0 for mask in sample["mask"]]


def advantage(returns: list, g: int, i: int, k: int, settings: dict) -> float:
    """The advantage of sample i of group g at its k-th return."""
    mine, kind = returns[g][i][k], settings["advantage"]
    at_turn = [[row[k] for row in group if k < len(row) and row[k] is not None] for group in returns]
    group = at_turn[g]
    if mine is None or same(group):
        return 0.0
    if kind == "rloo":
        return mine - (sum(group) - mine) / (len(group) - 1)
    centred = mine - sum(group) / len(group)
    if kind == "group_mean":
        return centred
    if kind == "max_rl":
        return centred / (sum(group) / len(group) - settings["lowest"])
    spread = group if kind == "grpo" else [value for values in at_turn for value in values]
    return centred / (torch.tensor(spread, dtype=torch.float64).std().item() + 1e-4)


def seed_factor(samples: list[dict], found: list[dict], alpha: float) -> float:
    """SEED-GRPO's factor: answers cluster, weighted by e to the mean log-probability."""
    members = [s for s, one in zip(samples, found) if one["reward"] is not None and any(s["mask"])]
    if len(members) < 2:
        return 1.0
    clusters: dict = {}
    for place, sample in enumerate(members):
        mean = sum(m for (m,) in sampled(sample, "mu")) / sum(sample["mask"])
        key = sample["answer"] or place
        clusters[key] = clusters.get(key, 0.0) + math.exp(mean)
    total = sum(clusters.values())
    entropy = -sum(mass / total * math.log(mass / total) for mass in clusters.values())
    return 1 / (1 + alpha / math.log(len(members)) * entropy)


def weigh(case: dict, credit: list[list[dict]]) -> None:
    """MaxEnt's target weights, w ~ q^(1/tau) exp(beta l_ref / tau); its clip loss has the advantage w - 1/G."""
    s = case["settings"]
    for group, found in zip(case["groups"], credit):
        members = [(sample, one) for sample, one in zip(group["samples"], found) if one["in_loss"]]
        if not members:
            continue
        size = len(members)
        p = torch.softmax(
            torch.tensor([one["reward"] for _, one in members], dtype=torch.float64) / s["q_temperature"], 0
        )
        q = p * (1 - size * s["q_floor"]) + s["q_floor"]
        q = q / q.sum()
        neutral = bool(q.max() - q.min() <= 1e-8)
        prior = [sum(r for (r,) in sampled(sample, "reference")) for sample, _ in members]
        if s["normalize_reference"]:
            prior = [value / sum(sample["mask"]) for value, (sample, _) in zip(prior, members)]
        w = torch.softmax((q.log() + s["beta"] * torch.tensor(prior, dtype=torch.float64)) / s["tau"], 0)
        w = torch.full_like(q, 1 / size) if neutral else w
        for (sample, one), weight in zip(members, w.tolist()):
            one["weight"] = weight
            one["advantages"] = [(weight - 1 / size) * mask for mask in sample["mask"]]
            one["in_loss"] = not (neutral and s["neutral"] == "skip")


# The loss


def mini_batch(case: dict, credit: list, groups: list[int], model: Tensors, old_model: Tensors):
    """The loss of the samples of these groups, 0-d, and its margin."""
    s = case["settings"]
    rows = [
        (g, sample["prompt"], sample, one)
        for g in groups
        for sample, one in zip(case["groups"][g]["samples"], credit[g])
        if one["in_loss"]
    ]
    width = max(len(prompt) + len(sample["tokens"]) for _, prompt, sample, _ in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)  # [N, L]
    column = {
        name: torch.zeros(len(rows), width, dtype=torch.float64) for name in ("mask", "mu", "reference", "advantages")
    }
    for n, (_, prompt, sample, one) in enumerate(rows):
        begin, end = len(prompt), len(prompt) + len(sample["tokens"])
        tokens[n, :end] = torch.tensor([*prompt, *sample["tokens"]])
        for name, values in column.items():
            source = one if name == "advantages" else sample
            values[n, begin:end] = torch.tensor(source[name], dtype=torch.float64)
    # column t of the [N, L - 1] tensors below is the token at place t + 1, predicted at t
    mask, mu, reference, advantages = (values[:, 1:] for values in column.values())

    def scored(of: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = torch.log_softmax(logits_of(of, tokens, case["temperature"])[:, :-1], -1)  # [N, L - 1, V]
        taken = log_p.gather(-1, tokens[:, 1:, None])[..., 0]
        return taken, -(log_p.exp() * log_p).sum(-1)  # [N, L - 1] each

    log_pi, entropy = scored(model)
    log_old = log_pi.detach() if s["first_update"] else scored(old_model)[0].detach()
    lengths = mask.sum(1)  # [N], at least 1
    of_row = lambda values: ((values * mask).sum(1) / lengths)[:, None].expand_as(mask)  # noqa: E731
    margins: list[torch.Tensor] = []

    def away(values: torch.Tensor, *bounds: float) -> None:
        margins.extend((values - bound).abs()[mask > 0].min().detach() for bound in bounds)

    weight = importance(s, of_row, (log_old - mu), away)
    base = mu if s["old_logprobs"] == "sampler" else log_old
    counts = {"tokens": mask.sum(), "rows": len(rows), "groups": len({g for g, *_ in rows}), "limit": case["limit"]}

    def gather(losses: torch.Tensor) -> torch.Tensor:
        losses = losses * mask
        if s["aggregation"] == "token_mean":
            return losses.sum() / counts["tokens"]
        if s["aggregation"] == "seq_mean":
            return (losses.sum(1) / lengths).mean()
        return losses.sum() / (counts["rows"] * counts["limit"])

    if s["loss"] == "maxent":
        total = listwise(s, rows, log_pi * mask, lengths, counts["groups"])
        if s["clip_coef"]:
            total = total + s["clip_coef"] * maxent_clip(
                s, log_pi, base, advantages, weight, mask, counts, gather, away
            )
    else:
        losses = token_losses(s, log_pi, base, advantages, of_row, away, mask)
        if s["around"] == "squared":
            losses = losses + 0.3 * (log_pi - base) ** 2
        if s["around"] == "off_policy":
            far = of_row((mu - log_pi).detach())
            away(far, s["delta"])
            losses = losses * ~((advantages < 0) & (far > s["delta"]))
        total = gather(weight * losses)
        if s["around"] == "target_entropy":
            total = total - 0.07 * (entropy * mask).sum() / counts["tokens"]
    if s["kl_place"] == "loss":
        d = log_pi - reference
        each = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[s["kl"]]
        total = total + s["kl_coef"] * gather(each)
    total = total - s["entropy_coef"] * (entropy * mask).sum() / counts["tokens"]
    return total, min(map(float, margins), default=math.inf)


def importance(s: dict, of_row, log_w: torch.Tensor, away) -> torch.Tensor:
    """[N, L - 1] the weight pi_old / mu after the chosen correction."""
    kind = s["mismatch"]
    if kind == "none":
        return torch.ones_like(log_w)
    w = torch.exp((of_row(log_w) if kind.startswith("sequence") else log_w).clamp(-20, 20))
    if kind.endswith("truncate"):
        return torch.minimum(w, torch.tensor(s["cap"]))
    away(w, s["low"], s["high"])
    return w * ((w >= s["low"]) & (w <= s["high"]))


def clipped(
    r: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float | None, away
) -> torch.Tensor:
    """PPO's pessimistic loss of a ratio; with `dual`, bounded where the advantage is negative."""
    away(r, 1 - low, 1 + high, *([] if dual is None else [dual]))
    gain = torch.minimum(r * advantages, r.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual * advantages), gain)
    return -gain


def token_losses(s: dict, log_pi, base, advantages, of_row, away, mask) -> torch.Tensor:
    """[N, L - 1] the loss of each token before the correction."""
    log_ratio = log_pi - base
    if s["loss"] == "reinforce":
        return -advantages * log_pi
    if s["loss"] == "cispo":
        bounded = torch.exp(log_ratio.clamp(-20, 20)).detach().clamp(s["floor"], s["cispo_cap"])
        return -bounded * advantages * log_pi
    if s["loss"] == "dppo":
        rise = (log_pi.exp() - base.exp()).detach()
        away(rise, -s["delta"], 2 * s["delta"])
        kept = torch.where(advantages > 0, rise <= 2 * s["delta"], rise >= -s["delta"])
        return -kept.double() * torch.exp(log_ratio).detach().clamp(max=s["cispo_cap"]) * advantages * log_pi
    if s["loss"] == "sapo":
        tau = torch.where(advantages > 0, torch.tensor(s["tau"]).double(), torch.tensor(2 * s["tau"]).double())
        return -4 / tau * advantages / (1 + torch.exp(-tau * (torch.exp(log_ratio) - 1)))
    if s["loss"] == "vespo":
        w = torch.exp((log_ratio * mask).sum(1, keepdim=True)).detach()
        phi = torch.where(advantages < 0, w**3 * torch.exp(2 - 2 * w), w ** s["tau"] * torch.exp(3 - 3 * w))
        return -phi * advantages * log_pi
    if s["loss"] == "gmpo":
        sign = torch.where(advantages > 0, 1.0, -1.0)
        away(log_ratio, -s["eps_low"], s["eps_high"])
        held = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-s["eps_low"], s["eps_high"]))
        return -torch.exp(of_row(held)) * advantages
    r = torch.exp((of_row(log_ratio) if s["loss"] == "gspo" else log_ratio).clamp(-20, 20))
    return clipped(r, advantages, s["eps_low"], s["eps_high"], s["dual"], away)


def listwise(s: dict, rows: list, log_pi: torch.Tensor, lengths: torch.Tensor, num_groups: int) -> torch.Tensor:
    """MaxEnt's cross-entropy between the weights and the policy's share among a group's samples, mean over groups."""
    scores = log_pi.sum(1) / (lengths if s["normalize_policy"] else 1)  # [N]
    total = torch.zeros((), dtype=torch.float64)
    for g in {row[0] for row in rows}:
        of_group = [n for n, row in enumerate(rows) if row[0] == g]
        w = torch.tensor([rows[n][3]["weight"] for n in of_group], dtype=torch.float64)
        total = total - (w * torch.log_softmax(scores[of_group], 0)).sum()
    return total / num_groups


def maxent_clip(s, log_pi, base, advantages, weight, mask, counts, gather, away) -> torch.Tensor:
    """The clip loss beside the listwise one: by tokens, or by whole sequences, summed over a group."""
    bounds = s["eps_low"], s["eps_high"], s["dual"]
    if s["clip_ratio"] == "token":
        return gather(weight * clipped(torch.exp((log_pi - base).clamp(-20, 20)), advantages, *bounds, away))
    log_s = ((log_pi - base) * mask).sum(1, keepdim=True)
    if s["normalize_policy"]:
        log_s = log_s / mask.sum(1, keepdim=True)
    losses = clipped(torch.exp(log_s.clamp(-20, 20)).expand_as(mask), advantages, *bounds, away) * weight * mask
    return (losses.sum(1) / mask.sum(1)).sum() / counts["groups"]
