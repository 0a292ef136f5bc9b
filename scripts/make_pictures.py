"""Makes the pictures of the console and of the report in docs/images anew, from runs that it starts itself.

    .venv/bin/python scripts/make_pictures.py                                        half an hour on two idle cores, most of it SmolLM2
    .venv/bin/python scripts/make_pictures.py --only report_failed console           the runs of these pictures alone

It needs chromium (Debian: apt-get install -y chromium) and, for SmolLM2, the package index once. The runs are kept in outputs/pictures,
and a run that is done is not repeated: delete its folder for a new one.
"""

import argparse
import base64
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.terminal_theme import MONOKAI  # noqa: E402
from rich.text import Text  # noqa: E402

from tests.parts.browser import CHROMIUM, MISSING, Browser  # noqa: E402
from tests.parts.report_page import at  # noqa: E402
from torchtitan_rl.observe.report import write_report  # noqa: E402

RUNS_FOLDER, IMAGES = ROOT / "outputs" / "pictures", ROOT / "docs" / "images"
WIDTH, COLUMNS = 1400, 124
"""Of a page in pixels, of the terminal in characters."""
CONSOLE_LINES = 71
TERMINAL = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>console</title></head>
<body style="margin: 0; background: {background}; color: {foreground}">
<main data-view="console" style="width: max-content"><pre style="margin: 0; padding: 12px 16px; font: 14px/1.35 'DejaVu Sans Mono', monospace">{code}</pre></main>
</body></html>"""

RUNS = {
    "smollm2": "--config smollm2 --num-prompts-per-step 8 --evaluation.num-prompts 64 --trainer.max-tokens-per-microbatch 2048",
    "debug": "--config debug --num-steps 20",
    "debug_high_rate": "--config debug --num-steps 20 --trainer.optimizer.lr 1e-3",
    "debug_guess": "--config debug_guess --num-steps 5 --metrics.keep-all-rows",
    "furlong": "--config debug --num-steps 20 --grader.rewards scripts/make_pictures.py:unit",
}
"""The options of each run."""


class Picture(NamedTuple):
    """A picture of a report: the runs on the page, its address, and its height in pixels."""

    runs: Sequence[str]
    state: dict[str, Any]
    height: int


PICTURES = {
    "report_overview": Picture(["smollm2"], {}, 900),
    "report_comparison": Picture(["debug", "debug_high_rate"], {}, 900),
    "report_failed": Picture(["furlong"], {}, 430),
    "report_samples": Picture(["smollm2"], {"view": "samples", "shown": True, "paint": "entropy"}, 760),
    "report_siblings": Picture(["smollm2"], {"view": "samples", "tab": "siblings"}, 760),
    "report_conversation": Picture(["debug_guess"], {"view": "samples", "split": "train"}, 760),
    "report_prompts": Picture(["smollm2"], {"view": "prompts", "kind": "up"}, 560),
}
CONSOLE = "console"


def unit(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """A reward function that fails in the third step, for the picture of a failed run."""
    metres = {"mile": 1609.344}
    return [metres["furlong" if trainer_state.global_step == 2 else "mile"] * 0 for _ in completions]


def train(name: str) -> Path:
    """The folder of the run. Trains it on a terminal of its own, and keeps what that showed, unless the folder has a report."""
    folder = RUNS_FOLDER / name
    if (folder / "report.html").is_file():
        return folder
    master, slave = os.openpty()
    command = ["./run_train.sh", *RUNS[name].split(), "--dump-folder", str(folder)]
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    print(" ".join(command), flush=True)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b"".join(_blocks(master))
    process.wait()
    folder.with_suffix(".console").write_bytes(shown)
    return folder


def _blocks(terminal: int) -> Iterator[bytes]:
    """What is written to the terminal, until its last process ends."""
    try:
        while block := os.read(terminal, 1 << 16):
            yield block
    except OSError:  # Linux's end of a terminal
        os.close(terminal)


def terminal_page(shown: str, page: Path) -> None:
    """Writes the last lines that a terminal showed as a page."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    lines = shown.replace("\r\n", "\n").replace(f"{ROOT}/", "").splitlines()
    for line in lines[-CONSOLE_LINES:]:
        console.print(Text.from_ansi(line), soft_wrap=True)
    page.write_text(console.export_html(theme=MONOKAI, code_format=TERMINAL, inline_styles=True))


def take(browser: Browser, name: str, folder: Path) -> Path:
    """Takes the picture. Returns its file."""
    page = folder / f"{name}.html"
    if name == CONSOLE:
        terminal_page(train("debug").with_suffix(".console").read_text(), page)
        browser.open(page, width=WIDTH)
        browser.resize(*browser.run("(e => [e.offsetWidth, e.offsetHeight])(document.querySelector('main'))"))
    else:
        picture = PICTURES[name]
        run, *others = map(train, picture.runs)
        write_report(run, page, others=others)
        page.write_text(page.read_text().replace(f"{ROOT}/", ""))  # a picture shows no path of this machine
        browser.open(at(page, **picture.state), width=WIDTH, height=picture.height)
    image = IMAGES / f"{name}.png"
    shot = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    Image.open(io.BytesIO(shot)).quantize(256, Image.Quantize.MAXCOVERAGE).save(
        image, optimize=True
    )  # a third of the bytes
    return image


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0; 2 if there is no browser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [CONSOLE, *PICTURES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PICTURE", help=", ".join(names))
    options = parser.parse_args(arguments)
    if CHROMIUM is None:
        print(MISSING, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, closing(Browser(Path(folder) / "profile")) as browser:
        for name in options.only:
            image = take(browser, name, Path(folder))
            print(f"{image.relative_to(ROOT)}: {image.stat().st_size / 1e3:.0f} kB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
