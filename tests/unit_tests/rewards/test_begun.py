"""Calls that workers begin before the grader is asked for the scores: the same scores, sooner."""

import asyncio
import time

from tests.parts.grading import group, groups, logged, rewards


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_and_async_functions_start_at_begin_and_in_process_functions_run_at_scores(build, tmp_path):
    def away(completions, **_):
        with (tmp_path / "begun").open("a") as file:
            file.write("once")
        return [1.0]

    def here(completions, **_):
        called.append(completions)
        return [2.0]

    async def together(completions, **_):
        (tmp_path / "together").touch()
        return [4.0]

    called, [one] = [], groups(1)
    graded = build(away, here, together, workers=1, in_process=["here"])
    round = graded.round()
    round.begin(one)
    wait_for(tmp_path / "begun")
    wait_for(tmp_path / "together")
    assert not called
    assert rewards(round.scored_groups()[0].samples) == [7.0]
    assert (tmp_path / "begun").read_text() == "once"


def later_the_earlier(completions, log_extra, log_metric, **_):
    number = int(completions[0])
    time.sleep(0.3 - 0.1 * number)
    log_extra("number", [number])
    log_metric("number", number)
    return [float("nan") if number == 1 else float(number)]


later_the_earlier.scope = "group"


def test_scores_are_independent_of_the_order_of_groups(build):
    found = []
    for order in (1, -1):
        graded, asked = build(later_the_earlier, workers=3, on_failure="none"), [*groups(3), group(prompt_idx=3)]
        round = graded.round()
        for one in asked[::order]:
            round.begin(one)
        scored = round.scored_groups()
        found.append(([(s.reward, s.reward_breakdown, s.extra) for g in scored for s in g.samples], logged(graded)))
    assert found[0] == found[1]
    assert [reward for reward, _, _ in found[1][0]] == [0.0, None, 2.0]


def test_async_functions_of_all_rounds_share_an_event_loop(build):
    """So that a client which the first call has opened is of use to the next."""
    loops = []

    async def notes(completions, **_):
        loops.append(asyncio.get_running_loop())
        return [1.0]

    graded = build(notes)
    for _ in range(2):
        graded.grade(groups(1))
    assert len(loops) == 2
    assert loops[0] is loops[1]
