"""torchtitan-rl chat: it asks what a run's prompts ask."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parts.talk import save_talker
from tests.unit_tests.models.lora.test_adapters import saver, updated
from tests.unit_tests.models.test_hf_decoder import trainer_of
from torchtitan_rl.command.chat import Chat
from torchtitan_rl.command.export import export
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.renderer import PromptRenderer
from torchtitan_rl.data.task import Example
from torchtitan_rl.run.start_checkpoint import load_tokenizer
from torchtitan_rl.sampling import SamplingConfig


@pytest.mark.parametrize("is_chat", [True, False])
def test_each_answer_is_the_models_to_the_prompt_that_a_run_renders(tmp_path, is_chat):
    save_talker(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    prompts = PromptRenderer.Config(
        apply_chat_template=is_chat, system_prompt="Add.", few_shot=[("1 + 1", "2")], max_prompt_tokens=512
    )
    renderer = prompts.build(task=SumDigits.Config().build(), tokenizer=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    chat, talk = Chat(tmp_path, prompts, SamplingConfig(temperature=0, max_tokens=6)), []
    for question in ("3 + 4", "and 5"):
        talk.append({"role": "user", "content": question})
        example = Example(text=f"{question}\n", messages=talk, expected_answer="")
        prompt = torch.tensor(renderer.prompt(example).token_ids).long()[None]
        expected = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
        answer = chat.ask(question)
        assert answer == tokenizer.decode(expected, skip_special_tokens=True)
        talk.append({"role": "assistant", "content": answer})


@pytest.mark.usefixtures("one_rank")
def test_a_run_answers_by_its_last_checkpoint_with_its_prompts_and_its_evaluations_sampling(tmp_path):
    start, run = save_talker(tmp_path / "start"), tmp_path / "run"
    prompts, sampling = {"system_prompt": "Add."}, {"temperature": 0, "max_tokens": 6}
    stored = {"hf_assets_path": str(start), "prompts": prompts, "evaluation": {"sampling": sampling}}
    run.mkdir()
    (run / "config.json").write_text(json.dumps(stored))
    trainer = trainer_of(start)
    updated(trainer)
    saver(trainer, run).save(1)
    export(run, tmp_path / "exported", None, "float32")
    answers = {}
    for folder in (tmp_path / "exported", start):
        answers[folder] = Chat(folder, PromptRenderer.Config(**prompts), SamplingConfig(**sampling)).ask("3 + 4")
    assert Chat.of(run).ask("3 + 4") == answers[tmp_path / "exported"] != answers[start]
    assert Chat.of(run, system_prompt="", max_tokens=2).ask("3 + 4") != answers[tmp_path / "exported"]
    assert not list(run.glob("tmp*"))
