"""Training from Python: a run as a call, its folder as the result, its failure as an exception."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.parts.tiny import DIMENSIONS
from torchtitan_rl.core.errors import TrainingStopped, UserError
from torchtitan_rl.library.models import new_hf_model
from torchtitan_rl.library.starts.small_tokenizer import make_small_tokenizer
from torchtitan_rl.observability import read_samples
from torchtitan_rl.resilience import job_processes
from torchtitan_rl.setup import notebook

OWN_CONFIG = f"""
from configs.debug import debug
from torchtitan_rl.library.models import small_qwen3


def tiny():
    config = debug()
    config.model_spec = small_qwen3(**{DIMENSIONS | {"vocab_size": 320}})
    config.num_steps, config.num_prompts_per_step, config.sampling.n = 1, 2, 2
    config.sampling.max_tokens = config.evaluation.sampling.max_tokens = 8
    config.evaluation.every = 0
    config.checkpoint.interval = 1000
    return config
"""
"""A user's own file: a config of one step with a tiny model."""


@pytest.mark.long
def test_a_run_is_a_call_that_returns_its_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    start = tmp_path / "my start"
    (tmp_path / "own.py").write_text(OWN_CONFIG)
    name = f"{tmp_path / 'own.py'}:tiny"
    config = notebook.load_config(name)
    new_hf_model(config.model_spec).save_pretrained(start)
    make_small_tokenizer(["What is 12 + 34?\n[ANSWER] 46"] * 4, vocab_size=320).save_pretrained(start)
    config.hf_assets_path, config.dump_folder = str(start), "my runs/first"
    folder = notebook.train(name, config, processes=1)
    assert folder == tmp_path / "my runs" / "first"
    [line] = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert line["step"] == 1
    assert read_samples(folder).num_rows > 0
    assert "step 1/1" in capfd.readouterr().out


def test_a_class_of_the_notebook_is_named(monkeypatch):
    config = notebook.load_config("debug")
    monkeypatch.setattr(type(config.task), "__module__", "__main__")
    with pytest.raises(UserError, match="classes and functions from files.*%%writefile"):
        notebook.train("debug", config)


def test_how_a_run_ends_is_how_the_call_ends(monkeypatch):
    for code, error in ((3, TrainingStopped), (1, TrainingStopped), (2, UserError)):
        monkeypatch.setattr(notebook, "_run", lambda *_, code=code: code)
        with pytest.raises(error, match=f"exit code {code}"):
            notebook.train("debug")


def test_an_interrupt_goes_to_the_run_which_ends_in_its_own_time(capfd):
    program = (
        "import signal, time\n"
        "def stop(*_): print('saving', flush=True); raise SystemExit(130)\n"
        "signal.signal(2, stop)\n"
        "print('step', flush=True)\n"
        "time.sleep(60)"
    )

    def interrupt_when_begun():
        shown = ""
        while "step" not in shown:
            time.sleep(0.05)
            shown += capfd.readouterr().out
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt_when_begun, daemon=True).start()
        assert notebook._run([sys.executable, "-c", program], {}) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().out == "saving\n"


def test_a_run_ends_with_the_notebook(tmp_path):
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    code = f"import os, sys; from torchtitan_rl.setup import notebook; notebook._run([sys.executable, '-c', {program!r}], os.environ)"
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    run = int(kernel.stdout.readline())
    kernel.kill()
    kernel.wait(10)
    deadline = time.monotonic() + 10
    while job_processes.is_alive(run):
        assert time.monotonic() < deadline
        time.sleep(0.05)
