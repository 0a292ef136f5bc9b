"""Sample rows and metrics as rich panels, for the console sink and the samples command.

Every cell is a `Text`: model output such as "[/answer]" or "list[int]" is never read as markup.
"""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchtitan_rl.observability.rows import Row
from torchtitan_rl.observability.text import compact_number, flat_cell, head_and_tail, head_and_tail_lines, printable

PROMPT_LINES, PROMPT_CHARACTERS = 4, 400
RESPONSE_LINES, RESPONSE_CHARACTERS = 12, 1200
"""The budget of one sample: longer text shows its head and tail."""

_IN_TITLE = ("select_reason", "split", "prompt_idx", "sample_idx")
_BELOW = ("expected_answer", "answer", "correct", "reward", "score", "advantage", "mass", "q_mass", "left_out",
          "response_tokens", "observed_tokens", "finish_reason", "logprob_mean", "logprob_diff_max",
          "staleness")  # fmt: skip
_ELSEWHERE = {"step", "run_id", "table", "prompt", "response", "messages", "policy_version", "group_size", "episode_id",
              "rank_in_group", "prompt_tokens", "in_loss", "logprob_diff_mean", *_IN_TITLE, *_BELOW}  # fmt: skip


def safe(text: object, console: Console, characters: int = 200, lines: int = 1) -> Text:
    """The text for this terminal: no escapes or control characters, head and tail of what is too long."""
    shown = head_and_tail(printable(str(text), console.encoding), characters)
    shown = head_and_tail_lines(shown, lines) if lines > 1 else shown.replace("\n", " ")
    return Text(shown, overflow="fold")


def sample_panel(row: Row, console: Console) -> Panel:
    """One row: why it is shown and where it is from, prompt, response, and its numbers below."""
    parts: list[RenderableType] = []
    if "prompt" in row:
        prompt = safe(row["prompt"], console, PROMPT_CHARACTERS, PROMPT_LINES)
        prompt.stylize("dim")
        parts.append(prompt)
    if "response" in row:
        parts.append(safe(row["response"], console, RESPONSE_CHARACTERS, RESPONSE_LINES))
    further = [column for column in row if column not in _ELSEWHERE]
    numbers = Text()
    for column in [*(column for column in _BELOW if column in row), *further]:
        if row[column] is None and column not in ("answer", "reward"):
            continue
        numbers.append(f"{safe(column, console).plain.replace('_', ' ')} ", style="dim")
        cell = compact_number(flat_cell(row[column])) if row[column] is not None else "none"
        numbers.append_text(safe(cell, console))
        numbers.append("  ")
    parts.append(numbers)
    reason = row.get("select_reason") or "sample"
    title = safe(f"{reason} · {row['split']}" if row.get("split") else reason, console)
    if row.get("prompt_idx") is not None:
        title.append_text(safe(f" · prompt {row['prompt_idx']} sample {row.get('sample_idx')}", console))
    title.stylize("bold")
    reward = row.get("reward", row.get("score"))
    good = isinstance(reward, (int, float)) and reward > 0 if row.get("correct") is None else row["correct"]
    return Panel(Group(*parts), title=title, title_align="left", border_style="green" if good else "yellow")


def metrics_grid(values: dict[str, float], console: Console, columns: int = 3) -> Table:
    """Names and numbers side by side, filled column by column."""
    grid = Table.grid(padding=(0, 2))
    names = list(values)
    height = -(-len(names) // columns)
    for line in range(height):
        cells: list[Text] = []
        for name in names[line::height]:
            cells += [safe(name, console), Text(compact_number(values[name]), justify="right")]
        grid.add_row(*cells)
    return grid


def rows_table(rows: Sequence[Row], columns: Sequence[str], console: Console, title: str) -> Table:
    """Rows under each other, one line a cell."""
    table = Table(title=Text(title, style="bold"), title_justify="left")
    for column in columns:
        table.add_column(Text(column.replace("_", " ")), overflow="fold", max_width=60)
    for row in rows:
        table.add_row(*(safe(compact_number(flat_cell(row.get(column))), console, 160) for column in columns))
    return table
