"""Router replay with a real engine: the trainer sends every token that the engine read to the engine's experts."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.outputs import CompletionOutput, RequestOutput

from tests.integration.parity import EchoingConversations
from tests.parts.pushes import PROMPTS, Pair
from tests.parts.stream import ListStream, begun
from tests.parts.tiny import crowded, members_of, sampled, save_odd_checkpoint
from torchtitan_rl.conversation import Conversation, Sampled
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.generator.in_flight import InFlight
from torchtitan_rl.generator.records import output_records
from torchtitan_rl.models.experts import mixtures
from torchtitan_rl.models.score import score
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.trainer.packing import by_member, pack
from torchtitan_rl.types import NO_RECORD, Normalizers, flat

pytestmark = pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="a GPU's engine records in another way")

LAYERS, MIXTURES, TOP_K = 3, [0, 2], 3  # layer 1 is dense
COUNTS = Normalizers(num_tokens=10, num_sequences=3, num_groups=2, max_completion_tokens=8)
LONG = SamplingConfig(n=3, max_tokens=40)


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    def save(folder) -> None:
        save_odd_checkpoint(folder, "qwen3_moe", tie=False, max_position_embeddings=384, moe_intermediate_size=64)

    made = Pair(tmp_path_factory.mktemp("experts"), save, router_replay=True)
    made.model.lm_head.config.reads_records = False
    yield made
    made.generator.close()


@pytest.fixture(autouse=True)
def _restored(pair):
    yield
    pair.restore()
    pair.generator.environments = None


def other_routers(pair) -> None:
    """Give the policy routers that choose other experts than the engine's."""
    with torch.no_grad():
        for moe in mixtures(pair.model):
            moe.router.gate.weight.to_local().normal_(generator=torch.Generator().manual_seed(1))


def scored(pair, batch, *, replay: bool):
    """(log-probabilities [T], experts [layers with a mixture, rows, K]) of a batch."""
    chosen = []
    hooks = [
        moe.router.register_forward_hook(lambda _, __, out: chosen.append(out[1][0].sort(-1).values))
        for moe in mixtures(pair.model)
    ]
    records = batch.sampler_records if replay else None
    scores = score(pair.model, batch.token_ids, batch.labels, batch.layout, 1.0, None, records)
    for hook in hooks:
        hook.remove()
    return scores.logprobs, torch.stack(chosen)


def recorded(batch):
    """(the engine's experts as in `scored`, which rows it read [rows])"""
    rows = len(batch.token_ids) - batch.layout.padding
    records = batch.sampler_records[:rows].view(rows, LAYERS, TOP_K)[:, MIXTURES].transpose(0, 1)
    return records.long().sort(-1).values, records[0, :, 0] != NO_RECORD


def test_engine_records_the_experts_of_every_token_that_it_read(pair):
    batch = pack(members_of(sampled(pair.generator, PROMPTS)), normalizers=COUNTS, multiple=64)
    (_, own), (engine, read) = scored(pair, batch, replay=False), recorded(batch)
    ends = {begin for begin in [*batch.layout.begins.tolist(), len(read)] if 0 < begin <= len(read)}
    assert (~read).nonzero().flatten().tolist() == sorted(end - 1 for end in ends)  # the last token of each sequence
    assert torch.equal(own[:, read], engine[:, read])  # the same weights in float32


@pytest.mark.parametrize("share_prompts", [False, True])
def test_replay_makes_the_choice_identical_for_every_token(pair, share_prompts):
    batch = pack(
        members_of(sampled(pair.generator, PROMPTS)), normalizers=COUNTS, multiple=64, share_prompts=share_prompts
    )
    engine, read = recorded(batch)
    assert batch.loss_mask[: len(read)].bool()[~read].sum() == 0  # every sampled token is predicted from a replayed one
    other_routers(pair)
    (_, own), (_, replayed) = scored(pair, batch, replay=False), scored(pair, batch, replay=True)
    assert (own[:, read] != engine[:, read]).any(-1).float().mean() > 0.5
    assert torch.equal(replayed[:, read], engine[:, read])
    assert torch.equal(replayed[0, ~read], own[0, ~read])  # of the first layer, whose input is the same


def test_packed_replay_equals_each_sequence_alone(pair):
    everyone = members_of(sampled(pair.generator, PROMPTS))
    other_routers(pair)

    def logprobs(some, share_prompts):
        batch = pack(some, normalizers=COUNTS, multiple=64, share_prompts=share_prompts)
        values = scored(pair, batch, replay=True)[0].detach()[batch.loss_positions].numpy()  # [M]
        return {id(m.episode): v for m, v in zip(batch.members, by_member(batch, values), strict=True)}

    alone = {}
    for member in everyone:
        alone |= logprobs([member], False)
    for share_prompts in (False, True):
        for name, values in logprobs(everyone, share_prompts).items():
            assert values == pytest.approx(alone[name], abs=1e-4)


def test_routers_learn_from_replayed_tokens(pair):
    batch = pack(members_of(sampled(pair.generator, PROMPTS)), normalizers=COUNTS, multiple=64)
    other_routers(pair)
    logprobs, _ = scored(pair, batch, replay=True)
    logprobs.sum().backward()
    gradients = [moe.router.gate.weight.grad.to_local() for moe in mixtures(pair.model)]
    assert all(gradient.abs().amax(1).all() for gradient in gradients)  # of every expert
    pair.model.zero_grad()


def records_of(groups) -> list[list]:
    return [completion.sampler_records.tolist() for completion in flat(groups)]


def test_preempted_sequences_have_the_same_records(pair):
    generator = pair.generator
    free = records_of(sampled(generator, PROMPTS, sampling_config=LONG, seeded=True))
    with crowded(generator):
        later = records_of(sampled(generator, PROMPTS, sampling_config=LONG, seeded=True))
    assert later == free


def test_conversations_have_records_of_the_environments_tokens_too(pair):
    pair.generator.environments = EchoingConversations()
    batch = pack(members_of(sampled(pair.generator, PROMPTS)), normalizers=COUNTS, multiple=64)
    (_, own), (engine, read) = scored(pair, batch, replay=False), recorded(batch)
    assert not batch.loss_mask[: len(read)].bool()[read].all()
    assert (batch.loss_mask[: len(read)].bool() <= read).all()
    assert torch.equal(own[:, read], engine[:, read])


def test_carried_groups_keep_their_records_through_a_checkpoint_and_a_push(pair):
    generator, short = pair.generator, SamplingConfig(n=3, max_tokens=4)
    prompts = [replace(prompt, sampling=short if i < 2 else LONG, stream_idx=i) for i, prompt in enumerate(PROMPTS[:4])]
    stream, config = ListStream(prompts), InFlight.Config(prompts=4)
    before = config.build(generator=generator, stream=stream)
    with begun(before, 2, step=0) as groups:
        list(groups)
    after = config.build(generator=generator, stream=stream)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    other_routers(pair)
    pair.sync(version=2)
    partials_of = {index: carried.samples for index, carried in before.carried.items()}
    with begun(after, 2, step=1) as groups:
        whole = list(groups)
    assert [group.prompt.stream_idx for group in whole] == [2, 3]
    went_on = 0
    for group in whole:
        partials = partials_of[group.prompt.prompt_idx]
        for partial, completion in zip(partials, group.samples, strict=True):
            kept, records = len(partial.traces[0].records), completion.sampler_records
            assert kept == len(group.prompt.token_ids) + partial.num_tokens - 1
            went_on += kept < len(records) - 1
            assert np.array_equal(records[:kept], partial.traces[0].records)
            assert (records[:-1] != NO_RECORD)[:, [0, -1]].all()
            assert (records[-1] == NO_RECORD).all()
    assert went_on
    pair.restore()
    pair.sync(version=3)


def test_a_gpu_engines_output_has_its_records():
    def output(experts):
        turn = CompletionOutput(0, "", [5, 6], None, None, routed_experts=experts, finish_reason="stop")
        return RequestOutput("0", None, [1, 2], None, [turn], finished=True)

    experts = np.arange(3 * 2 * 4, dtype=np.uint16).reshape(3, 2, 4)  # [tokens read, layers, K]
    records = output_records(output(experts), "")
    assert records.dtype == np.uint8
    assert records.tolist() == np.arange(24).reshape(3, 8).tolist()
    assert output_records(output(None), "") is None


def test_a_cut_turn_without_records_leaves_its_tokens_to_the_router():
    [prompt, *_] = PROMPTS
    conversation = Conversation(prompt=prompt, sample_idx=0, sampling=LONG, most_in_turn=40, most_tokens=128)
    num_prompt, width = len(prompt.token_ids), LAYERS * TOP_K
    conversation.append_turn(Sampled(0, [5, 6], [-1.0, -1.0], "", None, np.empty((0, width), np.uint8)))
    newer = np.ones((num_prompt + 3, width), np.uint8)  # the next step reads the whole context again
    conversation.append_turn(Sampled(0, [7, 8], [-1.0, -1.0], "", "stop", newer))
    records = conversation.completion(1).sampler_records
    assert records[:, 0].tolist() == [NO_RECORD] * (num_prompt + 1) + [1, 1, NO_RECORD]
