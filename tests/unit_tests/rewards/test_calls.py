"""Slow, wild and foreign reward functions: many calls at once and real kills."""

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.parts.grading import TaskOf, build_grader, constant, drained, groups, rewards, score
from torchtitan_rl.errors import UserError
from torchtitan_rl.rewards import Grader, RewardError
from torchtitan_rl.rewards.workers import WorkerKilled, WorkerPool


@pytest.mark.parametrize("workers", [1, 8])
def test_groups_of_a_step_are_scored_concurrently_and_returned_in_order(build, workers, tmp_path):
    """No call returns before all eight have begun; of those that share an event loop, the last to begin returns first."""

    def all_begun(number):
        (tmp_path / number).touch()
        return len(list(tmp_path.iterdir())) == 8

    async def awaits(completions, **_):
        async with asyncio.timeout(30):
            while not all_begun(completions[0]):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.08 - 0.01 * int(completions[0]))
        return [float(completions[0])]

    def waits(completions, **_):
        give_up = time.monotonic() + 30
        while not all_begun(completions[0]) and time.monotonic() < give_up:
            time.sleep(0.01)
        return [float(completions[0]) if time.monotonic() < give_up else -1.0]

    function = awaits if workers == 1 else waits
    graded = build(function, workers=workers)
    scored = graded.grade(groups(8))
    assert [rewards(g.samples) for g in scored] == [[float(i)] for i in range(8)]
    assert drained(graded)[f"reward/{function.__name__}/seconds"].value > 0


def test_blocking_async_function_times_out_without_losing_other_scores(build, monkeypatch):
    monkeypatch.setattr("torchtitan_rl.rewards.calls._CANCEL_SECONDS", 0.2)

    async def blocks(completions, **_):
        time.sleep(3)

    async def quick(completions, **_):
        return [1.0]

    [scored] = build(quick, blocks, time_limit_seconds=0.3, on_failure="none").grade(groups(1))
    assert scored.samples[0].reward_breakdown == {"quick": 1.0, "blocks": None}
    assert "took longer than 0.3 s and cannot be cancelled" in scored.samples[0].extra["error/blocks"]


def native_loop(completions, **_):
    return [sum(range(10**15))]


def fork_bomb(completions, **_):
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()  # leaves the process group
            os.fork()
    time.sleep(1000)


def dies(completions, **_):
    os._exit(0)


def write_to_sockets(data):
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                os.write(int(entry), data)


def half_message(completions, **_):
    write_to_sockets(b"\x7f\xff\xff\xff")
    time.sleep(1000)


def forged_message(completions, **_):
    forged = pickle.dumps(([1.0], None))
    write_to_sockets(len(forged).to_bytes(4, "big") + forged)
    time.sleep(1000)


def stopped(completions, **_):
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("function", "limit", "said"),
    [
        (half_message, 1.0, "longer than 1 s"),
        (forged_message, 30.0, "wrote into its worker's descriptors"),
        (stopped, 1.0, "longer than 1 s"),
        (native_loop, 0.5, "longer than 0.5 s"),
        (fork_bomb, 0.5, "longer than 0.5 s"),
        (dies, 30.0, "its process ended with exit code 0"),
    ],
)
def test_call_that_ignores_its_timeout_is_killed_and_the_next_call_has_a_new_process(build, function, limit, said):
    def fine(completions, **_):
        return [2.0]

    limits = {function.__name__: limit}
    graded = build(function, fine, workers=1, time_limit_seconds_of=limits, on_failure="none")
    before = _descendants()
    [scored] = graded.grade(groups(1))
    assert scored.samples[0].reward_breakdown[function.__name__] is None
    assert scored.samples[0].reward_breakdown["fine"] == 2.0
    assert said in scored.samples[0].extra[f"error/{function.__name__}"]
    deadline = time.monotonic() + 10
    while len(_descendants()) > len(before) + 2:  # a supervisor and a worker; what is killed may take a moment to end
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_signals_to_every_process_of_a_run_lose_no_call(tmp_path):
    """As a batch system sends them. The supervisor stays, and a call whose worker they end is made again."""

    def waits(number):
        (tmp_path / f"begun-{os.getpid()}").touch()
        time.sleep(0.5)
        return number

    pool = WorkerPool([waits], size=1)
    pool.submit(0, 0).result()
    [nursery] = pool._pids
    [supervisor] = map(int, Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split())
    next(tmp_path.iterdir()).unlink()
    for number in (signal.SIGTERM, signal.SIGKILL):
        call = pool.submit(0, 7)
        deadline = time.monotonic() + 20
        while not (begun := list(tmp_path.iterdir())):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        begun[0].unlink()
        if number == signal.SIGTERM:
            os.kill(supervisor, number)
        os.kill(int(begun[0].name.removeprefix("begun-")), number)
        assert call.result() == 7
        for left in tmp_path.iterdir():
            left.unlink()
    pool.close()


def test_time_limit_ends_with_its_call_and_a_dead_supervisor_is_named_at_every_call():
    pool = WorkerPool([abs], size=1)
    assert pool.call(0, -1, seconds=0.2) == 1
    time.sleep(0.4)  # an alarm that was left would end the supervisor
    assert pool.call(0, -2, seconds=30) == 2
    [nursery] = pool._pids
    os.kill(int(Path(f"/proc/{nursery}/task/{nursery}/children").read_text()), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerKilled, match="its supervisor has ended"):
            pool.call(0, -3, seconds=30)
    pool.close()


def test_a_killed_worker_is_not_called_a_fault_of_the_function(build):
    def killed(completions, **_):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RewardError, match="killed by signal 9.* from outside .*Start the same command") as error:
        score(build(killed), "a")
    assert "Correct the function" not in str(error.value)


def _descendants() -> set[int]:
    """Processes of this session's tests that run under the fork server: they have this process's command line."""
    mine = Path("/proc/self/cmdline").read_bytes()
    return {int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if _read(p) == mine}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_function_can_run_in_the_training_process(build):
    pids = []

    def here(completions, **_):
        pids.append(os.getpid())
        return [0.0]

    class JudgesHere(TaskOf):
        def extract_answer(self, text):
            pids.append(os.getpid())

    graded = build_grader(Grader.Config(in_process=["here", "judgement"]), JudgesHere(here))
    score(graded, "a")
    graded.close()
    assert pids == [os.getpid()] * 2
    with pytest.raises(UserError, match="grader.in_process = .*'there'"):
        build(here, in_process=["there"])


def test_workers_end_with_the_process_that_started_them(tmp_path):
    program = tmp_path / "outlived.py"
    program.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from torchtitan_rl.rewards.workers import WorkerPool\n"
        "def bomb():\n"
        "    if os.fork() == 0: os.setsid()\n"
        "    time.sleep(1000)\n"
        "pool = WorkerPool([bomb], 2)\n"
        "pool.submit(0); pool.submit(0); time.sleep(1)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, str(program)], timeout=60)
    deadline = time.monotonic() + 10
    while left := [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(program).encode() in _read(p)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_function_that_forks_and_returns_twice_gives_one_result(build, capfd):
    def forks(completions, **_):
        os.fork()
        return [float(completions[0])]

    assert [rewards(g.samples) for g in build(forks).grade(groups(3))] == [[0.0], [1.0], [2.0]]
    assert "a function forked and returned in the child too: the child ends here" in capfd.readouterr().err


class LeavesAMark:
    """Refers to itself, so that only the garbage collector destroys it. It notes which process did."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.myself = folder, self

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


def test_garbage_of_the_parent_is_not_destroyed_in_a_worker(tmp_path):
    """The destructor of torch's process group, for one, waits there for ever."""
    gc.collect()
    gc.disable()
    try:
        LeavesAMark(tmp_path)
        pool = WorkerPool([gc.collect], size=1)
        pool.submit(0).result()
        pool.close()
        assert not list(tmp_path.iterdir())
    finally:
        gc.enable()
    gc.collect()
    assert [mark.name for mark in tmp_path.iterdir()] == [str(os.getpid())]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (["one"], "'one'], expected a list of 1 numbers or None: could not convert string"),
        (torch.tensor(1.0), "expected a list of 1 numbers or None: iteration over a 0-d tensor"),
        (lambda completions: 1.0, "<lambda> at .*, expected a list of 1 numbers"),
        ("1", "'1', expected a list of 1 numbers or None: it is a str"),
        ({1.0: "a"}, "it is a dict"),
        ({1.0}, "it is a set"),
    ],
)
def test_rewards_that_are_not_a_list_of_numbers_are_refused(build, output, said):
    def returns(completions, **_):
        return output

    with pytest.raises(RewardError, match=said):
        score(build(returns), "a")


def test_function_that_modifies_its_arguments_affects_no_other(build):
    def changes(prompts, completions, operands, **_):
        prompts[0][0]["content"] = completions[0][0]["content"] = ""
        operands[0].clear()
        return [0.0]

    def reads(prompts, completions, operands, **_):
        return [float(prompts[0][0]["content"] == "hi" and completions[0][0]["content"] == "a" and operands[0] == [1])]

    fields = {"messages": [{"role": "user", "content": "hi"}], "columns": {"operands": [1]}}
    assert score(build(changes, reads), "a", **fields)[0].reward_breakdown["reads"] == 1.0


def test_run_stops_after_repeated_steps_without_any_reward(build, caplog):
    graded = build(constant(float("nan")), on_failure="none")
    score(graded, "a", "b")
    score(graded, "a", "b")
    assert len([r for r in caplog.records if "No completion got a reward: all 2 failed" in r.message]) == 2
    with pytest.raises(RewardError, match="3 times in a row: nothing is being learned"):
        score(graded, "a", "b")


FILE = """
class Judge:
    def __call__(self, completions, **_):
        return [1.0] * len(completions)


judge = Judge()


def at_most(limit, *, low=0.0):
    def at_most_limit(completions, **_):
        return [1.0 if len(text) <= limit else low for text in completions]

    return at_most_limit
"""


def test_rewards_are_named_by_their_reference_and_factories_take_literals(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    references = [f"{file}:judge", f"{file}:at_most(2)", "strict=" + f"{file}:at_most(limit=1, low=-1.0)"]
    built = build_grader(Grader.Config(rewards=references, weights={"judge": 0.5, "strict": 2.0}), TaskOf())
    assert built.reward_names == ["judge", "at_most", "strict"]
    assert score(built, "ab")[0].reward == 0.5 + 1.0 - 2.0
    with pytest.raises(UserError, match=r"grader.rewards = .*at_most\(file\)'.*literal values"):
        build_grader(Grader.Config(rewards=[f"{file}:at_most(file)"]), TaskOf())
    with pytest.raises(UserError, match=r"grader.rewards = .*Judge'.*not a class. Add \(\)"):
        build_grader(Grader.Config(rewards=[f"{file}:Judge"]), TaskOf())
