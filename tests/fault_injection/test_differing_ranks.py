"""Ranks that differ in what they hold in common: noticed before it does harm, with what differs and on which ranks."""

import pytest

from tests.fault_injection.harness import start

WHERE = "tests/fault_injection/differing.py"


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        ("other_seed", 2, r"error: config: it differs between the ranks: seed is 0 on rank 0, 1 on rank 1\. Start every node"),
        ("other_data", 3, r"stopped: step 1: the prompts differ between the ranks: they are not the same on rank 0 and on rank 1"),
        ("other_advantages", 3, r"stopped: step 1: the advantages differ between the ranks: they are not the same on rank 0 and"),
    ],
)  # fmt: skip
def test_differing_ranks_end_the_run_and_name_the_difference(tmp_path, config, code, message):
    ended = start(tmp_path, "--config", f"{WHERE}:{config}", "--num-steps", "3", ranks=2).end(240)
    assert ended.code == code
    ended.says(message)
    ended.never_says("Traceback")
