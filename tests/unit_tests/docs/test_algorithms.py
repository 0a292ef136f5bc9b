"""docs/algorithms.md and docs/metrics_algorithm.md are true: their examples run, and their keys are the keys."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.parts.algorithm import (
    MAX_TOKENS,
    episodes_of,
    group,
    loss_inputs,
    normalizers_of,
    pack,
    policy_like,
    run_loss,
)
from tests.unit_tests.core.algorithm.test_invariants import ALGORITHMS
from torchtitan_rl.core.algorithm import Algorithm
from torchtitan_rl.core.errors import UserError
from torchtitan_rl.library.maxent import BetaController, MaxEnt, MetaController, TauController
from torchtitan_rl.observability.metrics.reward_stats import group_metrics, participation_metrics

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The code blocks of docs/algorithms.md by the name in their first line, importable under it."""
    blocks = re.findall(r"```python\n# (.*?)\n(.*?)```", (DOCS / "algorithms.md").read_text(), re.DOTALL)
    for name, code in blocks:
        if name.endswith(".py"):
            (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield dict(blocks)
    for name, _ in blocks:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_the_example_of_a_new_loss_runs(examples):
    (usage,) = (code for name, code in examples.items() if name.startswith("in a config function"))
    namespace: dict = {}
    exec(usage, namespace)
    algorithm = namespace["algorithm"]
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    losses = algorithm.policy_loss(loss_inputs(logprobs, advantages=[2.0, -2.0], sequence_ids=[0, 1]))
    assert losses.tolist() == [2.0, -1.0]  # -2 * -1, and 0.25 * 2 * -2
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0]))
    batch = pack(episodes, normalizers_of(algorithm, episodes))
    values = policy_like(episodes)
    loss, metrics = run_loss(algorithm, episodes, values, batch)
    loss.backward()
    assert values[0].grad.tolist() == pytest.approx([-0.5 / 4] * 2)
    assert values[1].grad.tolist() == pytest.approx([0.25 * 0.5 / 4] * 2)
    assert "ratio/mean" in metrics


def test_the_example_of_a_new_advantage_runs(examples):
    median = importlib.import_module("median")
    algorithm = Algorithm.Config(advantage=median.Median.Config()).build(max_completion_tokens=MAX_TOKENS)
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0, 5.0, None]), group(1, [0.1] * 3))
    assert [episode.credit.advantage for episode in episodes] == [0.0, -1.0, 4.0, 0.0, 0.0, 0.0, 0.0]


def test_example_filter_leaves_out_easy_groups_with_its_own_reason(examples):
    filters = importlib.import_module("not_too_easy").NotTooEasy
    algorithm = filters.Config(zero_variance="drop").build(max_completion_tokens=MAX_TOKENS)
    easy = group(0, [1.0] * 4 + [0.0], correct=[True] * 4 + [False])
    hard = group(1, [1.0, 0.0], correct=[True, False])
    equal = group(2, [1.0, 1.0], correct=[True, True])
    step = episodes_of(algorithm, easy, hard, equal)
    reasons = [group.samples[0].credit.left_out for group in step.groups]
    assert reasons == ["filtered", None, "zero variance"]
    metrics = group_metrics(step.groups, algorithm)
    assert metrics["groups/filtered_fraction"].value == pytest.approx(1 / 3)
    assert metrics["groups/zero_variance_fraction"].value == pytest.approx(1 / 3)
    assert participation_metrics(step.groups)["loss/left_out/filtered"].value == pytest.approx(5 / 9)
    with pytest.raises(UserError, match="algorithm.zero_variance = 'keep': .* filter NotTooEasy.has_preference"):
        filters.Config().build(max_completion_tokens=MAX_TOKENS)


def documented() -> dict[re.Pattern, str]:
    """Each key of docs/metrics_algorithm.md as a pattern (<...> is a placeholder), with its reduction."""
    rows = re.findall(r"^\| (`.*?) \|.*\| (\w+) \|$", (DOCS / "metrics_algorithm.md").read_text(), re.MULTILINE)
    patterns = {}
    for keys, reduction in rows:
        for key in re.findall(r"`(.*?)`", keys):
            patterns[re.compile(re.sub(r"<.*?>", "[^/]+", key.replace("+", r"\+")))] = reduction
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
        assert reduction in matching, f"{key} ({reduction}) is not in docs/metrics_algorithm.md, which says {matching}"
    missing = [pattern.pattern for pattern in rows if not any(pattern.fullmatch(key) for key in keys)]
    assert missing == []
