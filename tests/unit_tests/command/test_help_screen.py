"""--help is one screen; --help all shows the fields."""

import pytest

from torchtitan_rl.command.registry import config_functions, parse_args


@pytest.fixture
def shown(capsys, monkeypatch):
    """Returns the lines that a command line prints on a terminal of 80 columns."""

    def lines(*arguments, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            parse_args(arguments)
        assert ended.value.code == 0
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.parametrize("name", config_functions())
def test_help_of_every_config_is_one_screen_of_80_by_40(name, shown):
    lines = shown("--config", name, "--help")
    assert len(lines) < 40  # the last line is the next prompt's
    assert max(map(len, lines)) <= 80


def test_help_all_has_every_field(shown):
    text = "\n".join(shown("--config", "debug", "--help", "all"))
    assert "--sampling.n" in text
    assert "--trainer.optimizer.lr" in text
