"""docs/extending.md: every example runs as the page has it, and does what the page says."""

import importlib
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parts.algorithm import (
    MAX_TOKENS,
    built,
    episodes_of,
    group,
    normalizers_of,
    pack,
    policy_like,
    run_loss,
)
from tests.parts.tiny import save_tiny_checkpoint
from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.errors import UserError
from torchtitan_rl.observe import Recorder, record_metric
from torchtitan_rl.observe.metrics.reward_stats import group_metrics, participation_metrics
from torchtitan_rl.run.identity import identity
from torchtitan_rl.validation import validate

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\w+\.py)[^\n]*\n(.*?)```", PAGE, re.DOTALL))
TESTED = {"kl_cov.py", "opo.py", "not_too_easy.py", "my_sink.py"}


pytestmark = pytest.mark.usefixtures("files")


def part(name: str):
    """A class of the page, by file and name. Example: part("opo.Opo")"""
    module, _, one = name.partition(".")
    return getattr(importlib.import_module(module), one)


def test_every_block_is_tested_and_at_most_30_lines():
    assert set(BLOCKS) == TESTED
    assert PAGE.count("```python") == len(BLOCKS)
    assert {name: len(code.splitlines()) for name, code in BLOCKS.items() if len(code.splitlines()) > 30} == {}


def test_loss_has_its_limits():
    config = load_config("debug")
    config.algorithm.loss = part("kl_cov.kl_cov").Config()
    validate(config, world_size=1)
    assert config.algorithm.loss.fraction == 0.002
    assert re.fullmatch(r"kl_cov:kl_cov [0-9a-f]+", identity(config.algorithm.loss))  # with its source's digest
    config.algorithm.loss.fraction = 2.0
    with pytest.raises(UserError, match=r"algorithm\.loss\.fraction = 2\.0: expected"):
        validate(config, world_size=1)


def test_kl_cov_holds_back_the_likely_tokens_of_good_answers():
    algorithm = built(loss=part("kl_cov.kl_cov").Config(fraction=0.25))
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0], logprobs=[(-0.1, -3.0, -0.2, -2.0), (-1.0,) * 4]))
    batch = pack(episodes, normalizers_of(algorithm, episodes), padding=3)
    batch.pi_old_logprobs = batch.sampler_logprobs.clone()
    logprobs = (batch.sampler_logprobs + 0.01 * batch.loss_mask).requires_grad_()  # [T]
    entropy = torch.arange(len(logprobs), dtype=logprobs.dtype)  # [T]
    output = algorithm.loss(batch, logprobs, entropy)
    output.loss.backward()
    inside = batch.loss_mask.nonzero().squeeze(1)  # [8] places of loss tokens
    ratio = math.exp(0.01)
    gradient = [-ratio * a / 8 for a in batch.advantages[inside].tolist()]
    expected = [value + (1 / 8 if i in (0, 2) else 0) for i, value in enumerate(gradient)]
    assert logprobs.grad[inside].tolist() == pytest.approx(expected, rel=1e-6)
    metrics = output.read(output.tally.numbers())
    assert metrics["kl_cov/entropy"].value == pytest.approx(inside[[0, 2]].double().mean().item())


def test_loss_inputs_have_sampler_and_reference():
    seen = {}
    clip = type(Algorithm.Config().build(max_completion_tokens=MAX_TOKENS).policy_loss)

    class Curious(clip):
        reads = ("reference_logprobs",)

        def __call__(self, inputs):
            seen.update(mu=inputs.sampler_logprobs, reference=inputs.reference_logprobs)
            return super().__call__(inputs)

    algorithm = built(loss=Curious.Config())
    logprobs, reference = [(-1.0, -2.0, -3.0), (-4.0,)], [[-1.5, -2.5, -3.5], [-4.5]]
    mask = [(True, False, True), (True,)]
    episodes = episodes_of(algorithm, group(0, [1.0, 0.0], logprobs=logprobs, loss_mask=mask), reference=reference)
    batch = pack(episodes, normalizers_of(algorithm, episodes), reference=reference, padding=1)
    run_loss(algorithm, episodes, policy_like(episodes), batch)
    inside = batch.loss_mask > 0
    assert seen["mu"][inside].tolist() == [-1.0, -3.0, -4.0]
    assert seen["reference"][inside].tolist() == [-1.5, -3.5, -4.5]


def test_advantage_weighs_the_baseline_by_length():
    algorithm = built(advantage=part("opo.Opo").Config())
    lengths = [1, 3, 2, 2]
    rewards = [1.0, 0.0, None, 4.0]
    episodes = episodes_of(algorithm, group(0, rewards, logprobs=[(-1.0,) * n for n in lengths]), group(1, [0.1] * 3))
    baseline = (1 * 1.0 + 3 * 0.0 + 2 * 4.0) / (1 + 3 + 2)
    expected = [1.0 - baseline, -baseline, 0.0, 4.0 - baseline, 0.0, 0.0, 0.0]
    assert [episode.credit.advantage for episode in episodes] == pytest.approx(expected)


def test_group_filter_leaves_out_easy_groups_with_its_own_reason():
    filters = part("not_too_easy.NotTooEasy").Config()
    algorithm = built(group_filter=filters, zero_variance="drop")
    easy = group(0, [1.0] * 4 + [0.0], correct=[True] * 4 + [False])
    hard = group(1, [1.0, 0.0], correct=[True, False])
    equal = group(2, [1.0, 1.0], correct=[True, True])
    step = episodes_of(algorithm, easy, hard, equal)
    reasons = [group.samples[0].credit.left_out for group in step.groups]
    assert reasons == ["too easy", None, "zero variance"]
    metrics = group_metrics(step.groups, algorithm)
    assert metrics["groups/zero_variance_fraction"].value == pytest.approx(1 / 3)
    assert participation_metrics(step.groups)["loss/left_out/too_easy"].value == pytest.approx(5 / 9)
    kept = episodes_of(built(group_filter=filters), easy, equal)  # without zero_variance it filters alone
    assert [group.samples[0].credit.left_out for group in kept.groups] == ["too easy", "too easy"]


def stream(replay):
    tokenizer = make_small_tokenizer(["What is 12 + 34? Write [ANSWER]"], vocab_size=300)
    return replay.Config().build(task=SumDigits.Config().build(), tokenizer=tokenizer, seed=0)


def seen(prompts, corrects):
    """A credited step: two samples of each prompt, right or wrong."""
    groups = []
    for index, prompt in enumerate(prompts):
        scored = group(index, [1.0, 0.0], correct=corrects[index])
        groups.append(replace(scored, prompt=prompt))
    return episodes_of(built(), *groups).groups


def test_replayed_prompts_come_again_also_after_a_resume(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    replay = part("replay.Replay")
    first = stream(replay)
    step = first.next_batch(4)
    first.observe(seen(step, [(True, True), (True, False), (False, False), (False, True)]))
    saved = first.state_dict()
    second = first.next_batch(4)
    assert [prompt.stream_idx for prompt in second] == [1, 3, 4, 5]
    assert [prompt.prompt_idx for prompt in second] == [0, 1, 2, 3]
    assert [prompt.text for prompt in second[:2]] == [step[1].text, step[3].text]
    assert [prompt.stream_idx for prompt in first.next_batch(4)] == [6, 7, 8, 9]
    resumed = stream(replay)
    resumed.load_state_dict(saved)
    assert [prompt.text for prompt in resumed.next_batch(4)] == [prompt.text for prompt in second]


def record(folder, steps):
    config = Recorder.Config(sinks=["my_sink.py:CsvSink"])
    run = Recorder(config, run_folder=folder, run_name="r", run_config={}, total_steps=9)
    for step in steps:
        record_metric("reward/mean", float(step))
        run.flush(step)
    run.close()


def test_sink_by_its_place_has_each_step_once_after_a_resume(tmp_path):
    record(tmp_path, [1, 2, 3, 4])
    record(tmp_path, [3, 4, 5])
    lines = (tmp_path / "reward.csv").read_text().split()
    assert lines == ["1,1.0", "2,2.0", "3,3.0", "4,4.0", "5,5.0"]


def test_model_family_of_another_name_is_read_from_its_folder(tmp_path):
    from vllm import ModelRegistry

    from torchtitan_rl.models.families import FAMILIES, QWEN3
    from torchtitan_rl.models.hf_config import spec_from_folder

    save_tiny_checkpoint(tmp_path / "own")
    config = (tmp_path / "own" / "config.json").read_text()
    (tmp_path / "own" / "config.json").write_text(config.replace("Qwen3ForCausalLM", "OwnQwen3ForCausalLM"))
    [entry, registered] = re.findall(r"`((?:FAMILIES\[|ModelRegistry).*?)`", " ".join(PAGE.split()))
    try:
        exec(entry, {"FAMILIES": FAMILIES, "QWEN3": QWEN3, "replace": replace})
        exec(registered, {"ModelRegistry": ModelRegistry})
        assert spec_from_folder(tmp_path / "own").name == "own_qwen3"
        assert "OwnQwen3ForCausalLM" in ModelRegistry.get_supported_archs()
    finally:
        FAMILIES.pop("OwnQwen3ForCausalLM", None)
