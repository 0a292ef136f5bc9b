"""What is printed: commands to the terminal are made visible, and nothing fails if nobody reads it."""

import io
import os
import sys

from torchtitan_rl.run.rank_output import OutputStream


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
