"""A reward function may print what it likes: a terminal is not flooded, and nothing fails of it."""

import io
import logging
import os
import re
import sys
import threading
import time
from unittest import mock

import pytest

from tests.parts.grading import grader, group, rewards
from torchtitan_rl.core import events
from torchtitan_rl.resilience.output_limit import OVERDUE, SHOWN, BoundedOutput, bounded_output, limit_streams


@pytest.fixture(autouse=True)
def as_in_a_run():
    stop = events.listen(BoundedOutput())
    yield
    stop()


def chatty(completions, **_):
    print("x" * 5_000_000)
    print("y" * 5_000_000, file=sys.stderr)
    return [1.0] * len(completions)


def quiet(completions, **_):
    print("seen", completions[0])
    return [1.0] * len(completions)


@pytest.mark.parametrize("in_process", [["chatty"], []])
def test_long_output_is_cut_and_counted(in_process, capfd):
    one = grader(chatty, in_process=in_process)
    assert rewards(one.grade([group("a")])[0].samples) == [1.0]
    one.close()
    for text in capfd.readouterr():
        assert SHOWN < len(text) < SHOWN + 300
        assert text.rstrip().endswith(
            "printed 5,000,001 characters here: the first 4,000 are shown, more are in the run's logs/"
        )


def test_concurrent_worker_output_is_attributed_to_reward_functions(capsys):
    one = grader(chatty)
    round = one.round()
    with bounded_output("tools and environments"):
        round.begin(group("a"))
        while "x" not in (shown := capsys.readouterr().out):
            time.sleep(0.01)
    round.scored_groups()
    one.close()
    shown += capsys.readouterr().out
    assert shown.count("x") == SHOWN
    assert "tools and environments printed" not in shown
    # The last write, of the line end alone, may come after the call has returned.
    assert re.search("reward functions printed 5,000,00[01] characters here", shown)


def test_output_that_a_thread_is_writing_is_counted_when_its_source_ends(capsys):
    """The stream's owner ends the block in the middle of a thread's write, as a slow terminal makes likely."""
    stream, _ = limit_streams()
    show = stream._show

    def slow(text):
        if text.startswith("x"):
            stream.begin("another source")
        show(text)

    stream.begin("reward functions")
    with mock.patch.object(stream, "_show", slow):
        print("x" * 5_000_000)
    stream.begin(OVERDUE)
    assert "reward functions printed 5,000,000 characters here" in capsys.readouterr().out


def test_output_of_a_timed_out_call_stays_limited_and_counted(capsys):
    """As a tool's that was given up: its thread cannot be ended."""
    given_up, print_now = threading.Event(), threading.Event()

    def overdue():
        print_now.wait()
        print("z" * 5_000_000)
        given_up.set()

    threading.Thread(target=overdue).start()
    grader(quiet).grade([group("a")])
    print_now.set()
    given_up.wait()
    print("our own line")
    grader(quiet).grade([group("a")])
    shown = capsys.readouterr().out
    assert shown.count("z") == SHOWN
    assert "other threads, such as those of calls that timed out, printed 5,000,001 characters here" in shown
    assert "our own line\n" in shown


def test_logged_output_of_a_run_is_limited(caplog, monkeypatch):
    monkeypatch.setattr("torchtitan_rl.resilience.output_limit.KEPT_OF_RUN", 1_500_000)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            grader(chatty).grade([group("a")])
    logged = [len(record.args[1]) for record in caplog.records if record.name.endswith("output_limit")]
    assert logged[::2] == [1_000_000, 500_000, 0]


def test_closed_pipe_fails_no_reward_and_is_reported_once(caplog, monkeypatch):
    caplog.set_level(logging.INFO)  # for the log file: on the terminal, `| head` needs no warning
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", open(writer, "w"))  # noqa: SIM115  (the test's end closes it)
    one = grader(chatty)
    assert [rewards(one.grade([group("a")])[0].samples) for _ in range(2)] == [[1.0], [1.0]]
    assert [r.getMessage() for r in caplog.records if "stdout cannot" in r.getMessage()] == [
        "stdout cannot be written any more ([Errno 32] Broken pipe): training continues, and its logs are in the run's folder"
    ]


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "* created\nstep 1\n"), (False, "step 1\n")])
def test_tracker_messages_are_omitted_in_pipes(is_terminal, shown, monkeypatch):
    class Stream(io.StringIO):
        def isatty(self):
            return is_terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    limit_streams()
    for name, text in (("sink trackio", "* created"), ("sink console", "step 1")):
        thread = threading.Thread(target=print, args=(text,), name=name)
        thread.start()
        thread.join()
    assert stream.getvalue() == shown
