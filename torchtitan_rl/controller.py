"""One step after another: prompts -> completions -> rewards -> advantages -> update -> weight sync -> log -> checkpoint.

Every rank runs this same program. What is small (prompts, completions, rewards, episodes) is equal on every rank; what is
big (weights, activations, KV cache) is sharded inside `trainer` and `generator`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import tyro
from torchtitan.config import CommConfig, Configurable
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.protocols.model_spec import ModelSpec
from transformers import AutoTokenizer

from torchtitan_rl import comm
from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.conversations.conversations import Conversations
from torchtitan_rl.device import engine_start_note, sample_memory
from torchtitan_rl.evaluation import Evaluation, print_results, results_of, write_results
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.generator.sampling import SamplingConfig, end_token_ids
from torchtitan_rl.generator.weight_sync import WeightSync
from torchtitan_rl.grading import Grader, TrainerState
from torchtitan_rl.metrics.efficiency import Footprint
from torchtitan_rl.metrics.idle import IdleNotice
from torchtitan_rl.metrics.step import record_evaluation, record_step
from torchtitan_rl.observability import (
    Recorder,
    Reduce,
    heartbeat,
    phase,
    progress,
    record_metric,
    record_metrics,
    timed,
)
from torchtitan_rl.run.board import WatchdogLimits
from torchtitan_rl.run.checkpoints import Resume
from torchtitan_rl.run.folder import check_still_there, holder
from torchtitan_rl.run.rank_output import failure_marker
from torchtitan_rl.run.resume import described
from torchtitan_rl.run.secrets import without_secrets
from torchtitan_rl.run.start import check_tokenizer
from torchtitan_rl.run.state import RunState
from torchtitan_rl.run.stop_signal import StopSignal
from torchtitan_rl.tasks import Task
from torchtitan_rl.tasks.prompt_stream import PromptStream
from torchtitan_rl.trainer.checkpoint import Checkpointer
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.types import Episode, Group, Prompt, ScoredCompletion


@contextmanager
def _part(name: str) -> Iterator[None]:
    """A timed part of a step after which the memory in use is sampled: it is the part's peak on a GPU."""
    with timed(name):
        yield
        sample_memory()


class Controller(Configurable):
    """Owns the parts of a run and the order in which they act."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_spec: Annotated[ModelSpec | None, tyro.conf.Suppress] = None

        hf_assets_path: str = ""
        """Hugging Face checkpoint folder (config.json, tokenizer, safetensors) that the policy starts from, or a name on the
        hub such as Qwen/Qwen3-0.6B. Empty: the task's own start, where it makes one (the debug configs)."""

        dump_folder: str = ""
        """The run's folder: logs, metrics, samples, checkpoints. Empty: a new one under outputs/."""

        resume: str = "auto"
        """auto: go on from the newest good checkpoint in the run's folder, if it has any; never: only a new run; a number:
        from that step; a folder: fork another run, or one of its checkpoints, into this new folder."""

        resume_changed: bool = False
        """Resume although model, task, seed, batch, algorithm or the optimizer's kind are not the checkpoint's."""

        seed: int = 0
        """Of the data order and the sampling."""

        num_steps: int = 200
        """Steps of the whole run, those before a resume included."""

        num_prompts_per_step: int = 32
        """Prompts in one step over all generator replicas; each gets sampling.n completions."""

        eval_only: bool = False
        """Evaluate the start, or the last checkpoint of dump_folder, print the results and end without training."""

        task: Task.Config | None = None
        prompts: PromptStream.Config = field(default_factory=PromptStream.Config)
        sampling: SamplingConfig = field(default_factory=SamplingConfig)
        conversations: Conversations.Config = field(default_factory=Conversations.Config)
        generator: Generator.Config = field(default_factory=Generator.Config)
        weight_sync: WeightSync.Config = field(default_factory=WeightSync.Config)
        grader: Grader.Config = field(default_factory=Grader.Config)
        algorithm: Algorithm.Config = field(default_factory=Algorithm.Config)
        trainer: Trainer.Config = field(default_factory=Trainer.Config)
        evaluation: Evaluation.Config = field(default_factory=Evaluation.Config)

        checkpoint: Checkpointer.Config = field(default_factory=Checkpointer.Config)
        metrics: Recorder.Config = field(default_factory=Recorder.Config)
        watchdog: WatchdogLimits = field(default_factory=WatchdogLimits)
        comm: CommConfig = field(default_factory=lambda: CommConfig(trace_buf_size=0, init_timeout_seconds=1800))
        """init_timeout_seconds is the longest that a rank waits for the others, in the whole run: more than the slowest
        replica's generation and rewards."""

    def __init__(self, config: Config, *, run_folder: Path, run_name: str, resume: Resume | None = None) -> None:
        """Build every part, load the start or the checkpoint of `resume`, and sync the engine. Collective."""
        self.config = config
        self.run_folder = run_folder
        self._held_by = holder(run_folder)
        self._saved = False
        world_size, rank = dist.get_world_size(), dist.get_rank()
        parallelism = config.trainer.parallelism
        set_spmd_backend(parallelism.spmd_backend)
        self.task = config.task.build()
        self.tokenizer = AutoTokenizer.from_pretrained(config.hf_assets_path)
        check_tokenizer(self.tokenizer, config.model_spec.model.vocab_size)
        self.prompts = config.prompts.build(task=self.task, tokenizer=self.tokenizer, seed=config.seed)
        self.grader = config.grader.build(task=self.task)
        self.algorithm = config.algorithm.build()
        self.evaluation = config.evaluation.build()
        evaluates = config.evaluation.every or config.eval_only  # else one alone, for the weight sync's probe
        self.held_out = self.prompts.held_out(config.evaluation.num_prompts if evaluates else 1)
        conversations = config.conversations.build(
            members=self.task.members(),
            tokenizer=self.tokenizer,
            end_token_ids=end_token_ids(config.hf_assets_path, self.tokenizer),
            template_options={"enable_thinking": config.prompts.enable_thinking},
        )
        conversations.check(self.held_out)
        with phase(f"build and shard the policy ({config.model_spec.name} {config.model_spec.flavor})"):
            self.trainer = config.trainer.build(
                model_spec=config.model_spec,
                hf_assets_path=config.hf_assets_path,
                parallel_dims=ParallelDims.from_config(parallelism, world_size),
                algorithm=self.algorithm,
                num_steps=config.num_steps,
                max_model_len=config.generator.max_model_len,
                max_completion_tokens=config.sampling.max_tokens,
                temperature=config.sampling.temperature,
                dump_folder=str(run_folder),
            )
        with phase("start the vLLM engine" + engine_start_note()):
            self.generator = config.generator.build(
                hf_assets_path=config.hf_assets_path,
                tokenizer=self.tokenizer,
                sampling=config.sampling,
                seed=config.seed,
                conversations=conversations,
            )
        parameters = sum(p.numel() for p in self.trainer.model.parameters())
        self.footprint = Footprint.of(config, parameters=parameters, world_size=world_size)
        self.weight_sync = config.weight_sync.build()
        self.idle_notice = IdleNotice()
        self.recorder = config.metrics.build(
            run_folder=run_folder,
            run_name=run_name,
            run_config=without_secrets(config.to_dict()),
            total_steps=config.num_steps,
            rank=rank,
            gather=comm.gather if world_size > 1 else None,
            decode=self.tokenizer.decode,
        )
        self.state = RunState(algorithm=self.algorithm, recorder=self.recorder, evaluation=self.evaluation)
        self.checkpointer = config.checkpoint.build(
            trainer=self.trainer,
            prompts=self.prompts,
            run_state=self.state,
            run_folder=run_folder,
            described=described(config),
        )
        self.generator.sleep()  # a resumed optimizer state needs the memory that the engine holds until the sync
        if resume is not None:
            with phase(f"load {resume.checkpoint}"):
                self.checkpointer.load(resume.checkpoint)
        self.checkpointer.check_room()
        self.trainer.restore_settings()
        self.trainer.finite.check_loaded()
        self._sync_weights()

    def run(self) -> int:
        """Train to the last step, or to the end of the step in which a stop is asked for, evaluating and saving when due.

        What was measured and saved is on disk when it returns: only the teardown is left, in `close`.

        Returns: 0 when training is complete, or the number of the signal that stopped it.
        """
        if self.config.eval_only:
            self._evaluate_only()
            return 0
        self.stop_signal = StopSignal(failure_marker=failure_marker(self.run_folder))
        self._begin()
        stopped = 0
        while self.state.step < self.config.num_steps and not stopped and not self.evaluation.gives_up:
            self.state.step += 1
            with heartbeat(f"step {self.state.step}"):
                self._train_step()
            stopped = comm.largest(self.stop_signal.number)
        if self.evaluation.gives_up:
            best_by = self.config.evaluation.best_by
            progress(f"evaluation.stop_after: {best_by} is no longer becoming better; raise it to go on")
        if stopped or self.evaluation.gives_up:
            self._stop()
        self.recorder.close()
        comm.barrier()  # a rank that leaves early would look like a failure to the others
        return stopped

    def _begin(self) -> None:
        """Evaluate a new run's start; say where a resumed one goes on."""
        if self.state.step == 0:
            with heartbeat("evaluation before the first step"):
                evaluated = self._evaluate()
            if evaluated:
                self.recorder.flush(0)
        elif self.state.step >= self.config.num_steps:
            progress(f"already at step {self.state.step}: raise num_steps ({self.config.num_steps}) to go on")
        else:
            progress(f"resuming after step {self.state.step}")

    def _stop(self) -> None:
        """Save what the last step did not, and say how to go on."""
        saved = self._saved or self.checkpointer.save(self.state.step, last_step=True)
        how_to_go_on = f"start again with --dump-folder {self.run_folder} to go on"
        progress(f"stopped after step {self.state.step}; {how_to_go_on if saved else 'nothing is saved'}")

    def _train_step(self) -> None:
        """The way of one step."""
        step = self.state.step
        with timed("step"):
            groups = self._collect_episodes()
            self.stop_signal.arm()
            with _part("train"):
                update = self.trainer.update(groups)
            with _part("sync"):
                self._sync_weights()
            self._evaluate()
        self.state.count(groups, update)
        record_step(groups, update, state=self.state, algorithm=self.algorithm, footprint=self.footprint)
        self.idle_notice.see(groups)
        record_metrics(self.prompts.metrics(self.state.prompts_seen))
        self.recorder.flush(step)
        check_still_there(self.run_folder, self._held_by)
        # After the flush, so that a resumed run neither repeats nor loses this step's metrics.
        with timed("checkpoint/save"):
            self._saved = self.checkpointer.save(step, last_step=step == self.config.num_steps)

    def _collect_episodes(self) -> list[Group[Episode]]:
        """Sample and grade the step's prompts, with fresh ones for groups that teach nothing if the algorithm asks for it."""
        scored: list[Group[ScoredCompletion]] = []
        missing = self.config.num_prompts_per_step
        for round in range(1 + self.algorithm.refill_rounds):
            fresh = enumerate(self.prompts.next_batch(missing), start=len(scored))
            scored += self._sample([replace(prompt, prompt_idx=i) for i, prompt in fresh], round=round)
            missing = self.config.num_prompts_per_step - sum(self.algorithm.usable_groups(scored))
            if missing == 0:
                break
        self.generator.sleep()
        groups = draft_episodes(scored)
        if self.algorithm.needs_reference:
            with _part("reference"):
                self.trainer.score_reference(groups)
        self.algorithm.assign_credit(groups, max_completion_tokens=self.config.sampling.max_tokens)
        return groups

    def _sample(
        self,
        prompts: Sequence[Prompt],
        *,
        round: int = 0,
        sampling: SamplingConfig | None = None,
        prefix: str = "",
    ) -> list[Group[ScoredCompletion]]:
        """Each replica samples its share and grades it, as far as it can meanwhile; all shares on every rank, in the prompts' order."""
        grades = self.generator.rank_in_replica == 0
        state = TrainerState(global_step=self.state.step, max_steps=self.config.num_steps)
        with _part(f"{prefix}generate"):
            # An evaluation, which has its own sampling, draws alike at every step and on any number of replicas.
            draws = {"step": 0, "seeded": True} if sampling else {"step": self.state.step}
            finished = partial(self.grader.begin, state=state) if grades else None
            mine = self.generator.generate(prompts, round=round, sampling_config=sampling, finished=finished, **draws)
        with timed(f"{prefix}grade"):
            scored = self.grader.score(mine if grades else [], state=state)
            record_metrics({prefix + key: metric for key, metric in self.grader.drain_metrics().items()})
        with timed(f"{prefix}gather"):
            scored = comm.all_gather_lists(scored)
        return sorted(scored, key=lambda group: group.prompt.prompt_idx)

    def _sync_weights(self) -> None:
        num_bytes = self.weight_sync.push(
            self.trainer.hf_weights(self.generator.dtype),
            self.generator,
            held=self.trainer.held_weights,
            policy_version=self.state.step,
            probe=self.held_out[0].token_ids,
            trainer_logprobs=self.trainer.token_logprobs,
        )
        record_metric("sync/bytes", num_bytes, Reduce.MAX)

    def _evaluate(self) -> bool:
        """Evaluate when due, and decide by the results; whether it was."""
        if not self.evaluation.due(self.state.step, self.config.num_steps):
            return False
        self.evaluation.conclude(self._results()["metrics"])
        if self.evaluation.is_best and self.state.step > 0:
            self.checkpointer.keep_best(self.state.step)
        return True

    def _results(self) -> dict[str, Any]:
        """Sample the held-out prompts in every way that is configured, record it, and write the results to the run's folder."""
        passes = {}
        for one in self.evaluation.passes:
            with timed("evaluate"):
                scored = self._sample(self.held_out, sampling=one.sampling, prefix=f"{one.prefix}/")
            passes[one.prefix] = draft_episodes(scored)
            record_evaluation(passes[one.prefix], one, step=self.state.step)
        results = results_of(passes)
        if dist.get_rank() == 0:
            write_results(self.run_folder / "evaluation", self.state.step, results)
        return results

    def _evaluate_only(self) -> None:
        """In place of training."""
        with heartbeat("evaluation"):
            results = self._results()
        if dist.get_rank() == 0:
            print_results(results)
            progress(f"results: {self.run_folder}/evaluation/step-{self.state.step}.json")
        self.recorder.close()
        comm.barrier()

    def close(self) -> None:
        """Stop the engine, before the process group that it uses."""
        self.grader.close()
        self.generator.close()
        comm.close_process_group()
