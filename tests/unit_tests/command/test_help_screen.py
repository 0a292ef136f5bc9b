"""--help is one screen; --help all shows the fields."""

import pytest

from torchtitan_rl import device
from torchtitan_rl.command.registry import parse_args


@pytest.fixture
def shown(capsys, monkeypatch):
    """Returns the lines that a command line prints on a terminal of 80 columns."""

    def lines(*arguments):
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit, match="0"):
            parse_args(arguments)
        return capsys.readouterr().out.splitlines()

    return lines


def test_help_is_one_screen_of_80_by_24(shown):
    lines = shown("--config", "qwen3_30b_a3b", "--sampling.n", "5", "--help")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("  --sampling.n 5  ") for line in lines)
    assert any(line.endswith("where there is no GPU:") == device.FOR_CPU for line in lines if "values" in line)


def test_help_of_rows_has_the_fields_of_the_data_and_cuts_no_value(shown):
    lines = shown("--config", "rows", "--task.path", "a_folder/with/a/long/name/rows.jsonl", "--help")
    assert "  --task.path a_folder/with/a/long/name/rows.jsonl" in lines
    assert {"--task.held-out-path", "--task.answer-kind", "--task.prompt-column"} <= {*" ".join(lines).split()}


def test_the_list_of_configs_is_one_screen_of_80_by_40(shown):
    lines = shown("--list-configs")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("  debug ") for line in lines) == 1


def test_help_all_has_every_field_and_the_one_timeout_between_ranks_that_counts(shown):
    text = " ".join(" ".join(shown("--config", "debug", "--help", "all")).split())
    assert "--sampling.n" in text
    assert "--trainer.optimizer.lr" in text
    assert "--comm.train-timeout-seconds" not in text
    assert "The longest time that a rank waits for the others, throughout the run." in text
