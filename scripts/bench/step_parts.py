"""Where a step's time goes on this device: the host and the GPU of a decode step, forward and backward apart, a push.

    .venv/bin/python scripts/bench/step_parts.py --config qwen3_0_6b --hf-assets-path FOLDER

Takes the arguments of a run, on one rank. Every completion has an advantage. Seconds are of the second step; the third runs under
torch.profiler, which slows the host, so only its GPU times and its numbers of kernels count. The last line is JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl import device  # noqa: E402  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from torchtitan_rl.algorithm.episodes import draft_episodes  # noqa: E402
from torchtitan_rl.build import Parts, build_parts  # noqa: E402
from torchtitan_rl.comm import be_only_rank  # noqa: E402
from torchtitan_rl.command.registry import parse_args  # noqa: E402
from torchtitan_rl.sampling import SamplingConfig  # noqa: E402
from torchtitan_rl.trainer import trainer as trainer_module  # noqa: E402
from torchtitan_rl.types import Completion, Episode, Group, ScoredCompletion  # noqa: E402

PROFILED_TOKENS = 24
"""Tokens of each completion under the profiler."""


class Marks:
    """Points in the device's work, in order. On a GPU it waits for none of them."""

    def __init__(self) -> None:
        self._points: list[tuple[str, object]] = []

    def put(self, name: str) -> None:
        """Mark that the part `name` begins here."""
        point: object = time.perf_counter()
        if not device.ON_CPU:
            point = torch.cuda.Event(enable_timing=True)
            point.record()
        self._points.append((name, point))

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each part, up to the next mark."""
        wait()
        found: dict[str, float] = {}
        for (name, begin), (_, end) in zip(self._points, self._points[1:], strict=False):
            took = end - begin if device.ON_CPU else begin.elapsed_time(end) / 1e3
            found[name] = found.get(name, 0.0) + took
        return found


def wait() -> None:
    """Wait until the device has done all its work."""
    if not device.ON_CPU:
        torch.cuda.synchronize()


def sample(
    parts: Parts, step: int, num_prompts: int, sampling: SamplingConfig | None = None
) -> list[Group[Completion]]:
    prompts = parts.prompts.next_batch(num_prompts)
    groups = list(parts.generator.generate(prompts, step=step, sampling_config=sampling))
    return sorted(groups, key=lambda group: group.prompt.prompt_idx)


def with_credit(parts: Parts, groups: list[Group[Completion]]) -> list[Group[Episode]]:
    """Returns the groups with rewards of 0 and 1 in turn."""
    scored = []
    for group in groups:
        samples = [ScoredCompletion(completion=one, reward=float(i % 2)) for i, one in enumerate(group.samples)]
        scored.append(Group(prompt=group.prompt, samples=samples))
    episodes = draft_episodes(scored)
    for source in parts.sources:
        source.add_logprobs(episodes)
    parts.algorithm.credit.assign(episodes)
    return episodes


@contextmanager
def marked(parts: Parts, marks: Marks) -> Iterator[None]:
    """Within this context an update marks its forwards, backwards and optimizer."""
    trainer = parts.trainer
    score, loss, clip = trainer.score, trainer.algorithm.loss, trainer_module.clip_grad_norm_

    def marked_score(*args: object) -> object:
        marks.put("forward")
        return score(*args)

    def marked_loss(*args: object) -> object:
        out = loss(*args)
        marks.put("backward")
        return out

    @wraps(clip)
    def marked_clip(*args: object, **kwargs: object) -> object:
        marks.put("optimizer")
        return clip(*args, **kwargs)

    trainer.score, trainer.algorithm.loss = marked_score, marked_loss
    trainer_module.clip_grad_norm_ = marked_clip
    try:
        yield
    finally:
        marks.put("end")
        del trainer.score, trainer.algorithm.loss
        trainer_module.clip_grad_norm_ = clip


def measured_step(parts: Parts, num_prompts: int) -> dict[str, float]:
    """Returns the seconds of a step's parts, and of a decode step."""
    engine = parts.generator.llm.llm_engine
    steps, step = [0], engine.step

    def counted() -> object:
        steps[0] += 1
        return step()

    engine.step = counted
    begin, host = time.perf_counter(), time.thread_time()
    groups = sample(parts, 2, num_prompts)
    found = {"generate": time.perf_counter() - begin, "generate, this thread's CPU": time.thread_time() - host}
    del engine.step
    tokens = sum(len(one.token_ids) for group in groups for one in group.samples)
    found |= {"engine steps": steps[0], "generated tokens": tokens}
    found |= {"ms of an engine step": 1e3 * found["generate"] / steps[0]}
    found |= {"ms of this thread's CPU for an engine step": 1e3 * found["generate, this thread's CPU"] / steps[0]}
    episodes, marks = with_credit(parts, groups), Marks()
    begin = time.perf_counter()
    with marked(parts, marks):
        parts.trainer.update(episodes)
    wait()
    found["update"] = time.perf_counter() - begin
    found |= marks.seconds()
    begin = time.perf_counter()
    parts.weight_sync.push(policy_version=2)
    wait()
    return found | {"push": time.perf_counter() - begin}


def profiled(function: Callable[[], object]) -> tuple[object, dict[str, float]]:
    """Returns the function's result, and its kernels and their milliseconds on the GPU."""
    activities = [ProfilerActivity.CPU] if device.ON_CPU else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        out = function()
        wait()
    on_gpu = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    launches = sum("LaunchKernel" in event.name or "GraphLaunch" in event.name for event in profiler.events())
    took = sum(event.self_device_time_total for event in on_gpu) / 1e3
    return out, {"kernels": len(on_gpu), "launches": launches, "GPU ms": took}


def main() -> None:
    be_only_rank()
    _, config = parse_args(sys.argv[1:])
    number = config.num_prompts_per_step
    parts = build_parts(config)
    parts.weight_sync.push(policy_version=0)
    parts.trainer.update(with_credit(parts, sample(parts, 1, number)))
    parts.weight_sync.push(policy_version=1)
    found: dict[str, object] = {"step": measured_step(parts, number)}
    short = SamplingConfig(n=config.sampling.n, max_tokens=PROFILED_TOKENS)
    groups, found[f"generate of {PROFILED_TOKENS} tokens"] = profiled(lambda: sample(parts, 3, number, short))
    episodes = with_credit(parts, groups)
    _, found["update of these"] = profiled(lambda: parts.trainer.update(episodes))
    _, found["push"] = profiled(lambda: parts.weight_sync.push(policy_version=3))
    for what, values in found.items():
        print(f"{what}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    print(json.dumps(found))
    parts.close()


if __name__ == "__main__":
    main()
