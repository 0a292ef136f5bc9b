"""Training with top_p, top_k and min_p: the engine's kept tokens are the distribution that the trainer scores."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.parts.pushes import PROMPTS, Pair
from tests.parts.tiny import crowded, members_of, sampled
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.models.score import score
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.trainer.gate import LogprobGate, LogprobGateError
from torchtitan_rl.trainer.logprob_diff import compare_with_sampler
from torchtitan_rl.trainer.packing import pack
from torchtitan_rl.trainer.trainer_config import LogprobGateConfig
from torchtitan_rl.types import NO_RECORD, Member, Normalizers

V, TEMPERATURE = 128, 0.7
COUNTS = Normalizers(num_tokens=10, num_sequences=3, num_groups=2, max_completion_tokens=8)
TRUNCATED = {name: {name: value} for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.05))}
TRUNCATED["all"] = {"top_p": 0.9, "top_k": 5, "min_p": 0.05}


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("kept"), records_kept=True)
    yield made
    made.generator.close()


def members(pair, **sampling) -> list[Member]:
    config = SamplingConfig(n=4, max_tokens=8, temperature=TEMPERATURE, **sampling)
    return members_of(sampled(pair.generator, PROMPTS, sampling_config=config))


def scores(pair, batch, labels=None):
    labels = batch.labels if labels is None else labels
    return score(
        pair.model, batch.token_ids, labels, batch.layout, TEMPERATURE, batch.loss_positions, batch.sampler_records
    )


def whole_distribution(pair, batch) -> torch.Tensor:
    """[M, V] the policy's probability of every token after each of M contexts, one label at a time."""
    places = batch.loss_positions
    with torch.no_grad():
        columns = [scores(pair, batch, torch.full_like(batch.labels, word)).logprobs[places] for word in range(V)]
    return torch.stack(columns, dim=1).double().exp()


def kept_sets(batch, V=V) -> torch.Tensor:  # noqa: N803
    """[M, V] bool"""
    bits = np.unpackbits(batch.sampler_records[batch.loss_positions].numpy(), axis=1, bitorder="little")
    return torch.from_numpy(bits[:, :V]).bool()


def expected_sets(logits: torch.Tensor, *, top_p=1.0, top_k=0, min_p=0.0) -> torch.Tensor:
    """[M, V] bool, by the definitions, in vLLM's order: min_p, top_k, top_p. logits: [M, V] float64."""
    p = logits.softmax(-1)
    logits = logits.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    p, order = logits.softmax(-1).sort(descending=True)
    before = p.cumsum(-1) - p  # the probability of all that are more likely
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before < top_p)
    return kept & logits.isfinite()


@pytest.mark.parametrize(("name", "share_prompts"), [*((name, False) for name in TRUNCATED), ("all", True)])
def test_engine_and_policy_have_one_distribution_over_the_whole_vocabulary(pair, name, share_prompts):
    batch = pack(members(pair, **TRUNCATED[name]), normalizers=COUNTS, multiple=64, share_prompts=share_prompts)
    places, kept = batch.loss_positions, kept_sets(batch)
    assert (kept.sum(1) < V).float().mean() > 0.9
    found = whole_distribution(pair, batch)
    torch.testing.assert_close(found.sum(1), torch.ones(len(places), dtype=torch.float64), rtol=0, atol=1e-5)
    assert (found[~kept] == 0).all()
    policy = scores(pair, batch).logprobs[places]
    torch.testing.assert_close(policy, batch.sampler_logprobs[places], rtol=0, atol=2e-5)
    # The sets are those of the policy's own distribution, which a forward without records gives.
    whole = whole_distribution(pair, replace(batch, sampler_records=None))
    by_definition = expected_sets(whole.log(), **TRUNCATED[name])
    assert (by_definition == kept).all(1).float().mean() > 0.95  # a border may fall within float32's rounding
    masked = torch.where(kept, whole, 0)
    torch.testing.assert_close(found, masked / masked.sum(1, keepdim=True), rtol=0, atol=1e-5)
    entropy = -(found * found.clamp(min=1e-300).log()).sum(1)
    torch.testing.assert_close(scores(pair, batch).entropy[places].double(), entropy, rtol=0, atol=1e-4)


def gate_of(pair, batch) -> None:
    """Check the batch as the trainer does before its first update."""
    with torch.no_grad():
        of_tokens = scores(pair, batch).at(batch.loss_positions)
    LogprobGate(LogprobGateConfig(), dtypes={"float32"}).check([compare_with_sampler(batch, of_tokens)])


def test_gate_passes_recorded_tokens_and_finds_others(pair):
    batch = pack(members(pair, top_p=0.9), normalizers=COUNTS, multiple=64)
    gate_of(pair, batch)
    moved = batch.sampler_records.roll(1, 0)  # of the token before
    one_more = batch.sampler_records.clone()
    one_more[:, 3] = NO_RECORD  # eight words that may not have been kept
    for wrong in (None, moved, one_more):
        with pytest.raises(LogprobGateError, match="top_p, top_k, min_p or a grammar"):
            gate_of(pair, replace(batch, sampler_records=wrong))


def test_whole_vocabulary_needs_no_records(pair):
    assert all(member.episode.completion.sampler_records is None for member in members(pair))


def test_preempted_sequences_have_the_same_records(pair):
    generator = pair.generator
    long = SamplingConfig(n=3, max_tokens=40, top_k=5)

    def records():
        groups = sampled(generator, PROMPTS, sampling_config=long, seeded=True)
        return [completion.sampler_records.tolist() for group in groups for completion in group.samples]

    free = records()
    with crowded(generator):
        later = records()
    assert later == free
    assert DEVICE_TYPE == "cuda" or not generator.records.__self__._rows
