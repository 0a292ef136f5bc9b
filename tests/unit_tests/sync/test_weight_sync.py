"""The ways to sync weights and be silently wrong, on a real engine: each must be caught or must not happen."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parts.pushes import PROMPTS, SEQUENCES, Pair
from tests.parts.tiny import sampled, scale_policy
from torchtitan_rl.device import DEVICE_TYPE, ON_CPU
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.sync import shard_checksums
from torchtitan_rl.sync.engine_weights import share_of
from torchtitan_rl.sync.in_process import CHANGED, OTHER_VALUES
from torchtitan_rl.types import Prompt, flat

DOWN = "model.layers.1.mlp.down_proj.weight"

pytestmark = pytest.mark.usefixtures("restored")


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("tiny"))
    yield made
    made.generator.close()


def module(pair, name: str) -> torch.nn.Module:
    """A module of the engine."""
    return pair.generator.llm.apply_model(lambda model: model.get_submodule(name))[0]


def test_changed_policy_arrives_completely(pair):
    pair.change()
    assert pair.sync() == sum(tensor.nbytes for _, tensor in pair.weights())
    assert pair.worst_diff() < 1e-4


def test_tensor_changed_by_the_engine_is_named_also_in_a_fused_layer(pair, monkeypatch):
    layer = module(pair, "model.layers.1.mlp.gate_up_proj")
    pack = layer.quant_method.process_weights_after_loading

    def change_and_pack(layer) -> None:
        layer.weight.data[len(layer.weight) // 2 :] *= 1.01  # the lower half is up_proj's
        pack(layer)

    monkeypatch.setattr(layer.quant_method, "process_weights_after_loading", change_and_pack)
    assert f"policy's: model.layers.1.mlp.up_proj.weight {OTHER_VALUES}. Nothing" in pair.fault()


def test_omitted_tensor_is_named_at_every_push(pair):
    pair.begin_anew(check_interval=0)
    without_head = {name: tensor.clone() for name, tensor in pair.weights() if name != "lm_head.weight"}
    for _ in range(2):
        assert "policy's: lm_head.weight was not sent. Nothing was sampled" in pair.fault(without_head)
        pair.sync()


@pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="a GPU engine packs nothing")
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_stale_packed_copy_is_named(pair, monkeypatch, name):
    layer = module(pair, name)
    pack, old = layer.quant_method.process_weights_after_loading, layer.cpu_linear

    def pack_but_keep_the_old(layer) -> None:
        pack(layer)
        layer.cpu_linear = old

    pair.change()
    monkeypatch.setattr(layer.quant_method, "process_weights_after_loading", pack_but_keep_the_old)
    assert f"policy's: {name}.weight {OTHER_VALUES}. Nothing" in pair.fault()


def test_skipped_push_is_named_at_once_between_full_checks(pair):
    pair.begin_anew(check_interval=0)
    for version in range(3):
        pair.sync(version=version)
    old = pair.changed(DOWN)
    scale_policy(pair.model, 1 + 1e-6)
    message = pair.fault(old, version=3)
    assert message.startswith("Weight sync 3 left")
    assert message.endswith("Some were right at the push before, so most likely nothing was sampled with them.")


def nudge(tensor) -> None:
    """Change one element by less than the probe sees."""
    tensor.view(-1)[5] += 1e-6


def test_wrong_element_of_an_unpacked_tensor_is_named_at_once(pair):
    pair.begin_anew(check_interval=0)
    pair.sync(version=0)
    message = pair.fault(pair.changed("model.norm.weight", nudge), version=1)
    assert (
        f"Weight sync 1 left the engine with other weights than the policy's: model.norm.weight {OTHER_VALUES}"
        in message
    )


@pytest.mark.skipif(not ON_CPU, reason="a GPU engine packs nothing")
def test_wrong_element_of_a_packed_matrix_is_named_at_the_next_full_check_with_the_affected_checkpoints(pair):
    pair.begin_anew(check_interval=4)
    for version in range(5):  # full at 0 and 4
        pair.sync(version=version)
    wrong = pair.changed(DOWN, nudge)
    for version in (5, 6, 7):
        pair.sync(wrong, version=version)
    message = pair.fault(wrong, version=8)
    proven = "They were last proven after step 4: checkpoints up to step 5 are good, later ones doubtful."
    assert f"policy's: {DOWN} {OTHER_VALUES}. {proven}" in message
    assert message.endswith("steps 6 to 8 may have been trained on their samples: --resume 5 or before.")


@pytest.mark.skipif(not ON_CPU, reason="a GPU engine packs nothing")
def test_wrong_element_of_a_packed_matrix_is_named_at_the_first_push_also_without_an_interval(pair):
    pair.begin_anew(check_interval=0)
    assert f"policy's: {DOWN} {OTHER_VALUES}. Nothing" in pair.fault(pair.changed(DOWN, nudge))


def test_one_engine_of_two_with_other_values_is_named(pair, monkeypatch):
    engine = pair.weight_sync._engine
    own = engine.checksums
    second = lambda **asked: torch.nn.functional.pad(own(**asked), (0, 0, 0, 1))  # noqa: E731
    monkeypatch.setattr(engine, "checksums", second)  # the second answers zeros
    assert DOWN in pair.weight_sync._other_values(packed=True)


@pytest.mark.skipif(not ON_CPU, reason="a GPU engine packs nothing")
def test_probe_of_every_push_lets_the_packed_matrices_be_compared(pair):
    pair.begin_anew(check_interval=0)
    pair.sync(version=0)
    message = pair.fault(pair.changed(DOWN, lambda t: t.mul_(1.01)), version=1)
    assert f"Weight sync 1 left the engine with other weights than the policy's: {DOWN} {OTHER_VALUES}" in message


@pytest.mark.skipif(not ON_CPU, reason="a GPU's push between full checks has no probe")
def test_noise_that_has_grown_since_the_last_full_check_refuses_no_push(pair):
    pair.begin_anew(check_interval=0)
    pair.sync()
    measured = pair.weight_sync._noise
    pair.weight_sync._noise = measured / 1e6  # as if it had grown a million times since
    pair.sync()
    assert pair.weight_sync._noise == pytest.approx(measured, rel=1e-3)


def test_evidence_says_whether_weights_explain_a_logprob_difference(pair):
    assert "bit for bit (compared now), so they are not the cause" in pair.weight_sync.evidence()
    layer = module(pair, "model.norm")
    kept = layer.weight.data.clone()
    layer.weight.data[3] = float("nan")
    evidence = pair.weight_sync.evidence()
    layer.weight.data.copy_(kept)
    assert f"not the policy's (compared now): model.norm.weight {OTHER_VALUES}. They were last proven after" in evidence


def test_replicas_that_drifted_are_named_with_their_ranks(pair, monkeypatch):
    shards = [("norm", (0, 0), 0, 17), ("norm", (0, 0), 1, 18), ("q", (0, 0), 0, 3), ("q", (64, 0), 1, 4)]
    monkeypatch.setattr(shard_checksums.comm, "all_gather_lists", lambda _: shards)
    assert pair.weight_sync.evidence().endswith("the engine is not the cause: norm is not the same on ranks 0 and 1.")


def test_changed_rotary_cache_is_named_and_doubts_no_earlier_step(pair):
    pair.begin_anew(check_interval=0)
    for version in range(3):
        pair.sync(version=version)
    name = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
    rotary = module(pair, name.rpartition(".")[0]).cos_sin_cache

    def change_during(weights):
        yield from weights
        rotary[7, 3] += 1e-3

    kept = rotary.clone()
    message = pair.fault(change_during(pair.weights()), version=3)
    rotary.copy_(kept)
    assert f"policy's: {name} {CHANGED}" in message
    assert "--resume" not in message


WRONG_MODELS = {
    "rotary base x 1.01": lambda model: scale_rotary_base(model, 1.01),
    "norm epsilon 1e-5 in place of 1e-6": lambda model: set_all(model, "variance_epsilon", 1e-5),
    "logits x 1.001": lambda model: setattr(model.logits_processor, "scale", 1.001),
    "capped logits": lambda model: setattr(model.logits_processor, "soft_cap", 30.0),
}


def set_all(model: torch.nn.Module, name: str, value: float) -> None:
    for layer in model.modules():
        if hasattr(layer, name):
            setattr(layer, name, value)


def scale_rotary_base(model: torch.nn.Module, factor: float) -> None:
    for layer in model.modules():
        if hasattr(layer, "cos_sin_cache"):
            powers = torch.arange(0, layer.rotary_dim, 2) / layer.rotary_dim  # [R / 2]
            angles = torch.arange(len(layer.cos_sin_cache))[:, None] * (factor * layer.base) ** -powers
            layer.cos_sin_cache.copy_(torch.cat([angles.cos(), angles.sin()], -1))


def fault_of_another_model(pair, change) -> str:
    """The error of a first push into an engine that computes another model; it computes its own again afterwards."""
    [engine] = pair.generator.llm.apply_model(lambda model: model)
    rotary, epsilon = engine.model.layers[0].self_attn.rotary_emb.cos_sin_cache, engine.model.norm.variance_epsilon
    kept = rotary.clone()
    change(engine)
    pair.begin_anew()
    try:
        return pair.fault()
    finally:
        rotary.copy_(kept)
        set_all(engine, "variance_epsilon", epsilon)
        engine.logits_processor.scale, engine.logits_processor.soft_cap = 1.0, None


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_push_is_refused_only_if_all_three_sequences_differ(pair, monkeypatch, wrong):
    """In some sequences a rounding error moves all later tokens together: one of Gemma 3's in bfloat16 was 3.5 times the noise."""
    pair.begin_anew()
    answers = iter(range(3))
    logprobs = pair.generator.prompt_logprobs
    monkeypatch.setattr(pair.generator, "prompt_logprobs", lambda ids: logprobs(ids) + 0.5 * (next(answers) < wrong))
    if wrong == 3:
        assert "They compute different models" in pair.fault()
    else:
        pair.sync()
    monkeypatch.undo()
    pair.begin_anew()


@pytest.mark.parametrize("wrong", WRONG_MODELS)
def test_another_model_is_named_by_the_probe(pair, wrong):
    message = fault_of_another_model(pair, WRONG_MODELS[wrong])
    assert "although every weight arrived. They compute different models" in message


@pytest.mark.parametrize(
    ("size", "full", "degree", "expected"),
    [
        (128, 128, 2, [(0, 2), (0, 2)]),  # replicated
        (64, 128, 2, [(0, 1), (64, 1)]),
        (64, 128, 4, [(0, 2), (0, 2), (64, 2), (64, 2)]),  # 2 key heads on 4 ranks
        (64, 100, 2, [(0, 1), (64, 1)]),  # a vocabulary padded to 128
        (64, 5, 1, [(0, 1)]),
    ],
)
def test_tensor_parallel_share_is_computed_from_shapes(size, full, degree, expected):
    assert [share_of(size, full, rank, degree) for rank in range(degree)] == expected


def test_every_weight_is_yielded_once_and_a_tied_one_under_both_names(pair):
    names = [name for name, _ in pair.weights()]
    assert len(names) == len(set(names))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(names)
    on_disk = pair.adapter.get_hf_storage_reader(pair.folder).read_metadata().state_dict_metadata
    assert set(on_disk) <= set(names)


def test_gathered_layers_have_the_same_weights_and_are_resharded(pair):
    one_by_one = {name: tensor.clone() for name, tensor in pair.weights()}
    gathered = {}
    for name, tensor in hf_weights(pair.model, pair.adapter, torch.float32, whole_blocks=True):
        gathered[name] = tensor.clone()
    assert list(gathered) == list(one_by_one)
    assert all(torch.equal(gathered[name], tensor) for name, tensor in one_by_one.items())
    assert all(isinstance(p, DTensor) for p in pair.model.layers.parameters())


def test_prefix_cache_is_reset_after_a_push(pair):
    block = pair.generator.llm.llm_engine.vllm_config.cache_config.block_size  # only whole blocks of tokens are cached
    prompt = Prompt(prompt_idx=0, text="", token_ids=[1 + i % 120 for i in range(2 * block + 3)], expected_answer="")
    sampled(pair.generator, [prompt])
    pair.change()
    pair.sync()
    for completion in sampled(pair.generator, [prompt])[0].samples:
        assert completion.sampler_logprobs == pytest.approx(pair.of_completion(prompt, completion), abs=1e-4)


def test_sampling_is_repeatable_by_seed_step_and_round(pair):
    def tokens(**at):
        return [c.token_ids.tolist() for c in flat(sampled(pair.generator, PROMPTS, **at))]

    assert tokens(step=3) == tokens(step=3)
    assert tokens(step=3) != tokens(step=4)
    assert tokens(step=3, round=1) != tokens(step=3)


def test_engine_metrics_have_cache_hits_and_tail_time(pair) -> None:
    sampled(pair.generator, PROMPTS)
    metrics = pair.generator.stats.metrics()
    assert metrics["generator/preemptions"].value == 0
    assert 0 <= metrics["generator/prefix_cache_hit_rate"].value < 1
    assert metrics["generator/prefix_cache_hit_rate"].weight == 4 * sum(map(len, SEQUENCES))
    assert metrics["generator/tail_s"].value >= 0
