"""`--preview`: the start answers a few prompts, and a line says whether there is something to learn from. Trains nothing."""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import fmean
from typing import TYPE_CHECKING

from torchtitan_rl import events
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.build import build_parts, prepare
from torchtitan_rl.data.answers import OR
from torchtitan_rl.errors import expect
from torchtitan_rl.observe.metrics.idle import likely_reason
from torchtitan_rl.text import head_and_tail
from torchtitan_rl.types import Episode, Group, flat

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

NUM_PROMPTS, NUM_SHOWN, NUM_DOUBTFUL = 16, 3, 2
"""Prompts that are sampled, those of which a good and a bad answer are shown, and doubtful judgements that are shown."""


def show_preview(config: "RunConfig") -> None:
    """Sample a few prompts on one rank, print answers, rewards and lengths, and what they mean for training."""
    os.environ["WORLD_SIZE"] = "1"
    resolved = prepare(config)
    expected = "a run that samples; this one learns from demonstrations alone"
    remedy = "Use --dry-run, which shows what is learned of the first rows."
    expect(resolved.config.needs_engine(resolved.algorithm), "--preview", True, expected, remedy)
    with closing(build_parts(config, resolved)) as parts:
        parts.weight_sync.push(policy_version=0)
        prompts = parts.prompts.next_batch(NUM_PROMPTS)
        grading, began = parts.grader.round(), time.monotonic()
        with events.heartbeat(f"answer {len(prompts)} prompts"):
            for group in parts.generator.generate(prompts):
                grading.begin(group)
            scored = sorted(grading.scored_groups(), key=lambda group: group.prompt.prompt_idx)
        groups = draft_episodes(scored)
        seconds = time.monotonic() - began
    for group in groups[:NUM_SHOWN]:
        ordered = sorted(group.samples, key=lambda episode: -(episode.reward or 0))
        print("\n".join(["", *answers(group, ordered[0], ordered[-1])]))
    print("\n".join(doubtful(groups)))
    in_a_step = f"a step samples {config.num_prompts_per_step} prompts"
    print(f"\n{measures(groups)}\nsampled in {seconds:.0f} s; {in_a_step}")
    print("\n".join([*advice(groups, config.sampling.max_tokens), verdict(groups)]), flush=True)


def doubtful(groups: Sequence[Group[Episode]]) -> list[str]:
    """Returns the first answers that are judged wrong with the expected answer in their text, one of a prompt."""
    lines: list[str] = []
    found = [(group, [e for e in group.samples if _names_the_answer(group, e)]) for group in groups]
    for group, episodes in [each for each in found if each[1]][:NUM_DOUBTFUL]:
        lines += ["", "judged wrong with the expected answer in its text; would you?"]
        lines += answers(group, episodes[0])
    return lines


def answers(group: Group[Episode], *episodes: Episode) -> list[str]:
    """Returns the end of the prompt, and these of its answers with their rewards."""
    lines = [
        f"prompt: {group.prompt.text[-300:]!r}",
        f"expected answer: {group.prompt.expected_answer!r:.200}",
    ]
    for episode in episodes:
        reward = "none" if episode.reward is None else f"{episode.reward:.3g}"
        ending = episode.completion.finish_reason
        ending = {"stop": "", "length": ", cut off"}.get(ending, f", {ending}")
        lines.append(
            f"  reward {reward}, {len(episode.completion.token_ids)} tokens{ending}: {head_and_tail(episode.completion.text, 300)!r}"
        )
    return lines


def measures(groups: Sequence[Group[Episode]]) -> str:
    """Returns a line with the mean reward, the shares of right, readable and cut answers, and the mean length."""
    episodes = flat(groups)
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    parts = [f"reward {fmean(rewards):.3g}" if rewards else "no rewards"]
    judged = [episode.scored for episode in episodes if episode.scored.correct is not None]
    if judged:
        right = fmean(bool(scored.correct) for scored in judged)
        read = fmean(scored.answer is not None for scored in judged)
        named = fmean(_names_the_answer(group, e) for group in groups for e in group.samples)
        parts += [
            f"{right:.0%} right",
            f"{named:.0%} judged wrong with the expected answer in their text",
            *[f"{read:.0%} with an answer in the form that the task reads"][read == 1 :],
        ]
    tokens = fmean(len(episode.completion.token_ids) for episode in episodes)
    parts += [f"{tokens:.0f} tokens on average", f"{_share_cut(groups):.0%} cut off"]
    return f"{len(episodes)} answers: {', '.join(parts)}"


def advice(groups: Sequence[Group[Episode]], max_tokens: int) -> list[str]:
    """Returns a line if more than a tenth of the answers are cut off at `max_tokens`."""
    if _share_cut(groups) <= 0.1:
        return []
    return [
        f"{_share_cut(groups):.0%} of the answers are cut off at sampling.max_tokens {max_tokens}: ask for shorter ones, "
        f"or allow longer ones with --sampling.max-tokens {2 * max_tokens}"
    ]


def _share_cut(groups: Sequence[Group[Episode]]) -> float:
    return fmean(episode.completion.finish_reason == "length" for episode in flat(groups))


def _names_the_answer(group: Group[Episode], episode: Episode) -> bool:
    """Whether a sample is judged wrong although it has an expected answer in its text: it may be read in another form."""
    text, accepted = episode.completion.text, group.prompt.expected_answer.split(OR)
    return episode.scored.correct is False and any(a in text for a in accepted if a)


def verdict(groups: Sequence[Group[Episode]]) -> str:
    """Returns what the rewards mean for training: only groups with different rewards have something to learn from."""
    differing = sum(len({episode.reward for episode in group.samples}) > 1 for group in groups)
    counted = f"{differing} of {len(groups)} prompts have answers with different rewards, which is what a step learns from"
    if differing == 0:
        return f"{counted}. {likely_reason(groups)}"
    if differing < len(groups) / 4:
        return f"{counted}. A step learns little: use prompts of medium difficulty, or more completions (--sampling.n)."
    return f"{counted}."
