"""torchtitan-rl serve: vLLM's server with a run's checkpoint, its end tokens, its evaluations' sampling and its tool calls."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch

from tests.parts.talk import save_talker
from tests.unit_tests.models.lora.test_adapters import saver, updated
from tests.unit_tests.models.test_hf_decoder import trainer_of
from torchtitan_rl.command.chat import Chat
from torchtitan_rl.command.command import main as command

QUESTION = [{"role": "user", "content": "higher or lower?"}]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_port_in_use_is_told_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert command(["serve", "no_such_run", "--port", str(port)]) == 2
    assert f"--port = {port}: expected a free port of localhost" in capsys.readouterr().err


def test_what_is_neither_a_folder_nor_a_model_nor_a_config_is_told(capsys, tmp_path):
    assert command(["serve", str(tmp_path / "run"), "--port", str(free_port())]) == 2
    assert "RUN_OR_FOLDER" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path):
    """A run's folder with a checkpoint, whose evaluations sample greedily."""
    start, run = save_talker(tmp_path / "start"), tmp_path / "run"
    stored = {"hf_assets_path": str(start), "prompts": {"system_prompt": "Guess."}}
    stored["evaluation"] = {"sampling": {"temperature": 0, "max_tokens": 6, "stop_token_ids": [33]}}
    run.mkdir()
    (run / "config.json").write_text(json.dumps(stored))
    trainer = trainer_of(start)
    updated(trainer)
    saver(trainer, run).save(1)
    return run


@pytest.mark.long
@pytest.mark.usefixtures("one_rank")
def test_a_runs_checkpoint_answers_both_apis_with_tokens_and_logprobs_until_ctrl_c(run, tmp_path):
    address, log = f"http://localhost:{(port := free_port())}", tmp_path / "log"
    program = [str(Path(sys.executable).with_name("torchtitan-rl")), "serve", str(run), "--port", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen(program, stdout=output, stderr=output, start_new_session=True)
    try:
        while "answers as" not in log.read_text():
            time.sleep(0.2)
            assert server.poll() is None, log.read_text()
        assert f"curl {address}/v1/chat/completions" in log.read_text()
        assert "must bring the run's prompts.system_prompt 'Guess.'" in log.read_text()
        client = httpx.Client(base_url=address, timeout=120)
        asked = {"messages": QUESTION, "max_tokens": 6}
        body = client.post("/v1/chat/completions", json=asked | {"logprobs": True, "return_token_ids": True}).json()
        [choice] = body["choices"]
        assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
        sequence = body["prompt_token_ids"] + choice["token_ids"]
        policy = Chat.of(run)._model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        expected = policy.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].tolist()
        num = len(choice["token_ids"])
        assert choice["token_ids"] == policy.argmax(-1)[-num:].tolist()  # greedy, as the run's evaluations
        sampled = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert sampled == pytest.approx(expected[-num:], abs=1e-3)
        echo = {"prompt": sequence, "echo": True, "logprobs": 1, "max_tokens": 1}
        [echoed] = client.post("/v1/completions", json=echo).json()["choices"]
        assert echoed["logprobs"]["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-3)
        message = client.post("/v1/messages", json=asked | {"model": "policy"}).json()
        assert message["content"][0]["text"] == choice["message"]["content"]
        warm = asked | {"temperature": 2.0, "seed": 3, "n": 4}
        texts = [client.post("/v1/chat/completions", json=warm).json()["choices"] for _ in range(2)]
        assert [each["message"] for each in texts[0]] == [each["message"] for each in texts[1]]
        assert len({each["message"]["content"] for each in texts[0]}) > 1
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(20) == 0
    finally:
        with suppress(ProcessLookupError):  # it has ended; a failed test's engine has not
            os.killpg(server.pid, signal.SIGKILL)
    assert not list(run.glob("tmp*"))
