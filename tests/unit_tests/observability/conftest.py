"""Parts the room's tests share: episodes, recorders that end with the test, and ranks simulated in one process."""

import logging
import multiprocessing
import pickle

import pytest

from torchtitan_rl.observability import Recorder, collector
from torchtitan_rl.types import Episode

FORK = multiprocessing.get_context("fork")
"""Processes that need no second import of torch."""

NASTY = (
    "[/answer] list[int] [bold]x[/] \x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07 \x9b2J "
    "<script>alert(1)</script> </table> | a | `b` 👩‍💻🇩🇪 \x00 \ud800 \u202etxt.exe\r\n"
) + "x" * 100_000
"""A model's answer: rich markup, ANSI escapes, HTML, table bars, emoji, NUL, a lone surrogate, 100k characters."""


@pytest.fixture(autouse=True)
def fresh_collector():
    """No recorder, and every one-time warning still to come."""
    collector.activate(None)
    collector._silenced.clear()
    logging.getLogger("torchtitan_rl").propagate = True
    yield
    collector.activate(None)


@pytest.fixture
def recorder(tmp_path):
    """Makes recorders of a run folder, and closes them when the test ends."""
    made = []

    def make(sinks=("jsonl",), folder=tmp_path, total_steps=10, rank=0, gather=None, run_config=None, **config):
        made.append(
            Recorder(
                Recorder.Config(sinks=list(sinks), **config),
                run_folder=folder,
                run_name="test run",
                run_config=run_config if run_config is not None else {"lr": 1e-5, "model": {"name": "debug"}},
                total_steps=total_steps,
                rank=rank,
                gather=gather,
            )
        )
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
        collector.activate(self.recorders[rank]._collector)
        collector.record_metric(*args, **kwargs)

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


def episode(prompt_idx=0, sample_idx=0, reward=1.0, **fields):
    """An episode with three tokens and log-probabilities of -0.5."""
    tokens = fields.pop("token_ids", [5, 6, 7])
    values = {
        "policy_version": 3,
        "prompt": f"What is {prompt_idx} + 1?",
        "response": f"[ANSWER] {prompt_idx + 1}",
        "expected_answer": str(prompt_idx + 1),
        "answer": str(prompt_idx + 1),
        "prompt_token_ids": [1, 2],
        "sampler_logprobs": [-0.5] * len(tokens),
        "finish_reason": "stop",
        "reward_breakdown": {"correct": reward},
        "extra": {},
        "group_size": 4,
    }
    return Episode(
        prompt_idx=prompt_idx, sample_idx=sample_idx, reward=reward, token_ids=tokens, **{**values, **fields}
    )
