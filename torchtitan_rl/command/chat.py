"""Asks a run's policy, or the model of a folder: `Chat.of("outputs/debug").ask("What is 38 + 64?")`."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_rl import device  # before torchtitan and transformers' models

# isort: split
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer
from transformers.utils.logging import disable_progress_bar

from torchtitan_rl.command.export import exported
from torchtitan_rl.data.chat_messages import Message, render_chat
from torchtitan_rl.data.end_tokens import end_token_ids
from torchtitan_rl.data.renderer import PromptRenderer, template_options
from torchtitan_rl.fields.field_limits import check_fields
from torchtitan_rl.fields.references import correctable
from torchtitan_rl.run.start_checkpoint import load_tokenizer
from torchtitan_rl.sampling import SamplingConfig

C = TypeVar("C")


class Chat:
    """A conversation with a model in transformers, with a run's prompts and sampling. No tool is called in it."""

    def __init__(
        self, folder: Path, prompts: PromptRenderer.Config, sampling: SamplingConfig
    ) -> None:
        """Load the model of a folder: on a CPU in float32, on a GPU in its own dtype.

        Args:
            prompts: the system prompt, the few-shot examples and the options of the chat template.
            sampling: of each answer; `n` does not count.
        """
        disable_progress_bar()
        self.prompts, self.sampling = prompts, sampling
        self.messages: list[Message] = []
        """The conversation, without the system prompt and the few-shot examples."""
        self.tokenizer = load_tokenizer(str(folder))
        dtype = torch.float32 if device.ON_CPU else "auto"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model.generation_config = GenerationConfig()  # the folder's own temperature does not count
        self._model = model.to(device.DEVICE_TYPE).eval()
        self._ends = [*end_token_ids(folder, self.tokenizer), *sampling.stop_token_ids]

    @classmethod
    def of(cls, folder: Path, *, step: int | None = None, **settings: Any) -> "Chat":
        """Returns a chat with a run's policy or a model's folder.

        Args:
            step: the step of the run's checkpoint; None: the last.
            settings: `system_prompt`, and fields of `SamplingConfig`. Without them a run's prompts and the sampling of its
                evaluations count; a model's folder has no system prompt, and its answers are greedy.

        Raises UserError if the run has no such checkpoint, or a setting is wrong.
        """
        stored = json.loads((folder / "config.json").read_text())
        is_run, changed = "hf_assets_path" in stored, settings.keys() & {"system_prompt"}
        sampled = stored["evaluation"]["sampling"] if is_run else {"temperature": 0.0}
        prompts = replace(
            _read(PromptRenderer.Config, stored.get("prompts", {})),
            **{name: settings.pop(name) for name in changed},
        )
        sampling = replace(_read(SamplingConfig, sampled), **settings)
        check_fields(sampling)
        with exported(folder, step) as model:
            return cls(model, prompts, sampling)

    @property
    def remembers(self) -> bool:
        """Whether prompts are chat messages. In plain text each question is a prompt of its own."""
        return self.prompts.apply_chat_template and bool(self.tokenizer.chat_template)

    def ask(self, question: str, *, aloud: bool = False) -> str:
        """Returns the answer, which the conversation keeps. `aloud`: it is printed as it comes."""
        prompt = self.tokenizer(
            self._prompt(question), return_tensors="pt", add_special_tokens=not self.remembers
        ).to(self._model.device)
        printer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        sequence = self._model.generate(  # [1, prompt and answer]
            **prompt,
            generation_config=self._generation(),
            tokenizer=self.tokenizer,
            streamer=printer if aloud else None,
        )
        answer_ids = sequence[0, prompt["input_ids"].shape[1] :]  # [T]
        most = self.sampling.max_tokens
        if aloud and len(answer_ids) == most and int(answer_ids[-1]) not in self._ends:
            print(f"(cut off at {most} tokens; --max-tokens allows more)", flush=True)
        answer = self.tokenizer.decode(answer_ids, skip_special_tokens=True)
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def _prompt(self, question: str) -> str:
        """Returns the text that a prompt of the run would have."""
        if not self.remembers:
            return self.prompts.preceded_text(f"{question}\n")
        asked = [*self.messages, {"role": "user", "content": question}]
        messages, options = self.prompts.preceded_messages(asked), template_options(self.prompts)
        with correctable("the chat template raises"):
            return render_chat(self.tokenizer, messages, add_generation_prompt=True, **options)

    def _generation(self) -> GenerationConfig:
        names = ("temperature", "top_p", "top_k", "min_p") if self.sampling.temperature else ()
        return GenerationConfig(
            max_new_tokens=self.sampling.max_tokens,
            eos_token_id=self._ends,
            pad_token_id=self._ends[0],
            stop_strings=self.sampling.stop or None,
            do_sample=self.sampling.temperature > 0,
            **{name: getattr(self.sampling, name) for name in names},
        )


def _read(config: Callable[..., C], stored: dict[str, Any]) -> C:
    """Returns a config from its part of a run's config.json. Fields of another version are left out."""
    known = {field.name for field in fields(config)}
    return config(**{name: value for name, value in stored.items() if name in known})
