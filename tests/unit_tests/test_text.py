"""Text from models, data rows and rewards is safe for a terminal, and that of every language stays as it is."""

import pytest

from torchtitan_rl.text import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;evil\x07", r"\x1b[2J\x1b]0;evil\x07"),
        ("\x9b2J \x00 \x7f", r"\x9b2J \x00 \x7f"),
        ("right\rwrong", r"right\rwrong"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
        ("\u202etxt.exe\u202c \u2067x\u2069", r"\u202etxt.exe\u202c \u2067x\u2069"),
        ("two\r\nlines\tand a tab\n", "two\nlines\tand a tab\n"),
    ],
)
def test_characters_that_a_terminal_obeys_are_shown_as_escapes(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Größe, 数学　",
        "می\u200cخواهم ۝ \u0601",
        "שלום\u200f!",
        "ภาษา\u200bไทย",
        "👩\u200d💻🇩🇪",
        "soft\u00adhyphen",
        "\ufeffx",
    ],
)
def test_text_of_every_language_stays_as_it_is(text):
    assert visible(text) == text
