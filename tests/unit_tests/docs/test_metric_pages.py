"""The page of metrics has every key that runs log, and no other. Integration tests check every line of their runs, too."""

import re
from pathlib import Path

from tests.parts.algorithm import episodes_of, group, normalizers_of, pack, policy_like, run_loss
from tests.parts.metric_pages import OF_ALGORITHM, RUN, documented_keys, pattern, undocumented
from torchtitan_rl.algorithm import (
    KL,
    Algorithm,
    BetaController,
    Cispo,
    Clip,
    Gspo,
    MaxEnt,
    MetaController,
    SequenceTruncate,
    TauController,
    TokenMask,
    TokenTruncate,
    Truncation,
)
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo

PACKAGE = Path(__file__).parents[3] / "torchtitan_rl"


def test_undocumented_metric_key_is_found():
    logged = """reward/mean reward/f/failures extra/f/a/b extra/f/a/non_finite evaluation/sampled/pass@4_low time/train
        evaluation/rows/accuracy evaluation/reward/f/seconds evaluation/sampled/extra/f/x step time"""
    assert undocumented(logged.split()) == []
    assert undocumented(["reward/f/other", "evaluation/rows/made_up", "obs/x"]) == [
        "evaluation/rows/made_up", "obs/x", "reward/f/other",
    ]  # fmt: skip


def test_documented_metric_keys_exist_in_the_code():
    """The last part of a key stands in a text of the code, alone or in a longer key; the objective's are below."""
    texts = set()
    for file in PACKAGE.rglob("*.py"):
        for text in re.findall(r"""["']([^"'\n]+)["']""", file.read_text()):
            texts |= set(re.split(r"[/{}]", text))
    # made of a number or of a field's name: quantiles, pass@k and the ends of intervals, lengths
    made = re.compile(r"p\d+|<\w+>|.*@k.*|\.\.\.|length_<bucket>")
    lasts = {key.rpartition("/")[2] for key in documented_keys(RUN)}
    missing = {last for last in lasts if not made.fullmatch(last) and last not in texts and not _composed(last, texts)}
    assert missing == set()


def _composed(name: str, texts: set[str]) -> bool:
    """Whether the code joins the name of two texts, such as accuracy and _low."""
    return any(name[:i] in texts and name[i:] in texts for i in range(4, len(name) - 3))


def documented() -> dict[re.Pattern, str]:
    """Each key of the algorithm's metrics as a pattern (<...> is a placeholder), with the reductions of its row."""
    rows = re.findall(r"^\| (`.*?) \|.*\| ([\w, ]+) \|$", OF_ALGORITHM, re.MULTILINE)
    return {pattern(key): reduction for keys, reduction in rows for key in re.findall(r"`(.*?)`", keys)}


def emitted() -> dict[str, str]:
    """Every key that some configuration emits, with its reduction."""
    controllers = {"tau_controller": TauController.Config(target=0.5)}
    controllers["beta_controller"] = BetaController.Config(target=0.1, horizon=10)
    meta_controller = MetaController.Config(target_entropy=0.5, target_kl=1)
    configs = [
        Algorithm.Config(loss=Clip.Config(eps_high=0.28, dual_clip=3.0), truncation=Truncation.Config(mode="penalty")),
        Algorithm.Config(loss=Gspo.Config()),
        Algorithm.Config(loss=Cispo.Config(cap=1.05)),
        Algorithm.Config(seed_grpo=SeedGrpo.Config(), mismatch=SequenceTruncate.Config(cap=1.01)),
        Algorithm.Config(kl=KL.Config(coef=0.1), entropy_coef=0.01, mismatch=TokenTruncate.Config(cap=1.01)),
        Algorithm.Config(mismatch=TokenMask.Config(low=0.99, high=1.01)),
        Algorithm.Config(loss=MaxEnt.Config(clip_coef=0.5, clip_ratio="sequence")),
        Algorithm.Config(loss=MaxEnt.Config(beta=0.1, clip_coef=0.1, **controllers)),
        Algorithm.Config(loss=MaxEnt.Config(meta_controller=meta_controller)),
    ]
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
        matching = [reductions for row, reductions in rows.items() if row.fullmatch(key)]
        assert any(reduction in row for row in matching), (
            f"{key} ({reduction}) is not in docs/metrics.md, which says {matching}"
        )
    assert [row.pattern for row in rows if not any(row.fullmatch(key) for key in keys)] == []
