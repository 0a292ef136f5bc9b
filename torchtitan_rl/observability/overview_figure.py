"""The report's first curves as one picture, for sinks that show pictures.

It is drawn from metrics.jsonl, so that a resumed run's picture has its earlier steps too. matplotlib is imported only here, at the end of a
run: it belongs to the extra "sinks", and without it a run has no picture.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchtitan_rl.observability.line_file import read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = Sequence[dict[str, Any]]
"""The lines of metrics.jsonl."""


class Panel(NamedTuple):
    """One chart of the picture: its curves as {key: label}, and the keys around the first curve.

    Example: Panel("Entropy (nats per token)", {"policy/entropy": ""})
    """

    title: str
    curves: dict[str, str]
    band: tuple[str, str] | None = None
    """Keys of the lower and the upper edge."""
    deviation: str | None = None
    """Key of the half width of a band around the first curve."""
    band_is: str = ""
    """The band in words."""
    log: bool = False


PANELS = (
    Panel("Reward", {"reward/mean": ""}, deviation="reward/std", band_is="mean ± std"),
    Panel(
        "Held-out accuracy",
        {"evaluation/accuracy": "greedy", "evaluation/sampled/accuracy": "sampled"},
        band=("evaluation/accuracy_low", "evaluation/accuracy_high"),
        band_is="95 % interval",
    ),
    Panel(
        "Completion length in tokens",
        {"completions/length/mean": ""},
        band=("completions/length/p05", "completions/length/p95"),
        band_is="5 to 95 %",
    ),
    Panel("Held-out loss (nats per token)", {"evaluation/loss": ""}),
    Panel("Divergence from the teacher (nats per token)", {"teacher/divergence": "exact", "teacher/kl_k3": "k3"}),
    Panel("Entropy (nats per token)", {"policy/entropy": ""}),
    Panel(
        "KL (nats per token)", {"policy/kl_k3": "old policy", "reference/kl_k3": "reference", "sampler/kl": "sampler"}
    ),
    Panel("Groups", {"groups/zero_variance_fraction": "no signal", "groups/all_right_fraction": "all right"}),
    Panel(
        "Log-prob difference, trainer − sampler (nats)",
        {"sampler/logprob_diff/mean": "mean", "sampler/logprob_diff/max": "max"},
        log=True,
    ),
    Panel("Gradient norm", {"optimizer/grad_norm": ""}),
    Panel("Seconds of a step", {"time/step": ""}),
)
COLUMNS = 3
STYLES = ("-", "--", ":")
"""So that equal curves are both seen."""
NEGLIGIBLE = 1e-9
"""A panel whose values are all as small as rounding is left out."""


def is_installed() -> bool:
    """Whether the library that draws the picture is there."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def overview_picture(run_folder: Path, title: str) -> np.ndarray | None:
    """The run's curves as uint8 [height, width, 3]; None if metrics.jsonl has fewer than two steps, or none of the curves."""
    lines = list(read_lines(run_folder / "metrics.jsonl", b"\n"))
    shown = [
        panel for panel in PANELS if any(abs(v) > NEGLIGIBLE for key in panel.curves for v in _points(lines, key)[1])
    ]
    if len(lines) < 2 or not shown:
        return None
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of building its list of fonts
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(shown) // COLUMNS)
    figure = Figure(figsize=(4.2 * COLUMNS, 0.5 + 2.5 * rows), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)  # not pyplot, whose state is the whole process's
    figure.suptitle(title.replace("$", r"\$"), fontsize=11)
    for place, panel in enumerate(shown):
        _draw(figure.add_subplot(rows, COLUMNS, place + 1), panel, lines)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # [height, width, 3]


def _draw(axes: "Axes", panel: Panel, lines: Lines) -> None:
    band: list[tuple[int, float, float]] = []
    for key, label in panel.curves.items():
        steps, values = _points(lines, key)
        if not steps:
            continue
        marker = "o" if len(steps) < 30 else None
        style = STYLES[len(axes.lines) % len(STYLES)]
        (curve,) = axes.plot(steps, values, style, linewidth=1.4, label=label, marker=marker, markersize=3)
        if key == next(iter(panel.curves)) and (band := _band(panel, lines, key)):
            axes.fill_between(*zip(*band), color=curve.get_color(), alpha=0.15, linewidth=0)
    if panel.log and any(value > 0 for curve in axes.lines for value in curve.get_ydata()):
        axes.set_yscale("log")
    if len(axes.lines) > 1:
        axes.legend(frameon=False, fontsize=8)
    axes.set_title(f"{panel.title} ({panel.band_is})" if band else panel.title, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _band(panel: Panel, lines: Lines, key: str) -> list[tuple[int, float, float]]:
    """(step, lower edge, upper edge) around the first curve, at the steps that have all of them."""
    middle = dict(zip(*_points(lines, key)))
    edges = [dict(zip(*_points(lines, name))) for name in panel.band or (panel.deviation,) if name is not None]
    steps = [step for step in middle if edges and all(step in edge for edge in edges)]
    if panel.deviation is not None:
        return [(step, middle[step] - edges[0][step], middle[step] + edges[0][step]) for step in steps]
    return [(step, edges[0][step], edges[1][step]) for step in steps]


def _points(lines: Lines, key: str) -> tuple[list[int], list[float]]:
    """The steps at which a series has a number, and its values there."""
    found = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), (int, float))]
    return [step for step, _ in found], [value for _, value in found]
