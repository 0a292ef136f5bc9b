"""Compares the product's scheduler with vLLM's own, under vLLM's engine core and on the CUDA platform.

    python -m tests.gpu_rehearsal.scheduling [REPORT.json]

Random workloads must make both ask the worker for the same steps, end with the same outputs, and leave the same KV cache.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from tests.gpu_rehearsal import engine as rehearsal

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import input_processor
from vllm.v1.executor import abstract
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput

from torchtitan_rl.core.generator import generator as generator_module
from torchtitan_rl.core.generator import scheduler as scheduler_module
from torchtitan_rl.core.generator.generator import Generator
from torchtitan_rl.core.generator.sampling import SamplingConfig
from torchtitan_rl.core.generator.turn_engine import TurnEngine
from torchtitan_rl.observability.engine_stats import EngineStats

SCHEDULERS = ("stock", "turns")
ALIVE: list[object] = []
"""Engines: one that is collected ends the process group, which the next ones need."""
WORKLOADS = 24
"""Random workloads of each mode."""


class RecordingWorker(rehearsal.CountingWorker):
    """Writes down what it is asked for. Its log-probabilities and ranks differ from token to token."""

    blocks = 28

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple] = []

    def execute_model(self, scheduled: object) -> ModelRunnerOutput | None:
        self.asked.append(_plain(scheduled))
        return super().execute_model(scheduled)

    def sample_tokens(self, _: object) -> AsyncModelRunnerOutput:
        out = super().sample_tokens(_).get_output()
        ids = out.logprobs.logprob_token_ids
        lengths = np.array([len(self._requests[name][1]) for name in out.req_ids])
        values = (-(ids[:, 0] * 31 + lengths * 17) % 101 / 7).astype(np.float32)
        out.logprobs = LogprobsLists(ids, values[:, None], (ids[:, 0] + lengths) % 9)
        late = type("Late", (AsyncModelRunnerOutput,), {"get_output": lambda _: out})
        return late()


def _name(request_id: str) -> str:
    """Without the random part that vLLM appends."""
    return request_id.rsplit("-", 1)[0]


def _plain(scheduled: object) -> tuple:
    """All that the model runner is told of a step."""
    new = [
        (_name(one.req_id), one.prompt_token_ids, one.prefill_token_ids, one.block_ids, one.num_computed_tokens)
        for one in scheduled.scheduled_new_reqs
    ]
    cached = scheduled.scheduled_cached_reqs
    again = [
        [_name(one) for one in cached.req_ids],
        sorted(map(_name, cached.resumed_req_ids)),
        cached.new_block_ids,
        cached.num_computed_tokens,
        cached.num_output_tokens,
    ]
    numbers = [(_name(one), number) for one, number in scheduled.num_scheduled_tokens.items()]
    finished = sorted(map(_name, scheduled.finished_req_ids))
    preempted = sorted(map(_name, scheduled.preempted_req_ids or ()))
    return repr((new, again, numbers, finished, preempted, scheduled.total_num_scheduled_tokens))


class Driven:
    """An engine with one of the schedulers, and what it did."""

    def __init__(self, at: str, name: str, *, asynchronous: bool) -> None:
        options = generator_module.engine_options

        def engine_options(config: Generator.Config) -> dict:
            return options(config) | {"async_scheduling": asynchronous}

        made = scheduler_module.scheduler_class(asynchronous=asynchronous)
        with (
            mock.patch.object(generator_module, "engine_options", engine_options),
            mock.patch.object(generator_module, "scheduler_class", return_value=made),
        ):
            config = Generator.Config(dtype="bfloat16", max_model_len=160, max_num_seqs=24, scheduler=name)
            self.generator = config.build(
                hf_assets_path=rehearsal._folder(rehearsal.SPEC, at),
                sampling=SamplingConfig(n=8, max_tokens=48),
                seed=3,
                tokenizer=rehearsal._Tokenizer(),
                stats=EngineStats(),
            )
        self.engine = self.generator.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.worker = self.core.model_executor.driver_worker
        assert self.core.async_scheduling == asynchronous
        assert isinstance(self.core.scheduler, scheduler_module.TurnScheduler) == (name == "turns")

    def run(self, seed: int) -> dict[str, list]:
        """Returns the steps, the outputs, the KV cache after each step, and the statistics of one random workload."""
        rng = random.Random(seed)
        self.worker.asked, self._outputs, self._caches, self._named = [], [], [], 0
        self.generator.stats.begin()
        self.generator.llm.reset_prefix_cache()
        turns = TurnEngine(self.generator.llm, self.generator.tokenizer, [], seed=lambda _: 0)
        prompts = [[rng.randrange(10, 100) for _ in range(rng.choice([1, 9, 15, 16, 17, 32, 60]))] for _ in range(5)]
        for _ in range(rng.randrange(1, 5)):
            for _ in range(rng.choice([1, 4, 12, 30])):
                self._add(rng, rng.choice(prompts))
            for _ in range(rng.randrange(1, 40)):
                self._step()
            ending = rng.random()
            unfinished = [state.external_req_id for state in self.engine.output_processor.request_states.values()]
            if ending < 0.3 and unfinished:
                self.engine.abort_request(rng.sample(unfinished, min(3, len(unfinished))))
            elif ending < 0.6 and unfinished:
                self._cut(turns)
            elif ending < 0.8:
                while self.engine.has_unfinished_requests():
                    self._step()
        while self.engine.has_unfinished_requests():
            self._step()
        self._step()  # the batch ahead ends
        stats = self.generator.stats.metrics([])
        rate = stats.get("generator/prefix_cache_hit_rate")
        counted = (stats["generator/preemptions"].value, rate and (rate.value, rate.weight))
        return {"steps": self.worker.asked, "outputs": self._outputs, "caches": self._caches, "statistics": [counted]}

    def _add(self, rng: random.Random, prompt: list[int]) -> None:
        """A request as `TurnEngine.add` makes it, or one of which each token is read."""
        kinds = RequestOutputKind
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 15, 16, 17, 48, 90]),
            stop_token_ids=rng.sample(range(10, 100), rng.choice([0, 0, 1, 3])) + [rehearsal.END] * rng.randrange(2),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            seed=rng.choice([None, 5]),
            output_kind=kinds.CUMULATIVE if rng.random() < 0.1 else kinds.FINAL_ONLY,
            skip_clone=True,
        )
        self._named += 1
        self.engine.add_request(f"{self._named}", tokens_input(list(prompt)), params)

    def _step(self) -> None:
        self._note(one for one in self.engine.step() if one.finished)
        pool = self.core.scheduler.kv_cache_manager.block_pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        hashes = {block.block_id: repr(block.block_hash) for block in pool.blocks if block.block_hash is not None}
        self._caches.append(repr((free, hashes, [block.ref_cnt for block in pool.blocks])))

    def _cut(self, turns: TurnEngine) -> None:
        """As groups in flight end a step."""
        before = len(turns.outputs)
        with mock.patch.object(TurnEngine, "_sampled"):
            turns.take_back()
        self._note(turns.outputs[before:])

    def _note(self, outputs: Iterator) -> None:
        for one in outputs:
            [turn] = one.outputs
            said = turn.logprobs
            numbers = list(said.logprobs), list(said.token_ids), list(said.ranks), turn.cumulative_logprob
            ended = turn.finish_reason, turn.stop_reason, one.num_cached_tokens
            self._outputs.append(repr((one.request_id, list(turn.token_ids), numbers, ended)))


def differences(at: str, *, asynchronous: bool, workloads: int = WORKLOADS) -> list[str]:
    """Returns what the two schedulers do differently."""
    mode = "asynchronous" if asynchronous else "synchronous"
    driven = [Driven(f"{at}/{mode}-{name}", name, asynchronous=asynchronous) for name in SCHEDULERS]
    ALIVE.extend(driven)
    found: list[str] = []
    preempted = outputs = 0
    for seed in range(workloads):
        stock, turns = (one.run(seed) for one in driven)
        preempted += stock["statistics"][0][0]
        outputs += len(stock["outputs"])
        for what in stock:
            for place, (a, b) in enumerate(zip(stock[what], turns[what], strict=False)):
                if a != b:
                    found.append(f"{mode} workload {seed}, {what} {place}: {a} and {b}")
                    break
            if len(stock[what]) != len(turns[what]):
                found.append(f"{mode} workload {seed}: {len(stock[what])} and {len(turns[what])} {what}")
    if not (preempted and outputs):
        found.append(f"{mode}: {preempted} preemptions and {outputs} outputs cover nothing")
    return found


@contextmanager
def _worker(kind: type) -> Iterator[None]:
    """Within this context an engine gets this worker."""

    class Executor(rehearsal.CountingExecutor):
        def _init_executor(self) -> None:
            self.driver_worker = kind()

        def determine_available_memory(self) -> list[int]:
            return [kind.blocks * 2 * 2 * 16 * 2 * 32 * 2]

    with mock.patch.object(abstract.Executor, "get_class", staticmethod(lambda _: Executor)):
        yield


def _main(*report: str) -> int:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29519")}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    input_processor.random_uuid = lambda: (
        "0" * 8
    )  # the order in which aborted requests are freed depends on their names
    dist.init_process_group("fake", rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as at, _worker(RecordingWorker):
        found = {mode: differences(at, asynchronous=mode == "asynchronous") for mode in ("asynchronous", "synchronous")}
    for path in report:
        Path(path).write_text(json.dumps(found))
    print(json.dumps(found, indent=1))
    return int(bool(found["asynchronous"] or found["synchronous"]))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
