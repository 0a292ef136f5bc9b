"""A reward from another model, served by any OpenAI-compatible chat server, such as vLLM's or a hosted one."""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.data.task import completion_text
from torchtitan_rl.fields.typed_arguments import check_above_zero, typed

QUESTION = """Mark an answer from 0 (worthless) to 10 (perfect).

Question:
{prompt}

Answer:
{completion}

Right answer, for your information:
{expected_answer}

End with the mark alone on the last line, as: Mark: 7"""


@typed
@dataclass(eq=False)
class Judge:
    """A reward function: the judge's mark for each completion, divided by `highest`; None once the budget is used up.

    Up to `concurrency` requests of a replica are open at the same time. A request that times out or meets an overloaded
    server is retried with exponential backoff. The same question is asked only once. An answer without a mark, a mark
    above `highest` and an unreachable server count as failures of this function; see grader.on_failure_of.
    """

    base_url: str
    model: str
    _: KW_ONLY
    question: str = QUESTION
    """A format string with {prompt}, {completion} and {expected_answer}."""
    mark: str = r"[Mm]ark:\s*(-?\d+(?:\.\d+)?)(?!\w|[.,]\d)"
    """A regular expression whose first group is the mark. The last match in the judge's answer counts."""
    highest: float = 10.0
    """The mark that gives reward 1."""
    concurrency: int = 32
    timeout_seconds: float = 30.0
    """Of one request. grader.time_limit_seconds_of should exceed the time of all retries."""
    retries: int = 3
    max_tokens: int = 512
    budget: int | None = None
    """Maximum number of requests of this process, not counting retries; None: unlimited."""
    cache: str = ""
    """A JSON Lines file that stores marks for later runs; ranks with the same file system share it."""

    scope = "group"
    """Each prompt's completions have a time limit and a failure of their own."""

    def __post_init__(self) -> None:
        check_above_zero(concurrency=self.concurrency, highest=self.highest)
        check_above_zero(max_tokens=self.max_tokens, timeout_seconds=self.timeout_seconds)
        self.question.format(prompt="", completion="", expected_answer="")
        if re.compile(self.mark).groups < 1:
            raise ValueError(
                f"mark {self.mark!r} has no group in parentheses, which would be the mark"
            )
        self._marks = _read(self.cache)
        self._tasks: dict[str, asyncio.Task[float]] = {}
        """The questions that are being asked. The same question shares one task."""
        self._open = asyncio.Semaphore(self.concurrency)

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        expected_answer: Sequence[str],
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float | None]:
        # Before any await, so that the budget is used in order.
        tasks = []
        for prompt, said, expected in zip(prompts, completions, expected_answer, strict=True):
            parts = {"prompt": _text(prompt), "completion": completion_text(said)}
            tasks.append(self._ask(self.question.format(**parts, expected_answer=expected)))
        log_metric("left_out", sum(task is None for task in tasks) / len(tasks))
        await asyncio.gather(*filter(None, tasks))
        return [task and task.result() / self.highest for task in tasks]

    def _ask(self, question: str) -> "asyncio.Task[float] | None":
        """Returns the task that fetches the mark; the same question shares one task. None: the budget is used up."""
        key = hashlib.sha256(json.dumps([self.model, question]).encode()).hexdigest()
        if key not in self._tasks:
            if key not in self._marks:
                if self.budget == 0:
                    return None
                self.budget = self.budget and self.budget - 1
            task = asyncio.create_task(self._mark(key, question))
            task.add_done_callback(lambda _: self._tasks.pop(key))
            self._tasks[key] = task
        return self._tasks[key]

    async def _mark(self, key: str, question: str) -> float:
        if key not in self._marks:
            async with self._open:
                answer = await self._request(question)
            marks = list(re.finditer(self.mark, answer))
            if not marks:
                raise ValueError(f"the judge gave no mark: {answer[-200:]!r}")
            mark = float(marks[-1][1])
            if mark > self.highest:
                above = f"{mark:g}, and highest is {self.highest:g}"
                raise ValueError(f"the judge gave {above}: {answer[-200:]!r}")
            self._marks[key] = mark
            if self.cache:
                with Path(self.cache).open("a") as file:
                    file.write(json.dumps([key, mark]) + "\n")
        return self._marks[key]

    async def _request(self, question: str) -> str:
        from openai import APIConnectionError, AsyncOpenAI

        async with AsyncOpenAI(
            base_url=self.base_url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            timeout=self.timeout_seconds,
            max_retries=self.retries,
        ) as client:
            try:
                reply = await client.chat.completions.create(
                    model=self.model,
                    messages=[{"role": "user", "content": question}],
                    temperature=0,
                    max_tokens=self.max_tokens,
                )
            except APIConnectionError as error:
                raise ConnectionError(f"{self.base_url} does not answer: {error}") from error
        return reply.choices[0].message.content or ""


def _read(cache: str) -> dict[str, float]:
    """Returns the marks in the cache file. A truncated line is ignored."""
    marks = {}
    for line in Path(cache).read_text().splitlines() if cache and Path(cache).exists() else []:
        with suppress(ValueError):
            key, mark = json.loads(line)
            marks[key] = mark
    return marks


def _text(prompt: str | list[dict[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(each["content"] for each in prompt)
