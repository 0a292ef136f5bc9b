"""Sample rows and metrics as rich panels, for the console sink.

Every cell is a `Text`: model output such as "[/answer]" or "list[int]" is never read as markup.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchtitan_rl.observe.cell_text import compact_number, flat_cell, head_and_tail_lines
from torchtitan_rl.observe.sample_rows import Row, messages_of
from torchtitan_rl.text import head_and_tail, visible

MESSAGES, MESSAGE_LINES, MESSAGE_CHARACTERS = 12, 10, 1000
"""Limits for one sample (its number of messages) and for each message; of longer ones, the head and the tail are shown."""

PLAIN_WIDTH = 120
"""Width of the output, in characters, if it is not a terminal."""

GAP = Text("  ")
"""Between two values of a line."""

EVALUATION_PREFIX = "evaluation/"
SHARES = ("format_rate", "clipped_fraction")
"""Measures of an evaluation in 0..1, beside those with an interval. They are shown in percent."""

_HIDDEN_AT_0 = ("staleness", "carried_tokens")
_ELSEWHERE = {
    "select_reason", "split", "prompt_idx", "sample_idx", "prompt", "response", "messages", "conversation", "traces", "tokens",
    "step", "run_id", "table", "policy_version", "group_size", "episode_id", "prompt_tokens", "in_loss", "logprob_diff_mean",
    "logprob_diff_max", "q_mass", "update_mass_proxy",
}  # fmt: skip
"""Columns in the panel's title and text, and those that a reader of it does not need."""


def plain_console() -> Console:
    """A console on standard output that never interprets text as markup. Coloured only on a terminal, and not with NO_COLOR."""
    # By itself rich takes NO_COLOR for colours alone, and still writes the escapes of bold and dim.
    system = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(
        file=sys.stdout, highlight=False, markup=False, emoji=False, color_system=system
    )
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def safe(
    text: object, console: Console, characters: int = 200, lines: int = 1, style: str = ""
) -> Text:
    """The text in a form safe for this terminal and its encoding (see `visible`), shortened to head and tail."""
    encoded = visible(str(text)).replace("\t", "    ").encode(console.encoding, "backslashreplace")
    shown = head_and_tail(encoded.decode(console.encoding), characters)
    shown = head_and_tail_lines(shown, lines) if lines > 1 else shown.replace("\n", " ")
    return Text(shown, style, overflow="fold")


def sample_panel(row: Row, console: Console) -> Panel:
    """A panel for one row: reason and origin in the title, then its messages and numbers."""
    good = row.get("correct")
    if good is None:
        reward = row.get("reward", row.get("score"))
        good = isinstance(reward, (int, float)) and reward > 0
    title = [row.get("select_reason") or "sample", row.get("split")]
    if row.get("prompt_idx") is not None:  # first: a narrow title is cut
        title.insert(0, f"prompt {row['prompt_idx']} sample {row.get('sample_idx')}")
    return Panel(
        Group(*_turns(messages_of(row), console), _numbers(row, console)),
        title=safe(" · ".join(str(part) for part in title if part), console, style="bold"),
        title_align="left",
        border_style="green" if good else "yellow",
    )


def _turns(messages: Sequence[dict[str, Any]], console: Console) -> list[Text]:
    """The messages with role and turn facts, such as the reward. Of many, the first and the last."""
    lines = []
    for message in messages:
        facts = " · ".join(
            f"{name} {compact_number(flat_cell(cell))}"
            for name, cell in message.items()
            if name not in ("role", "content")
        )
        line = safe(message.get("role", "message"), console, style="bold").append(" ")
        if facts:
            line.append_text(safe(facts, console, style="dim")).append("\n")
        content = message.get("content", "")
        line.append_text(safe(content, console, MESSAGE_CHARACTERS, MESSAGE_LINES))
        lines.append(line)
    if left_out := max(0, len(lines) - MESSAGES):
        note = safe(f"[... {left_out} messages ...]", console, style="dim")
        lines[MESSAGES // 2 : MESSAGES // 2 + left_out] = [note]
    return lines


def _numbers(row: Row, console: Console) -> Text:
    """Names and cells of a row's other columns, without those that add nothing: no value, no staleness."""
    parts: list[Text] = []
    for column, cell in row.items():
        idle = column in _HIDDEN_AT_0 and cell == 0
        empty = cell is None and column not in ("answer", "reward")
        if not (column in _ELSEWHERE or idle or empty):
            shown = "none" if cell is None else compact_number(flat_cell(cell))
            parts.append(_named(column, shown, console))
    return GAP.join(parts)


def _named(name: str, value: str, console: Console) -> Text:
    """Example: "reward=1.2". Without a space, so that no line ends between the two."""
    return Text.assemble(safe(f"{name}=", console, style="dim"), safe(value, console))


def metric_table(values: Mapping[str, float | str], console: Console) -> Table:
    """Metrics, each group in lines after its name, which is the key up to the first "/". A text is shown as it is.

    Example: "  time  generate=0.589  train=0.5817"
    """
    groups: dict[str, list[Text]] = {}
    for key, value in values.items():
        group, _, name = key.partition("/")
        shown = f"{value:.1%}" if group == "share" else compact_number(value)
        groups.setdefault(group, []).append(_named(name, shown, console))
    table = Table.grid(padding=(0, 2, 0, 0))
    for group, parts in groups.items():
        table.add_row("", safe(group, console, style="cyan"), GAP.join(parts))
    return table


def percent(value: float) -> str:
    """Formats a share: 0.975 as "97.5%"."""
    return f"{100 * value:.1f}%"


def evaluation_measures(values: dict[str, float]) -> dict[str, float | str]:
    """The evaluation's measures, accuracies and those with an interval first; shares in percent. Example: {"evaluation/accuracy": "61.7% (55.5 to 67.7)"}.

    The unit of what a reward function logs is not known, whatever its name.
    """
    measures: dict[str, float | str] = {}
    known = {key for key in values if "/extra/" not in key}
    with_interval = {key for key in known if {f"{key}_low", f"{key}_high"} <= known}
    for key in sorted(values, key=lambda k: (not k.endswith("/accuracy"), k not in with_interval)):
        is_end = key.endswith(("_low", "_high")) and key.rpartition("_")[0] in with_interval
        if not key.startswith(EVALUATION_PREFIX) or key.endswith("/seconds") or is_end:
            continue
        measures[key] = values[key]
        if key in with_interval:
            low, high = values[f"{key}_low"], values[f"{key}_high"]
            measures[key] = f"{percent(values[key])} ({100 * low:.1f} to {100 * high:.1f})"
        elif key in known and key.endswith(SHARES):
            measures[key] = percent(values[key])
    return measures
