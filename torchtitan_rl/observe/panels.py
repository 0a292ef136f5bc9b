"""Sample rows and metrics as rich panels, for the console sink.

Every cell is a `Text`: model output such as "[/answer]" or "list[int]" is never read as markup.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from torchtitan_rl.observe.cell_text import compact_number, flat_cell, head_and_tail_lines
from torchtitan_rl.observe.sample_rows import Row
from torchtitan_rl.text import head_and_tail, visible

PROMPT_LINES, PROMPT_CHARACTERS = 4, 400
"""Limits for a prompt without messages; of longer text, the head and the tail are shown."""
RESPONSE_LINES, RESPONSE_CHARACTERS = 12, 1200
"""Limits for a response, and for the last message of a prompt, which is the question."""
MESSAGES, MESSAGE_LINES, MESSAGE_CHARACTERS = 12, 6, 400
"""Limits for one conversation (its number of messages) and for each message."""

PLAIN_WIDTH = 120
"""Width of the output, in characters, if it is not a terminal."""

GAP = 2
"""Spaces between two values of a line."""

_IN_TITLE = ("select_reason", "split", "prompt_idx", "sample_idx")
_BELOW = (
    "expected_answer", "answer", "correct", "reward", "score", "advantage", "mass", "q_mass", "left_out", "turns",
    "response_tokens", "observed_tokens", "environment_seconds", "finish_reason", "logprob_mean", "logprob_diff_max",
    "staleness", "carried_tokens",
)  # fmt: skip
_HIDDEN_AT_0 = ("staleness", "carried_tokens")
_ELSEWHERE = {
    "step", "run_id", "table", "prompt", "response", "messages", "conversation", "traces", "policy_version", "group_size",
    "episode_id", "rank_in_group", "prompt_tokens", "in_loss", "logprob_diff_mean", "tokens", *_IN_TITLE, *_BELOW,
}  # fmt: skip


class _PlainConsole(Console):
    """A console that falls silent when nobody reads it any more, as after `| head`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # a stream without a file: nothing waits in it either
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.file.fileno())  # else Python complains at exit about unwritten text
            os.close(null)


def plain_console() -> Console:
    """A console on standard output that never interprets text as markup. Coloured only on a terminal, and not with NO_COLOR."""
    # By itself rich takes NO_COLOR for colours alone, and still writes the escapes of bold and dim.
    system = None if os.environ.get("NO_COLOR") else "auto"
    console = _PlainConsole(
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
    """A panel for one row: reason and origin in the title, then prompt, response and numbers."""
    parts: list[RenderableType] = []
    if "prompt" in row:
        parts += prompt_lines(row, console)
    if row.get("conversation"):
        parts += _turns(row["conversation"], console)
    elif "response" in row:
        if row.get("messages"):
            parts.append(Text("assistant", "bold"))
        parts.append(safe(row["response"], console, RESPONSE_CHARACTERS, RESPONSE_LINES))
    good = row.get("correct")
    if good is None:
        reward = row.get("reward", row.get("score"))
        good = isinstance(reward, (int, float)) and reward > 0
    title = [row.get("select_reason") or "sample", row.get("split")]
    if row.get("prompt_idx") is not None:  # first: a narrow title is cut
        title.insert(0, f"prompt {row['prompt_idx']} sample {row.get('sample_idx')}")
    return Panel(
        Group(*parts, _Wrapped(_numbers(row, console))),
        title=safe(" · ".join(filter(None, title)), console, style="bold"),
        title_align="left",
        border_style="green" if good else "yellow",
    )


def prompt_lines(row: Row, console: Console) -> list[Text]:
    """The prompt's messages, without what the chat template adds to them; a prompt without messages as its text."""
    if not row.get("messages"):
        prompt = str(row["prompt"]).rstrip()
        return [safe(prompt, console, PROMPT_CHARACTERS, PROMPT_LINES, style="dim")]
    *before, question = row["messages"]
    text = str(question.get("content", "")).rstrip()
    return [
        *_turns(before, console),
        safe(question.get("role", "message"), console, style="bold"),
        safe(text, console, RESPONSE_CHARACTERS, RESPONSE_LINES, style="dim"),
    ]


def _turns(conversation: Sequence[dict[str, Any]], console: Console) -> list[Text]:
    """The conversation's messages with role and turn facts, such as the reward. Of many, the first and the last."""
    lines = []
    for message in conversation:
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


def _numbers(row: Row, console: Console) -> list[Text]:
    """Names and cells of a row's other columns, without those that add nothing: no value, score = reward, no staleness."""
    parts: list[Text] = []
    for column in [*(c for c in _BELOW if c in row), *(c for c in row if c not in _ELSEWHERE)]:
        cell = row[column]
        repeated = column == "score" and cell == row.get("reward")
        idle = column in _HIDDEN_AT_0 and cell == 0
        empty = cell is None and column not in ("answer", "reward")
        if not (repeated or idle or empty):
            shown = "none" if cell is None else compact_number(flat_cell(cell))
            parts.append(_named(column.replace("_", " "), shown, console))
    return parts


def _named(name: str, value: str, console: Console) -> Text:
    return Text.assemble(safe(f"{name} ", console, style="dim"), safe(value, console))


def _lines(parts: Sequence[Text], width: int) -> list[Text]:
    """The parts in lines of this width. A line never ends within a part that fits one."""
    lines = [Text(overflow="fold")]
    for part in parts:
        if lines[-1] and lines[-1].cell_len + GAP + part.cell_len > width:
            lines.append(Text(overflow="fold"))
        if lines[-1]:
            lines[-1].append(" " * GAP)
        lines[-1].append_text(part)
    return lines


class _Wrapped:
    """Parts in lines as wide as the place where they are printed."""

    def __init__(self, parts: Sequence[Text]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from _lines(self._parts, options.max_width)


def metric_lines(values: dict[str, float], console: Console) -> list[Text]:
    """Metrics in lines that fit, each group after its name, which is the key up to the first "/".

    Example: "  time  generate 0.589  train 0.5817"
    """
    groups: dict[str, list[Text]] = {}
    for key, value in values.items():
        group, _, name = key.partition("/")
        shown = f"{value:.1%}" if group == "share" else compact_number(value)
        groups.setdefault(group, []).append(_named(name, shown, console))
    indent = GAP + max((len(group) for group in groups), default=0) + GAP
    lines: list[Text] = []
    for group, parts in groups.items():
        start = Text(" " * GAP).append_text(safe(group, console, style="cyan"))
        for line in _lines(parts, console.width - indent):
            start.pad_right(indent - start.cell_len)
            lines.append(start.append_text(line))
            start = Text()
    return lines
