"""PromptStream: what a prompt is, the same on every rank, and resumed at the exact place."""

import dataclasses
import sys
from datetime import datetime

import pytest
from tokenizers import processors

from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.rows import Rows
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.errors import UserError

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def tokenizer():
    return make_small_tokenizer(["What is 12 + 34?\n[ANSWER] 46"] * 4, vocab_size=300)


def stream(tokenizer, *, seed=0, task=None, read_ahead=0, **config) -> PromptStream:
    task = task or SumDigits.Config(max_integers=2, instruction="").build()
    return PromptStream.Config(read_ahead=read_ahead, **config).build(task=task, tokenizer=tokenizer, seed=seed)


def texts(prompts):
    return [prompt.text for prompt in prompts]


def contents(prompts):
    return [(p.prompt_idx, p.text, p.token_ids.tolist(), p.expected_answer, p.columns) for p in prompts]


@pytest.mark.parametrize(("batches_before", "read_ahead"), [(0, 0), (1, 0), (3, 0), (0, 16), (3, 16)])
def test_resume_continues_at_the_exact_position(tokenizer, batches_before, read_ahead):
    whole = stream(tokenizer, read_ahead=read_ahead)
    for _ in range(batches_before):
        whole.next_batch(5)
    state = whole.state_dict()
    resumed = stream(tokenizer, read_ahead=read_ahead)
    resumed.next_batch(2)
    resumed.load_state_dict(state)
    for _ in range(3):
        assert contents(resumed.next_batch(7)) == contents(whole.next_batch(7))
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize(("before", "after"), [(0, 16), (16, 0)])
def test_resume_reads_ahead_as_the_new_config_says(tokenizer, before, after):
    whole, resumed = stream(tokenizer, read_ahead=before), stream(tokenizer, read_ahead=after)
    whole.next_batch(5)
    resumed.load_state_dict(whole.state_dict())
    assert contents(resumed.next_batch(7)) == contents(whole.next_batch(7))


def test_held_out_examples_may_be_a_tuple(tokenizer):
    class Tupled(SumDigits):
        def held_out_examples(self, num):
            return tuple(super().held_out_examples(num))

    prompts = stream(tokenizer, task=Tupled(SumDigits.Config(max_integers=2, instruction="")))
    assert contents(prompts.held_out(3)) == contents(stream(tokenizer).held_out(3))


def test_held_out_prompts_are_fixed_and_do_not_advance_the_stream(tokenizer):
    prompts = stream(tokenizer)
    held_out = contents(prompts.held_out(10))
    assert held_out == contents(prompts.held_out(10)) == contents(stream(tokenizer, seed=9).held_out(10))
    assert [prompt_idx for prompt_idx, *_ in held_out] == list(range(10))
    assert contents(prompts.next_batch(4)) == contents(stream(tokenizer).next_batch(4))


def test_chat_template_receives_the_tools_of_the_task(tokenizer):
    def add(a: int) -> int:
        """
        Adds.

        Args:
            a: A number.
        """
        return a

    class WithTools(SumDigits):
        def tools(self):
            return (add,)

    tokenizer.chat_template = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + CHAT_TEMPLATE
    with_tools = WithTools(SumDigits.Config(max_integers=2, instruction=""))
    assert stream(tokenizer, task=with_tools).next_batch(1)[0].text.startswith("[add]<user>")
    assert stream(tokenizer).next_batch(1)[0].text.startswith("<user>")


def test_too_long_generated_prompt_is_skipped_and_counted(tokenizer):
    class WithALongOne(SumDigits):
        def train_example(self, index, *, seed):
            example = super().train_example(index, seed=seed)
            return dataclasses.replace(example, text="What " * 600) if index in (1, 9) else example

    with_long_ones = stream(tokenizer, task=WithALongOne(SumDigits.Config(max_integers=2, instruction="")))
    expected = texts(stream(tokenizer).next_batch(10))
    assert texts(with_long_ones.next_batch(8)) == expected[:1] + expected[2:9]
    assert with_long_ones.num_passed_over == 2 - 1
    assert texts(with_long_ones.next_batch(1)) == texts(stream(tokenizer).next_batch(11))[-1:]
    assert with_long_ones.num_passed_over == 2


def test_a_template_writes_the_date_of_the_config(tokenizer):
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE
    [prompt] = stream(tokenizer, date="2024-02-29").next_batch(1)
    assert prompt.text.startswith("29 Feb 2024<user>")
    [prompt] = stream(tokenizer).next_batch(1)
    assert prompt.text.startswith(datetime.now().strftime("%d %b %Y<user>"))
    with pytest.raises(UserError, match=r"prompts.date = 'Monday': expected a date such as"):
        stream(tokenizer, date="Monday")


@pytest.mark.parametrize("enable_thinking", [False, True])
def test_chat_prompt_tokens_equal_apply_chat_template(tokenizer, enable_thinking):
    tokenizer.chat_template = "{{ enable_thinking }}" + CHAT_TEMPLATE
    config = {"system_prompt": "Add.", "few_shot": [("What is 1 + 1?\n", "2")], "enable_thinking": enable_thinking}
    for prompt in stream(tokenizer, **config).next_batch(3):
        assert [message["role"] for message in prompt.messages] == ["system", "user", "assistant", "user"]
        assert prompt.messages[0]["content"] == "Add."
        rendered = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, enable_thinking=enable_thinking, return_dict=False
        )
        assert prompt.token_ids.tolist() == rendered


def test_plain_text_prompt_starts_with_system_prompt_and_examples(tokenizer):
    config = {"system_prompt": "Add.", "few_shot": [("What is 1 + 1?\n", "2"), ("What is 1 + 2?\n", "3")]}
    [bare] = stream(tokenizer).next_batch(1)
    tokenizer.chat_template = CHAT_TEMPLATE
    [prompt] = stream(tokenizer, apply_chat_template=False, **config).next_batch(1)
    assert prompt.messages is None
    assert prompt.text == f"Add.\n\nWhat is 1 + 1?\n2\n\nWhat is 1 + 2?\n3\n\n{bare.text}"


@pytest.mark.parametrize("chat", [True, False])
def test_a_hint_ends_the_question_and_names_no_special_token(tokenizer, chat):
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    prompts = stream(tokenizer, system_prompt="Add.")
    prompt = prompts.at(0)
    hinted = prompts.hinted(prompt, f"What is{tokenizer.eos_token} 46")
    question = prompt.columns["operands"]
    asked = f"What is {question[0]} + {question[1]}?"
    wanted = f"<system>Add.<user>{asked}\n\nWhat is 46<a>" if chat else f"What is 46\n\nAdd.\n\n{asked}\n"
    assert hinted.text == wanted
    assert hinted.token_ids.tolist() == tokenizer(wanted, add_special_tokens=not chat)["input_ids"]
    assert (hinted.prompt_idx, hinted.expected_answer) == (prompt.prompt_idx, prompt.expected_answer)


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_that_does_not_name_the_tags_that_are_read_is_given_a_request(tokenizer, tmp_path, chat):
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "What is {i}?", "answer": {i}}}\n' for i in range(3)))

    def asked(template="", **config):
        task = Rows.Config(path=str(tmp_path / "a.jsonl"), answer_kind="tag", template=template).build()
        return stream(tokenizer, task=task, **config).at(0).text

    assert "Give the final answer between <answer> and </answer>." in asked()
    assert asked().endswith("</answer>.<a>" if chat else "?")
    assert "between" not in asked(system_prompt="Write <answer>")
    assert "between" not in asked("{prompt}")


def test_messages_without_a_chat_template_are_an_error_with_the_remedy(tokenizer):
    class Chat(SumDigits):
        def train_example(self, index, *, seed):
            return dataclasses.replace(super().train_example(index, seed=seed), text="")

    with pytest.raises(UserError, match="prompts.apply_chat_template.*the tokenizer has none. Start from an instruct"):
        stream(tokenizer, task=Chat(SumDigits.Config(max_integers=2, instruction="")))


def _with(**changes):
    """A task of sums with other texts or messages."""

    class Changed(SumDigits):
        def train_example(self, index, *, seed):
            return dataclasses.replace(super().train_example(index, seed=seed), **changes)

        held_out_examples = SumDigits.held_out_examples

    return Changed(SumDigits.Config(max_integers=2, instruction=""))


@pytest.mark.parametrize("chat", [False, True])
def test_special_token_text_in_a_prompt_is_refused_or_allowed(tokenizer, chat):
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    text = "Is <|endoftext|> one?"
    task = _with(text=text, messages=[{"role": "user", "content": text}])
    with pytest.raises(UserError, match=r"with '<\|endoftext\|>' in its text, .*--prompts.special-tokens allow"):
        stream(tokenizer, task=task)
    [prompt] = stream(tokenizer, task=task, special_tokens="allow").next_batch(1)
    assert tokenizer.eos_token_id in prompt.token_ids


@pytest.mark.parametrize("text", ["2+0=", "<|pad|>2+0="])
def test_a_plain_prompt_has_one_bos_and_no_eos_although_the_tokenizer_adds_both(tokenizer, text):
    tokenizer.bos_token = "<|pad|>"
    special = [("<|pad|>", tokenizer.bos_token_id), ("<|endoftext|>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A <|endoftext|>", special_tokens=special
    )
    [prompt] = stream(tokenizer, task=_with(text=text), special_tokens="allow").next_batch(1)
    assert tokenizer.decode(prompt.token_ids) == "<|pad|>2+0="


class _Ends(SumDigits):
    """From the 40th example on it does as `act` says."""

    def train_example(self, index, *, seed):
        return self.act() if index >= 40 else super().train_example(index, seed=seed)


@pytest.mark.parametrize("act", [sys.exit, lambda: None])
def test_task_that_fails_while_prefetching_does_not_hang_the_step(tokenizer, act):
    task = _Ends(SumDigits.Config(max_integers=2, instruction=""))
    task.act = act
    prompts = stream(tokenizer, task=task, read_ahead=16)
    with pytest.raises(UserError, match="train_example"):
        prompts.next_batch(64)
