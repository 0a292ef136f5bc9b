"""vLLM's CPU engine shares memory between the ranks of one replica under a name that only the ranks decide."""

from pathlib import Path

import pytest

from torchtitan_rl.core.device import ON_CPU
from torchtitan_rl.cpu.shared_memory import unlink_shared_memory


@pytest.mark.skipif(not ON_CPU, reason="a GPU engine shares no such memory")
def test_what_a_killed_run_left_is_taken_away_and_nothing_else():
    names = {which: Path(f"/dev/shm/-tp:0-[{ranks}]-cpushm_{which[0]}") for which, ranks in
             {"1 mine": "90002-90003", "0 my sibling's": "90002-90003", "1 another replica's": "90000-90001"}.items()}  # fmt: skip
    for path in names.values():
        path.touch()
    try:
        unlink_shared_memory(range(90002, 90004), 1)
        assert {which for which, path in names.items() if path.exists()} == {"0 my sibling's", "1 another replica's"}
    finally:
        for path in names.values():
            path.unlink(missing_ok=True)
