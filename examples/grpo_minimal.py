"""GRPO in a loop of one's own: the parts of torchtitan_rl as a library, on sums of two integers.

    .venv/bin/python examples/grpo_minimal.py                        # one process, on a CPU or a GPU
    .venv/bin/torchrun --nproc_per_node=2 examples/grpo_minimal.py   # the policy sharded over two, two engines

The task, the model of 2.4M parameters and its start are those of the config `debug`. The first run makes the start, which takes
two minutes of two CPU cores. In 50 steps, accuracy rises from about 60 % to 99 %. A step is

    prompts -> sample -> reward -> credit -> update -> push

Every rank runs this file and makes the same calls in the same order. Prompts, completions, rewards and credit are small and equal on
every rank; weights, activations and the KV cache are sharded inside `trainer` and `generator`. `update` packs the episodes into
micro-batches, and stops the program if trainer and sampler disagree on the sampled tokens.

What a run of `torchtitan_rl.train` has beyond this loop: checkpoints and resume, metrics, sample tables, the report, the watchdog,
stop signals, refilled groups, groups in flight.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchtitan_rl import comm, events
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.build import Parts, build_parts
from torchtitan_rl.config import RunConfig
from torchtitan_rl.configs.debug import debug
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.observe.terminal import Terminal
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import Episode, Group, Prompt, flat

GREEDY = SamplingConfig(n=1, max_tokens=32, temperature=0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="updates of the policy (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a step (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=64, help="prompts of the evaluations before and after training")
    parser.add_argument(
        "--model", default="", help="a Hugging Face folder to start from; default: the start of `debug`"
    )
    parser.add_argument("--output", type=Path, help="folder for the trained policy, which transformers and vLLM load")
    args = parser.parse_args()
    if args.output and args.output.exists():
        parser.error(f"--output {args.output} exists: name a new folder")
    return args


def config_of(args: argparse.Namespace) -> RunConfig:
    """A config names every part and its settings. Any config of configs/ fits here."""
    config = debug()
    config.hf_assets_path = args.model
    config.num_steps = args.steps  # the learning rate's schedule needs it
    config.num_prompts_per_step = args.prompts
    config.sampling.n = args.samples
    config.evaluation.num_prompts = args.held_out
    return config


def sample(
    parts: Parts, prompts: Sequence[Prompt], *, step: int, sampling: SamplingConfig | None = None
) -> list[Group[Episode]]:
    """Complete and score the prompts. Each engine replica takes its share; every rank returns all groups, in order."""
    grading = parts.grader.round()
    for group in parts.generator.generate(prompts, step=step, sampling_config=sampling):
        if parts.generator.rank_in_replica == 0:  # the ranks of one engine all have its completions
            grading.begin(group)  # worker processes score it while other groups are still being sampled
    scored = comm.all_gather_lists(grading.scored_groups())
    return draft_episodes(sorted(scored, key=lambda group: group.prompt.prompt_idx))


def assign_credit(groups: Sequence[Group[Episode]]) -> None:
    """Dr. GRPO: the advantage is the reward minus the group's mean. It is the same for every token of a completion.

    In place of these lines, `parts.algorithm.credit.assign(groups)` does all that `config.algorithm` asks for. An episode with
    `credit.left_out` set is not trained on.
    """
    for group in groups:
        mean = sum(episode.reward for episode in group.samples) / len(group.samples)
        for episode in group.samples:
            episode.credit.advantage = episode.reward - mean


def train_step(parts: Parts, step: int, num_prompts: int) -> str:
    """One step. Returns the line to print."""
    began = time.perf_counter()
    groups = sample(parts, parts.prompts.next_batch(num_prompts), step=step)
    parts.generator.sleep()  # on a GPU, the trainer needs the memory of the KV cache
    assign_credit(groups)
    update = parts.trainer.update(groups)
    parts.weight_sync.push(policy_version=step)  # the engine now samples with the new weights
    episodes = flat(groups)
    reward = sum(episode.reward for episode in episodes) / len(episodes)
    diff = max(episode.logprob_diff.max for episode in episodes if episode.logprob_diff)
    return (
        f"step {step:3}  reward {reward:.3f}  correct {correct(groups):6.1%}  grad {update.grad_norm:.3f}  "
        f"logprob diff {diff:.1e}  {time.perf_counter() - began:.1f} s"
    )


def correct(groups: Sequence[Group[Episode]]) -> float:
    """The fraction of completions that the task judges right."""
    episodes = flat(groups)
    return sum(episode.scored.correct for episode in episodes) / len(episodes)


def save(parts: Parts, start: Path, output: Path) -> None:
    """Write the policy as a Hugging Face folder, with the other files of the start. Collective, because shards are gathered."""
    # Copies: a gathered tensor is freed when the next one is asked for.
    model = parts.trainer.model
    weights = {
        name: tensor.to("cpu", copy=True).contiguous()
        for name, tensor in hf_weights(model, parts.trainer.state_dict_adapter, torch.float32)
    }
    if model.enable_weight_tying:
        del weights["lm_head.weight"]  # the same tensor as the embedding's
    if comm.is_rank_0():
        shutil.copytree(start, output, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    comm.barrier()


def main() -> None:
    args = parse_args()
    events.listen(Terminal())  # shows the phases of the start, and any that takes long
    config = config_of(args)
    try:
        with closing(build_parts(config)) as parts:
            parts.weight_sync.push(policy_version=0)  # the engine starts with empty weights
            before = correct(sample(parts, parts.held_out, step=0, sampling=GREEDY))
            for step in range(1, args.steps + 1):
                events.progress(train_step(parts, step, args.prompts))  # printed on rank 0
            after = correct(sample(parts, parts.held_out, step=0, sampling=GREEDY))
            events.progress(f"held-out sums that are right: {before:.1%} before training, {after:.1%} after")
            if args.output:
                save(parts, Path(parts.config.hf_assets_path), args.output)
    except (UserError, TrainingStopped) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
