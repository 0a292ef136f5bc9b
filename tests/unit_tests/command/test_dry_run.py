"""--print-config shows the config; --dry-run shows what a run would do and starts nothing."""

import dataclasses
import gc
import json
import re
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tests.parts.algorithm import algorithm_of
from torchtitan_rl.command.registry import parse_args
from torchtitan_rl.configs.toys.answer_recipes import sums
from torchtitan_rl.configs.toys.sum_digits import debug_task
from torchtitan_rl.configs.toys.warm_start import make_checkpoint
from torchtitan_rl.errors import UserError
from torchtitan_rl.run import manifest
from torchtitan_rl.run.checkpoint_folder import CheckpointFolder
from torchtitan_rl.run.dump_folder import lock
from torchtitan_rl.run.resume import config_fields
from torchtitan_rl.run.start_checkpoint import prepare_start


def test_a_printed_config_is_the_one_of_config_json_with_the_command_line_s_values(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from torchtitan_rl.configs.debug import debug\n\n\ndef small():\n    return debug()\n"
    )
    with pytest.raises(SystemExit, match="0"):
        parse_args(["--config", f"{tmp_path / 'mine.py'}:small", "--print-config", "--num-steps", "7"])
    told = json.loads(capsys.readouterr().out)
    assert told["num_steps"] == 7
    assert told["algorithm"]["loss"]["class"] == "torchtitan_rl.algorithm.losses.clip:Clip"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts") / "start"
    make_checkpoint(folder, debug_task().build(), 0, dataclasses.replace(sums(), steps=1, batch_size=2))
    return folder


@pytest.fixture
def dry_run(start, capsys):
    """Returns what a dry run with these options prints."""

    def shown(*options: str, config: str = "debug") -> str:
        with pytest.raises(SystemExit, match="0"):
            parse_args(["--dry-run", "--config", config, "--hf-assets-path", str(start), *options])
        return capsys.readouterr().out

    return shown


def test_a_dry_run_shows_layout_memory_prompts_and_rewards(dry_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    gc.disable()  # as the command's process until its imports are done
    shown = dry_run()
    assert gc.isenabled()
    assert "4 ranks: the policy is sharded FSDP 4 x TP 1, in 1 replica; 4 engines on 1 rank each" in shown
    assert "a step: 16 prompts x 8 completions = 128 sequences of up to 32 + 32 tokens" in shown
    assert re.search(
        r"memory of this machine \d+ GiB, there is no GPU; estimated for each rank besides Python: ", shown
    )
    assert "engine's weights 0.0, KV cache 1.0)" in shown
    assert "a checkpoint every 20 steps: 29 MB each, up to 88 MB\n" in shown  # 12 bytes each of 2.4 million
    assert "each GPU" not in shown
    assert shown.count(" of 5: 11 tokens\nWhat is ") == 5
    lines = {line.split()[0]: line for line in shown.partition("--- rewards")[2].splitlines() if "reward " in line}
    assert "reward 1.2 (correct 1, format 0.2); judged right" in lines["right"]
    assert "reward -0.8 (correct -1, format 0.2); judged wrong" in lines["wrong"]
    assert "'': reward -1 (correct -1, format 0); judged wrong" in lines["empty"]


def test_a_dry_run_plans_for_gpus_that_this_machine_has_not_without_the_model_s_weights(start, tmp_path):
    for file in start.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    lengths = ["--prompts.max-prompt-tokens", "32", "--sampling.max-tokens", "32"]
    plan = ["--config", "sums", *lengths, "--hf-assets-path", str(tmp_path), "--dry-run", "8x80"]
    command = [sys.executable, "-m", "torchtitan_rl.command.command", "train", *plan, "--generator.ranks", "2"]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    assert "6 ranks that only train, and 2 that only sample: the policy is sharded FSDP 6 x TP 1, in 1 replica" in shown
    assert "a step: 32 prompts x 8 completions" in shown  # a GPU's sizes
    assert "memory of each GPU of 80 GiB, estimated: weight sync " in shown
    assert "; a rank that only samples 34.0 GiB (engine 32.0, CUDA 2.0)" in shown


def test_a_dry_run_shows_rows_without_commands_to_the_terminal(dry_run, tmp_path):
    rows = [{"prompt": f"\x1b[2J\x1b]0;evil\x07 \u202e Größe 数学 {i}", "answer": "3"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown = dry_run(f"--task.path={tmp_path / 'rows.jsonl'}", "--prompts.max-prompt-tokens=256", config="rows")
    assert r"\x1b[2J\x1b]0;evil\x07 \u202e Größe 数学" in shown
    assert not set("\x1b\x07\u202e") & set(shown)


def test_a_dry_run_shows_what_the_teacher_reads(dry_run):
    config = "tests/parts/told_sums.py:self_taught"
    assert "--- prompt 1 as the teacher reads it\nHint: Carry.\n\nWhat is " in dry_run(config=config)
    with pytest.raises(UserError, match=r"^teacher_hint = 'advise': expected a column .* They have \['advice', "):
        dry_run("--teacher-hint", "advise", config=config)


def test_a_dry_run_of_demonstrations_shows_what_is_learned(dry_run, start, tmp_path):
    """Without samples there is no answer to show, and none to reward."""
    rows = [{"prompt": f"{i} + 1?", "completion": f"It is {i + 1}."} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lengths = ["--prompts.max-prompt-tokens=32", "--sampling.max-tokens=32", "--num-prompts-per-step=4"]
    out = dry_run(f"--task.path={tmp_path / 'rows.jsonl'}", *lengths, config="sft")
    assert "expected answer" not in out
    assert "--- rewards" not in out
    assert "one process trains; nothing is sampled\na step: 4 demonstrations of up to 32 + 32 tokens" in out
    shown = re.findall(r"-- learned, (\d+) tokens: '(It is \d\.<\|endoftext\|>)'\n", out)
    tokenizer = AutoTokenizer.from_pretrained(start)
    assert [int(count) for count, _ in shown] == [len(tokenizer(text)["input_ids"]) for _, text in shown]
    assert len(shown) == 3


@pytest.mark.parametrize(("weight", "said"), [("1", False), ("-1", True)])
def test_a_dry_run_says_that_the_right_answer_gets_no_more_than_the_wrong_one(dry_run, weight, said):
    shown = dry_run("--grader.weights", "correct", weight)
    assert ("the right answer gets no more than the wrong one" in shown) == said


@pytest.mark.parametrize(
    ("kind", "right"), [("auto", "red"), ("tag", "<answer>red</answer>"), ("box", r"\\boxed{red}")]
)
def test_a_dry_run_says_that_nothing_asks_for_the_form_of_its_right_answer(dry_run, tmp_path, kind, right):
    rows = [{"prompt": f"What is {i}?", "answer": "red"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = [f"--task.path={tmp_path / 'rows.jsonl'}", "--prompts.max-prompt-tokens=256"]
    shown = dry_run(*options, "--task.answer-kind", kind, config="rows")
    assert f"right  '{right}': reward 1 " in shown
    assert ("the prompt does not ask for it" in shown) == (kind == "box")


def test_a_reward_that_fails_in_a_dry_run_is_an_error_as_in_the_run(dry_run, tmp_path):
    (tmp_path / "my_rewards.py").write_text("def fails(completions, **_):\n    return completions[0]['role']\n")
    with pytest.raises(UserError, match=r"Reward function 'fails' failed on prompt .*: TypeError: .* line 2"):
        dry_run("--grader.rewards", f"{tmp_path}/my_rewards.py:fails")


def test_a_dry_run_finds_a_wrong_environment(dry_run, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torchtitan_rl.configs.debug import debug\nfrom torchtitan_rl.configs.toys.sum_digits import SumDigits\n"
        "class Mine(SumDigits):\n    def environment(self, prompt): raise KeyError('x')\n"
        "def mine():\n    config = debug()\n    config.task = Mine.Config(max_integers=2, instruction='')\n    return config\n"
    )
    with pytest.raises(UserError, match="Mine.environment raised KeyError: 'x'"):
        dry_run(config=f"{tmp_path / 'mine.py'}:mine")


def test_a_dry_run_refuses_a_run_folder_that_cannot_be_made_and_leaves_none_behind(dry_run, tmp_path):
    with pytest.raises(UserError, match="dump_folder: cannot write to /proc/x: No such file or directory"):
        dry_run("--dump-folder", "/proc/x")
    dry_run("--dump-folder", str(tmp_path / "new" / "run"))
    assert not list(tmp_path.iterdir())


def test_a_dry_run_checks_the_run_folder_and_the_checkpoint_as_the_run_does(dry_run, start, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(UserError, match="dump_folder = .* but it has .*"):
        dry_run("--dump-folder", str(start))
    with pytest.raises(UserError, match="resume = '77': expected a step with a checkpoint in .*run/checkpoint: there"):
        dry_run("--dump-folder", str(run), "--resume", "77")
    assert not run.exists()
    _, config = parse_args(["--config", "debug", "--hf-assets-path", str(start)])
    prepare_start(config)
    config.prompts.date = "2024-02-29"
    folder = CheckpointFolder(run)
    run.mkdir()
    unfinished = folder.begin(20)
    (unfinished / ".metadata").write_text("index")
    folder.finish(20, manifest.describe(unfinished.iterdir()), {"config": config_fields(config, algorithm_of(config))})
    assert f"{run}: goes on from {run}/checkpoint/step-20" in dry_run("--dump-folder", str(run))
    for wrong, says in {"--seed=5": "seed 0 -> 5", "--num-steps=3": "num_steps = 3: expected at least 20"}.items():
        with pytest.raises(UserError, match=says):
            dry_run("--dump-folder", str(run), wrong)
    with lock(run), pytest.raises(UserError, match="another run is using"):
        dry_run("--dump-folder", str(run))
