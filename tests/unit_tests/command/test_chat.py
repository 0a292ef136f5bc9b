"""torchtitan-rl chat: it asks what a run's prompts ask."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parts.talk import save_talker
from torchtitan_rl.command.chat import Chat
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
