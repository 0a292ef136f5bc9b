"""Shows a run's stored samples in the terminal: ranked, filtered or over time.

python -m torchtitan_rl.observability.samples outputs/debug                       selected rows of the last step
python -m torchtitan_rl.observability.samples outputs/debug --best 3 --worst 3    best and worst of the whole run
python -m torchtitan_rl.observability.samples outputs/debug --step 40 --group 2   siblings side by side
python -m torchtitan_rl.observability.samples outputs/debug --prompt "12 + 34"    one prompt over time
"""

import argparse
import sys
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from torchtitan_rl.observability import read_rows
from torchtitan_rl.observability.panels import plain_console, prompt_lines, rows_table, sample_panel
from torchtitan_rl.observability.sample_rows import Row, score_of
from torchtitan_rl.observability.select import SIBLING

NARROW = 60
"""Width in characters below which a table leaves out columns, so that the others can be read."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0; 1 if no row matches; 2 if a folder has no samples."""
    options = _parser().parse_args(arguments)
    console = plain_console()
    try:
        rows = _matching(options.run, options)
    except (OSError, ValueError) as error:  # no run, or a damaged file
        print(error, file=sys.stderr)
        return 2
    if not rows:
        print(f"no stored row of {options.run} matches. {_stored_steps(options.run)}", file=sys.stderr)
        return 1
    if options.prompt is not None and options.group is None and not (options.best or options.worst):
        columns = ["step", "split", "prompt_idx", "sample_idx", "reward", "response_tokens", "answer", "response"]
        if console.width < NARROW:
            columns = [column for column in columns if column not in ("split", "response_tokens", "answer")]
        console.print(rows_table(rows, columns, console, f"rows whose prompt contains {options.prompt!r}, by step"))
    elif options.group is not None:
        return _print_group(rows, options.group, console)
    elif options.best or options.worst:
        _print_ranked(rows, options, console)
    else:
        last = max(row["step"] for row in rows)
        of_last = [row for row in rows if row["step"] == last]
        selected = [row for row in of_last if row.get("select_reason") not in (None, "", SIBLING)] or of_last
        _print_panels(selected, console)
        if left_out := len(of_last) - len(selected):
            more = f"{left_out} more stored rows of step {last}: --step {last} --best {len(of_last)} ranks all"
            console.print(Text(more, style="dim"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_rl.observability.samples",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--step", type=int, metavar="N", help="show only this step")
    parser.add_argument("--best", type=_count, default=0, metavar="K", help="the K rows with the highest score")
    parser.add_argument("--worst", type=_count, default=0, metavar="K", help="the K rows with the lowest score")
    parser.add_argument("--prompt", metavar="TEXT", help="only prompts that contain TEXT; alone: their rows over time")
    parser.add_argument("--group", type=int, metavar="I", help="the samples of prompt I side by side, at its last step")
    parser.add_argument("--table", metavar="KEY", help='show only this table, such as "rollout/samples"')
    parser.add_argument("--split", metavar="NAME", help='show only this split, such as "train"')
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of rows, 0 or more")
    return int(text)


def _matching(run: str, options: argparse.Namespace) -> list[Row]:
    wanted = {"step": options.step, "table": options.table, "split": options.split}
    return [
        row
        for row in read_rows(run)
        if all(value is None or row.get(column) == value for column, value in wanted.items())
        and (options.prompt is None or options.prompt in str(row.get("prompt", "")))
    ]


def _stored_steps(run: str) -> str:
    """Describes the stored rows. Example: "It has steps 1 to 50 (50 of them), splits eval_greedy, train, tables rollout/samples." """
    rows = list(read_rows(run))
    if not rows:
        return "It has no rows of a whole step: the first is not over, or the file is damaged."
    steps = sorted({row["step"] for row in rows})
    splits, tables = (", ".join(sorted({str(row[key]) for row in rows if key in row})) for key in ("split", "table"))
    return f"It has steps {steps[0]} to {steps[-1]} ({len(steps)} of them), splits {splits}, tables {tables}."


def _print_panels(rows: Sequence[Row], console: Console) -> None:
    for table in dict.fromkeys(row["table"] for row in rows):
        members = [row for row in rows if row["table"] == table]
        failed = " · this step failed: its samples as far as they came" if members[0].get("unfinished") else ""
        console.print(Text(f"step {rows[0]['step']} · {table}{failed}", style="bold"))
        for row in members:
            console.print(sample_panel(row, console))


def _print_ranked(rows: list[Row], options: argparse.Namespace, console: Console) -> None:
    ranked = sorted((row for row in rows if score_of(row) is not None), key=score_of, reverse=True)
    for title, chosen in (("best", ranked[: options.best]), ("worst", ranked[::-1][: options.worst])):
        for place, row in enumerate(chosen, 1):
            console.print(Text(f"{title} {place} · step {row['step']}", style="bold"))
            console.print(sample_panel(row, console))
    if unranked := len(rows) - len(ranked):
        console.print(Text(f"{unranked} rows have no score and are not ranked", style="dim"))


def _print_group(rows: list[Row], prompt_idx: int, console: Console) -> int:
    members = [row for row in rows if row.get("prompt_idx") == prompt_idx]
    if not members:
        known = sorted({row["prompt_idx"] for row in rows if "prompt_idx" in row})
        print(f"no stored row has prompt_idx {prompt_idx}; stored: {known[:20]}", file=sys.stderr)
        return 1
    # A prompt_idx names a different prompt in each split.
    for split in sorted({str(row.get("split")) for row in members}):
        _print_siblings([row for row in members if str(row.get("split")) == split], split, console)
    return 0


def _print_siblings(rows: list[Row], split: str, console: Console) -> None:
    last = max(row["step"] for row in rows)
    siblings = [row for row in rows if row["step"] == last]
    size = siblings[0].get("group_size")
    console.print(Text(f"{split} · step {last} · {len(siblings)} stored of {size or '?'} siblings", style="bold"))
    for line in prompt_lines({"prompt": "", **siblings[0]}, console):
        console.print(line)
    width = min(max(30, (console.width - 4) // min(3, len(siblings))), console.width - 2)
    shown = [{c: v for c, v in row.items() if c not in ("prompt", "messages")} for row in siblings]
    panels = [sample_panel(row, console) for row in shown]
    console.print(Columns(panels, width=width, padding=(0, 1)))


if __name__ == "__main__":
    sys.exit(main())
