"""A reward function may print what it likes: a terminal is not flooded, and nothing fails of it."""

import logging
import sys

import pytest

from tests.unit_tests.grading.helpers import grader, group, rewards
from torchtitan_rl.observability.printed import KEPT, SHOWN


def chatty(completions, **_):
    print("x" * 5_000_000)
    print("y" * 5_000_000, file=sys.stderr)
    return [1.0] * len(completions)


def quiet(completions, **_):
    print("seen", completions[0])
    return [1.0] * len(completions)


@pytest.mark.parametrize("workers", [0, 1])
def test_five_megabytes_are_cut_and_counted(workers, capfd):
    one = grader(chatty, workers=workers)
    assert rewards(one.score([group("a")])[0].samples) == [1.0]
    one.close()
    for text in capfd.readouterr():
        assert SHOWN < len(text) < SHOWN + 300
        assert text.rstrip().endswith(
            "printed 5,000,001 characters here: the first 4,000 are shown, more are in the run's logs/"
        )


def test_what_is_not_shown_is_in_the_log_up_to_a_bound(caplog):
    with caplog.at_level(logging.INFO):
        grader(chatty).score([group("a")])
    assert [len(record.args[1]) for record in caplog.records if record.name.endswith("printed")] == [KEPT, KEPT]


def test_little_is_shown_as_it_is(capsys):
    grader(quiet).score([group("a")])
    assert capsys.readouterr().out == "seen a\n"
