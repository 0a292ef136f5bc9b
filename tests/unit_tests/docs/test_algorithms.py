"""docs/metrics.md is true: its keys are the keys that objectives emit."""

import re

from tests.parts.algorithm import (
    episodes_of,
    group,
    normalizers_of,
    pack,
    policy_like,
    run_loss,
)
from tests.parts.metric_pages import OF_ALGORITHM, pattern
from tests.unit_tests.algorithm.test_invariants import ALGORITHMS
from torchtitan_rl.algorithm import Algorithm, BetaController, MaxEnt, MetaController, TauController


def documented() -> dict[re.Pattern, str]:
    """Each key of docs/metrics.md as a pattern (<...> is a placeholder), with the reductions of its row."""
    rows = re.findall(r"^\| (`.*?) \|.*\| ([\w, ]+) \|$", OF_ALGORITHM, re.MULTILINE)
    patterns = {}
    for keys, reduction in rows:
        for key in re.findall(r"`(.*?)`", keys):
            patterns[pattern(key)] = reduction
    return patterns


def emitted() -> dict[str, str]:
    """Every key that some configuration emits, with its reduction."""
    controllers = {
        "tau_controller": TauController.Config(target=0.5),
        "beta_controller": BetaController.Config(target=0.1, horizon=10),
    }
    configs = list(ALGORITHMS.values())
    configs.append(Algorithm.Config(loss=MaxEnt.Config(beta=0.1, clip_coef=0.1, **controllers)))
    configs.append(
        Algorithm.Config(loss=MaxEnt.Config(meta_controller=MetaController.Config(target_entropy=0.5, target_kl=1)))
    )
    found = {}
    for config in configs:
        algorithm = config.build(max_completion_tokens=300)
        lengths = [2, 40, 70, 130, 260]
        columns = {"answer": ["1", "2", "1", None, None]}
        completions = group(0, [1.0, 0.0, 0.5, 0.0, 1.0], logprobs=[(-1.0,) * n for n in lengths], **columns)
        reference = [[-2.0] * n for n in lengths]
        episodes = episodes_of(algorithm, completions, reference=reference)
        batch = pack(episodes, normalizers_of(algorithm, episodes), reference=reference)
        metrics = run_loss(algorithm, episodes, policy_like(episodes), batch).metrics
        metrics |= algorithm.group_metrics(episodes.groups)
        for _ in range(2):  # the first step of a tau controller moves nothing
            metrics |= algorithm.after_update({key: metrics[key].value for key in algorithm.controller_inputs})
        for key, metric in metrics.items():  # a distribution is shown by its quantiles
            shown = [f"{key}/p{n:02d}" for n in (5, 25, 50, 75, 95)] if metric.reduction == "distribution" else [key]
            found |= dict.fromkeys(shown, metric.reduction)
    return found


def test_every_metric_is_documented_with_its_reduction_and_every_documented_one_exists():
    keys, rows = emitted(), documented()
    for key, reduction in keys.items():
        matching = [row for pattern, row in rows.items() if pattern.fullmatch(key)]
        assert any(reduction in row for row in matching), (
            f"{key} ({reduction}) is not in docs/metrics.md, which says {matching}"
        )
    missing = [pattern.pattern for pattern in rows if not any(pattern.fullmatch(key) for key in keys)]
    assert missing == []
