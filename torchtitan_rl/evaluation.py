"""Held-out accuracy: the same prompts every time, sampled greedily, judged by the task that also rewards training."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan.config import Configurable

from torchtitan_rl.generator import SamplingConfig
from torchtitan_rl.tasks import Task
from torchtitan_rl.types import Prompt, ScoredCompletion


class Evaluation(Configurable):
    """When to evaluate, on how many prompts, and what the samples amount to."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        every: int = 10
        """Steps between evaluations, besides one before the first step and one after the last; 0 never evaluates."""

        num_prompts: int = 256
        """Held-out prompts."""

        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(n=1, temperature=0.0))
        """Greedy by default; n > 1 with a temperature adds pass@n."""

    def __init__(self, config: Config, *, task: Task) -> None:
        self.config = config
        self.task = task

    def due(self, step: int, num_steps: int) -> bool:
        """Whether the policy is evaluated after `step` (0: before the first)."""
        every = self.config.every
        return bool(every) and (step % every == 0 or step == num_steps)

    def metrics(self, prompts: Sequence[Prompt], scored: Sequence[ScoredCompletion]) -> dict[str, float]:
        """accuracy (mean over completions), pass@n (share of prompts with a right one), answer_rate, reward, length."""
        expected = {prompt.prompt_idx: prompt.expected_answer for prompt in prompts}
        right: dict[int, list[bool]] = {}
        for s in scored:
            idx = s.completion.prompt_idx
            right.setdefault(idx, []).append(self.task.is_correct(s.answer, expected[idx]))
        rewards = [s.reward for s in scored if s.reward is not None]
        found = {
            "evaluation/accuracy": _mean([x for group in right.values() for x in group]),
            "evaluation/answer_rate": _mean([s.answer is not None for s in scored]),
            "evaluation/response_tokens": _mean([len(s.completion.token_ids) for s in scored]),
        }
        if rewards:
            found["evaluation/reward"] = _mean(rewards)
        if self.config.sampling.n > 1:
            found[f"evaluation/pass@{self.config.sampling.n}"] = _mean([any(group) for group in right.values()])
        return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
