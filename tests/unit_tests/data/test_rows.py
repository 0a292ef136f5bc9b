"""rows: which rows become examples, in which order, and what is said of the others."""

import json
import re

import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value

from tests.parts.grading import build_grader, grader, rewards, score
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.data.tasks import Rows
from torchtitan_rl.errors import UserError
from torchtitan_rl.rewards import Grader


def lines(*rows) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def save(path, rows) -> None:
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_bytes(lines(*rows))


def sums(num, **more):
    return [{"prompt": f"{i} + 1?", "answer": i + 1, **more} for i in range(num)]


@pytest.fixture
def build(tmp_path):
    def build(content, name="data.jsonl", **config) -> Rows:
        rows = content if isinstance(content, bytes) else lines(*content)
        (tmp_path / name).write_bytes(rows)
        few = {"held_out_share": 0.05} | config
        return Rows.Config(path=str(tmp_path / name), **few).build()

    return build


def told(task, capsys) -> str:
    """What a run's start says of the rows, with a tokenizer that finds no fault."""
    task.leave_out(lambda examples: [None] * len(examples))
    return capsys.readouterr().out


def texts(task, num, seed=0):
    return [task.train_example(i, seed=seed).text for i in range(num)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.jsonl", b"\xef\xbb\xbf" + lines(*sums(20))),
        ("blank.jsonl", b"\n" + lines(*sums(20)) + b"\n\n"),
        ("lines.json", lines(*sums(20))),
    ],
)
def test_a_byte_order_mark_blank_lines_and_lines_in_json_change_nothing(build, name, content):
    task = build(content, name)
    found = {(e.text, e.expected_answer) for e in (task.train_example(i, seed=0) for i in range(19))}
    found |= {(e.text, e.expected_answer) for e in task.held_out_examples(1)}
    assert found == {(f"{i} + 1?", str(i + 1)) for i in range(20)}


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TWO = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "demonstrated", "answer", "told_of_it"),
    [
        ({"messages": TWO, "tools": " "}, TWO[1:], "", "prompt from column messages"),
        ({"chosen": TWO, "rejected": TWO}, TWO[1:], "", "chosen; not in the prompt: rejected"),
        (
            {"prompt": TWO[:1], "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": 1}}, [], "2",
            "prompt from column prompt, answer from column reward_model.ground_truth; not in the prompt: extra_info",
        ),
        ({"question": "1 + 1?", "ground_truth": "2", "info": '{"answer": 3}'}, [], "2", "not in the prompt: info"),
        ({"question": "1 + 1?", "answer": '{"ground_truth": "2"}'}, [], "2", "answer from column answer.ground_truth"),
        ({"question": "1 + 1?", "answer": "2", "input": "x"}, [], "2", "answer from column answer; not in the prompt: input"),
        ({"question": "1 + 1?", "answer": "1 + 1 = 2.\n#### 2\n"}, [], "2", ""),
        ({"question": "1 + 1?", "answer": "It is #### 2"}, [], "It is #### 2", ""),
        ({"question": "1 + 1?", "answer": ["2", "two", "", "2"]}, [], "2\nor\ntwo", "answer from column answer"),
        ({"question": "1 + 1?", "answer": [{"answer": 2}, {"answer": 3}]}, [], "2\nor\n3", "answer from column answer.answer"),
        ({"prompt": "1 + 1?", "messages": TWO, "prompt_id": "a"}, TWO[1:], "", "not in the prompt: prompt, prompt_id"),
        (
            {"prompt": "1 + 1?", "answer": "2", "finish_reasons": ["stop"]}, [], "2",
            "not in the prompt: finish_reasons; not given to reward functions: finish_reasons",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_formats_that_people_have_are_known_by_their_columns(
    tmp_path, capsys, name, row, demonstrated, answer, told_of_it
):
    rows = [json.loads(json.dumps(row).replace("1 + 1", f"{i} + 1")) for i in range(3)]
    save(tmp_path / name, rows)
    task = Rows.Config(path=str(tmp_path / name), demonstrations="last" if demonstrated else "none").build()
    [example] = task.held_out_examples(1)
    assert example.messages[-1]["role"] == "user"
    assert " + 1" in example.messages[-1]["content"]
    assert (example.demonstration or [], example.expected_answer) == (demonstrated, answer)
    assert (example.tools or [{"function": ADD}])[0]["function"] == ADD
    assert (row.get("tools", " ") != " ") == bool(example.tools)
    assert told_of_it.replace("data.parquet", name) in capsys.readouterr().out


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_messages_keep_thinking_and_calls_without_the_nulls_of_arrow(tmp_path, name):
    thought = {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [CALL]}
    turns = [TWO[0], thought, {"role": "tool", "content": "2"}]
    asked = [{"role": "user", "content": f"{i}?"} for i in range(2)]
    tools = [[{"name": "add", "parameters": {f"{i}": 1}}] for i in range(2)]
    rows = [{"messages": [*turns, asked[i]], "tools": tools[i]} for i in range(2)]
    save(tmp_path / name, rows)
    [example] = Rows.Config(path=str(tmp_path / name)).build().held_out_examples(1)
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert example.messages[:3] == [TWO[0], {**turns[1], "content": "", "tool_calls": [called]}, turns[2]]
    assert [*example.tools[0]["function"]["parameters"]] == [example.messages[3]["content"][0]]


def test_a_column_of_media_that_is_empty_or_a_name_is_kept(build):
    build([{"prompt": f"{i}?", "images": [], "video": None, "image": "python:3.12"} for i in range(2)])


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
@pytest.mark.parametrize(
    ("row", "first"),
    [
        ({"instruction": "Add.", "input": "1 + 1?", "output": "2", "system": "Be brief."}, ["Be brief."]),
        (
            {"instruction": "Add.", "input": "1 + 1?", "output": "2", "system": "Be brief.", "history": [["a", "b"]]},
            ["Be brief.", "a", "b"],
        ),
        ({"messages": [{"role": "system", "content": "Be brief."}, *TWO], "system": "Be brief."}, ["Be brief."]),
        ({"prompt": "1 + 1?", "response": "2", "system_prompt": "Be brief."}, ["Be brief."]),
        ({"instruction": "Add.", "context": "1 + 1?", "response": "2"}, []),
    ],
)
def test_llama_factorys_system_and_history_come_before_the_prompt(tmp_path, capsys, name, row, first):
    rows = [json.loads(json.dumps(row).replace("1 + 1", f"{i} + 1")) for i in range(2)]
    save(tmp_path / name, rows)
    [example] = Rows.Config(path=str(tmp_path / name), demonstrations="all").build().held_out_examples(1)
    assert [one["content"] for one in example.messages[:-1]] == first
    assert example.messages[-1]["content"].endswith(" + 1?")
    assert example.demonstration == TWO[1:]
    assert "system" not in capsys.readouterr().out


def test_a_column_without_any_value_is_as_if_it_were_not_there(build):
    empty = {"prompt": None, "answer": "", "completion": float("nan")}
    task = build([{**empty, "question": f"{i}?", "response": "one"} for i in range(3)], demonstrations="last")
    [example] = task.held_out_examples(1)
    assert (example.text[1:], example.demonstration) == ("?", [{"role": "assistant", "content": "one"}])
    assert not task.has_answers


def test_a_number_beside_an_instruction_is_in_the_prompt(build):
    numbers = (21, 8.0, 0, None, float("nan"), [])
    task = build([{"instruction": "Double.", "system": float("nan"), "input": number} for number in numbers])
    held_out = [example.text for example in task.held_out_examples(1)]
    assert sorted(held_out + texts(task, 3)) == ["Double.", "Double.\n\n0", "Double.\n\n21", "Double.\n\n8"]


def test_a_row_with_null_for_a_column_of_the_template_is_left_out_as_one_without_it(build, capsys):
    rows = [{"prompt": f"{i}?", "hint": i} for i in range(3)]
    task = build([*rows, {"prompt": "3?", "hint": None}, {"prompt": "4?"}], template="{prompt} {hint}")
    assert "left out: 2 no column 'hint' for task.template (rows 4, 5)" in told(task, capsys)


def test_a_row_with_an_image_in_any_column_is_left_out_undecoded(tmp_path, capsys):
    pictures = [None, None, {"bytes": b"no image", "path": None}]
    features = Features({"prompt": Value("string"), "picture": Image()})
    rows = Dataset.from_dict({"prompt": ["a", "b", "c"], "picture": pictures}, features)
    rows.to_parquet(tmp_path / "a.parquet")
    task = Rows.Config(path=str(tmp_path / "a.parquet")).build()
    assert "left out: 1 something in 'picture', but policies read text alone" in told(task, capsys)


def test_every_cell_of_a_csv_file_is_text(build):
    task = build(b"prompt,level,answer\na?,007,x\nb?,,y\nc?,8.0,z\n", "a.csv")
    examples = [*(task.train_example(i, seed=0) for i in range(2)), *task.held_out_examples(1)]
    assert {example.columns["level"] for example in examples} == {"007", None, "8.0"}


def test_a_dotted_column_name_is_a_column_or_a_place_inside_one(build):
    assert texts(build([{"a.b": f"{i}?"} for i in range(2)], prompt_column="a.b"), 1)[0] in ("0?", "1?")
    assert texts(build([{"a": {"b": f"{i}?"}} for i in range(2)], prompt_column="a.b"), 1)[0] in ("0?", "1?")
    assert texts(build([{"a": ["x", f"{i}?"]} for i in range(2)], prompt_column="a.1"), 1)[0] in ("0?", "1?")
    with pytest.raises(UserError, match=r"2 no 'a.c' \(rows 1, 2\)"):
        build([{"a": {"b": f"{i}?"}} for i in range(2)], prompt_column="a.c")


@pytest.mark.parametrize(
    ("config", "names", "read"),
    [
        ({}, ["train/0.jsonl", "test/0.jsonl"], "0"),
        ({}, ["data/train-0.jsonl", ".cache/train.jsonl", "data/.ipynb_checkpoints/train-0.jsonl"], "0"),
        ({}, ["a.jsonl", "trains/b.jsonl"], "01"),
        ({"subset": "main"}, ["main/train.jsonl", "socratic/train.jsonl"], "0"),
        ({"split": "train_sft"}, ["train_sft-0.jsonl", "train_prefs-0.jsonl", "test_sft-0.jsonl"], "0"),
        ({}, ["train_sft-0.jsonl", "train_prefs-0.jsonl"], None),
        ({}, ["train_0.jsonl", "train1.jsonl", "test_0.jsonl"], "01"),
        ({}, ["Train.jsonl", "Test.jsonl"], "0"),
        ({}, ["a.jsonl", "b.jsonl/notes.txt"], "0"),
    ],
)
def test_a_split_is_the_files_with_its_name_in_their_path(tmp_path, config, names, read):
    for place, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(lines(*({"prompt": f"{place}{i}?"} for i in range(9))))
    built = Rows.Config(path=str(tmp_path), **config)
    if read is None:
        with pytest.raises(UserError, match=r"files of the split 'train', but it has \['train_prefs-0.jsonl'"):
            built.build()
    else:
        assert {text[0] for text in texts(built.build(), 8)} == {*read}


def test_an_answer_with_classes_is_the_name_that_the_hub_shows(tmp_path):
    rows = {"question": ["a", "b", "c"], "answer": [1, 1, -1]}
    features = Features({"question": Value("string"), "answer": ClassLabel(names=["A", "B"])})
    Dataset.from_dict(rows, features).to_parquet(tmp_path / "mmlu.parquet")
    task = Rows.Config(path=str(tmp_path / "mmlu.parquet")).build()
    [example] = task.held_out_examples(2)
    assert (example.expected_answer, example.columns["answer"]) == ("B", 1)
    assert len(task._train.kept) == 1


def test_each_epoch_has_every_row_once_in_a_seeded_order(build):
    task = build(sums(20))
    first, second = texts(task, 38)[:19], texts(task, 38)[19:]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 19
    assert first != second
    assert first == texts(build(sums(20)), 19)
    assert first != texts(task, 19, seed=1)
    assert task.epoch(38) == 2.0


def test_held_out_split_depends_only_on_prompts_and_seed(build):
    def held_out(task):
        return sorted(e.text for e in task.held_out_examples(100))

    chosen = held_out(build(sums(40), held_out_share=0.25))
    assert len(chosen) == 10
    assert chosen == held_out(build(sums(40)[::-1], held_out_share=0.25))
    assert chosen != held_out(build(sums(40), held_out_share=0.25, held_out_seed=1))
    assert not set(chosen) & set(texts(build(sums(40), held_out_share=0.25), 30))


@pytest.mark.parametrize(("rows", "held_out"), [(3, 1), (60, 15), (200, 16), (1000, 50)])
def test_few_rows_hold_out_enough_for_a_curve_and_name_what_holds_out_more(build, capsys, rows, held_out):
    task = build(sums(rows), held_out_share="auto")
    assert len(task.held_out_examples(held_out)) == held_out
    assert "evaluations have" not in capsys.readouterr().out
    task.held_out_examples(64)
    out = capsys.readouterr().out
    assert f"evaluations have {held_out} row" in out
    assert f"--task.held-out-share {min(0.5, 64 / rows):.2g}, or" in out


class ConversedRows(Rows):
    """Rows whose completions are conversations."""

    def environment(self, prompt, *, seed=0):
        return None


CHAT = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("as_messages", "kind", "given"), [(False, Rows, str), (True, Rows, list), (False, ConversedRows, list)]
)
def test_reward_functions_get_texts_for_text_prompts_and_messages_for_messages_as_in_trl(
    tmp_path, as_messages, kind, given
):
    rows = sums(8)
    if as_messages:
        rows = [{"messages": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    task = kind(Rows.Config(path=str(tmp_path / "rows.jsonl")))
    tokenizer = make_small_tokenizer(["1 + 1?"] * 4, vocab_size=300, chat=True)
    tokenizer.chat_template = CHAT
    stream = PromptStream.Config(read_ahead=0).build(task=task, tokenizer=tokenizer, seed=0)
    [prompt] = stream.next_batch(1)

    def seen(prompts, completions, **_):
        assert prompts[0] == (prompt.messages[0]["content"] if given is str else prompt.messages)
        return [float(type(each) is given) for each in completions]

    assert rewards(score(grader(seen), "a", "b", prompt=prompt)) == [1.0, 1.0]


def test_messages_become_the_prompt_and_other_columns_reach_reward_functions(build):
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
    task = build([{"messages": turns, "level": 3}, {"messages": turns[1:], "source": {"page": 1}}])
    both = [task.train_example(0, seed=0), *task.held_out_examples(1)]
    assert {len(example.messages) for example in both} == {2, 1}
    assert all(example.text == "" and example.expected_answer == "" for example in both)
    columns = [example.columns for example in both]
    assert {"level": 3, "source": None} in columns
    assert {"level": None, "source": {"page": 1}} in columns


def test_rows_without_answers_have_no_default_reward_or_correctness(build):
    task = build([{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(UserError, match="grader.rewards = .*a reward function, as the task has none"):
        build_grader(Grader.Config(), task)
    assert task.judge("x", None) is None


def test_skipped_rows_are_reported_with_their_numbers(build, capsys):
    rows = [*sums(3), {"prompt": "9?"}, {"prompt": "8?", "answer": ""}, *sums(2), {"prompt": "7?", "answer": 7}]
    assert (
        "data.jsonl: 3 rows for training; left out: 2 without an answer (rows 4, 5), "
        "2 with the prompt of an earlier row (rows 6, 7)" in told(build(rows), capsys)
    )


def test_named_held_out_tables_are_excluded_from_training(build, tmp_path, capsys):
    for name, rows in (("easy", sums(4)), ("hard", [{"prompt": f"{i} * 2?", "answer": 2 * i} for i in range(9)])):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(*rows))
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("easy", "hard")}
    task = build(sums(6), held_out_paths=paths)
    out = told(task, capsys)
    assert "data.jsonl: 2 rows for training; left out: 4 also held out (rows 1, 2, 3, 4)" in out
    assert "easy.jsonl: 4 rows held out as easy" in out
    assert [(e.task, e.text) for e in task.held_out_examples(5)] == [
        *[("easy", f"{i} + 1?") for i in range(3)],
        *[("hard", f"{i} * 2?") for i in range(2)],
    ]
    assert set(task.members()) >= {e.task for e in task.held_out_examples(99)} | {task.train_example(0, seed=0).task}
    with pytest.raises(UserError, match="task.held_out_path = .*Name all tables in held_out_paths"):
        build(sums(6), held_out_paths=paths, held_out_path=paths["easy"])
    with pytest.raises(UserError, match="task.held_out_paths = 'sampled': expected a name"):
        build(sums(6), held_out_paths={"sampled": paths["easy"]})


def test_held_out_tables_have_the_split_that_is_named_and_rows_that_can_be_used(build, tmp_path):
    for name in ("easy", "hard"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_bytes(lines({"prompt": f"{name} train", "answer": 1}))
        (tmp_path / name / "test.jsonl").write_bytes(lines({"prompt": f"{name} test", "answer": 1}))
    paths = {name: str(tmp_path / name) for name in ("easy", "hard")}
    task = build(sums(6), held_out_paths=paths, held_out_split="test")
    assert [(e.task, e.text) for e in task.held_out_examples(2)] == [("easy", "easy test"), ("hard", "hard test")]
    (tmp_path / "none.jsonl").write_bytes(lines({"prompt": 5, "answer": 1}))
    unusable = "task.held_out_path = .*0 rows held out; left out: 1 'prompt' is neither text nor a list of messages"
    with pytest.raises(UserError, match=unusable):
        build(sums(6), held_out_path=str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"answer": 3}, "no 'prompt'"),
        ({"prompt": 3}, "'prompt' is neither text nor a list of messages"),
        ({"prompt": '[{"role": "user"}]'}, "'prompt' is text that lists messages; write a list"),
        ({"prompt": "half \ud800"}, "characters that UTF-8 cannot encode"),
        ({"prompt": "a", "answer": [["b"]]}, "'answer' is neither text nor a number; a dotted name, such as answer.value"),
        ({"prompt": TWO[:1], "images": ["a.png"]}, "something in 'images', but policies read text alone"),
        ({"prompt": [{"from": "bot", "value": "2"}]}, "the role 'bot', which is none of"),
        ({"prompt": [{"from": ["human"], "value": "2"}]}, "a message without a role"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'; expected parts of type 'text'"),
        ({"prompt": [{"role": "assistant", "content": "", "tool_calls": ["add"]}]}, "tool_calls is no list of functions with names"),
        ({"prompt": [{"role": "user", "content": None, "tool_calls": "[]"}]}, "a message whose content is not text"),
        ({"prompt": [{"role": "assistant", "tool_calls": [{"name": "add", "arguments": "a=1"}]}]},
         "a call of 'add' whose arguments are no JSON object"),
        ({"prompt": [{"role": "assistant", "content": "2", "function_call": {"name": "add"}}]}, "function_call.*; write tool_calls"),
        ({"prompt": [{"role": "assistant", "content": "2", "weight": 0}]}, "with weight 0, which would be learned.*; leave weight out"),
        ({"prompt": [{"role": "system", "content": "a"}]}, "messages that do not end with the user"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_is_left_out_with_its_number(build, capsys, row, fault):
    out = told(build(lines(*sums(2), row)), capsys)
    assert re.search(rf"1 row for training; left out: 1 .*{fault}.* \(row 3\)", out)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"instruction": "a", "output": "b", "history": "c"}, "'history' is no list of pairs"),
        ({"instruction": "a", "output": "b", "history": 5}, "'history' is no list of pairs"),
        ({"instruction": "a", "output": "b", "context": ["c"]}, "'context' is neither text nor a number"),
        ({"conversations": [{"role": "system", "content": "a"}, *TWO], "system": "b"}, "'conversations' and another in 'system'"),
        ({"messages": [*TWO, TWO[1]]}, "two messages of the assistant's in a row, .*; join them"),
        ({"messages": TWO, "videos": "a.mp4"}, "something in 'videos', but policies read text alone"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_a_demonstration_that_cannot_be_read_is_left_out_with_its_number(tmp_path, name, row, fault):
    save(tmp_path / name, [row])
    with pytest.raises(UserError, match=rf"left out: 1 .*{fault}.* \(row 1\)"):
        Rows.Config(path=str(tmp_path / name), demonstrations="last").build()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", lines(*[{"prompt": i, "answer": 1} for i in range(30)]), "0 rows .* left out: 30 .* .rows 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...."),
        ("a.jsonl", b"\n \n", "task.path = .*expected at least one row, but it is empty"),
        ("a.jsonl", lines({"text": "a"}), r"task.prompt_column = '': expected the column .* but it has \['text'\]"),
        ("a.jsonl", lines(*sums(1)), "task.path = .*expected rows for training and held-out rows"),
        ("a.jsonl", lines(*sums(1) * 3), "0 rows for training; left out: 2 with the prompt of an earlier"),
        ("a.jsonl", lines(*sums(1)) + b'\n\n{"prompt":', "row 3: Expecting value: line 1 column 11"),
        ("a.jsonl", b'{"prompt": "h\xe9"}', "row 1: 'utf-8' codec can't decode byte 0xe9"),
        ("a.jsonl", b"[1]", "row 1: not a JSON object"),
        ("a.json", b'[{"prompt": "a"},]', "Expecting value: line 1 column 18"),
        ("a.csv", b"prompt,answer\na,1\nb,2,3\n", "row 2: more fields than the header"),
        ("a.csv", b"prompt,answer\na,1\nh\xe9,2\n", "'utf-8' codec can't decode byte 0xe9"),
        ("a.csv", b'prompt,answer\na,1\n"b,2\nc,3\n', "unexpected end of data"),
        ("a.csv", b"prompt;answer\na;1\n", r"holds the prompt, but it has \['prompt;answer'\]"),
        ("a.csv", b"prompt,answer,answer\na,1,2\n", "several columns .'answer'."),
        ("a.csv", b"prompt,answer\n", "expected at least one row, but it is empty"),
    ],
)  # fmt: skip
def test_a_file_without_rows_to_train_on_is_an_error_with_a_remedy(build, name, content, message):
    with pytest.raises(UserError, match=message):
        build(content, name)


def test_paths_and_columns_that_do_not_exist_are_errors_with_the_remedy(build, tmp_path):
    with pytest.raises(UserError, match="task.path = '': expected rows to train on"):
        Rows.Config().check_files()
    with pytest.raises(UserError, match="task.path = 'nowhere.jsonl': expected a file or folder that exists"):
        Rows.Config(path="nowhere.jsonl").build()
    with pytest.raises(UserError, match="'~no_such_user/rows.jsonl': expected a file or folder that exists"):
        Rows.Config(path="~no_such_user/rows.jsonl").build()
    with pytest.raises(UserError, match=r"task.answer_column = 'label': expected a column .*It has \['prompt'"):
        build(sums(2), answer_column="label")
    with pytest.raises(UserError, match="left out: 2 no column 'query' for task.template .rows 1, 2."):
        build(sums(2), template="{query}")
    with pytest.raises(UserError, match=r"holds the prompt, but it has \['chosen', 'rejected'\]"):
        build(lines({"chosen": "1 + 1 is 2", "rejected": "3"}), demonstrations="last")  # text without a prompt
    with pytest.raises(UserError, match="left out: 2 task.template cannot be filled: Single '{' encountered"):
        build(sums(2), template="{")
    with pytest.raises(UserError, match="task.template = .* which the prompt would show"):
        build(sums(3), template="{prompt} {answer}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"expected files of the split 'train', but it has \[\]. Pass a file"):
        Rows.Config(path=str(tmp_path / "empty")).build()


def test_rows_with_an_unreadable_answer_are_left_out_and_named(build, capsys):
    rows = [*sums(9), {"prompt": "a", "answer": "blue"}, {"prompt": "b", "answer": ["red", "blue"]}]
    left_out = "8 rows for training; left out: 2 no answer that can be read in 'answer' (rows 10, 11)"
    assert left_out in told(build(rows, answer_kind="number"), capsys)
    with pytest.raises(UserError, match="0 rows for training; left out: 2 no answer .*with --task.prompt-column and"):
        build(rows[9:], answer_kind="number")


def test_a_file_with_decimal_commas_is_refused_and_single_ones_are_left_out(build, capsys):
    commas = [{"prompt": answer, "answer": answer} for answer in ("-3,5", "1.234,5 km", "0,125", "12,5 €")]
    grouped = [{"prompt": answer, "answer": answer} for answer in ("3,125", "1.200", "(1,200)", "1,234,567")]
    refused = "decimal points, but 4 answers of data.jsonl have commas.* Write 3.5, 3.125 and 1200"
    with pytest.raises(UserError, match=refused):
        build([*sums(300), *grouped, *commas], answer_kind="number")
    told_of_one = "left out: 1 with a decimal comma, such as 3,5 (row 201)"
    assert told_of_one in told(build([*sums(200), commas[0], *grouped], answer_kind="number"), capsys)


@pytest.mark.parametrize(
    ("prompt", "answers", "kind", "expected"),
    [
        ("What is {}?", ["The sum is 4.\n#### 4", "1,200", *range(40, 80), "none"], "number", "1,200"),
        ("How far is {}?", ["4,940 km", "3 1/2 miles", "7", *range(40, 42)], "number", "4,940"),
        ("When is {}?", ["3 May", "4 June", "7"], "text", "3 May"),
        ("What is {}?", [r"so $\boxed{\sqrt{2}}$", "4", r"(1, 2)"], "math", r"\sqrt{2}"),
        ("What is {}?\nA) 1\nB) 2", ["A", "B", "A"], "choice", "B"),
        ("What is {}?", ["A", "B", "A"], "text", "B"),
        ("Sort {}", ["1, 2, 3", "2, 3, 4", "5"], "text", "2, 3, 4"),
        ("Sort {} and write <answer>1</answer>", ["1", "2", "3"], "tag", "3"),
        ("Say {}", ["", "", ""], "text", ""),
    ],
)  # fmt: skip
def test_answers_are_read_as_prompts_and_answers_show_unless_a_kind_is_set(
    build, capsys, prompt, answers, kind, expected
):
    rows = [{"prompt": prompt.format(i), "answer": answer} for i, answer in enumerate(answers)]
    more = {"held_out_share": 0.01} if any(answers) else {"answer_column": ""}
    if not any(answers):
        rows = [{"prompt": row["prompt"]} for row in rows]
    task = build(rows, **more)
    assert task.config.answer_kind == kind
    assert expected in {task.train_example(i, seed=0).expected_answer for i in range(len(rows))} | {
        example.expected_answer for example in task.held_out_examples(1)
    }
    assert (f"answers are read as {kind} (" in capsys.readouterr().out) == any(answers)
    assert build(rows, answer_kind="box", **more).config.answer_kind == "box"


def test_tables_show_the_final_answer_of_a_text_unless_all_of_it_is_expected(build):
    task = build([{"prompt": f"Sort {i}", "answer": answer} for i, answer in enumerate(["a, b", "b\nc", "d"])])
    grading = build_grader(Grader.Config(), task)
    texts = ["I sort them.\nThe answer is b, c.", "B\nc", "I think\n<answer>d</answer>", "b\nd"]
    scored = score(grading, *texts, expected_answer="b\nc\nor\nd")
    assert [(each.answer, each.correct) for each in scored] == [
        ("b, c", False), ("B\nc", True), ("d", True), ("d", True),
    ]  # fmt: skip


def test_unavailable_hub_data_set_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    with pytest.raises(UserError, match=r"task.path = 'org/name': .*\(task.subset\) and the split 'train', but"):
        Rows.Config(path="org/name").build()


def test_prompts_that_are_too_long_or_that_the_template_rejects_are_left_out_before_training(build, capsys):
    system = {"role": "system", "content": "Add."}
    rows = [{"prompt": f"{'long ' * 100}{i}", "answer": 1} for i in range(2)]
    rows += [{"prompt": [system, {"role": "user", "content": f"1 + {i}?"}], "answer": 1} for i in range(3)]
    task = build([*sums(9), *rows], held_out_share=0.3)
    tokenizer = make_small_tokenizer(["1 + 1?"] * 4, vocab_size=300, chat=True)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}<|user|>"
    )
    tokenizer.chat_template += "{{ messages[-1].content }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    stream = PromptStream.Config(max_prompt_tokens=64, read_ahead=0).build(task=task, tokenizer=tokenizer, seed=0)
    out = capsys.readouterr().out
    assert "longer than prompts.max_prompt_tokens 64 (--prompts.max-prompt-tokens 128 allows longer ones) (row" in out
    assert "that the chat template rejects: no system (row" in out
    prompts = stream.next_batch(30) + stream.held_out(10)
    assert len({prompt.text for prompt in prompts}) == 9
    assert stream.num_passed_over == 0
