"""Files as people have them give the prompts and completions that docs/data.md promises, by the commands of its table."""

import json
import re
import shlex
from datetime import datetime
from importlib.resources import files
from pathlib import Path

import pandas
import pyarrow
import pytest
from datasets import Dataset, DatasetDict

from tests.parts.talk import chat_tokenizer
from torchtitan_rl.command.registry import parse_args

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
COMMANDS = dict(re.findall(r"^\| (.+) \| `(--config [^`]+)` \|$", PAGE, re.MULTILINE))
"""By what the table says of the file."""
NUM = 8
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}


def asked(i: int) -> dict:
    return {"role": "user", "content": f"{i} + {i}?"}


def said(i: int, **thinking: str) -> dict:
    return {"role": "assistant", "content": f"It is {2 * i}.", **thinking}


def calling(i: int) -> list[dict]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": i})}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": f"{2 * i}"}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, answer]


def plain(i: int) -> dict:
    return {"prompt": f"{i} + {i}?", "answer": 2 * i}


def verl(i: int) -> dict:
    judged = {"style": "rule", "ground_truth": f"{2 * i}"}
    return {"data_source": "a", "prompt": [asked(i)], "reward_model": judged, "extra_info": {"split": "a", "index": i}}


def pairs(i: int) -> dict:
    wrong = {"role": "assistant", "content": "No."}
    return {"prompt": f"{i} + {i}?", "chosen": [asked(i), said(i)], "rejected": [asked(i), wrong], "score_chosen": 8.0}


def openr1(i: int) -> dict:
    done = [asked(i), said(i)]
    row = {"problem": f"{i} + {i}?", "solution": f"We add ${i}$ and ${i}$.", "answer": f"{2 * i}", "messages": done}
    return row | {"generations": ["a"], "correctness_math_verify": [True], "finish_reasons": ["stop"]}


def wildchat(i: int) -> dict:
    more = {"country": "A", "header": {"agent": "b"}, "timestamp": datetime(2024, 1, 1), "redacted": False}
    return {"model": "m", "conversation": [asked(i) | more | {"timestamp": None}, said(i) | more], "turn": 1}


def xlam(i: int) -> dict:
    tools = [{"name": "add", "description": "", "parameters": {"a": {"description": "", "type": "int"}}}]
    calls = [{"name": "add", "arguments": {"a": i}}]
    return {"id": i, "query": f"{i} + {i}?", "answers": json.dumps(calls), "tools": json.dumps(tools)}


FORMATS = [
    ("OpenR1-Math", "shards", openr1),
    ("DeepScaleR", "shards", lambda i: {"problem": f"{i} + {i}?", "answer": f"{2 * i}", "solution": ""}),
    ("Big-Math", "shards", lambda i: {"problem": f"{i} + {i}?", "answer": f"{2 * i}", "domain": ["a"], "rate": 0.5}),
    ("DAPO-17k", "rows.parquet", verl),
    ("WildChat", "rows.parquet", wildchat),
    ("xlam", "rows.json", xlam),
    *(("a prompt and an answer", f"rows.{ending}", plain) for ending in ("jsonl", "json", "csv", "tsv", "parquet")),
    *(("a prompt and an answer", f"rows.jsonl.{ending}", plain) for ending in ("gz", "zst", "bz2", "lz4")),
    ("a prompt and an answer", "rows.json.zst", plain),
    ("a prompt and an answer", "saved_one", plain),
    ("a folder", "shards", plain),
    ("a folder", "saved", plain),
    ("verl", "train.parquet", verl),
    ("prime-rl", "a.jsonl", lambda i: {"question": f"{i} + {i}?", "info": json.dumps({"answer": 2 * i, "level": 1})}),
    (
        "prime-rl", "b.jsonl",
        lambda i: {"prompt": f"{i} + {i}?", "verification_info": json.dumps({"ground_truth": f"{2 * i}"})},
    ),
    ("prime-rl", "c.parquet", lambda i: {"prompt": [asked(i)], "answer": f"{2 * i}", "info": {"a": 1}, "task": "add"}),
    ("an answer elsewhere", "d.jsonl", lambda i: {"prompt": f"{i} + {i}?", "meta": {"solution": {"value": 2 * i}}}),
    ("a prompt and a completion", "e.jsonl", lambda i: {"prompt": f"{i} + {i}?", "completion": f"It is {2 * i}."}),
    ("OpenAI", "f.jsonl", lambda i: {"messages": [asked(i), *calling(i), said(i)], "tools": [TOOL]}),
    ("OpenAI", "g.parquet", lambda i: {"messages": [asked(i), *calling(i), said(i)], "tool_defs": json.dumps([TOOL])}),
    (
        "ShareGPT", "h.json",
        lambda i: {"conversations": [{"from": "human", "value": f"{i} + {i}?"}, {"from": "gpt", "value": f"It is {2 * i}."}]},
    ),
    (
        "ShareGPT", "i.json",
        lambda i: {"conversations": [{"from": "user", "content": f"{i} + {i}?"}, {"from": "assistant", "content": f"It is {2 * i}."}]},
    ),
    ("Alpaca", "j.json", lambda i: {"instruction": f"{i} + {i}?", "input": "", "output": f"It is {2 * i}."}),
    ("preference pairs", "k.parquet", pairs),
    ("thinking", "l.jsonl", lambda i: {"messages": [asked(i), said(i, reasoning_content="I add.")]}),
    (
        "thinking", "m.jsonl",
        lambda i: {"messages": [asked(i), said(i, content=f"<think>\nI add.\n</think>\n\nIt is {2 * i}.")]},
    ),
]  # fmt: skip


def write(path: Path, rows: list[dict]) -> None:
    """Writes the rows as the path's name says; in CSV with a missing answer, which makes decimals of the others."""
    table = Dataset.from_list(rows)
    if path.name == "saved":
        DatasetDict(train=table, test=table.select([0])).save_to_disk(path)
    elif path.name == "saved_one":
        table.save_to_disk(path)
    elif path.name == "shards":
        path.mkdir()
        for name, shard in {"train-00000-of-00002": [1, 2], "train-00001-of-00002": [3, 4], "test": [0]}.items():
            table.select(shard).to_parquet(path / f"{name}.parquet")
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        missing = pandas.DataFrame([*rows, {"prompt": "?", "answer": None}])
        missing.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    else:
        lines = json.dumps(rows) if ".json." in f"{path.name}." else "\n".join(map(json.dumps, rows))
        kind = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}.get(path.suffix)
        with pyarrow.CompressedOutputStream(str(path), kind) if kind else path.open("wb") as file:
            file.write(lines.encode())


@pytest.mark.parametrize(("what", "name", "row"), FORMATS, ids=[name for _, name, _ in FORMATS])
def test_a_file_is_read_by_the_command_of_the_docs(tmp_path, monkeypatch, what, name, row):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    [command] = [command for told, command in COMMANDS.items() if what in told]
    write(tmp_path / name, [row(i) for i in range(NUM)])
    config = parse_args(shlex.split(command))[1]
    config.task.path = str(tmp_path / name)
    made = chat_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    made.add_tokens(["<think>", "</think>"])  # Qwen3's are not special
    made.chat_template = (files("trl") / "chat_templates" / "qwen3.jinja").read_text()
    ends = {"end_token_ids": [made.vocab["<|im_end|>"]], "max_completion_tokens": 512}
    config.prompts.read_ahead = 0
    task = config.task.build()
    assert what != "a folder" or [example.expected_answer for example in task.held_out_examples(9)] == ["0"]
    prompt = config.prompts.build(task=task, tokenizer=made, seed=0, **ends).at(0)
    number = int(re.search(r"(\d) \+ \d\?", prompt.text)[1])
    if prompt.demonstration is None:
        assert float(prompt.expected_answer) == 2 * number
        return
    learned = prompt.demonstration.token_ids[prompt.demonstration.loss_mask]
    thinking = "<think>\nI add.\n</think>\n\n" * (what == "thinking")
    if what == "xlam":
        call = json.dumps({"name": "add", "arguments": {"a": number}})
        assert made.decode(learned) == f"<tool_call>\n{call}\n</tool_call><|im_end|>"
        return
    assert made.decode(learned) == f"{thinking}It is {2 * number}.<|im_end|>"
    assert ('"name": "add", "parameters"' in prompt.text, '"arguments": {"a": ' in prompt.text) == (
        what == "OpenAI",
    ) * 2
