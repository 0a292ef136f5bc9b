"""`PromptStream` yields a task's tokenized prompts, identically on every rank, and resumes at the exact position."""

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchdata.nodes import BaseNode, Mapper, Prefetcher

from torchtitan_rl.data.renderer import PromptRenderer, Refused, TooLong
from torchtitan_rl.data.task import Example, Task
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.events import progress
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.fields.references import correctable, load_function, tried
from torchtitan_rl.summary import same_everywhere
from torchtitan_rl.types import Episode, Group, Metric, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_CHECKED = 8
"""Number of training examples tokenized at start-up, to report a wrong tokenizer before training."""

_MAX_PASSED_OVER = 1000
"""Maximum number of consecutive prompts that may be too long before the stream gives up."""


class PromptStream(OwnConfig):
    """Provides the prompts of each step.

    Every rank builds the stream from the same seed, so all get the same prompts without communication. Checkpoints save
    it as `dataloader`; its state is the same on every rank and does not depend on their number.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PromptRenderer.Config):
        read_ahead: int = number(64, least=0, most=65536, remedy="Use 64.")
        """Number of prompts that a thread reads and tokenizes ahead of the step. 0: no thread."""

        demonstrate: str = ""
        """A function (example, rng) that returns the text of a completion to learn from, for a task whose data has none
        (package.module:function or path/to/file.py:function). The rng is a random.Random that depends on the seed and the
        example's place. Empty: the task's own demonstrations, if it has any."""

    def __init__(
        self,
        config: Config,
        *,
        task: Task,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        **demonstrations: Any,
    ) -> None:
        """`demonstrations`: end_token_ids and max_completion_tokens of `PromptRenderer`."""
        super().__init__(config)
        self.task = task
        self.seed = seed
        self.num_passed_over = 0
        """Number of prompts skipped since the start or the resume because they were too long."""
        # A copy, because one thread tokenizes while another decodes, and a tokenizer is not thread-safe.
        own = copy.deepcopy(tokenizer)
        self._renderer = PromptRenderer(config, task=task, tokenizer=own, **demonstrations)
        self._demonstrate = None
        if config.demonstrate:
            self._demonstrate = load_function(config.demonstrate, "prompts.demonstrate")
        self._check_start()
        tried(task, "leave_out", self._renderer.faults)
        prompts: BaseNode[Prompt | Exception] = Mapper(_Places(), self._at)
        self._prompts = Prefetcher(prompts, config.read_ahead) if config.read_ahead else prompts
        self._prompts.reset()

    def next_batch(self, num_prompts: int, *, first_idx: int = 0) -> list[Prompt]:
        """Returns the next `num_prompts` training prompts, with prompt_idx first_idx, first_idx + 1, ...

        Prompts longer than `max_prompt_tokens` are skipped. Raises UserError for a prompt that has no tokens or that
        the tokenizer cannot represent.
        """
        return [replace(self._next(), prompt_idx=first_idx + index) for index in range(num_prompts)]

    def at(self, stream_idx: int) -> Prompt:
        """Returns the training prompt with this `stream_idx`. Raises UserError if it can no longer be one."""
        prompt = self._at(stream_idx)
        if not isinstance(prompt, Prompt):
            raise prompt
        return prompt

    def hinted(self, prompt: Prompt, hint: str) -> Prompt:
        """Returns the prompt as a teacher reads it that is told `hint`."""
        return self._renderer.hinted(prompt, hint)

    def observe(self, groups: Sequence[Group[Episode]]) -> None:
        """Called with each step's credited groups. The stream does not depend on them; a subclass may (docs/extending.md)."""

    def held_out(self, num: int) -> list[Prompt]:
        """Returns the first `num` held-out prompts, with prompt_idx 0, 1, ..., the same at every call; fewer if the task has fewer."""
        prompts = []
        for index, example in enumerate(tried(self.task, "held_out_examples", num)):
            example = self._demonstrated(example, f"held_out/{index}")
            prompts.append(replace(self._renderer.prompt(example), prompt_idx=index))
        return prompts

    def epoch(self, num_seen: int) -> float | None:
        return self.task.epoch(num_seen)

    def metrics(self, num_seen: int) -> dict[str, Metric]:
        """Returns the number of skipped prompts and, for a finite data set, the epoch after `num_seen` prompts."""
        metrics = {"prompts/too_long": same_everywhere(float(self.num_passed_over))}
        epoch = self.epoch(num_seen)
        return metrics if epoch is None else {**metrics, "optimizer/epoch": same_everywhere(epoch)}

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as one string, because DCP needs fixed keys, which torchdata's state does not have."""
        return {"position": json.dumps(self._prompts.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = json.loads(state_dict["position"])
        source = state.get("snapshot", state)  # a Prefetcher wraps its source's state
        ahead = {"snapshot": source, "steps_since_snapshot": 0}
        self._prompts.reset(ahead if self.config.read_ahead else source)

    def _next(self) -> Prompt:
        for _ in range(_MAX_PASSED_OVER):
            prompt = next(self._prompts)
            if isinstance(prompt, Prompt):
                return prompt
            if not isinstance(prompt, TooLong):
                raise prompt
            if not self.num_passed_over:
                more = "further ones are only counted, as prompts/too_long"
                progress(f"a prompt is skipped; {more}: {prompt}")
            self.num_passed_over += 1
        raise prompt

    def _at(self, index: int) -> Prompt | BaseException:
        """Returns the prompt at an index of the stream, or the exception, which the step that needs it raises.

        SystemExit is returned too: it would end the read-ahead thread, and the step would wait forever.
        """
        try:
            return replace(self._renderer.prompt(self._example(index)), stream_idx=index)
        except BaseException as error:
            return error

    def _example(self, index: int) -> Example:
        example = tried(self.task, "train_example", index, seed=self.seed)
        place = f"{type(self.task).__name__}.train_example({index})"
        expect(isinstance(example, Example), place, example, "an Example", "Return one.")
        return self._demonstrated(example, f"{self.seed}/{index}")

    def _demonstrated(self, example: Example, place: str) -> Example:
        """Returns the example with the demonstration of `prompts.demonstrate`, if there is such a function."""
        if self._demonstrate is None:
            return example
        field, reference = "prompts.demonstrate", self._renderer.config.demonstrate
        expected = "a function that returns text"
        with correctable(f"{field} = {reference!r}: expected {expected}, but it raises"):
            text = self._demonstrate(example, random.Random(f"demonstrate/{place}"))
        filled = isinstance(text, str) and text.strip() != ""
        expect(filled, field, reference, f"{expected}, but it returned {text!r:.80}", "Correct it.")
        return replace(example, demonstration=[{"role": "assistant", "content": text}])

    def _check_start(self) -> None:
        """Raises UserError if the tokenizer does not fit the task, or if none of the first examples can be a prompt."""
        examples = [self._example(index) for index in range(_NUM_CHECKED)]
        unfit: list[UserError] = []
        for example in (*examples, *self.task.held_out_examples(1)):
            try:
                self._renderer.prompt(example)
            except Refused as error:
                unfit.append(error)
        if len(unfit) >= _NUM_CHECKED:
            raise unfit[0]


class _Places(BaseNode[int]):
    """The indices of the training stream: 0, 1, 2, ... without end."""

    def reset(self, initial_state: dict[str, int] | None = None) -> None:
        super().reset(initial_state)
        self._place = initial_state["place"] if initial_state else 0

    def next(self) -> int:
        self._place += 1
        return self._place - 1

    def get_state(self) -> dict[str, int]:
        return {"place": self._place}
