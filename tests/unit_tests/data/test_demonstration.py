"""Demonstrations of rows and functions: what is learned of them, and which are left out."""

import json
from dataclasses import replace
from importlib.resources import files

import pytest

from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.end_tokens import end_token_ids
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.data.tasks import Rows
from torchtitan_rl.errors import UserError

USER = {"role": "user", "content": "2 + 2?"}
TALK = [
    USER,
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "It is 6."},
]
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that drops the thinking of earlier turns of the assistant."""
THOUGHT = [
    {**one, "content": f"<think>...</think>{one['content']}"} if one["role"] == "assistant" else one for one in TALK
]


@pytest.fixture
def tokenizer():
    return make_small_tokenizer(["What is 2 + 2?\nIt is 4."] * 4, vocab_size=320, chat=True)


@pytest.fixture
def stream(tmp_path, tokenizer):
    def stream(rows, *, demonstrations="last", chat=True, max_completion_tokens=64, **task) -> PromptStream:
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "completion": "It is 2."}))
        built = Rows.Config(
            path=str(path), held_out_path=str(tmp_path / "held_out.jsonl"), demonstrations=demonstrations, **task
        ).build()
        config = PromptStream.Config(apply_chat_template=chat, read_ahead=0)
        options = {"end_token_ids": end_token_ids(tmp_path, tokenizer), "max_completion_tokens": max_completion_tokens}
        return config.build(task=built, tokenizer=tokenizer, seed=0, **options)

    return stream


def learned(tokenizer, completion) -> list[str]:
    """The texts of the runs of tokens to learn."""
    runs, before = [], False
    for token, learns in zip(completion.token_ids.tolist(), completion.loss_mask.tolist(), strict=True):
        if learns:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = learns
    return [tokenizer.decode(run) for run in runs]


def test_a_completion_is_learned_with_its_end_token(stream, tokenizer):
    rows = [{"prompt": f"{i} + 1?", "completion": "It is."} for i in range(2)]
    for chat in (True, False):
        prompt = stream(rows, chat=chat).at(0)
        assert learned(tokenizer, prompt.demonstration) == ["It is.<|endoftext|>"]
        assert tokenizer.decode(prompt.token_ids) == prompt.text
        assert ("<|assistant|>" in prompt.text) is chat


@pytest.mark.parametrize(("template", "end", "num"), [("phi3", "<|end|>", 2), ("qwen3", "<|im_end|>", 1)])
def test_a_turn_is_learned_up_to_the_token_by_which_the_template_ends_it(stream, tokenizer, template, end, num):
    """Phi-3's writes a line break and <|endoftext|> after the last. The tokenizer's own end is <|endoftext|>."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", end]})
    tokenizer.chat_template = (files("trl") / "chat_templates" / f"{template}.jinja").read_text()
    demonstration = stream([{"messages": TALK}] * 2, demonstrations="all" if num > 1 else "last").at(0).demonstration
    found = [one[one.index("It") :] for one in learned(tokenizer, demonstration)]
    assert found == [f"It is 4.{end}", f"It is 6.{end}"][-num:]
    assert tokenizer.decode(demonstration.token_ids).endswith(end)


@pytest.mark.parametrize("demonstrations", ["last", "all"])
def test_a_turn_that_only_the_next_one_ends_is_refused_by_name(stream, tokenizer, demonstrations):
    """GLM-4's template as published: the policy would not learn to stop."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = (files("trl") / "chat_templates" / "glm4moe.jinja").read_text()
    with pytest.raises(UserError, match="a turn has none of the end tokens"):
        stream([{"messages": TALK}] * 2, demonstrations=demonstrations)


def test_all_turns_or_the_last_are_learned_and_the_user_is_not(stream, tokenizer):
    shown = stream([{"messages": TALK}], demonstrations="all", held_out_share=0.5)
    assert learned(tokenizer, shown.at(0).demonstration) == ["It is 4.<|endoftext|>", "It is 6.<|endoftext|>"]
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    prompt = shown.at(0)
    both = [*prompt.token_ids.tolist(), *prompt.demonstration.token_ids.tolist()]
    assert whole.startswith(tokenizer.decode(both))
    last = stream([{"messages": TALK}]).at(0)
    assert learned(tokenizer, last.demonstration) == ["It is 6.<|endoftext|>"]
    assert "And 3 + 3?" in last.text


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3_5_nothink", "qwen3_instruct_2507"])
def test_answers_of_two_tools_are_read_as_the_template_writes_them(stream, tokenizer, template):
    """Some write them as one turn, which is not what they write for the first one alone."""
    tokenizer.chat_template = (files("trl") / "chat_templates" / f"{template}.jinja").read_text()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    told = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "6"}]
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call, call]}, *told, TALK[-1]]
    shown = stream([{"messages": talk}], demonstrations="all", max_completion_tokens=500).at(0)
    both = [*shown.token_ids.tolist(), *shown.demonstration.token_ids.tolist()]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == f"{tokenizer.decode(both)}\n"
    assert learned(tokenizer, shown.demonstration)[-1] == "It is 6.<|im_end|>"


def test_a_template_that_changes_earlier_turns_is_refused_for_all_turns_only(stream, tokenizer):
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(UserError, match="cannot be learned: the chat template changes its earlier turns"):
        stream([{"messages": THOUGHT}], demonstrations="all")
    last = stream([{"messages": THOUGHT}]).at(0)
    assert learned(tokenizer, last.demonstration) == ["<think>...</think>It is 6.<|endoftext|>"]


def test_rows_with_thinking_are_told_of_the_template_s_switch(stream, tokenizer):
    tokenizer.chat_template = (files("trl") / "chat_templates" / "qwen3.jinja").read_text()
    told = "does not begin as the prompt ends.*: pass --prompts.enable-thinking for rows with thinking"
    with pytest.raises(UserError, match=told):
        stream([{"messages": [USER, THOUGHT[1]]}])


def test_rows_that_cannot_be_learned_are_left_out_and_listed(stream, capsys):
    rows = [
        {"prompt": "1?", "completion": "fine"},
        {"prompt": "2?", "completion": " "},
        {"prompt": "3?", "completion": None},
        {"prompt": "4?", "completion": "long" * 30},
        {"prompt": "5?", "completion": "a<|endoftext|>b"},
        {"prompt": "1?", "completion": "another answer"},
        {"prompt": "1?", "completion": "fine"},
    ]
    stream(rows, max_completion_tokens=20)
    told = capsys.readouterr().out
    assert "2 rows for training" in told
    for part in (
        "2 without a completion (rows 2, 3)",
        "1 equal to an earlier row (row 7)",
        "1 whose demonstration is longer than sampling.max_tokens 20 (row 4)",
        "1 with '<|endoftext|>' in its text, which the tokenizer reads as a special token",
    ):
        assert part in told


def test_rows_of_one_prompt_are_held_out_together(stream, tmp_path):
    path = tmp_path / "several.jsonl"
    rows = [{"prompt": f"{i}?", "completion": str(answer)} for i in range(10) for answer in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    task = Rows.Config(path=str(path), demonstrations="last", held_out_share=0.1).build()
    held_out = {example.text for example in task.held_out_examples(30)}
    assert len(task.held_out_examples(30)) == 3
    assert held_out.isdisjoint(task.train_example(i, seed=0).text for i in range(27))


def test_a_function_demonstrates_any_task_by_seed_and_place(tokenizer):
    def build(seed):
        config = PromptStream.Config(read_ahead=0, demonstrate="torchtitan_rl.configs.toys.answer_recipes:right_sum")
        return config.build(
            task=SumDigits.Config(max_integers=2, instruction="").build(), tokenizer=tokenizer, seed=seed
        )

    prompt = build(0).at(3)
    assert prompt.demonstration.text.removesuffix("<|endoftext|>").endswith(f"[ANSWER] {prompt.expected_answer}")
    assert build(0).held_out(1)[0].demonstration.text == build(1).held_out(1)[0].demonstration.text


def test_rows_without_a_column_to_learn_name_the_option_and_their_columns(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i} + 2?", "answer": f"{i + 2}"}) for i in range(3)))
    with pytest.raises(UserError, match=r"--task.completion-column: one of \['prompt', 'answer'\]"):
        Rows.Config(path=str(path), demonstrations="last", held_out_share=0.4).build()


def test_a_call_without_content_is_learned(tokenizer):
    class Calling(SumDigits):
        def train_example(self, index, *, seed):
            call = {"type": "function", "function": {"name": "add", "arguments": {}}}
            turn = {"role": "assistant", "content": None, "tool_calls": [call]}
            return replace(super().train_example(index, seed=seed), demonstration=[turn])

    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content or m.tool_calls[0].function.name }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    task = Calling.Config(max_integers=2, instruction="").build()
    prompt = PromptStream.Config(read_ahead=0).build(task=task, tokenizer=tokenizer, seed=0).at(0)
    assert learned(tokenizer, prompt.demonstration) == ["add<|endoftext|>"]
