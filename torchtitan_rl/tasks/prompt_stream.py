"""PromptStream: a task's examples as tokenised prompts, the same on every rank, resumable at the exact place."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.config import Configurable
from transformers import PreTrainedTokenizerBase

from torchtitan_rl.run.errors import expect
from torchtitan_rl.tasks import Example, Task
from torchtitan_rl.types import Prompt

_NUM_CHECKED = 8
"""Training examples that are tokenised at start-up, so that a wrong tokenizer is an error before training."""


class PromptStream(Configurable):
    """Gives each step its prompts.

    Every rank builds the same stream from the same seed and so gets the same prompts without any communication. It is
    the checkpoint's `dataloader`: all ranks save the same state.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        apply_chat_template: bool = True
        """Render the task's messages with the tokenizer's chat template, where both exist; else take the plain text."""

        enable_thinking: bool = False
        """Handed to the chat template; Qwen3's knows it, most others ignore it."""

        max_prompt_tokens: int = 512
        """Longest prompt in tokens, chat template included; a longer one is an error."""

    def __init__(self, config: Config, *, task: Task, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.config = config
        self.task = task
        self._members = task.members()
        self.tokenizer = tokenizer
        # A batch size of None and no workers: items come one at a time and none is read ahead, so the saved position is
        # that of the last prompt used.
        self._loader = StatefulDataLoader(
            _TrainExamples(task, seed), batch_size=None, num_workers=0, collate_fn=_unchanged
        )
        self._examples: Iterator[Example] | None = None
        for index in range(_NUM_CHECKED):
            self._tokenize(0, task.train_example(index, seed=seed), check_answer=True)
        for example in task.held_out_examples(1):
            self._tokenize(0, example, check_answer=True)

    def next_batch(self, num_prompts: int) -> list[Prompt]:
        """The next `num_prompts` training prompts, with prompt_idx 0, 1, ...

        Raises UserError for a prompt without tokens, longer than `max_prompt_tokens`, or that the tokenizer cannot represent.
        """
        if self._examples is None:
            self._examples = iter(self._loader)
        return [self._tokenize(index, next(self._examples)) for index in range(num_prompts)]

    def held_out(self, num: int) -> list[Prompt]:
        """The first `num` held-out prompts, prompt_idx 0, 1, ...; the same at every call. Raises as `next_batch`."""
        return [self._tokenize(index, example) for index, example in enumerate(self.task.held_out_examples(num))]

    def state_dict(self) -> dict[str, Any]:
        """The position, as one string: a loader's own state changes its keys as it goes; DCP loads into given ones."""
        return {"position": json.dumps(self._loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position: the next batch is the one that followed it."""
        self._loader.load_state_dict(json.loads(state_dict["position"]))
        self._examples = None

    def _tokenize(self, prompt_idx: int, example: Example, *, check_answer: bool = False) -> Prompt:
        chat = example.messages is not None and self.config.apply_chat_template and self.tokenizer.chat_template
        if chat:
            text = self.tokenizer.apply_chat_template(
                example.messages,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=self.config.enable_thinking,
                tools=self._members[example.task].tool_schemas(),
            )
        else:
            text = example.text
        # A chat template writes its own special tokens; plain text gets what the tokenizer adds, such as <bos>.
        token_ids = self.tokenizer(text, add_special_tokens=not chat)["input_ids"]
        self._check_represents(text)
        if check_answer:
            self._check_represents(example.expected_answer)
        shown, longest = _shortened(text), self.config.max_prompt_tokens
        expect(
            len(token_ids) > 0,
            f"prompt {prompt_idx}",
            shown,
            "at least one token, from which the first of the completion is predicted",
            "Leave such examples out in the task.",
        )
        expect(
            len(token_ids) <= longest,
            "prompts.max_prompt_tokens",
            longest,
            f"at least {len(token_ids)}, the length in tokens of prompt {prompt_idx}: {shown!r}",
            "Raise it (and generator.max_model_len with it), or leave such examples out in the task.",
        )
        return Prompt(
            prompt_idx=prompt_idx,
            text=text,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            expected_answer=example.expected_answer,
            messages=example.messages if chat else None,
            columns=example.columns,
            task=example.task,
            sampling=example.sampling,
        )

    def _check_represents(self, text: str) -> None:
        """Raise UserError unless the tokenizer gives `text` back from its token ids, without unknown tokens."""
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        decoded = self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        unknown = self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in token_ids
        # Some tokenizers put a space before the first word, which is no loss.
        expect(
            not unknown and decoded.strip() == text.strip(),
            "hf_assets_path",
            self.tokenizer.name_or_path,
            f"a tokenizer that can represent the task's text: {_shortened(text)!r} comes back as {_shortened(decoded)!r}",
            "Use the folder of the checkpoint that the policy starts from, with its own tokenizer files.",
        )


class _TrainExamples(IterableDataset):
    """A task's endless training stream; its state is the index of the next example."""

    def __init__(self, task: Task, seed: int) -> None:
        self._task = task
        self._seed = seed
        self._index = 0

    def __iter__(self) -> Iterator[Example]:
        while True:
            # Counted before it is handed out: a generator stands still at its yield, and the state is read then.
            self._index += 1
            yield self._task.train_example(self._index - 1, seed=self._seed)

    def state_dict(self) -> dict[str, int]:
        return {"index": self._index}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._index = state_dict["index"]


def _unchanged(example: Example) -> Example:
    """In place of the default collate function, which would turn numbers in an example's columns into tensors."""
    return example


def _shortened(text: str, max_characters: int = 200) -> str:
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."
