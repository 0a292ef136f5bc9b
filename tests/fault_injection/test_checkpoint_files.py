"""Files of a checkpoint torn, flipped or lost between two starts of a run."""

import shutil

import pytest

from tests.fault_injection.harness import train, weights_of

EVERY_STEP = ["--checkpoint.interval", "1"]


def flip_a_bit(folder):
    shard = folder / "__0_0.distcp"
    with open(shard, "r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """A run of 3 steps with its last two checkpoints, and what it goes on to have at step 4."""
    folder = tmp_path_factory.mktemp("three")
    assert train(folder, "--num-steps", "3", *EVERY_STEP).code == 0
    whole = tmp_path_factory.mktemp("four")
    shutil.copytree(folder / "run", whole / "run")
    assert train(whole, "--num-steps", "4", *EVERY_STEP).code == 0
    return folder / "run", weights_of(whole / "run", 4)


@pytest.mark.quick
def test_a_flipped_bit_is_found_the_step_before_is_used_and_the_end_is_the_same(three_steps, tmp_path):
    run, expected = three_steps
    shutil.copytree(run, tmp_path / "run")
    flip_a_bit(tmp_path / "run" / "checkpoint" / "step-3")
    ended = train(tmp_path, "--num-steps", "4", *EVERY_STEP)
    assert ended.code == 0
    ended.says(
        "skipped step-3: __0_0.distcp is damaged", "later step kept as set-aside-step-3", "resuming after step 2"
    )
    assert weights_of(tmp_path / "run", 4) == expected
