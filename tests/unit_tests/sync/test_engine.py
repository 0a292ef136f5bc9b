"""A real engine: crowded, waiting and interrupted sequences give the same completions."""

import os

import pytest
from safetensors.torch import load_file

from tests.parts.pushes import PROMPTS, TokenizerStandIn, fill
from tests.parts.tiny import crowded, sampled, save_tiny_checkpoint
from torchtitan_rl import events
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.generator.start import CPU_BLOCK_TOKENS, start_engine
from torchtitan_rl.generator.turn_engine import TurnEngine
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import Completion, flat

pytestmark = pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="the numbers of blocks are a CPU engine's")

LONG = SamplingConfig(n=3, max_tokens=CPU_BLOCK_TOKENS + 9, stop_token_ids=[7])
"""Into a second block of the cache, with some that end before."""


@pytest.fixture(scope="module")
def generator(one_rank, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint(folder)
    made = Generator(
        Generator.Config(dtype="float32", max_model_len=128),
        hf_assets_path=str(folder),
        tokenizer=TokenizerStandIn(),
        sampling=LONG,
        seed=0,
    )
    fill(made, load_file(folder / "model.safetensors"))
    yield made
    made.close()


@pytest.fixture
def scheduler(generator):
    generator.llm.reset_prefix_cache()
    return generator.llm.llm_engine.engine_core.engine_core.scheduler


def said(completions: list[Completion]) -> list[tuple]:
    return [(c.token_ids.tolist(), c.sampler_logprobs.tolist(), c.finish_reason) for c in completions]


def test_each_decode_step_is_reported_as_progress(generator) -> None:
    class Counter(events.Listener):
        steps = 0

        def advanced(self) -> None:
            self.steps += 1

    counter = Counter()
    stop_listening = events.listen(counter)
    with events.heartbeat("step 1"):  # which the listener does not ask for
        completions = flat(sampled(generator, PROMPTS, seeded=True))
    stop_listening()
    assert counter.steps >= max(completion.num_sampled for completion in completions)


def test_preempted_sequence_continues_sampling(generator) -> None:
    free = flat(sampled(generator, PROMPTS, seeded=True))
    with crowded(generator):
        later = flat(sampled(generator, PROMPTS, seeded=True))
    for one, other in zip(free, later, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-5)


def test_queueing_does_not_change_completions(generator, scheduler, monkeypatch) -> None:
    at_once = flat(sampled(generator, PROMPTS, seeded=True))
    monkeypatch.setattr(scheduler, "max_num_active_reqs", 5)
    one_by_one = flat(sampled(generator, PROMPTS, seeded=True))
    assert [c.token_ids.tolist() for c in one_by_one] == [c.token_ids.tolist() for c in at_once]


def test_aborted_requests_do_not_affect_the_next_call(generator, scheduler, monkeypatch) -> None:
    expected, step, steps = said(flat(sampled(generator, PROMPTS))), TurnEngine.step, []

    def five_steps(engine: TurnEngine) -> list:
        steps.append(engine)
        if len(steps) > 5:
            raise InterruptedError
        return step(engine)

    monkeypatch.setattr(TurnEngine, "step", five_steps)
    with pytest.raises(InterruptedError):
        sampled(generator, PROMPTS)
    monkeypatch.undo()
    assert said(flat(sampled(generator, PROMPTS))) == expected


def test_a_rank_whose_engine_does_not_start_keeps_its_number_in_the_job(one_rank, tmp_path, monkeypatch):
    """Else a generator on a rank of its own would write its failure, and the report, as rank 0."""
    numbers = []

    def fails(**_):
        numbers.append(os.environ["RANK"])
        raise RuntimeError("too little memory")

    save_tiny_checkpoint(tmp_path)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr("vllm.LLM", fails)
    with pytest.raises(RuntimeError, match="too little memory"):
        start_engine(Generator.Config(max_model_len=128), str(tmp_path))
    assert (numbers, os.environ["RANK"]) == (["0"], "2")
