"""PromptStream: a task's examples as tokenised prompts, the same on every rank, resumable at the exact place."""

import copy
import json
from dataclasses import dataclass, replace
from typing import Any

from torchdata.nodes import BaseNode, Mapper, Prefetcher
from torchtitan.config import Configurable
from transformers import PreTrainedTokenizerBase

from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import UserError, expect
from torchtitan_rl.core.events import progress
from torchtitan_rl.core.summary import same_everywhere
from torchtitan_rl.core.types import Metric, Prompt
from torchtitan_rl.library.prompts.renderer import PromptRenderer, Refused, TooLong
from torchtitan_rl.library.task import Example, Task

_NUM_CHECKED = 8
"""Training examples that are tokenised at start-up, so that a wrong tokenizer is an error before training."""

_MAX_PASSED_OVER = 1000
"""Prompts in a row that may be too long before the task is taken to have no others."""


class PromptStream(Configurable):
    """Gives each step its prompts.

    Every rank builds the same stream from the same seed and so gets the same prompts without any communication. It is
    the checkpoint's `dataloader`: all ranks save the same state, whatever their number.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PromptRenderer.Config):
        read_ahead: int = number(64, least=0, most=65536, remedy="Use 64; 0 reads each prompt when it is asked for.")
        """Prompts that a thread reads and tokenises ahead of the step; 0: each when it is asked for."""

    def __init__(self, config: Config, *, task: Task, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.config = config
        self.task = task
        self.seed = seed
        self.num_passed_over = 0
        """Prompts passed over since the start or the resume, as they were too long."""
        # A copy, as a tokenizer is not made for the two threads that decode and tokenise at the same time.
        self._renderer = PromptRenderer(config, task=task, tokenizer=copy.deepcopy(tokenizer))
        self._check_start()
        task.leave_out(self._renderer.faults)
        prompts: BaseNode[Prompt | Exception] = Mapper(_Places(), self._at)
        self._prompts = Prefetcher(prompts, config.read_ahead) if config.read_ahead else prompts
        self._prompts.reset()

    def next_batch(self, num_prompts: int, *, first_idx: int = 0) -> list[Prompt]:
        """The next `num_prompts` training prompts, with prompt_idx first_idx, first_idx + 1, ...

        Raises UserError for a prompt without tokens, or that the tokenizer cannot represent; passes over those that are
        longer than `max_prompt_tokens`.
        """
        return [replace(self._next(), prompt_idx=first_idx + index) for index in range(num_prompts)]

    def held_out(self, num: int) -> list[Prompt]:
        """The first `num` held-out prompts, prompt_idx 0, 1, ...; the same at every call. Raises UserError as the task does."""
        examples = enumerate(self.task.held_out_examples(num))
        return [replace(self._renderer.prompt(example), prompt_idx=index) for index, example in examples]

    def metrics(self, num_seen: int) -> dict[str, Metric]:
        """How far the data has been gone through after `num_seen` prompts, and what was passed over on the way."""
        metrics = {"prompts/too_long": same_everywhere(float(self.num_passed_over))}
        epoch = self.task.epoch(num_seen)
        return metrics if epoch is None else {**metrics, "optimizer/epoch": same_everywhere(epoch)}

    def state_dict(self) -> dict[str, Any]:
        """The position, as one string: torchdata's state changes its keys as it goes; DCP loads into given ones."""
        return {"position": json.dumps(self._prompts.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position: the next batch is the one that followed it."""
        self._prompts.reset(json.loads(state_dict["position"]))

    def _next(self) -> Prompt:
        for _ in range(_MAX_PASSED_OVER):
            prompt = next(self._prompts)
            if isinstance(prompt, Prompt):
                return prompt
            if not isinstance(prompt, TooLong):
                raise prompt
            if not self.num_passed_over:
                progress(f"a prompt is passed over, as all such are and prompts/too_long counts: {prompt}")
            self.num_passed_over += 1
        raise prompt

    def _at(self, index: int) -> Prompt | BaseException:
        """The prompt at a place of the stream. An error is handed on, to be raised by the step that asks for it; an exit too,
        which would end the thread that reads ahead and leave the step waiting."""
        try:
            return self._renderer.prompt(self._example(index))
        except BaseException as error:
            return error

    def _example(self, index: int) -> Example:
        example = self.task.train_example(index, seed=self.seed)
        place = f"{type(self.task).__name__}.train_example({index})"
        expect(isinstance(example, Example), place, example, "an Example", "Return one for every index from 0 up.")
        return example

    def _check_start(self) -> None:
        """Raise UserError when the tokenizer does not fit the task, or none of the first examples can be a prompt."""
        examples = [self._example(index) for index in range(_NUM_CHECKED)]
        unfit: list[UserError] = []
        for example in examples + self.task.held_out_examples(1):
            self._renderer.check_represents(example.expected_answer)
            try:
                self._renderer.prompt(example)
            except (TooLong, Refused) as error:
                unfit.append(error)
        if len(unfit) >= _NUM_CHECKED:
            raise unfit[0]


class _Places(BaseNode[int]):
    """0, 1, 2, ... without end: the places of the training stream."""

    def reset(self, initial_state: dict[str, int] | None = None) -> None:
        super().reset(initial_state)
        self._place = initial_state["place"] if initial_state else 0

    def next(self) -> int:
        self._place += 1
        return self._place - 1

    def get_state(self) -> dict[str, int]:
        return {"place": self._place}
