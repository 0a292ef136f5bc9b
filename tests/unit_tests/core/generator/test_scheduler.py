"""The product's scheduler on a real CPU engine: vLLM's own samples the same tokens with the same log-probabilities, to the last bit.

tests/gpu_rehearsal/scheduling.py compares the two step by step on random workloads, and tests/integration_tests.py in whole runs.
"""

import json
from contextlib import contextmanager

import pytest
from safetensors.torch import load_file

from tests.parts.conversations import engine, prompts
from tests.parts.talk import chat_tokenizer, save_talker
from tests.parts.tiny import DIMENSIONS, sampled
from torchtitan_rl.core.device import DEVICE_TYPE
from torchtitan_rl.core.generator import SamplingConfig, scheduler
from torchtitan_rl.core.generator.generator import CPU_BLOCK_TOKENS, Generator
from torchtitan_rl.core.types import flat
from torchtitan_rl.library.in_flight import InFlight
from torchtitan_rl.observability.engine_stats import EngineStats

pytestmark = pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="the numbers of blocks are a CPU engine's")

LONG = SamplingConfig(n=3, max_tokens=2 * CPU_BLOCK_TOKENS + 9)
ENDS: set[int] = set()
"""The tokens at which this model would end."""
SAMPLINGS = {
    "lengths": LONG,
    "one token": SamplingConfig(n=4, max_tokens=1),
    "stop tokens": SamplingConfig(n=5, max_tokens=60, stop_token_ids=[5, 20, 31, 40, 77, 90, 100]),
    "stop texts": SamplingConfig(n=5, max_tokens=60, stop=["a", "7", "e "]),
    "greedy": SamplingConfig(n=2, max_tokens=40, temperature=0),
    "truncated": SamplingConfig(n=3, max_tokens=40, top_p=0.8, top_k=20),
}


@pytest.fixture(scope="module")
def made():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def pair(tmp_path_factory, made):
    """Engines with vLLM's scheduler and with the product's, of the same weights."""
    folder = save_talker(tmp_path_factory.mktemp("policy"), **DIMENSIONS)
    for file in folder.glob("*config.json"):  # this model would end after a few tokens
        entries = json.loads(file.read_text())
        ended = entries.pop("eos_token_id", None)
        ENDS.update(ended if isinstance(ended, list) else [ended] if ended is not None else [])
        file.write_text(json.dumps(entries))
    with engine(folder, made) as turns:
        stock = Generator.Config(dtype="float32", max_model_len=256, sleep=False, scheduler="stock").build(
            stats=EngineStats(), hf_assets_path=str(folder), tokenizer=made, sampling=turns.sampling, seed=0
        )
        stock.load_weights(load_file(folder / "model.safetensors").items(), policy_version=0)
        assert isinstance(core(turns).scheduler, scheduler.TurnScheduler)
        assert not isinstance(core(stock).scheduler, scheduler.TurnScheduler)
        stock.end_token_ids = turns.end_token_ids = []
        yield stock, turns


def core(one: Generator):
    return one.llm.llm_engine.engine_core.engine_core


def said(completions) -> list[tuple]:
    return [(c.token_ids.tolist(), c.sampler_logprobs.tolist(), c.finish_reason, c.text) for c in completions]


@contextmanager
def crowded(one: Generator, blocks: int):
    """Within this context the KV cache has so many blocks."""
    pool = core(one).scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
    try:
        yield
    finally:
        pool.free_blocks(taken)


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_both_schedulers_sample_the_same(pair, made, name, seeded):
    found = []
    for one in pair:
        one.llm.reset_prefix_cache()
        groups = sampled(one, prompts(made, 6), step=3, sampling_config=SAMPLINGS[name], seeded=seeded)
        found.append(said(flat(groups)))
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens, *_ in found[0]}) > 1 or name == "greedy"


def test_both_schedulers_preempt_the_same(pair, made):
    found = []
    for one in pair:
        one.llm.reset_prefix_cache()
        with crowded(one, 18):
            many = SamplingConfig(n=8, max_tokens=3 * CPU_BLOCK_TOKENS)
            completions = said(flat(sampled(one, prompts(made, 2), step=4, sampling_config=many, seeded=True)))
        found.append((completions, one.stats.metrics([])["generator/preemptions"].value))
    assert found[0] == found[1]
    lengths = [len(tokens) for tokens, *_ in found[0][0]]
    assert found[0][1] > 0, f"nothing was preempted, so nothing was tested: lengths {lengths}"


def test_both_schedulers_cut_groups_in_flight_the_same(pair, made):
    found, cut = [], 0
    for one in pair:
        in_flight, steps = InFlight.Config(prompts=6).build(prompt_at=None), []
        for step in range(3):
            one.llm.reset_prefix_cache()
            one.policy_version = step
            one.sampling = SamplingConfig(n=3, max_tokens=60, stop_token_ids=sorted(ENDS))
            taken = in_flight.admit(prompts(made, in_flight.num_new(3)))
            groups = list(in_flight.sample(one, taken, needed=3, step=step, round=0))
            in_flight.gather(one)
            steps += [said(group.samples) for group in groups]
            carried = [
                (s.token_ids, s.sampler_logprobs, s.finish_reason)
                for c in in_flight.carried.values()
                for s in c.samples
            ]
            steps.append(carried)
            cut += any(tokens and not end for tokens, _, end in carried)
        found.append(steps)
        one.policy_version = 0
    assert found[0] == found[1]
    assert cut, "no completion was cut, so nothing was tested"


def test_probe_between_turns_is_answered_the_same(pair, made):
    ids = prompts(made, 1)[0].token_ids
    assert pair[0].prompt_logprobs(ids).tolist() == pair[1].prompt_logprobs(ids).tolist()


def test_vllm_with_another_scheduler_falls_back_to_its_own_with_one_line(monkeypatch, capsys):
    from vllm.v1.core.sched.scheduler import Scheduler

    assert scheduler.scheduler_class(asynchronous=False) is not None
    update = Scheduler.update_from_output
    with monkeypatch.context() as patch:
        patch.setattr(
            Scheduler, "update_from_output", lambda self, scheduled, sampled: update(self, scheduled, sampled)
        )
        assert scheduler.scheduler_class(asynchronous=False) is None
    with monkeypatch.context() as patch:
        patch.delattr(Scheduler, "_update_request_with_output")
        assert scheduler.scheduler_class(asynchronous=True) is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("has another scheduler than 0.32.0, so its own one is used" in line for line in lines)


def test_sequences_that_may_outgrow_the_cache_are_said_once(pair, made, monkeypatch, capsys):
    one = pair[1]
    cache = one.llm.llm_engine.vllm_config.cache_config
    monkeypatch.setattr(one, "_said_cache_is_small", False)
    monkeypatch.setattr(cache, "num_gpu_blocks", 8)  # 256 tokens
    few = SamplingConfig(n=2, max_tokens=10)
    one.begin(prompts(made, 4), sampling_config=few)
    assert capsys.readouterr().out == ""
    for _ in range(2):
        one.begin(prompts(made, 4), sampling_config=LONG)
    [line] = capsys.readouterr().out.splitlines()
    assert "12 sequences take" in line
    assert "which holds 256" in line
    assert "VLLM_CPU_KVCACHE_SPACE" in line
