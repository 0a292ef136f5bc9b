"""Parts the room's tests share: groups of episodes, the worst of model outputs, and forked processes."""

import multiprocessing

import numpy as np

from torchtitan_rl.observe import Reduce, episode_rows, record_metric
from torchtitan_rl.types import Completion, Credit, Episode, Group, Prompt, ScoredCompletion, flat

FORK = multiprocessing.get_context("fork")
"""Processes that need no second import of torch."""

NASTY = (
    "[/answer] list[int] [bold]x[/] \x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07 \x9b2J "
    "<script>alert(1)</script> </table> | a | `b` 👩‍💻🇩🇪 \x00 \ud800 \u202etxt.exe\r\n"
) + "x" * 100_000
"""A model's answer: rich markup, ANSI escapes, HTML, table bars, emoji, NUL, a lone surrogate, 100k characters."""


def sample(
    sample_idx=0, reward=1.0, *, token_ids=(5, 6, 7), text="[ANSWER]", finish_reason="stop", loss_mask=None,
    policy_version=3, token_versions=None, breakdown=None, extra=None, answer="1", correct=None, **episode
):  # fmt: skip
    """An episode of three tokens with log-probabilities of -0.5; further keywords are its Credit's or the Episode's own."""
    credit = {name: episode.pop(name) for name in Credit.__dataclass_fields__ if name in episode}
    completion = Completion(
        sample_idx=sample_idx, policy_version=policy_version, token_ids=list(token_ids),
        sampler_logprobs=[-0.5] * len(token_ids), text=text, finish_reason=finish_reason, loss_mask=loss_mask,
        token_versions=None if token_versions is None else np.array(token_versions, dtype=np.int32),
    )  # fmt: skip
    scored = ScoredCompletion(
        completion=completion, reward=reward, reward_breakdown={"correct": reward} if breakdown is None else breakdown,
        extra=extra or {}, answer=answer, correct=correct,
    )  # fmt: skip
    return Episode(scored=scored, credit=Credit(**credit), **episode)


def group(prompt_idx, *samples, **prompt):
    """A prompt of two tokens and its samples."""
    fields = {"text": f"What is {prompt_idx} + 1?", "expected_answer": str(prompt_idx + 1), **prompt}
    return Group(prompt=Prompt(prompt_idx=prompt_idx, token_ids=[1, 2], **fields), samples=list(samples))


def rows_of(*groups, step=4, split="train"):
    """The groups as rows of a sample table."""
    return episode_rows(groups, step=step, split=split)


RECORD_STEPS = 3


def nasty_step(step, n=4):
    """Two prompts with n responses each; the best of prompt 1 is nasty."""
    extra = {"note": "[/b]", "mixed": [1.5, "text", [1]][step - 1]} if step > 1 else {}
    texts = {(p, s): f"[ANSWER] {p}-{s}" for p in range(2) for s in range(n)} | {(1, n - 1): NASTY}
    return [
        group(
            p,
            *(sample(s, float(10 * p + s), text=texts[p, s], extra=extra) for s in range(n)),
            messages=[{"role": "user", "content": f"question {p} \ud800"}],
        )
        for p in range(2)
    ]


def record_run(run):
    """Three steps with a mean, quantiles, training and evaluation samples."""
    for step in range(1, RECORD_STEPS + 1):
        groups = nasty_step(step)
        rewards = [episode.reward for episode in flat(groups)]
        for reward in rewards:
            record_metric("reward/mean", reward)
        record_metric("reward", rewards, Reduce.DISTRIBUTION)
        record_metric("odd key 👩‍💻 \ud800 [/b] |", 1.0)
        record_metric("rollout/samples", rows_of(*groups, step=step), Reduce.TABLE)
        record_metric("evaluation/samples", rows_of(groups[0], step=step, split="eval"), Reduce.TABLE)
        record_metric("evaluation/accuracy", 0.5)
        run.flush(step)
    run.close()
    assert not any(sink_thread.disabled for sink_thread in run.sinks.values())
