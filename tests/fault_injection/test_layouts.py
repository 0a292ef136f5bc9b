"""A checkpoint goes on under another layout: the same prompts, the same samples, the same losses but for rounding."""

import pytest

from tests.fault_injection.conftest import STEPS
from tests.fault_injection.harness import copy_until, metrics_of, train, weights_of


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ["--trainer.parallelism.tensor-parallel-degree", "2"]),
        # As many engines as before, or other random numbers would be drawn.
        (4, ["--generator.tensor-parallel-degree", "2"]),
    ],
)
def test_checkpoint_of_two_fsdp_ranks_resumes_with_tensor_parallelism_and_on_four_ranks(
    whole_run_2, tmp_path, ranks, layout
):
    run = copy_until(whole_run_2, 3, tmp_path)
    ended = train(tmp_path, *STEPS, *layout, ranks=ranks)
    assert ended.code == 0
    ended.says("changed since step-3: .*tensor_parallel_degree 1 -> 2", "resuming after step 3")
    found, expected = metrics_of(run), metrics_of(whole_run_2)
    assert list(found) == list(expected)
    for step in (4, 5, 6):
        assert found[step]["reward/mean"] == expected[step]["reward/mean"]
        for key in ("loss/total", "optimizer/grad_norm"):
            assert found[step][key] == pytest.approx(expected[step][key], rel=1e-2, abs=1e-4), (step, key)
    position = "dataloader.position "
    assert weights_of(run, 6)[position] == weights_of(whole_run_2, 6)[position]
