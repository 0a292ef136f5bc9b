"""torchtitan-rl export: what is not there or in the way is said before anything is written."""

import json

import pytest

from torchtitan_rl.command import export as script
from torchtitan_rl.command.programs import uses
from torchtitan_rl.errors import UserError
from torchtitan_rl.run.checkpoint_folder import CheckpointFolder


def test_each_wrong_argument_is_named_and_nothing_is_written(tmp_path):
    run, start, output = tmp_path / "run", tmp_path / "start", tmp_path / "exported"

    def export_says(message: str, step: int | None = None) -> None:
        with pytest.raises(UserError, match=message):
            script.export(run, output, step, "float32")

    export_says("RUN = .*expected a run's folder, and no model's")
    run.mkdir()
    (run / "config.json").write_text('{"model_type": "qwen3"}')  # a model's, which may have no tokenizer
    export_says("RUN = .*expected a run's folder, and no model's")
    described = {"config": "debug", "hf_assets_path": str(start)}
    (run / "config.json").write_text(json.dumps(described))
    export_says("hf_assets_path = .*/start': expected the folder that the run started from")
    start.mkdir()
    (start / "config.json").write_text("{}")
    export_says(r"--step = 0: expected one of \[\], the checkpoints in")
    for step in (20, 100):
        CheckpointFolder(run).begin(step)
        CheckpointFolder(run).finish(step, {}, {"config": {}})
    export_says(r"--step = 7: expected one of \[20, 100\]", step=7)
    assert script.find_checkpoint(run, None).name == "step-100"
    (run / "checkpoint" / "step-20" / "manifest.json").unlink()
    export_says("--step = 20: expected a whole checkpoint, .* it has no manifest.json", step=20)
    assert not output.exists()
    output.mkdir()
    (output / "model.safetensors").write_text("")
    export_says("--output = .*expected a new folder")


def test_a_relative_start_is_found_from_the_folder_of_the_runs_command(tmp_path, monkeypatch):
    for folder in ("run", "outputs/start"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "outputs/start/config.json").write_text("{}")
    described = {"hf_assets_path": "outputs/start", "folder_of_command": str(tmp_path)}
    (tmp_path / "run/config.json").write_text(json.dumps(described))
    monkeypatch.chdir(tmp_path / "run")
    assert script.start_of(tmp_path / "run") == tmp_path / "outputs/start"


def test_the_lines_to_chat_and_serve_name_what_can_be_loaded(tmp_path):
    [chat, serve] = uses(tmp_path / "merged", tmp_path / "run")
    assert chat.endswith(f"torchtitan-rl chat {tmp_path}/merged")
    assert serve.endswith(f"torchtitan-rl serve {tmp_path}/merged")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/base"}')
    [chat, serve] = uses(tmp_path, tmp_path / "run")
    assert chat.endswith(f"torchtitan-rl chat {tmp_path}/run")
    assert serve.endswith(f"torchtitan-rl serve {tmp_path}/run")


def test_every_file_but_the_starts_weights_is_copied(tmp_path):
    start, output = tmp_path / "start", tmp_path / "exported"
    kept = ("generation_config.json", "chat_template.jinja", "tokenizer.model", "additional_chat_templates/rag.jinja")
    left = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "consolidated.00.pth", "a.gguf")
    for name in (*kept, *left, "config.json"):
        (start / name).parent.mkdir(parents=True, exist_ok=True)
        (start / name).write_text("{}")
    output.mkdir()
    script.copy_assets(start, output, "float32")
    assert {str(file.relative_to(output)) for file in output.rglob("*.*")} == {*kept, "config.json"}
