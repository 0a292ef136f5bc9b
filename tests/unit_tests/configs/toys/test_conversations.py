"""The two tasks of configs/debug_conversations.py: what is asked, answered and rewarded."""

import random
import re

import pytest

from tests.parts.talk import chat_tokenizer
from torchtitan_rl.configs.toys import conversation_recipes as starts
from torchtitan_rl.configs.toys.calculator import Calculator, multiply
from torchtitan_rl.configs.toys.guess_number import GuessNumber
from torchtitan_rl.data.template import ChatTemplate
from torchtitan_rl.data.tool_schemas import tool_schemas
from torchtitan_rl.types import Prompt


def prompt_of(example) -> Prompt:
    return Prompt(prompt_idx=0, text=example.text, token_ids=[1], expected_answer=example.expected_answer)


@pytest.mark.parametrize("task", [Calculator.Config().build(), GuessNumber.Config().build()])
def test_conversation_tasks_have_disjoint_training_and_held_out_examples(task):
    held_out = {example.text + example.expected_answer for example in task.held_out_examples(90)}
    trained = {
        e.text + e.expected_answer for seed in (0, 1) for e in (task.train_example(i, seed=seed) for i in range(500))
    }
    assert len(held_out) == 90
    assert not held_out & trained


def test_the_calculator_multiplies_and_its_answer_is_the_last_integer_tagged():
    task = Calculator.Config().build()
    example = task.train_example(0, seed=0)
    assert str(multiply(*example.columns["factors"])) == example.expected_answer
    said = [{"role": "assistant", "content": "<tool_call>...</tool_call>"}, {"role": "tool", "content": "[ANSWER] 1"},
            {"role": "assistant", "content": "[ANSWER] 12"}]  # fmt: skip
    assert task.correct(completions=[said], expected_answer=["12"]) == [1.0]
    assert task.correct(completions=[said[:2]], expected_answer=["1"]) == [
        -1.0
    ]  # the tool's words are not the policy's


def test_guessing_game_answers_higher_or_lower_and_rewards_the_number():
    task = GuessNumber.Config().build()
    example = task.train_example(3, seed=0)
    secret = int(example.expected_answer)
    assert example.columns["low"] <= secret <= example.columns["high"]
    game = task.environment(prompt_of(example))
    texts = (str(secret - 1), str(secret + 1), "x", str(secret))
    turns = [game.step({"role": "assistant", "content": text}) for text in texts]
    assert [turn.messages[0]["content"] for turn in turns] == ["higher", "lower", "write a number", "right"]
    assert [turn.reward for turn in turns] == [-0.05, -0.05, -0.05, 1.0]
    assert [turn.done for turn in turns] == [False, False, False, True]
    assert task.extract_answer(f"50\n{secret}") == str(secret)


@pytest.mark.parametrize(
    ("task", "recipe", "role"),
    [
        (Calculator.Config().build(), starts.calculator(), "tool"),
        (GuessNumber.Config().build(), starts.guesser(), "user"),
    ],
)
def test_warm_start_text_equals_the_rendered_text_of_a_run(task, recipe, role):
    """What lies between two turns in the text is the template's answer to the first one."""
    made = chat_tokenizer()
    template = ChatTemplate(made, end_token_ids=[made.eos_token_id], tools=tool_schemas(task.tools()) or None)
    heard = 0
    for index in range(20):
        text = recipe.worked(task.train_example(index, seed=0), random.Random(index))
        for said in re.findall(rf"<\|{role}\|>(.*?)<\|endoftext\|>", text):
            answer = template.answer([{"role": role, "name": "x", "content": said}], last_token=-1)
            assert made.decode(answer, skip_special_tokens=False) in text
            heard += 1
    assert heard
