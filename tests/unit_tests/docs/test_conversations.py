"""The code of docs/conversations.md, run as it is written, with a policy that says what it is told to."""

import re
from pathlib import Path
from typing import get_args

import pytest

from tests.parts.conversations import ScriptedEngine, conversation, play
from tests.parts.grading import build_grader
from tests.parts.talk import chat_tokenizer
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.types import FinishReason, Group

PAGE = (Path(__file__).parents[3] / "docs" / "conversations.md").read_text()


def talk(config, *texts: str):
    """The scored completion of the config's first prompt by a policy that says these texts, and the prompt."""
    made = chat_tokenizer()
    task = config.task.build()
    [prompt] = PromptStream.Config(max_prompt_tokens=1000).build(task=task, tokenizer=made, seed=0).next_batch(1)
    conversations = config.conversations.build(
        members=task.members(), tokenizer=made, end_token_ids=[made.eos_token_id], template_options={}
    )
    conversations.check([prompt])
    one = conversation(prompt)
    play(conversations, ScriptedEngine(made, *texts), [one])
    group = Group(prompt=one.prompt, samples=[one.completion(0)])
    [scored] = build_grader(config.grader, task).grade([group])
    return one.prompt, scored.samples[0]


def test_the_tool_task_answers_calls_until_there_is_none(files):
    config = load_config(f"{files}/my_tools.py:powers")
    asked = config.task.build().train_example(0, seed=0)
    base = int(re.search(r"\d+", asked.messages[0]["content"])[0])
    call = f'<tool_call>{{"name": "power", "arguments": {{"base": {base}, "exponent": 3}}}}</tool_call>'
    prompt, scored = talk(config, call, f"[ANSWER] {base**3}")
    assert "power(base, exponent)" in prompt.text
    assert [message["role"] for message in scored.completion.messages] == ["assistant", "tool", "assistant"]
    assert scored.completion.messages[1]["content"] == str(base**3)
    assert scored.correct
    assert scored.reward == pytest.approx(1.2)


def test_the_environment_counts_in_turn(files):
    config = load_config(f"{files}/my_environment.py:countup")
    prompt, scored = talk(config, "2", "6", "10", "14", "18")
    assert prompt.messages[-1]["content"] == "We count by 2 to 20, in turn. I begin: 0"
    assert [message["content"] for message in scored.completion.messages[1::2]] == ["4", "8", "12", "16"]
    assert scored.completion.finish_reason == "stop"
    assert scored.reward == pytest.approx(1.4)
    assert scored.correct
    _, scored = talk(config, "2", "7")
    assert not scored.correct
    assert [turn.reward for turn in scored.completion.turns] == [0.1, -1.0]


def test_the_table_of_finish_reasons_is_complete():
    table = re.search(r"\| finish reason .*?\n\n", PAGE, re.DOTALL)[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(get_args(FinishReason))
