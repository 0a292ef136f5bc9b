"""Fixtures of the room's tests: recorders that end with the test, and ranks simulated in one process."""

import logging
import pickle

import pytest

from torchtitan_rl.events import recorded_by
from torchtitan_rl.observe import Recorder, record_metric


@pytest.fixture(autouse=True)
def logs_reach_pytest():
    logging.getLogger("torchtitan_rl").propagate = True


@pytest.fixture
def recorder(tmp_path):
    """Makes recorders of a run folder, and closes them when the test ends."""
    made = []

    def make(sinks=("jsonl",), folder=tmp_path, total_steps=10, rank=0, gather=None, decode=None, **config):
        about = {"run_name": "test run", "run_config": {"lr": 1e-5, "model": {"name": "debug"}}}
        about |= {"total_steps": total_steps, "rank": rank, "gather": gather, "decode": decode}
        made.append(Recorder(Recorder.Config(sinks=list(sinks), **config), run_folder=folder, **about))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Ranks:
    """Recorders of several ranks in one process, joined by a gather that pickles as torch's does."""

    def __init__(self, make, count, **config):
        self._sent = []
        self.recorders = [make(rank=rank, gather=self._gather_of(rank), **config) for rank in range(count)]
        self.gathers = [0] * count

    def record(self, rank, *args, **kwargs):
        """record_metric as called on `rank`."""
        with recorded_by(self.recorders[rank].collector):
            record_metric(*args, **kwargs)

    def flush(self, step):
        """Flushes all ranks; returns what rank 0 does."""
        self._sent = []
        others = [recorder.flush(step) for recorder in self.recorders[:0:-1]]
        assert others == [{}] * len(others)
        return self.recorders[0].flush(step)

    def _gather_of(self, rank):
        def gather(collection):
            self.gathers[rank] += 1
            self._sent.insert(0, pickle.dumps(collection))
            return [pickle.loads(sent) for sent in self._sent] if rank == 0 else None

        return gather


@pytest.fixture
def ranks(recorder):
    """Makes simulated ranks."""
    return lambda count, **config: Ranks(recorder, count, **config)
