"""Whatever reads the policy's text takes time in proportion to it, also for text that was made to be slow."""

import time

import pytest

from torchtitan_rl.configs.toys.sum_digits import ANSWER as SUMS
from torchtitan_rl.data.answers import last_boxed, last_number, last_tagged
from torchtitan_rl.data.tasks.gsm8k import ANSWER as GSM8K
from torchtitan_rl.data.tool_calls import parse_calls, without_thinking
from torchtitan_rl.rewards import formats
from torchtitan_rl.text import visible

TAGS, JSON_OBJECT = formats.tags(["think", "answer"]), formats.json_object()
READERS = {
    "last_tagged": last_tagged,
    "last_boxed": last_boxed,
    "last_number": last_number,
    "boxed": lambda text: formats.boxed([text]),
    "tags": lambda text: TAGS([text]),
    "json_object": lambda text: JSON_OBJECT([text]),
    "without_thinking": without_thinking,
    "parse_calls": lambda text: parse_calls(text, ["f"]),
    "gsm8k": GSM8K.findall,
    "sums": SUMS.findall,
    "visible": visible,
}
PIECES = [
    "<answer>", "</answer>", "<think>", "<think></think>", "<answer>x</answer>", "\\boxed{", "{", "1", "1,111", "1.", "-", "```\n",
    "\n", "<tool_call>", '{"name": "f", ', "####", "#### ", "####,", "[ANSWER]", "[ANSWER] ", "\x1b[", "\x1b]", " ", "a",
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_answer_extraction_time_is_linear_in_the_text(reader):
    read = READERS[reader]
    for begin in ("", "```", "<answer>", "\\boxed{", "####", "<think>"):
        for piece in PIECES:
            texts = [begin + piece * (length // len(piece)) for length in (10_000, 100_000)]
            short, long = (min(seconds(read, text) for _ in range(2)) for text in texts)
            assert long < 40 * short + 0.05, (begin, piece)  # quadratic: 100 times


def seconds(read, text):
    started = time.process_time()
    read(text)
    return time.process_time() - started
