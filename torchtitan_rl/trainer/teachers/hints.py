"""What a teacher reads more than the policy: a hint of the row, or feedback on the attempts of the group."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torchtitan_rl.errors import expect
from torchtitan_rl.events import record_metric
from torchtitan_rl.fields.references import correctable, load_function
from torchtitan_rl.trainer.packing import pack
from torchtitan_rl.types import Episode, Group, Member, Prompt, TrainBatch, flat

if TYPE_CHECKING:
    from torchtitan_rl.data.stream import PromptStream

HintTexts = Callable[[Group[Episode]], Sequence[str | None]]
"""Returns for each sample of a group what its teacher reads after the question; None: nothing more than the policy."""

_TRIED = 8
"""Training prompts of which one at least must have the column of a hint."""


class Hints:
    """The prompts under which a teacher scores a step's samples, a `Source` that is asked before the teacher.

    A sample without a hint, or whose hint leaves no room for it, has the policy's own prompt.
    """

    name = "hints"

    def __init__(self, source: str, prompts: "PromptStream", max_tokens: int) -> None:
        """
        Args:
            source: `teacher_hint`, a column of the rows or a reference to a function of the type `HintTexts`.
            max_tokens: the longest prompt and completion together.

        Raises:
            UserError: naming `teacher_hint`, if there is no such function or none of the first rows has the column.
        """
        self._source, self._hinted, self._max_tokens = source, prompts.hinted, max_tokens
        self._prompts: dict[tuple[int, int], Prompt] = {}
        """The teacher's prompt of samples with a hint, by prompt_idx and sample_idx."""
        self._texts: HintTexts = partial(column, source)
        if ":" in source:
            self._texts = load_function(source, "teacher_hint")
            return
        rows = [prompts.at(index) for index in range(_TRIED)]
        known = sorted({name for row in rows for name in (*row.columns, "expected_answer")})
        has_text = any(column(source, Group(prompt=row, samples=[None])) != [None] for row in rows)
        expected = "a column with text in the first training rows"
        remedy = f"They have {known}. For a function, name its file: FILE.py:FUNCTION."
        expect(has_text, "teacher_hint", source, expected, remedy)

    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Find the teacher's prompt of every sample, before the teacher is asked."""
        self._prompts = {}
        for group in groups:
            expected = f"a text or None for each of the {len(group.samples)} samples"
            with correctable(
                f"teacher_hint = {self._source!r}: expected {expected}, but it raises"
            ):
                texts = [*self._texts(group)]
            whole = len(texts) == len(group.samples) and all(
                text is None or isinstance(text, str) for text in texts
            )
            expect(whole, "teacher_hint", self._source, expected, f"It returned {texts!r:.200}.")
            prompts: dict[tuple[int, str], Prompt] = {}  # rendered once for each prompt and text
            for text, episode in zip(texts, group.samples, strict=True):
                if not text:
                    continue
                prompt, completion = Member.of(group, episode).prompt, episode.completion
                if (hinted := prompts.get((id(prompt), text))) is None:
                    hinted = prompts[id(prompt), text] = self._hinted(prompt, text)
                if len(hinted.token_ids) + len(completion.token_ids) <= self._max_tokens:
                    self._prompts[prompt.prompt_idx, completion.sample_idx] = hinted
        record_metric(
            "teacher/hinted_fraction", len(self._prompts) / max(len(flat(groups)), 1), "last"
        )

    def groups(self, groups: Sequence[Group[Episode]]) -> list[Group[Episode]]:
        """Returns the groups as the teacher reads them: the same credit, and each sample with the teacher's prompt."""
        read: list[Group[Episode]] = []
        for group in groups:
            samples: list[Episode] = []
            for episode in group.samples:
                prompt = self._prompt_of(Member.of(group, episode))
                completion = replace(episode.completion, prompt=prompt)
                scored = replace(episode.scored, completion=completion)
                samples.append(replace(episode, scored=scored))
            read.append(replace(group, samples=samples))
        return read

    def _prompt_of(self, member: Member) -> Prompt:
        key = member.prompt.prompt_idx, member.episode.completion.sample_idx
        return self._prompts.get(key, member.prompt)

    def batch(self, batch: TrainBatch, multiple: int) -> TrainBatch:
        """Returns the micro-batch with the teacher's prompts: the same tokens are in the loss, in the same order."""
        members = [member._replace(prompt=self._prompt_of(member)) for member in batch.members]
        return pack(members, normalizers=batch.normalizers, multiple=multiple)


def column(name: str, group: Group[Episode]) -> list[str | None]:
    """A row's column, after "Hint: ", for each sample: a hint, a solution, a demonstration, or `expected_answer`."""
    prompt = group.prompt
    columns = {"expected_answer": prompt.expected_answer, **prompt.columns}
    text = str(columns.get(name) or "").strip()
    return [f"Hint: {text}" if text else None] * len(group.samples)


def feedback(group: Group[Episode]) -> list[str | None]:
    """SDPO's, Hübotter et al., arXiv 2601.20802: the best attempt of the group, for those with a lower reward, and what a reward
    function said of one's own with `log_extra("feedback", ...)`."""
    rewarded = [episode for episode in group.samples if episode.reward is not None]
    best = max(rewarded, key=lambda episode: episode.reward, default=None)
    texts: list[str | None] = []
    for episode in group.samples:
        parts: list[str] = []
        if episode.reward is not None and best.reward > episode.reward:
            parts.append(f"A better answer:\n{best.completion.text.strip()}")
        if text := episode.scored.extra.get("feedback"):
            attempt = episode.completion.text.strip()
            parts.append(f"Your last answer:\n{attempt}\nFeedback on it: {text}")
        texts.append("\n\n".join(parts) or None)
    return texts
