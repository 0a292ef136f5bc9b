"""Which exit code a rank ends with, and what it says."""

import errno
import faulthandler
import gc
import multiprocessing
import os
import sys
from contextlib import ExitStack

import pytest
import torch

from torchtitan_rl import events
from torchtitan_rl.command import train
from torchtitan_rl.command.registry import config_functions, parse_args
from torchtitan_rl.configs.toys.small_models import small_qwen3
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.fields.references import load_function
from torchtitan_rl.run.rank_status import StatusFile
from torchtitan_rl.run.start_checkpoint import START_CHECKPOINTS


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `main` in a process of its own, with `training` in place of the run; returns its exit code and its output."""

    def in_child(training, args):
        gc.freeze()  # a collector that frees another test's process group here waits for its threads, which a child lacks
        terminal = os.open(tmp_path / "terminal", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115  (in place of pytest's)
        faulthandler.dump_traceback_later(50, file=2)
        train.train_run = training
        train.main(args)

    def run(training, args=("--config", "debug")):
        child = multiprocessing.get_context("fork").Process(target=in_child, args=(training, args))
        child.start()
        child.join(60)
        exit_code = child.exitcode
        child.kill()  # one that hangs would keep its locks from later runs
        said = (tmp_path / "terminal").read_text()
        assert exit_code is not None, said
        return exit_code, said

    monkeypatch.setenv("RANK", "0")
    config_functions()  # imported once, not in each child
    return run


def raising(error):
    def training(*_):
        raise error

    return training


def test_a_finished_run_ends_with_0(run):
    assert run(lambda name, *_: print(name)) == (0, "debug\n")


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (UserError("sampling.n = 1: ..."), (2, "error: sampling.n = 1: ...\n")),
        (TrainingStopped("the loss is NaN"), (3, "stopped: the loss is NaN\n")),
    ],
)
def test_wrong_input_and_training_that_stops_itself_end_with_their_message_alone(run, error, ends):
    assert run(raising(error)) == ends


def test_rank_that_only_lost_another_one_leaves_the_reason_to_it(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHTITAN_RL_WATCH", str(tmp_path))
    lost = RuntimeError("[../pair.cc:544] Connection closed by peer [127.0.0.1]:3")
    assert "Connection closed" in run(raising(lost))[1]  # it is the first that fails
    assert (tmp_path / "failed").exists()
    assert run(raising(lost)) == (1, "")


def test_a_bug_has_its_traceback_which_ends_with_the_last_line_that_is_the_users_own(run, tmp_path):
    (tmp_path / "mine.py").write_text("def f():\n    return [][3]\n")
    code, said = run(lambda *_: load_function(f"{tmp_path}/mine.py:f", "--config")())
    assert code == 1
    assert "Traceback" in said
    assert said.endswith(
        f"IndexError: list index out of range\nThe last line of your own code in it: {tmp_path}/mine.py, line 2\n"
    )


@pytest.mark.parametrize("request_", [0, None, 3])
def test_exit_during_the_run_fails_it(run, request_):
    code, said = run(raising(SystemExit(request_)))
    assert code == 1
    assert f"something called sys.exit({request_}) in the middle of the run" in said


@pytest.mark.parametrize("code", ["import sys\n\nsys.exit(0)\n", "import sys\n\n\ndef f():\n    sys.exit(0)\n"])
def test_config_that_exits_fails_the_run(run, tmp_path, code):
    (tmp_path / "mine.py").write_text(code)
    code, said = run(None, ["--config", f"{tmp_path}/mine.py:f"])
    assert code == 2
    assert "it calls sys.exit(0)" in said


def test_keyboard_interrupt_in_a_config_function_ends_as_ctrl_c_does(run, tmp_path):
    (tmp_path / "mine.py").write_text("def f():\n    raise KeyboardInterrupt\n")
    code, said = run(None, ["--config", f"{tmp_path}/mine.py:f"])
    assert code == 130
    assert said == f"interrupted ({tmp_path}/mine.py, line 2)\n"


@pytest.mark.parametrize("shown", ["1", "none"])
def test_a_rank_to_show_that_does_not_exist_is_wrong_input(run, monkeypatch, shown):
    monkeypatch.setenv("LOG_RANK", shown)
    assert run(None) == (2, f"error: LOG_RANK = '{shown}': expected a rank, 0 to 0. Leave it out for 0.\n")


IN_BFLOAT16 = ["--config", "debug", "--generator.dtype", "bfloat16", "--trainer.logprob-gate.max-diff", "None"]


def test_a_predicted_peak_over_the_gpus_memory_is_a_warning_before_a_process_group_starts(run, monkeypatch):
    def stop(*_):
        raise UserError("stopped")

    monkeypatch.setattr("torchtitan_rl.build.gpu_memory_bytes", lambda: 2**30)
    monkeypatch.setattr("torchtitan_rl.comm.init_process_group", stop)

    def start(config):
        config.hf_assets_path = str(START_CHECKPOINTS / "none")  # neither made nor compared
        config.model_spec = small_qwen3(vocab_size=320)

    monkeypatch.setattr("torchtitan_rl.build.prepare_start", start)
    code, said = run(train.train_run, IN_BFLOAT16)
    assert code == 2
    assert "memory of each GPU of 1 GiB, estimated: engine awake" in said
    assert "warning: that is more than the GPU has" in said
    assert said.endswith("error: stopped\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grader.rewards", "nowhere.py:f"], "grader.rewards = 'nowhere.py:f': expected a file that exists"),
        (["--config", "debug_rows", "--task.path", "nowhere.jsonl"], "task.path = 'nowhere.jsonl': expected a file"),
    ],
)
def test_task_and_rewards_are_checked_before_a_start_is_made(monkeypatch, options, message):
    def made(config):
        raise AssertionError("a start is made")

    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torchtitan_rl.build.prepare_start", made)
    monkeypatch.setattr(events, "_listeners", [])
    with pytest.raises(UserError, match=message):
        train.train_run(*parse_args(options), output=None, status_file=StatusFile(0), cleanup=ExitStack())


def test_engine_without_enough_memory_at_its_start_names_the_setting(run):
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory
    from vllm.v1.worker.utils import request_memory

    def without_room(*_):
        _check_enough_kv_cache_memory(0, lambda: 1, 64, lambda _: 0)

    def without_free_memory(*_):
        snapshot = MemorySnapshot(free_memory=2**30, total_memory=2**36, device=torch.device("cpu"), auto_measure=False)
        request_memory(snapshot, CacheConfig(gpu_memory_utilization=0.4))

    assert "Raise generator.gpu_memory_utilization (on a CPU VLLM_CPU_KVCACHE_SPACE)" in run(without_room)[1]
    assert "Lower generator.gpu_memory_utilization, or end what else uses" in run(without_free_memory)[1]


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.ENOMEM, "fork failed")]
)
def test_out_of_memory_error_names_settings_to_lower_by_phase(run, error):
    def training(*_):
        with events.heartbeat("step 3"), events.timed("train"):
            raise error

    exit_code, said = run(training)
    assert exit_code == 1
    assert (
        "This process was refused memory in step 3: train. Lower trainer.max_tokens_per_microbatch, num_prompts" in said
    )
