"""The ways to sync weights and be silently wrong, on a real engine: each must be caught or must not happen."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.integration.parity import SEQUENCES, TokenizerStandIn
from tests.parts.tiny import sampled, save_tiny_checkpoint, scale_policy, sharded_policy
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.generator.engine_stats import EngineStats
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.generator.start import start_generator
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.score import score
from torchtitan_rl.models.shard_checksums import ShardChecksums, unequal_replicas
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.sync import weight_sync
from torchtitan_rl.sync.probe import DRAWS, LARGEST_RATIO, distance, rounding_noise
from torchtitan_rl.sync.weight_proof import CHANGED, OTHER_VALUES, WeightProof, share_of
from torchtitan_rl.sync.weight_sync import WeightSync, WeightSyncError
from torchtitan_rl.trainer.model_loader import load_hf_weights
from torchtitan_rl.types import Completion, Prompt, SegmentLayout, flat

PROMPTS = [Prompt(prompt_idx=i, text="", token_ids=s, expected_answer="") for i, s in enumerate(SEQUENCES)]


class Pair:
    """A policy and an engine in one process."""

    def __init__(
        self,
        folder,
        save=save_tiny_checkpoint,
        policy_dtype: str = "float32",
        records_kept=False,
        tokenizer=None,
        **generator,
    ) -> None:
        save(folder)
        self.dtype = policy_dtype
        self.model, self.adapter = sharded_policy(folder, seq_len=384, dtype=policy_dtype)
        self.folder = str(folder)
        settings = {"dtype": "float32", "max_model_len": 384, "sleep": False} | generator
        self.generator = start_generator(
            Generator.Config(**settings),
            stats=EngineStats(),
            hf_assets_path=self.folder,
            tokenizer=tokenizer or TokenizerStandIn(),
            sampling=SamplingConfig(n=4, max_tokens=8),
            seed=0,
            records_kept=records_kept,
        )
        self.proof = WeightProof.of(self.generator, ShardChecksums(self.model, self.adapter))
        self.begin_anew()
        self.sync()

    def begin_anew(self, check_interval: int = 1) -> None:
        """Let the next push be a run's first, which is proven in full."""
        config = WeightSync.Config(check_interval=check_interval)
        dtypes = {self.dtype, self.generator.config.dtype}
        self.weight_sync = config.build(proof=self.proof, policy=self.model, dtypes=dtypes)

    def restore(self) -> None:
        scale_policy(self.model, 1.0)  # back to shards
        load_hf_weights(self.model, self.adapter, self.folder)

    def change(self) -> None:
        scale_policy(self.model, 1.5)

    def weights(self):
        return hf_weights(self.model, self.adapter, self.generator.dtype)

    def logprobs(self, ids, temperature: float = 1.0) -> np.ndarray:
        tokens = torch.tensor(list(ids), device=DEVICE_TYPE)
        with torch.no_grad():
            layout = SegmentLayout.of([len(tokens)], device=DEVICE_TYPE)
            return score(self.model, tokens, tokens.roll(-1), layout, temperature).logprobs[:-1].cpu().numpy()

    def of_completion(self, prompt: Prompt, completion: Completion, temperature: float = 1.0) -> np.ndarray:
        """The policy's log-probabilities of a completion's tokens, [L]."""
        whole = np.concatenate([prompt.token_ids, completion.token_ids])
        return self.logprobs(whole, temperature)[len(prompt.token_ids) - 1 :]

    def sync(self, weights=None, version: int = 1) -> int:
        return self.weight_sync.push(
            self.weights() if weights is None else weights,
            self.generator,
            policy_version=version,
            probe=np.array(SEQUENCES[0]),
            trainer_logprobs=self.logprobs,
        )


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("tiny"))
    yield made
    made.generator.close()


@pytest.fixture(autouse=True)
def _restored(pair):
    yield
    pair.restore()
    pair.sync()


def test_changed_policy_arrives_completely(pair):
    pair.change()
    assert pair.sync() == sum(tensor.nbytes for _, tensor in pair.weights())
    for sequence in SEQUENCES:
        assert pair.generator.prompt_logprobs(np.array(sequence)) == pytest.approx(pair.logprobs(sequence), abs=1e-4)


def module(pair, name: str) -> torch.nn.Module:
    """A module of the engine."""
    return pair.generator.llm.apply_model(lambda model: model.get_submodule(name))[0]


def test_tensors_that_differ_from_the_policy_are_named(pair):
    old = [(name, tensor.clone()) for name, tensor in pair.weights()]
    pair.change()
    pair.begin_anew()
    with pytest.raises(WeightSyncError, match=f"policy's: model.embed_tokens.weight {OTHER_VALUES}; .* and .* more"):
        pair.sync(old)


def test_tensor_changed_by_the_engine_is_named_also_in_a_fused_layer(pair, monkeypatch):
    layer = module(pair, "model.layers.1.mlp.gate_up_proj")
    pack = layer.quant_method.process_weights_after_loading

    def change_and_pack(layer) -> None:
        layer.weight.data[len(layer.weight) // 2 :] *= 1.01  # the lower half is up_proj's
        pack(layer)

    monkeypatch.setattr(layer.quant_method, "process_weights_after_loading", change_and_pack)
    pair.begin_anew()
    with pytest.raises(WeightSyncError, match=f"policy's: model.layers.1.mlp.up_proj.weight {OTHER_VALUES}. Nothing"):
        pair.sync()


def test_omitted_tensor_is_named_at_every_push(pair):
    pair.change()
    without_head = [(name, tensor) for name, tensor in pair.weights() if name != "lm_head.weight"]
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="policy's: lm_head.weight was not sent. Nothing was sampled"):
            pair.sync(without_head)
        pair.sync()


def test_empty_push_is_an_error(pair):
    with pytest.raises(WeightSyncError, match="model.embed_tokens.weight was not sent; .* and .* more"):
        pair.sync([])


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
    pair.begin_anew()
    with pytest.raises(WeightSyncError, match=f"policy's: {name}.weight {OTHER_VALUES}. Nothing"):
        pair.sync()


@pytest.mark.parametrize("name", ["model.layers.1.mlp.gate_proj.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_swapped_rows_are_named(pair, name):
    swapped = [(name, tensor.clone()) for name, tensor in pair.weights()]
    matrix = dict(swapped)[name]
    matrix[[3, 40]] = matrix[[40, 3]]
    pair.begin_anew()
    with pytest.raises(WeightSyncError, match=f"policy's: {name} {OTHER_VALUES}. Nothing"):
        pair.sync(swapped)


def begin_with_shares(pair, monkeypatch, proof_share: float) -> None:
    """Push once, proven in full. The proofs of later pushes may take `proof_share` of a step."""
    monkeypatch.setattr(weight_sync, "PROOF_SHARE", proof_share)
    pair.begin_anew(check_interval=0)
    pair.sync(version=0)


@pytest.mark.parametrize("right", [0, 1, 6, 15])
def test_skipped_push_is_named_at_once_with_the_smallest_check(pair, monkeypatch, right):
    begin_with_shares(pair, monkeypatch, 0.0)
    for push in range(right):
        pair.sync(version=push + 1)
    old = [(name, tensor.clone()) for name, tensor in pair.weights()]
    scale_policy(pair.model, 1 + 1e-6)
    with pytest.raises(WeightSyncError, match=f"Weight sync {right + 1} left .* [Nn]othing was sampled with them"):
        pair.sync(old, version=right + 1)


def test_wrong_element_is_named_within_16_pushes_with_the_affected_checkpoints(pair, monkeypatch):
    name, faults = (
        "model.norm.weight",
        [],
    )  # the only tensors outside the first and last layer are this and the embedding
    begin_with_shares(pair, monkeypatch, 0.0)
    for push in range(1, 17):
        wrong = [(n, t.clone()) for n, t in pair.weights()]
        dict(wrong)[name][5] += 1e-6
        try:
            pair.sync(wrong, version=push)
        except WeightSyncError as error:
            faults.append((push, str(error)))
    assert [push for push, _ in faults] == [16]
    assert (
        f"policy's: {name} {OTHER_VALUES}. They were last proven after step 0: checkpoints up to step 1 are good, later"
        in faults[0][1]
    )
    assert "the 15 steps 2 to 16 may have been trained on their samples: --resume 1 or before." in faults[0][1]


def test_every_tensor_is_checked_at_each_push_if_that_is_cheap(pair, monkeypatch):
    begin_with_shares(pair, monkeypatch, 1e9)
    wrong = [(n, t.clone()) for n, t in pair.weights()]
    dict(wrong)["model.norm.weight"][5] += 1e-6
    with pytest.raises(WeightSyncError, match=f"Weight sync 1 .* model.norm.weight {OTHER_VALUES}. Nothing"):
        pair.sync(wrong, version=1)


def test_sixteen_partial_checks_cover_every_tensor_and_always_the_first_and_last_layer(pair):
    shares = [pair.proof.due(first, 1) for first in range(16)]
    assert set.union(*shares) == pair.proof.due(5, 16) == {name for name, _ in pair.weights()}
    assert all(
        {"model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"} <= share for share in shares
    )


def test_evidence_says_whether_weights_explain_a_logprob_difference(pair, monkeypatch):
    begin_with_shares(pair, monkeypatch, 0.0)
    assert "bit for bit (compared now), so they are not the cause" in pair.weight_sync.evidence(pair.generator)
    layer = module(pair, "model.norm")
    kept = layer.weight.data.clone()
    layer.weight.data[3] = float("nan")
    said = pair.weight_sync.evidence(pair.generator)
    layer.weight.data.copy_(kept)
    assert (
        f"not the policy's (compared now): model.norm.weight {OTHER_VALUES}. They were last proven after step 0" in said
    )


def test_replicas_that_drifted_are_named_with_their_ranks(pair, monkeypatch):
    shards = [("norm", (0, 0), 0, 17), ("norm", (0, 0), 1, 18), ("q", (0, 0), 0, 3), ("q", (64, 0), 1, 4)]
    monkeypatch.setattr(pair.proof, "drifted", lambda: unequal_replicas(shards))
    said = pair.weight_sync.evidence(pair.generator)
    assert said.endswith("the engine is not the cause: norm is not the same on ranks 0 and 1.")


def test_wrong_copy_of_a_tied_tensor_is_named(pair):
    pair.change()
    weights = [(n, t * 1.01 if n == "lm_head.weight" else t) for n, t in pair.weights()]
    pair.begin_anew()
    with pytest.raises(WeightSyncError, match=f"lm_head.weight {OTHER_VALUES}"):
        pair.sync(weights)


def test_changed_rotary_cache_is_named(pair):
    name = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
    rotary = module(pair, name.rpartition(".")[0]).cos_sin_cache

    def change_during(weights):
        yield from weights
        rotary[7, 3] += 1e-3

    kept = rotary.clone()
    pair.begin_anew()
    with pytest.raises(WeightSyncError, match=f"policy's: {name} {CHANGED}"):
        pair.sync(change_during(pair.weights()))
    rotary.copy_(kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probe_is_compared_with_the_noise_of_rounding(dtype):
    sync = WeightSync.Config().build(proof=None, policy=None, dtypes={"float32", dtype})
    highest = {"float32": 30, "bfloat16": 3}[dtype]
    trainer = np.full(4, -40.0)  # [L - 1] so improbable that bfloat16's unit, 1 - p, is 1
    sync.check_probe(trainer + 0.9 * highest * 0.2, trainer, noise=0.2)
    with pytest.raises(
        WeightSyncError, match=f"times as much as rounding explains .0.2.; the limit is {highest} times"
    ):
        sync.check_probe(trainer + 1.1 * highest * 0.2, trainer, noise=0.2)
    with pytest.raises(WeightSyncError, match="nan times"):
        sync.check_probe(np.array([0.1, np.nan]), np.zeros(2), noise=0.2)


def test_noise_is_that_of_the_draws_relative_to_how_certain_each_token_is():
    certain, improbable = np.log(1 - 1e-2), -40.0
    exact = np.array([certain, improbable])  # [L - 1]
    off = np.array([0.05 * (1e-2 + 1e-4), 0.05])  # [L - 1]
    draws = iter([exact, exact + off, exact - off, exact + off, exact - off])
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict(), "norm": torch.nn.Identity()})
    assert rounding_noise(model, lambda ids: next(draws), np.arange(3), torch.bfloat16) == pytest.approx(0.05, rel=1e-3)
    assert distance(exact + off, exact, torch.float32) == pytest.approx(0.05 / 2**0.5, rel=1e-3)  # plain


@pytest.mark.parametrize("engine_noise", [0.7, 1.4])
@pytest.mark.parametrize("uncertain", [0.01, 0.1, 0.5])
def test_probe_stops_no_right_push_in_a_million_where_few_tokens_are_uncertain(uncertain, engine_noise):
    """Noise grows with 1 - p, and its size differs from token to token. A normal tail fitted to the simulated ratios is under 1e-6."""
    draw = np.random.default_rng(0)
    ratios = []
    for _ in range(4000):
        is_uncertain = draw.random(127) < uncertain  # [L - 1]
        one_minus_p = np.where(is_uncertain, draw.uniform(0.1, 1, 127), 10 ** draw.uniform(-6, -2, 127))
        trainer = np.log1p(-one_minus_p)
        noise = 0.05 * one_minus_p * draw.lognormal(0, 0.5, 127)
        moved = [distance(trainer + noise * draw.normal(size=127), trainer, torch.bfloat16) for _ in range(DRAWS)]
        engine = trainer + engine_noise * noise * draw.normal(size=127)
        ratios.append(distance(engine, trainer, torch.bfloat16) / np.sqrt(np.mean(np.square(moved))))
    log_ratios = np.log(ratios)  # [pushes]
    assert log_ratios.mean() + 5 * log_ratios.std() < np.log(LARGEST_RATIO[torch.bfloat16])


def test_probe_obeys_a_limit_of_ones_own():
    sync = WeightSync.Config(max_diff=0.5).build(proof=None, policy=None, dtypes={"bfloat16"})
    with pytest.raises(WeightSyncError, match="by 0.6, more than weight_sync.max_diff = 0.5"):
        sync.check_probe(np.array([0.0, -0.6]), np.zeros(2), noise=1.0)


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


@pytest.mark.parametrize("wrong", WRONG_MODELS)
def test_another_model_is_named_by_the_probe(pair, wrong):
    engine = pair.generator.llm.apply_model(lambda model: model)[0]
    rotary = module(pair, "model.layers.0.self_attn.rotary_emb").cos_sin_cache
    kept, epsilon = rotary.clone(), engine.model.norm.variance_epsilon
    WRONG_MODELS[wrong](engine)
    pair.begin_anew()
    pair.proof._constants.clear()  # or the proof names the rotary cache first
    with pytest.raises(WeightSyncError, match="They compute different models"):
        pair.sync()
    rotary.copy_(kept)
    set_all(engine, "variance_epsilon", epsilon)
    engine.logits_processor.scale, engine.logits_processor.soft_cap = 1.0, None
    pair.proof._constants |= {"model.layers.0.self_attn.rotary_emb.cos_sin_cache": kept}


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
    found = {}
    for name, tensor in hf_weights(pair.model, pair.adapter, torch.float32, whole_blocks=True):
        found[name] = tensor.clone()
    assert list(found) == list(one_by_one)
    assert all(torch.equal(found[name], tensor) for name, tensor in one_by_one.items())
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
    metrics = pair.generator.stats.metrics([])
    assert metrics["generator/preemptions"].value == 0
    assert 0 <= metrics["generator/prefix_cache_hit_rate"].value < 1
    assert metrics["generator/prefix_cache_hit_rate"].weight == 4 * sum(map(len, SEQUENCES))
    assert metrics["generator/tail_s"].value >= 0
