"""`PromptRenderer` turns an example into the text and tokens of a prompt."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jinja2 import TemplateError
from torchtitan.config import Configurable

from torchtitan_rl.data.chat_messages import Message, Tools, left_out, render_chat
from torchtitan_rl.data.demonstration import chat_segments, plain_segments, tokenized
from torchtitan_rl.data.task import Example, Task, may_answer
from torchtitan_rl.data.template import special_tokens
from torchtitan_rl.data.tool_schemas import tool_schemas
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.fields.number import MANY, number
from torchtitan_rl.fields.references import correctable
from torchtitan_rl.text import strings
from torchtitan_rl.types import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Refused(UserError):
    """An example that cannot be a prompt, for example because the chat template rejects its system message."""

    def __init__(self, text: Any, fault: str) -> None:
        """`fault`: the reason, worded to follow "a prompt" and "3 rows"."""
        super().__init__(f"prompt = {text!r:.200}: a prompt {fault}.")
        self.fault = fault


class TooLong(Refused):
    """A prompt that has more tokens than prompts.max_prompt_tokens."""


class PromptRenderer(Configurable):
    """Renders messages with the tokenizer's chat template; without messages or template, uses the plain text."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        apply_chat_template: bool = True
        """Render the task's messages with the tokenizer's chat template. Without messages or template, the example's
        plain text is used."""

        system_prompt: str = ""
        """System message of every prompt; in plain text, the first paragraph. A prompt with its own system message
        keeps that one. Empty: none."""

        few_shot: list[tuple[str, str]] = field(default_factory=list)
        """Pairs of question and answer placed before every prompt: as user and assistant turns, or in plain text as one
        paragraph per pair, with the answer directly after the question."""

        enable_thinking: bool = False
        """Passed to the chat template. Qwen3's template uses it; most others ignore it."""

        date: str = ""
        """The date that a chat template writes which asks for today's, such as 2026-11-26. Empty: the day of the run's start,
        which its checkpoints keep."""

        special_tokens: Literal["refuse", "allow"] = "refuse"
        """Prompts with the name of a special token in their text, such as <|im_end|>, which would become that token.
        refuse: such rows of a data set are left out and listed. allow: for prompts that contain a chat format already."""

        max_prompt_tokens: int = number(512, least=1, remedy="Set it to the longest to allow.")
        """Maximum prompt length in tokens, including system prompt and few-shot examples. Longer rows of a data set are
        left out and listed at the start. Longer generated prompts are skipped and counted as prompts/too_long."""

        def preceded_messages(self, messages: list[Message]) -> list[Message]:
            """Returns the messages preceded by the system prompt and the few-shot examples."""
            preface = []
            if messages[0]["role"] == "system":
                preface, messages = messages[:1], messages[1:]
            elif self.system_prompt:
                preface = [{"role": "system", "content": self.system_prompt}]
            for question, answer in self.few_shot:
                preface.append({"role": "user", "content": question.strip()})
                preface.append({"role": "assistant", "content": answer.strip()})
            return [*preface, *messages]

        def preceded_text(self, text: str) -> str:
            """Returns the text preceded by the system prompt and the few-shot examples."""
            system = [self.system_prompt] if self.system_prompt else []
            shown = [question + answer for question, answer in self.few_shot]
            return "\n\n".join([*system, *shown, text])

    def __init__(
        self,
        config: Config,
        *,
        task: Task,
        tokenizer: "PreTrainedTokenizerBase",
        end_token_ids: Collection[int] = (),
        max_completion_tokens: int = MANY,
    ) -> None:
        """`end_token_ids`: what may end a demonstration's turn; empty: the tokenizer's. `max_completion_tokens`: of a demonstration."""
        self.config = config
        self.tokenizer = tokenizer
        self._end_token_ids = set(end_token_ids) or {tokenizer.eos_token_id}
        self._max_completion_tokens = max_completion_tokens
        self._members = task.members()
        members = self._members.items()
        self._tools = {name: tool_schemas(member.tools()) or None for name, member in members}
        self._may_answer = {name: may_answer(member) for name, member in members}
        self._options = template_options(config)
        self._special = special_tokens(tokenizer)
        single = tokenizer("x", return_special_tokens_mask=True)
        num_before = len(list(takewhile(bool, single["special_tokens_mask"])))
        # Tokens, such as <bos>, that the tokenizer puts before a plain text. A chat template writes special tokens itself.
        self._before_text: list[int] = single["input_ids"][:num_before]
        self._template = str(tokenizer.chat_template or "") if config.apply_chat_template else ""
        is_read = "enable_thinking" in self._template or not config.enable_thinking
        expected = "False, as no chat template with such a switch is used"
        expect(is_read, "prompts.enable_thinking", True, expected, "Leave it out.")
        if self._template:
            with correctable(f"the chat_template of {tokenizer.name_or_path} raises"):
                self._check_template()

    def prompt(self, example: Example) -> Prompt:
        """Returns the example as a prompt with prompt_idx 0. Raises Refused or another UserError if it cannot."""
        [prompt] = self.prompts([example])
        if isinstance(prompt, UserError):
            raise prompt
        return prompt

    def prompts(self, examples: Sequence[Example]) -> list[Prompt | UserError]:
        """Returns each example as a prompt, or the error if it cannot be one. A batch is tokenized on all cores."""
        rendered = [self._checked_text(example) for example in examples]
        texts = [each.text for each in rendered if isinstance(each, _Rendered)]
        tokenized_texts = iter(self._token_ids(texts) if texts else ())
        return [
            self._checked(each, next(tokenized_texts)) if isinstance(each, _Rendered) else each
            for each in rendered
        ]

    def hinted(self, prompt: Prompt, hint: str) -> Prompt:
        """Returns the prompt with a hint: at the end of its last user message, or before a plain text. Names of special
        tokens are left out of it."""
        hint = self._special.sub("", hint)
        if not prompt.messages:
            messages, text = None, f"{hint}\n\n{prompt.text}"
        else:
            messages = _with_paragraph(prompt.messages, hint)
            text = self._chat_text(messages, self._tools_of(prompt))
        [token_ids] = self._token_ids([text])
        whole = self._begun(token_ids, is_chat=bool(messages))
        return replace(prompt, text=text, messages=messages, token_ids=whole)

    def faults(self, examples: Sequence[Example]) -> list[str | None]:
        """Returns for each example why it cannot be a prompt, worded to follow "3 rows"; None if it can."""
        odd = "that have no tokens or that the tokenizer cannot represent"
        prompts = self.prompts(examples)
        return [None if isinstance(p, Prompt) else getattr(p, "fault", odd) for p in prompts]

    def _checked_text(self, example: Example) -> "_Rendered | UserError":
        """Returns the example's text, or the error that is known before it is tokenized."""
        rendered = self._rendered(example)
        if isinstance(rendered, UserError) or self.config.special_tokens == "allow":
            return rendered
        texts = strings([rendered.messages or rendered.text, example.demonstration, example.tools])
        for text in texts:
            if special := self._special.search(text):
                return Refused(
                    text,
                    f"with {special[0]!r} in its text, which the tokenizer reads as a special token "
                    "(--prompts.special-tokens allow keeps such, as prompts in a chat format)",
                )
        return rendered

    def _rendered(self, example: Example) -> "_Rendered | Refused":
        is_chat = bool(example.messages and self._template)
        if example.tools and (self._tools[example.task] or not is_chat):
            fault = "with tools, which only a chat template can render, for a task that has none of its own"
            return Refused(example.text or example.messages, fault)
        if not is_chat:
            return _Rendered(example, None, self._plain_text(example))
        messages = self.config.preceded_messages(example.messages)
        request = self._members[example.task].answer_request("\n".join(strings(messages)))
        messages = _with_paragraph(messages, request) if request else messages
        shown = messages[-1].get("content")
        try:
            tools, following = self._tools_of(example), example.demonstration or ()
            text = self._chat_text(messages, tools)
            render = partial(self._chat_text, add_generation_prompt=not following)
            lost = left_out(render, [*messages, *following], tools, self._template)
        except (TemplateError, TypeError) as error:
            return Refused(shown, f"that the chat template rejects: {error}")
        if lost:
            return Refused(shown, f"of which the chat template leaves out {lost}")
        return _Rendered(example, messages, text)

    def _tools_of(self, example: Example | Prompt) -> Tools | None:
        return example.tools or self._tools[example.task]

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _begun(self, token_ids: list[int], *, is_chat: bool) -> list[int]:
        """Returns the tokens after those that the tokenizer puts before a plain text."""
        whole = token_ids if is_chat else [*self._before_text, *token_ids]
        bos = self.tokenizer.bos_token_id
        # A plain text that begins with <bos>, such as a chat format, has it already.
        return whole[1:] if whole[:2] == [bos, bos] else whole

    def _plain_text(self, example: Example) -> str:
        why = "it is switched off" if self.tokenizer.chat_template else "the tokenizer has none"
        expect(
            bool(example.text or not example.messages), "prompts.apply_chat_template", self.config.apply_chat_template,
            f"a chat template, because the task's prompts are chat messages without plain text, but {why}",
            "Start from an instruct checkpoint, or give the task plain text (task.template).",
        )  # fmt: skip
        text = self.config.preceded_text(example.text)
        request = self._members[example.task].answer_request(text)
        return f"{request}\n\n{text}" if request else text

    def _chat_text(
        self, messages: list[Message], tools: Tools | None, *, add_generation_prompt: bool = True
    ) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools, **self._options}
        return render_chat(self.tokenizer, messages, **options)

    def _check_template(self) -> None:
        """Raises UserError unless the template renders and opens the assistant's turn. What it leaves out is found in each prompt."""
        question, answer = {"role": "user", "content": "@asked@"}, "@generated@"
        tools = next(iter(self._tools.values()))
        opened = self._chat_text([question], tools)
        closed, whole = (
            self._chat_text([question, *more], tools, add_generation_prompt=False)
            for more in ((), ({"role": "assistant", "content": answer},))
        )
        # Some templates need no generation prompt: with "[/INST]" the answer follows the user's turn directly.
        expect(
            opened != closed or whole.partition(answer)[0].strip() == opened.strip(),
            "the tokenizer's chat_template", self.tokenizer.name_or_path,
            f"a template that opens the assistant's turn, but with add_generation_prompt it renders {opened!r}",
            "Add the assistant's header for add_generation_prompt, or pass --prompts.no-apply-chat-template.",
        )  # fmt: skip

    def _checked(self, rendered: "_Rendered", text_ids: list[int]) -> Prompt | UserError:
        example, messages, text = rendered
        token_ids = self._begun(text_ids, is_chat=bool(messages))
        decoded = self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        try:
            self._check(text, token_ids, decoded)
            demonstration = self._demonstration(rendered) if example.demonstration else None
        except UserError as error:
            return error
        as_text = example.is_text and not self._may_answer[example.task]
        return Prompt(
            prompt_idx=0,
            text=text,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            expected_answer=example.expected_answer,
            messages=messages,
            question=example.text if as_text else None,
            columns=example.columns,
            task=example.task,
            sampling=example.sampling,
            tools=example.tools,
            demonstration=demonstration,
        )

    def _demonstration(self, rendered: "_Rendered") -> Completion:
        example, messages, text = rendered
        answer = example.demonstration
        try:
            if messages is None:
                segments = plain_segments(answer, self.tokenizer.eos_token)
            else:
                render = partial(self._chat_text, tools=self._tools_of(example))
                segments = chat_segments(text, messages, answer, render)
            completion = tokenized(segments, self.tokenizer, end_token_ids=self._end_token_ids)
        except (ValueError, TypeError, TemplateError) as error:
            fault = f"whose demonstration cannot be learned: {error}"
            raise Refused(text, fault) from error
        longest = self._max_completion_tokens
        if len(completion.token_ids) > longest:
            raise Refused(text, f"whose demonstration is longer than sampling.max_tokens {longest}")
        return completion

    def _check(self, text: str, token_ids: list[int], decoded: str) -> None:
        shown, longest = text[:200], self.config.max_prompt_tokens
        expected = "at least one token to predict the completion from"
        remedy = "Leave such examples out in the task."
        expect(len(token_ids) > 0, "prompt", shown, expected, remedy)
        if len(token_ids) > longest:
            remedy = f"--prompts.max-prompt-tokens {2 * longest} allows longer ones"
            raise TooLong(shown, f"longer than prompts.max_prompt_tokens {longest} ({remedy})")
        unknown = self.tokenizer.unk_token_id in token_ids  # None is no token
        # Some tokenizers add <bos> or a space before the first word, which is harmless.
        is_represented = not unknown and text.strip() in decoded
        expected = f"a tokenizer that represents the task's text, but {shown!r} decodes to {decoded[:200]!r}"
        remedy = (
            "Use the checkpoint folder that the policy starts from, with its own tokenizer files."
        )
        expect(is_represented, "hf_assets_path", self.tokenizer.name_or_path, expected, remedy)


def template_options(config: PromptRenderer.Config) -> dict[str, Any]:
    """Returns the arguments of the chat template that the config sets. `strftime_now` replaces the one of transformers."""
    try:
        day = datetime.fromisoformat(config.date) if config.date else datetime.now()
    except ValueError as error:
        raise UserError(
            f"prompts.date = {config.date!r}: expected a date such as 2026-11-26. Leave it out for the day of the start."
        ) from error
    return {"enable_thinking": config.enable_thinking, "strftime_now": day.strftime}


def _with_paragraph(messages: Sequence[Message], paragraph: str) -> list[Message]:
    """Returns the messages with a paragraph more at the end of the last user message."""
    roles = [message["role"] for message in messages]
    last = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    question = messages[last]
    longer = {**question, "content": f"{question['content']}\n\n{paragraph}"}
    return [message if message is not question else longer for message in messages]


class _Rendered(NamedTuple):
    example: Example
    messages: list[Message] | None
    """None for a plain-text prompt."""
    text: str
