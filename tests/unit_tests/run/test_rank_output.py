"""What is printed: commands to the terminal are made visible, and nothing fails if nobody reads it."""

import io
import logging
import os
import subprocess
import sys
import warnings

from torchtitan_rl.run.rank_output import OutputStream, RankLog


def test_closed_pipe_fails_no_print():
    reader, writer = os.pipe()
    os.close(reader)
    stream = OutputStream(open(writer, "w"))  # noqa: SIM115  (the test's end closes it)
    for _ in range(3):
        print("x" * 100_000, file=stream)
        stream.flush()


def test_user_code_cannot_close_the_stream(capsys):
    stream = OutputStream(sys.stdout)
    stream.close()
    print("still here", file=stream)
    assert capsys.readouterr().out == "still here\n"


def test_printed_text_commands_no_terminal_but_keeps_colours_and_progress_bars():
    shown = io.StringIO()
    print("\x1b[2J\x1b]0;evil\x07 \u202e \x1b[1;32mgreen\x1b[0m 50%\r100%", file=OutputStream(shown))
    assert shown.getvalue() == r"\x1b[2J\x1b]0;evil\x07 \u202e " + "\x1b[1;32mgreen\x1b[0m 50%\r100%\n"


WARNS = """
import sys, warnings
from pathlib import Path
from torchtitan_rl.run.rank_output import RankOutput

output = RankOutput(rank=0, shown_rank="0")
warnings.warn_explicit("of a library", FutureWarning, warnings.__file__, 1)
output.to_file(Path(sys.argv[1]))
warnings.warn("of the user's code", UserWarning)
"""


def test_a_library_s_warning_is_in_the_log_alone_and_the_user_s_on_the_terminal_too(tmp_path):
    (tmp_path / "users.py").write_text(WARNS)
    command = [sys.executable, tmp_path / "users.py", tmp_path]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "of a library" not in shown
    assert "UserWarning: of the user's code" in shown
    assert {"of a library", "of the user's code"} <= {
        *(tmp_path / "logs/rank_0.log").read_text().replace("\n", ": ").split(": ")
    }


def test_a_notebook_gets_its_logging_back():
    def settings():
        root = logging.getLogger()
        return root.level, [*root.handlers], logging.raiseExceptions, warnings.showwarning

    before = settings()
    RankLog(rank=0).close()
    assert settings() == before
