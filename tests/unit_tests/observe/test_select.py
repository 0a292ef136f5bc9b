"""Sample tables: which rows are shown, why, and that ranks select exactly what one rank would."""

import math
import pickle
import random as chance

from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.observe.select import Selection, shown

ALL = ("top:2", "bottom:2", "random:2", "longest:2", "truncated:2", "failed:2", "unscored:3", "zero_variance:2",
       "group_best:1", "group_worst:1", "pinned:three")  # fmt: skip


def selected(rows, select):
    return shown(Selection(select).select(rows))


def over_ranks(ranks, select):
    """The selection when each rank holds some rows and sends what it selects, pickled, to the first."""
    selection = Selection(select)
    sent = [pickle.loads(pickle.dumps(selection.select(rows))) for rows in ranks]
    return selection.select([row for rows in sent for row in rows])


def row(prompt_idx=0, sample_idx=0, score=0.0, **cells):
    return {"prompt_idx": prompt_idx, "sample_idx": sample_idx, "score": score, "response": "x", **cells}


scores = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, math.inf, -math.inf, math.nan, None]), st.floats(width=16)
)
some_rows = st.lists(
    st.builds(
        row,
        prompt_idx=st.integers(0, 4),
        sample_idx=st.integers(0, 3),
        score=scores,
        answer=st.sampled_from([None, "3"]),
        finish_reason=st.sampled_from(["stop", "length"]),
        response_tokens=st.integers(0, 5),
        prompt=st.sampled_from(["one two three", "four"]),
    ),
    max_size=20,
    unique_by=lambda row: (row["prompt_idx"], row["sample_idx"]),
)


def scores_by_hand(rows, k, sign):
    """The scores of top k (sign -1) or bottom k (sign 1) of pooled rows by the specification, written independently."""
    return sorted(
        (r["score"] for r in rows if r["score"] is not None and not math.isnan(r["score"])), key=lambda x: sign * x
    )[:k]


def spread(rows, count, seed):
    """The rows on `count` ranks. A prompt's rows are on one rank."""
    where = chance.Random(seed)
    of_prompt = [where.randrange(count) for _ in range(5)]
    return [[r for r in rows if of_prompt[r["prompt_idx"]] == rank] for rank in range(count)]


@settings(max_examples=120, deadline=None)
@given(rows=some_rows, count=st.sampled_from([1, 2, 4]), k=st.integers(0, 4), seed=st.integers(0, 2**16))
def test_selection_over_1_2_and_4_ranks_equals_that_of_the_pooled_rows(rows, count, k, seed):
    ranks = spread(rows, count, seed)
    for name, sign in (("top", -1), ("bottom", 1)):
        found = shown(over_ranks(ranks, (f"{name}:{k}", "unscored:0")))
        assert sorted(r["score"] for r in found) == sorted(scores_by_hand(rows, k, sign))
    assert repr(over_ranks(ranks, ALL)) == repr(Selection(ALL).select(rows))


def test_ties_rotate_by_step_independent_of_arrival_order():
    first = {}
    for step in [*range(20)] * 5:
        rows = [row(p, s, 1.0, step=step) for p in range(8) for s in range(4)]
        chance.shuffle(rows)
        [top] = selected(rows, ("top:1", "unscored:0"))
        assert first.setdefault(step, top) == top
    assert len({top["prompt_idx"] for top in first.values()}) > 4, "prompt 0 must not be shown in every step"


def test_each_named_selector_selects_its_rows():
    rows = [
        row(0, 0, 1.0, response_tokens=9, answer="1", finish_reason="length", prompt="one"),
        row(0, 1, 0.0, response_tokens=2, answer=None, finish_reason="stop", prompt="one"),
        row(1, 0, 0.5, response_tokens=3, answer="1", finish_reason="stop", prompt="two"),
        row(1, 1, 0.5, response_tokens=3, answer="1", finish_reason="stop", prompt="two"),
    ]
    expected = {
        "longest": [(0, 0)],
        "truncated": [(0, 0)],
        "failed": [(0, 1)],
        "zero_variance": [(1, 0)],
        "group_best": [(0, 0), (1, 0)],
        "group_worst": [(1, 0), (0, 1)],
        "pinned:two": [(1, 0), (1, 1)],
    }
    for name, places in expected.items():
        found = selected(rows, (name,))
        assert [(r["prompt_idx"], r["sample_idx"]) for r in found] == places, name
        assert {r["select_reason"] for r in found} == {name.partition(":")[0].replace("_", " ")}


def test_the_whole_group_of_a_shown_row_is_stored():
    rows = [row(p, s, float(4 * p + s)) for p in range(6) for s in range(4)]
    found = Selection(("top", "unscored:0")).select(rows)
    reasons = [(r["prompt_idx"], r["sample_idx"], r["select_reason"]) for r in found]
    assert reasons == [(5, 3, "top"), (5, 2, "sibling"), (5, 1, "sibling"), (5, 0, "sibling")]


def test_any_recorded_column_and_a_users_function_rank_rows_over_all_ranks(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(
        "def shortest(row):\n    return -len(row['response'])\n\ndef broken(row):\n    return row['absent']\n"
    )
    lengths = [3, None, 9, 1, "9"] * 4
    rows = [row(i, score=1.0, response="x" * (5 + i % 7), **{"extra/length": n}) for i, n in enumerate(lengths)]
    own = [f"{tmp_path}/mine.py:shortest:3", f"{tmp_path}/mine.py:broken:2"]
    stored = over_ranks([rows[rank::4] for rank in range(4)], ["top:2:extra/length", "bottom:1:extra/length", *own])

    def chosen(reason, column):
        return [r[column] for r in stored if reason in r["select_reason"].split(", ")]

    assert chosen("top extra/length", "extra/length") == [9, 9]
    assert chosen("bottom extra/length", "extra/length") == [1]
    assert chosen("shortest", "response") == ["xxxxx"] * 3
    assert chosen("broken", "response") == []
    assert caplog.text.count("it ranks no row from here on") == 1


def test_a_users_function_may_return_a_number_of_numpy(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy\n\ndef longest(row):\n    return numpy.int64(len(row['response']))\n"
    )
    rows = [row(i, score=None, response="x" * i) for i in range(4)]
    assert [r["response"] for r in selected(rows, (f"{tmp_path}/mine.py:longest", "unscored:0"))] == ["xxx"]
