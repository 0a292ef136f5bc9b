"""The keys of docs/metrics.md."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
OF_A_LINE = {"step", "time"}
"""What a line of metrics.jsonl has besides metrics."""


RUN, OF_ALGORITHM = PAGE.read_text().split("\n## Metrics of the algorithm\n")


def documented_keys(text: str = RUN + OF_ALGORITHM) -> list[str]:
    """The keys in the first column of the tables of a text, with placeholders such as <function>."""
    return [
        key for cell in re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE) for key in re.findall(r"`([^`]+)`", cell)
    ]


def pattern(key: str) -> re.Pattern[str]:
    """What runs log for a documented key: <name> stands for anything, another placeholder for one part."""
    parts = re.split(r"(<\w+>)", key.replace("@k", "@<k>"))
    wild = {"<name>": ".+", "<column>": ".+", "<k>": r"\d+"}
    return re.compile("".join(wild.get(part, "[^/]+") if part[:1] == "<" else re.escape(part) for part in parts))


def undocumented(keys: Iterable[str]) -> list[str]:
    """The keys that the page lacks. evaluation/X stands for evaluation/sampled/X and evaluation/<task>/X too."""
    known = [pattern(key) for key in documented_keys() if not key.endswith("...")]

    def forms(key: str) -> list[str]:
        plain = key.removesuffix("/non_finite").replace("evaluation/sampled/", "evaluation/")
        return [plain, re.sub(r"^evaluation/[^/]+/", "evaluation/", plain)]

    return sorted(
        key for key in set(keys) - OF_A_LINE if not any(one.fullmatch(form) for one in known for form in forms(key))
    )
