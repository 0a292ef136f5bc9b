"""The training loop: prompts -> completions -> rewards -> advantages -> update -> weight sync -> log -> checkpoint.

Every rank runs this program. Small values are equal on every rank: prompts, and episodes, since the replicas' samples and
their rewards have been gathered. Large ones (weights, activations, KV cache) are sharded inside `trainer` and `generator`.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchtitan.config import Configurable

from torchtitan_rl import comm
from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.loss import Source
from torchtitan_rl.errors import SamplerFault
from torchtitan_rl.evaluation import Evaluation
from torchtitan_rl.events import heartbeat, progress, record_metric, timed
from torchtitan_rl.fields.number import number
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.rewards import Grader
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.services import GroupsInFlight, Services, Sync
from torchtitan_rl.state import RunState
from torchtitan_rl.trainer.trainer_config import TrainerConfig
from torchtitan_rl.types import Completion, Episode, Group, IntArray, Prompt, ScoredCompletion

if TYPE_CHECKING:
    from torchtitan_rl.trainer.trainer import Trainer


class Controller(Configurable):
    """Owns the parts of a run and calls them in order."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        # The upper limit is numpy's, which vLLM seeds.
        seed: int = number(0, least=0, most=2**32 - 1, remedy="Use 0, 1, 2, ...")
        """Seed of the data order and of sampling."""

        num_steps: int = number(200, least=1, most=10**9, remedy="Use 50 or more.")
        """Steps of the whole run, including those before a resume."""

        num_prompts_per_step: int = number(
            32,
            least=1,
            most=65536,
            remedy="Use 16 or more; the host keeps a step's completions in memory.",
        )
        """Prompts per step, over all generator replicas. Each gets sampling.n completions."""

        sampling: SamplingConfig = field(default_factory=SamplingConfig)
        """Sampling of completions: number, length, temperature."""
        generator: Generator.Config = field(default_factory=Generator.Config)
        """The vLLM engine: its dtype, memory and parallelism."""
        grader: Grader.Config = field(default_factory=Grader.Config)
        """The reward functions, their weights and time limits."""
        algorithm: Algorithm.Config = field(default_factory=Algorithm.Config)
        """The objective: advantages, loss, KL, truncation."""
        trainer: TrainerConfig = field(default_factory=TrainerConfig)
        """The policy's updates: learning rate, parallelism, LoRA."""
        evaluation: Evaluation.Config = field(default_factory=Evaluation.Config)
        """Evaluation on held-out prompts, and stopping by it."""

    def __init__(
        self,
        config: Config,
        *,
        trainer: "Trainer",
        generator: Generator,
        in_flight: GroupsInFlight,
        grader: Grader,
        sources: Sequence[Source],
        algorithm: Algorithm,
        evaluation: Evaluation,
        state: RunState,
        held_out: list[Prompt],
        probe: IntArray,
        services: Services,
    ) -> None:
        """
        Args:
            in_flight: samples the groups, and carries those that a step has begun and not ended; new or from a checkpoint.
            sources: the frozen models that the algorithm asks for.
            state: the progress of the run, new or from a checkpoint.
            generator: the engine, or what stands for it in a run that samples nothing (generator/demonstrations.py).
            held_out: the prompts of every evaluation, at least one.
            probe: [L] the tokens by which the weight sync compares trainer and engine.
        """
        self.config = config
        self.trainer = trainer
        self.generator = generator
        self.in_flight = in_flight
        self.grader = grader
        self.sources = sources
        self.algorithm = algorithm
        self.evaluation = evaluation
        self.state = state
        self.held_out = held_out
        self.probe = probe
        self.services = services
        self._saved = False

    def run(self) -> int:
        """Train to the last step, or to the end of the step in which a stop is requested. Evaluate and save when due.

        All results are on disk when it returns; only `close` remains.

        Returns: 0 if training is complete, else the number of the signal that stopped it.
        """
        self._begin()
        stopped = 0
        last_step = self.config.num_steps
        while self.state.step < last_step and not (stopped or self.evaluation.gives_up):
            self.state.step += 1
            with heartbeat(f"step {self.state.step}"):
                self._train_step()
            stopped = comm.largest(self.services.stop.number)
        if self.evaluation.gives_up:
            best_by = self.config.evaluation.best_by
            progress(
                f"evaluation.stop_after: {best_by} has stopped improving; raise stop_after to continue"
            )
        if stopped or self.evaluation.gives_up:
            self._stop()
        self.services.observer.close()
        comm.barrier()  # the other ranks would take an early exit for a failure
        return stopped

    def evaluate_only(self) -> None:
        """Evaluate without training."""
        if self.evaluation.passes:
            self.sync_weights()
        with heartbeat("evaluation"):
            self._evaluate()
        self.services.observer.close()
        comm.barrier()

    def _begin(self) -> None:
        """Push the first weights. Evaluate a new run before its first step, or report where a resumed run continues."""
        self._sync_for_next()
        if self.state.step == 0:
            with heartbeat("evaluation before the first step"):
                evaluated = self._evaluate_when_due()
            if evaluated:
                self.services.observer.flush(0)
        elif self.state.step >= self.config.num_steps:
            progress(
                f"already at step {self.state.step}: raise num_steps ({self.config.num_steps}) to go on"
            )
        else:
            progress(f"resuming after step {self.state.step}")

    def _stop(self) -> None:
        """Save the last step if it is not saved yet, and report how to continue."""
        step = self.state.step
        if self._saved or self.services.checkpoints.save(step, last_step=True):
            then = f"start again with --dump-folder {self.services.run_folder} to go on"
        else:
            then = "nothing is saved"
        progress(f"stopped after step {step}; {then}")

    def _train_step(self) -> None:
        """One training step."""
        step, services = self.state.step, self.services
        with timed("step"):
            try:
                groups = self._collect_episodes()
                # Reward functions and tools ran since the last step and may have replaced the signal handlers.
                services.stop.arm()
                services.check_replicated(step, groups)
                with timed("train"):
                    update = self.trainer.update(groups)
            except SamplerFault as fault:
                # The sampler's log-probabilities are not the policy's. Say whether the engine has the policy's weights.
                raise type(fault)(
                    f"{fault} {services.weight_sync.evidence(self.generator)}"
                ) from fault
            with timed("sync"):
                record_metric("sync/bytes", self._sync_for_next(), "max")
            self._evaluate_when_due()
        self.state.count(groups, update)
        services.observer.step(groups, update, self.state)
        services.observer.flush(step)
        # Saved after the flush, so that a resumed run neither repeats nor loses this step's metrics.
        with timed("checkpoint/save"):
            self._saved = services.checkpoints.save(step, last_step=step == self.config.num_steps)

    def _collect_episodes(self) -> list[Group[Episode]]:
        """Sample, grade and credit the step's prompts."""
        scored = self._sample_and_refill()
        self.generator.sleep()  # the engine frees its GPU memory for the update; the push wakes it
        groups = draft_episodes(scored)
        for source in self.sources:
            with timed(source.name):
                source.add_logprobs(groups)
        self.algorithm.credit.assign(groups)
        # A curriculum may choose the next steps' prompts by these groups, and leaves them as they are.
        self.services.prompts.observe(groups)
        self.services.observer.keep(groups, step=self.state.step, split="train")
        return groups

    def _sample_and_refill(self) -> list[Group[ScoredCompletion]]:
        """Sample and grade the step's prompts; once, unless with `zero_variance` "refill" new ones replace groups left out."""
        scored: list[Group[ScoredCompletion]] = []
        missing = self.config.num_prompts_per_step
        for sampling_round in range(1 + self.algorithm.refill_rounds):
            new = self.services.prompts.next_batch(
                self.in_flight.num_new(missing), first_idx=len(scored)
            )
            prompts = self.in_flight.admit(new)
            self.services.check_replicated(self.state.step, prompts)
            # Lazy: they are sampled while `_sample_and_grade` takes them.
            groups = self.in_flight.sample(
                self.generator,
                prompts,
                needed=missing,
                step=self.state.step,
                round=sampling_round,
            )
            scored += self._sample_and_grade(groups)
            self.in_flight.gather(self.generator)
            kept = [
                group for group in scored if self.algorithm.credit.group_left_out(group) is None
            ]
            missing = self.config.num_prompts_per_step - len(kept)
            if missing == 0:
                break
        return scored

    def _sample_and_grade(
        self, groups: Iterator[Group[Completion]], prefix: str = "", split: str = "train"
    ) -> list[Group[ScoredCompletion]]:
        """Sample this replica's groups and grade each as soon as it is whole.

        Returns the groups of all replicas, in the prompts' order, on every rank.
        """
        grading = self.grader.round(self.services.reward_state(self.state, self.evaluation))
        with timed(f"{prefix}generate"), closing(groups):
            for group in groups:
                self.services.observer.keep([group], step=self.state.step, split=split)
                # All ranks of one engine have its completions. One grades them, so that no reward function runs twice.
                if self.generator.rank_in_replica == 0:
                    grading.begin(group)
        with timed(f"{prefix}grade"):
            scored = grading.scored_groups()
            for key, metric in self.grader.drain_metrics():
                record_metric(prefix + key, *metric)
        with timed(f"{prefix}gather"):
            scored = comm.all_gather_lists(scored)
        for group in scored:
            rewards = [sample.reward for sample in group.samples if sample.reward is not None]
            self.algorithm.credit.advantage.check_rewards(rewards)
        self.services.observer.keep(scored, step=self.state.step, split=split)
        return sorted(scored, key=lambda group: group.prompt.prompt_idx)

    def _sync_for_next(self) -> int:
        """Push the policy if the next step or an evaluation samples from it. Returns the number of bytes sent."""
        evaluates = self.evaluation.passes and self.evaluation.due(
            self.state.step, self.config.num_steps
        )
        return self.sync_weights() if self.in_flight.needs_engine or evaluates else 0

    def sync_weights(self) -> int:
        """Push the policy into the engine and verify the weights there. Returns the number of bytes sent."""
        return push_policy(
            self.services.weight_sync,
            self.trainer,
            self.generator,
            self.probe,
            policy_version=self.state.step,
        )

    def _evaluate_when_due(self) -> bool:
        """Evaluate if due and act on the results. Returns whether it was due."""
        if not self.evaluation.due(self.state.step, self.config.num_steps):
            return False
        self.evaluation.conclude(self._evaluate(), self.state.step)
        if self.evaluation.is_best and self.state.step > 0:
            self.services.checkpoints.keep_best(self.state.step)
        return True

    def _evaluate(self) -> dict[str, float]:
        """Sample the held-out prompts once for each pass. Returns the evaluation's metrics by name."""
        self.services.check_replicated(self.state.step, self.held_out)
        sampled = {}
        for its_pass, sampling in self.evaluation.passes.items():
            with timed("evaluate"):
                # Always step 0 and a seed for each sample: the draws do not depend on the step or the number of
                # replicas.
                groups = self.generator.generate(
                    self.held_out, sampling_config=sampling, seeded=True
                )
                scored = self._sample_and_grade(groups, f"{its_pass.prefix}/", its_pass.split)
            sampled[its_pass] = draft_episodes(scored)
        with timed("evaluate"):
            measured = self.services.measure(sampled)
        return self.services.observer.evaluation(sampled, self.state, measured)

    def close(self) -> None:
        """Stop the engine, then the process group that it uses."""
        self.grader.close()
        self.generator.close()
        comm.close_process_group()


def push_policy(
    weight_sync: Sync,
    trainer: "Trainer",
    generator: Generator,
    probe: IntArray,
    *,
    policy_version: int,
) -> int:
    """Push the policy into the engine and verify the weights there. Returns the bytes sent. Collective.

    Args:
        probe: [L] the tokens that both sides score.
    """
    return weight_sync.push(
        trainer.hf_weights(generator.dtype, adapters_only=generator.holds_base),
        generator,
        policy_version=policy_version,
        probe=probe,
        trainer_logprobs=trainer.token_logprobs,
    )
