"""--help is one screen; --help GROUP and --help all show the fields."""

import pytest

from torchtitan_rl.setup.registry import config_functions, parse_args


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


@pytest.mark.parametrize(
    ("group", "has", "lacks"),
    [
        ("trainer", "--trainer.optimizer.lr", "--sampling.n"),
        ("trainer.optimizer", "--trainer.optimizer.lr", "--trainer.max-norm"),
        ("weight-sync", "--weight-sync.max-diff", "--trainer.max-norm"),
        ("run", "--num-steps", "--sampling.n"),
        ("all", "--sampling.n", "no such text"),
    ],
)
def test_help_of_a_group_has_its_fields_alone(group, has, lacks, shown):
    text = "\n".join(shown("--config", "debug", "--help", group))
    assert has in text
    assert lacks not in text
