"""The training loop: sample -> credit -> update -> push -> evaluate -> log -> save.

Every rank runs this program. Small values are equal on every rank: prompts, and episodes, since the replicas' samples and
their rewards have been gathered. Large ones (weights, activations, KV cache) are sharded inside `trainer` and `generator`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchtitan.config import Configurable

from torchtitan_rl import comm
from torchtitan_rl.algorithm import Algorithm, draft_episodes
from torchtitan_rl.errors import SamplerFault
from torchtitan_rl.evaluation import Evaluation
from torchtitan_rl.events import heartbeat, progress, record_metric, timed
from torchtitan_rl.fields.number import number
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.parts import Parts
from torchtitan_rl.replicated import check_replicated
from torchtitan_rl.rewards import Grader, TrainerState
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.state import RunState
from torchtitan_rl.trainer.trainer_config import TrainerConfig
from torchtitan_rl.types import Episode, EvaluationPass, Group, ScoredCompletion

if TYPE_CHECKING:
    from torchtitan_rl.observe.observer import RunObserver
    from torchtitan_rl.run.checkpointer import Checkpointer
    from torchtitan_rl.sampler import FarSampler, Sampler
    from torchtitan_rl.trainer.trainer import UpdateReport


@dataclass(kw_only=True, eq=False)
class Controller(Parts, Configurable):
    """Owns the parts of a run and calls them in order: `_step` is a training step."""

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

    sampler: "Sampler | FarSampler"
    """Samples prompts and has the completions graded, here or on other ranks."""
    evaluation: Evaluation
    state: RunState
    """The progress of the run, new or from a checkpoint."""
    observer: "RunObserver"
    """Only what its `evaluation` returns is read: by it the best checkpoint and an early end are chosen."""
    checkpoints: "Checkpointer"
    stop_requested: Callable[[], int]
    """Returns the number of the signal that asks for the run's end, 0 for none, and makes sure that a signal is noticed."""
    _saved: bool = field(default=False, init=False)
    _stopped: int = field(default=0, init=False)
    """The number of the signal that has ended training."""

    def run(self) -> int:
        """Train to the last step, or to the end of the step in which a stop is requested. Evaluate and save when due.

        All results are on disk when it returns; only `close` remains.

        Returns: 0, or the number of the signal that asked it to stop.
        """
        self.stop_requested()
        self._begin()
        self._saved = self.state.step > 0  # as the checkpoint that it goes on from
        last_step = self.config.num_steps
        while self.state.step < last_step and not (self._stopped or self.evaluation.gives_up):
            self.state.step += 1
            with heartbeat(f"step {self.state.step}"):
                self._step()
            self._stopped = comm.largest(self.stop_requested())
        if (self._stopped or self.evaluation.gives_up) and not self._saved:
            self.checkpoints.save(self.state.step, last_step=True)
        self.observer.close()
        comm.barrier()  # the other ranks would take an early exit for a failure
        return self._stopped

    def evaluate_only(self) -> None:
        """Evaluate without training."""
        self.stop_requested()
        if self.evaluation.passes:
            self.weight_sync.push(policy_version=self.state.step)
        with heartbeat("evaluation"):
            self._measure_held_out()
        self.observer.close()
        comm.barrier()

    def _begin(self) -> None:
        """Say where a resumed run continues, push the first weights, and evaluate a new run before its first step."""
        step, num_steps = self.state.step, self.config.num_steps
        if step >= num_steps:
            progress(f"already at step {step}: raise num_steps ({num_steps}) to go on")
            return
        if step > 0:
            progress(f"resuming after step {step}")
        self._push()
        if step == 0:
            with heartbeat("evaluation before the first step"):
                evaluated = self._evaluate()
            if evaluated:
                self.observer.flush(0)

    def _step(self) -> None:
        """One training step."""
        with timed("step"):
            groups = self._sample()
            self._credit(groups)
            update = self._update(groups)
            self.sampler.arrive()
            with timed("sync"):
                record_metric("sync/bytes", self._push(), "max")
            self._evaluate()
        self._log(groups, update)
        self._save()  # after the metrics, so that a resumed run neither repeats nor loses this step's

    def _sample(self) -> list[Group[Episode]]:
        """Sample and grade the step's prompts. Returns the groups of all replicas, without credit.

        With `zero_variance` "refill" there are further rounds: new prompts for groups that will be left out of the loss.
        """
        wanted, credit = self.config.num_prompts_per_step, self.algorithm.credit
        scored: list[Group[ScoredCompletion]] = []
        missing = wanted
        for sampling_round in range(1 + self.algorithm.refill_rounds):
            new = self.sampler.draw(self.prompts, missing, first_idx=len(scored))
            groups = self.sampler.training_groups(
                new, missing, sampling_round, state=self._trainer_state()
            )
            scored += self._checked(groups, split="train")
            missing = wanted - sum(credit.group_left_out(group) is None for group in scored)
            if missing == 0:
                break
        self.generator.sleep()  # the engine frees its GPU memory for the update; the push wakes it
        self.sampler.go_ahead(self.prompts, wanted, state=self._trainer_state(ahead=1))
        return draft_episodes(scored)

    def _checked(
        self, scored: list[Group[ScoredCompletion]], split: str
    ) -> list[Group[ScoredCompletion]]:
        """Keep groups for the case that their step fails, and refuse rewards that the advantage cannot have."""
        self.observer.keep(scored, step=self.state.step, split=split)
        for group in scored:
            rewards = [sample.reward for sample in group.samples if sample.reward is not None]
            self.algorithm.credit.advantage.check_rewards(rewards)
        return scored

    def _trainer_state(self, ahead: int = 0) -> TrainerState:
        """What reward functions get to know of the run, in this step or `ahead` of it."""
        config, state = self.config, self.state
        return TrainerState(
            global_step=state.step + ahead,
            max_steps=config.num_steps,
            epoch=self.prompts.epoch(state.prompts_seen) or 0.0,
            num_input_tokens_seen=state.tokens_seen,
            train_batch_size=config.num_prompts_per_step * config.sampling.n,
            eval_steps=config.evaluation.every,
            best_metric=self.evaluation.best,
            best_global_step=self.evaluation.best_step,
        )

    def _credit(self, groups: Sequence[Group[Episode]]) -> None:
        """Give the episodes the log-probabilities of frozen models and their credit."""
        for source in self.sources:
            with timed(source.name):
                source.add_logprobs(groups)
        self.algorithm.credit.assign(groups)
        # A curriculum may choose the next steps' prompts by these groups, and leaves them as they are.
        self.prompts.observe(groups)
        self.observer.keep(groups, step=self.state.step, split="train")

    def _update(self, groups: list[Group[Episode]]) -> "UpdateReport":
        """Train on the groups."""
        # Reward functions and tools ran since the last step and may have replaced the signal handlers.
        self.stop_requested()
        check_replicated(self.state.step, groups)
        try:
            with timed("train"):
                return self.trainer.update(groups, self.teacher)
        except SamplerFault as fault:
            # The sampler's log-probabilities are not the policy's. Say whether the engine has the policy's weights.
            if self.weight_sync:
                self.sampler.arrive()
                fault.evidence = self.weight_sync.evidence()
            raise

    def _push(self) -> int:
        """Push the policy into the engine if the next step or an evaluation samples from it. Returns the bytes sent."""
        if self.algorithm.policy_loss.from_engine or (self.evaluation.passes and self._evaluates):
            return self.weight_sync.push(policy_version=self.state.step)
        return 0

    @property
    def _evaluates(self) -> bool:
        """Whether an evaluation follows this step."""
        return self.evaluation.due(self.state.step, self.config.num_steps)

    def _evaluate(self) -> bool:
        """Evaluate if due and act on the results. Returns whether it was due."""
        if not self._evaluates:
            return False
        self.evaluation.conclude(self._measure_held_out(), self.state.step)
        if self.evaluation.is_best and self.state.step > 0:
            self.checkpoints.keep_best(self.state.step)
        return True

    def _measure_held_out(self) -> dict[str, float]:
        """Sample the held-out prompts once for each pass. Returns the evaluation's metrics by name."""
        # Not with this module, whose Config `--help` reads.
        from torchtitan_rl.trainer.teachers.frozen_models import held_out_measures

        check_replicated(self.state.step, self.held_out)
        episodes: dict[EvaluationPass, list[Group[Episode]]] = {}
        for its_pass, sampling in self.evaluation.passes.items():
            with timed("evaluate"):
                scored = self.sampler.held_out_groups(
                    self.held_out, sampling, its_pass, state=self._trainer_state()
                )
            episodes[its_pass] = draft_episodes(self._checked(scored, its_pass.split))
        with timed("evaluate"):
            measured = held_out_measures(self.trainer, self.held_out, episodes, self.teacher)
        return self.observer.evaluation(episodes, self.state, measured)

    def _log(self, groups: list[Group[Episode]], update: "UpdateReport") -> None:
        """Count the step and write its metrics and tables."""
        self.state.count(groups, update)
        self.observer.step(groups, update, self.state)
        self.observer.flush(self.state.step)

    def _save(self) -> None:
        """Save a checkpoint if it is due."""
        step = self.state.step
        with timed("checkpoint/save"):
            self._saved = self.checkpoints.save(step, last_step=step == self.config.num_steps)

    def close(self) -> None:
        """Let generators on other ranks end too, and close the parts."""
        self.sampler.close(self._stopped)
        super().close()
