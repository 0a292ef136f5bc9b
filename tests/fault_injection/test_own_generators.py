"""Generators on ranks of their own, one step ahead: whichever rank is killed, and when, the run goes on to the last bit."""

import re
import signal

import pytest

from tests.fault_injection.harness import metrics_of, start, steps_of, train, weights_of

KILLED = 128 + signal.SIGKILL
STEPS = 40
AHEAD = [
    "--generator.ranks", "2", "--generator.ahead", "1", "--algorithm.old-logprobs", "sampler", "--num-steps", str(STEPS),
    "--checkpoint.interval", "2", "--evaluation.every", "2", "--evaluation.num-prompts", "16",
]  # fmt: skip
"""Ranks 0 and 1 train, ranks 2 and 3 sample."""
KINDS = {
    "turns": ["--config", "debug"],
    "conversations in flight": ["--config", "tests/parts/talk.py:talk", "--in-flight.prompts", "8"],
}
MOMENTS = [
    (2, "start the vLLM engine", 2),
    (3, "step 1: generate", 3),
    (1, "step 1: train", 1),
    # from here on after one more checkpoint
    (2, ": generate", 2),
    (3, ": grade", 3),
    (0, ": train", 0),
    (0, ": sync", 2),
    (1, ": checkpoint/save", 1),
    (0, ": checkpoint/save", 3),
    (0, ": evaluate", 0),
]
"""The rank that is watched, its phase, and the rank that is then killed."""
CLOCK = re.compile("^(time|idle|perf|share|machine|memory|generator)|seconds|share$")


def computed(run):
    """The metrics of each step but those that a clock or the machine gives."""
    return {
        step: {key: value for key, value in row.items() if not CLOCK.search(key)}
        for step, row in metrics_of(run).items()
    }


def compare(resumed, straight):
    """All metrics but clocks are equal in each step."""
    assert computed(resumed) == computed(straight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_trainer_or_generator_is_named_and_the_run_goes_on_bitwise(tmp_path, kind):
    args, whole, folder = [*KINDS[kind], *AHEAD], tmp_path / "whole", tmp_path / "run"
    whole.mkdir()
    assert train(whole, *args, ranks=4, timeout_s=900).code == 0
    for number, (watched, phase, killed) in enumerate(MOMENTS):
        saved = max(steps_of(folder), default=0)
        run = start(tmp_path, *args, ranks=4, log=f"{number}.log")
        if number > 2:
            run.wait_until(lambda saved=saved: max(steps_of(folder), default=0) > saved, "save")
        run.wait_in(phase, rank=watched)
        run.signal(signal.SIGKILL, rank=killed)
        ended = run.end(60)
        assert ended.code == KILLED
        ended.says(rf"rank {killed} \(.*\) in .* was killed by signal 9 \(SIGKILL\)")
        ended.never_says("Traceback")
        assert run.left() == {}
    train(tmp_path, *args, ranks=4, timeout_s=900).says(r"resuming after step \d")
    assert weights_of(folder, STEPS) == weights_of(whole / "run", STEPS)
    compare(folder, whole / "run")
