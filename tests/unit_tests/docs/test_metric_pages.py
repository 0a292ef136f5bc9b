"""The page of metrics has every key that runs log, and no other. Integration tests check every line of their runs, too."""

import re
from pathlib import Path

from tests.parts.metric_pages import RUN, documented_keys, undocumented

PACKAGE = Path(__file__).parents[3] / "torchtitan_rl"


def test_undocumented_metric_key_is_found():
    logged = [
        "reward/mean",
        "reward/f/failures",
        "extra/f/a/b",
        "extra/f/a/non_finite",
        "evaluation/sampled/pass@4_low",
    ]
    logged += ["evaluation/rows/accuracy", "evaluation/reward/f/seconds", "evaluation/sampled/extra/f/x", "time/train"]
    assert undocumented([*logged, "step", "time"]) == []
    assert undocumented(["reward/f/other", "evaluation/rows/made_up", "obs/x"]) == [
        "evaluation/rows/made_up", "obs/x", "reward/f/other",
    ]  # fmt: skip


def test_documented_metric_keys_exist_in_the_code():
    """The last part of a key stands in a text of the code, alone or in a longer key; test_algorithms.py has the objective's."""
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
