"""A cluster takes a node back: SIGTERM to that node's launcher, a grace period, SIGKILL to all; then the same command on all nodes."""

import signal

from tests.fault_injection.conftest import STEPS
from tests.fault_injection.harness import start, steps_of, two_nodes, weights_of

PREEMPTED = 128 + signal.SIGTERM


def start_both(folder, name):
    """A run of two launchers with a rank each."""
    nodes, _ = two_nodes()
    return [start(folder, *STEPS, log=f"{name}{i}.log", launcher=node) for i, node in enumerate(nodes)]


def test_preempted_node_ends_all_nodes_with_143_and_the_restart_resumes_bitwise(whole_run_2, tmp_path):
    nodes = start_both(tmp_path, "first")
    nodes[0].wait_in("generate")
    nodes[1].signal(signal.SIGTERM)
    assert [node.end(240).code for node in nodes] == [PREEMPTED, PREEMPTED]
    saved = max(steps_of(tmp_path / "run"))
    assert saved < 6
    again = start_both(tmp_path, "again")
    assert [node.end(600).code for node in again] == [0, 0]
    again[0].end().says(f"resuming after step {saved}")
    assert weights_of(tmp_path / "run", 6) == weights_of(whole_run_2, 6)
