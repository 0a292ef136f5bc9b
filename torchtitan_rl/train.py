"""Entry point of every rank: `torchrun -m torchtitan_rl.train --config NAME [--dotted.overrides]`.

Exit codes: 0 if the run is done, or was stopped by a signal and saved (the launcher then exits with 128 + N or 75); 1 after an
unforeseen error, with a traceback; 2 for wrong input, with a message; 3 if training stopped itself (NaN, or trainer and sampler
disagree), with a message. The last checkpoint is kept.
"""

import logging
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.common.secret_variables import hide_from_proc
from torchtitan_rl.resilience.parent import PhaseForParent, begin_reading, end_reading, fork_rank, say_done

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the first step Ctrl-C ends the process without a traceback
    hide_from_proc()
    fork_rank()  # before torch is imported

from torchtitan_rl.common.text import visible
from torchtitan_rl.core import (
    device,  # noqa: F401  (first: its effects must precede torchtitan and vLLM)
    events,
)
from torchtitan_rl.core.errors import TrainingStopped, UserError
from torchtitan_rl.library.references import users_frames
from torchtitan_rl.observability.machine import MemorySampler, bfloat16_warning
from torchtitan_rl.observability.terminal import Terminal
from torchtitan_rl.resilience.checkpoint_folder import CheckpointFolder
from torchtitan_rl.resilience.death import has_no_memory, memory_remedy
from torchtitan_rl.resilience.job_processes import die_with_parent
from torchtitan_rl.resilience.printed import BoundedOutput, limit_streams, mask_output
from torchtitan_rl.resilience.rank_output import RankOutput
from torchtitan_rl.resilience.rank_status import READING_CONFIG, StatusFile, heartbeat_text
from torchtitan_rl.resilience.run_end import REPORT, Phases, phase_of, write_end
from torchtitan_rl.setup.secrets import masked

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.core.algorithm import Algorithm
    from torchtitan_rl.core.controller import Controller
    from torchtitan_rl.core.generator.generator import Generator
    from torchtitan_rl.core.grading.grader import Scorers
    from torchtitan_rl.core.services import Services
    from torchtitan_rl.core.state import RunState
    from torchtitan_rl.core.trainer.trainer import Trainer
    from torchtitan_rl.library.environments.factory import Conversations
    from torchtitan_rl.library.prompts.stream import PromptStream
    from torchtitan_rl.library.task import Task
    from torchtitan_rl.observability.recorder import Recorder
    from torchtitan_rl.proof.weight_sync import WeightSync
    from torchtitan_rl.resilience.checkpoint_folder import Resume
    from torchtitan_rl.resilience.checkpointer import Checkpointer
    from torchtitan_rl.setup.run_config import RunConfig

WRONG_INPUT, STOPPED = 2, 3


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line's training as one of torchrun's ranks, or without torchrun as the only rank."""
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**single, "MASTER_PORT": str(_free_port())}.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    status_file = StatusFile(int(os.environ["RANK"]))
    status_file.update(phase=READING_CONFIG)
    output = RankOutput(rank=int(os.environ["RANK"]), shown_rank=os.environ.get("LOG_RANK", "0"), mask=masked)
    mask_output(masked)
    limit_streams()

    def config_is_read() -> None:
        status_file.update(phase="start", since=time.monotonic())
        end_reading()

    events.listen(PhaseForParent())
    begin_reading()
    try:
        output.check_shown_rank(int(os.environ["WORLD_SIZE"]))
        from torchtitan_rl.setup.registry import parse_args

        # Only parse_args may exit: for --help, --list-configs and unknown options.
        name, config = parse_args(sys.argv[1:] if args is None else args, on_read=config_is_read)
        try:
            _train(name, config, output)
        except SystemExit as request:  # for example in a reward function: the run is not done
            raise RuntimeError(f"something called sys.exit({request.code!r}) in the middle of the run") from request
    except SystemExit:
        say_done()
        status_file.update(outcome="done", since=time.monotonic())
        raise
    except BaseException as error:  # CheckpointException and KeyboardInterrupt are no Exceptions
        output.fail(*_message_and_code(error))
    say_done()
    output.end(0)


def check_arguments(args: Sequence[str]) -> int:
    """Check a command line as far as it takes no heavy import. torchrun's agent calls it while the ranks start.

    Returns WRONG_INPUT after a message on stderr, or 0: the ranks say everything else.
    """
    from torchtitan_rl.core.config import check_fields
    from torchtitan_rl.setup.dump_folder import check_dump_folder
    from torchtitan_rl.setup.registry import parse_args
    from torchtitan_rl.setup.start_checkpoint import check_folder

    try:
        _, config = parse_args(args)
        check_fields(config)
        check_dump_folder(config.dump_folder)
        check_folder(config)
    except UserError as error:
        print(visible(masked(f"error: {error}")), file=sys.stderr)
        return WRONG_INPUT
    except SystemExit as request:  # of the parser, which has printed why
        return WRONG_INPUT if request.code == WRONG_INPUT else 0
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _message_and_code(error: BaseException) -> tuple[str, int]:
    """What the terminal and end.json say about the error that ends the run, and the exit code."""
    if isinstance(error, UserError):
        return f"error: {error}", WRONG_INPUT
    if isinstance(error, TrainingStopped):
        return f"stopped: {error}", STOPPED
    return _error_message(error), 1


def _error_message(error: BaseException) -> str:
    """The message of an unforeseen error: its traceback, or one line if it only means that another rank is gone."""
    if not _lost_a_rank(error):
        return "\n".join([traceback.format_exc().rstrip(), *_users_line(error), *_memory_line(error)])
    logging.getLogger(__name__).info("lost another rank", exc_info=True)  # with the traceback, in the rank's log
    return "this rank lost the connection to another one and ends"


def _lost_a_rank(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone. It comes from gloo, NCCL or the store."""
    signs = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _users_line(error: BaseException) -> list[str]:
    """The last line of the traceback in the user's code, such as a config, a task or a reward function; [] if there is none."""
    frames = users_frames(error)
    return [f"The last line of your own code in it: {frames[-1].filename}, line {frames[-1].lineno}"] if frames else []


def _memory_line(error: BaseException) -> list[str]:
    """What to lower if the error says that there was no memory; [] if it does not."""
    if not has_no_memory(error):
        return []
    phase = phase_of(error)
    return [f"This process was refused memory{f' in {phase}' if phase else ''}. {memory_remedy(phase)}"]


def _train(name: str, config: "RunConfig", output: RankOutput) -> None:
    status_file = StatusFile(int(os.environ["RANK"]))
    status_file.update(notice_s=config.watchdog.notice_seconds, limit_s=config.watchdog.limit_seconds)
    phases = Phases()
    for listener in (status_file, Terminal(slowest=heartbeat_text), BoundedOutput(), MemorySampler(), phases):
        events.listen(listener)
    with events.phase("import torchtitan and transformers"):
        from torchtitan_rl.core import comm
        from torchtitan_rl.resilience.replicated import check_config
        from torchtitan_rl.setup.build_grader import find_scorers
        from torchtitan_rl.setup.build_prompts import build_prompts
        from torchtitan_rl.setup.build_task import build_task
        from torchtitan_rl.setup.installation import check_environment
        from torchtitan_rl.setup.memory import choose_by_memory, gpu_memory_bytes, memory_warning
        from torchtitan_rl.setup.resume import config_fields, prepare_resume, weights_digest
        from torchtitan_rl.setup.run_folder import RunFolder
        from torchtitan_rl.setup.second_opinion import compare_start
        from torchtitan_rl.setup.start_checkpoint import missing_start, prepare_start
        from torchtitan_rl.setup.trial import try_objective
        from torchtitan_rl.setup.validation import check_model, check_task, schedule_warning, validate
    check_environment()
    world_size = int(os.environ["WORLD_SIZE"])
    validate(config, world_size=world_size)
    task = build_task(config.task)
    scorers = find_scorers(config.grader, task)
    check_task(config, task)
    missing = missing_start(config)
    check_model(config, world_size=world_size)
    if missing is not None:
        # Their errors, before the minute it takes.
        _, held_out, _ = build_prompts(config, config.task.build(), missing.tokenizer())
        try_objective(config, held_out[0], [reward.name for one in scorers.values() for reward in one.rewards])
        prepare_start(config)
    with events.heartbeat("compare the policy with transformers"):
        compared = compare_start(config)
    for estimate in (choose_by_memory, memory_warning):
        if said := estimate(config, world_size=world_size, gpu_bytes=gpu_memory_bytes()):
            events.progress(said)
    for said in filter(None, (compared, bfloat16_warning(config.dtypes), schedule_warning(config))):
        events.progress(said)
    with events.heartbeat("start"), events.timed("wait for the other ranks"):
        comm.init_process_group(config.comm)
    starts = {"hf_assets_path": config.hf_assets_path, "trainer.lora.start": config.trainer.lora.start}
    digests = {f"{field} (its weights)": weights_digest(Path(path)) for field, path in starts.items() if path}
    check_config(config_fields(config) | digests)
    folder = RunFolder.find(config.dump_folder, name)
    resume = prepare_resume(config, folder.path)  # what it refuses, it refuses before anything is written
    folder.claim()
    output.to_file(folder.path)
    status_file.update(run_folder=str(folder.path))
    try:
        with folder.kept_if_refused():
            folder.describe(name, config, resume)
            controller = build_run(config, folder.path, task=task, scorers=scorers, resume=resume)
        stopped = _carry_out(controller)
    except BaseException as error:
        if folder.is_refused:
            status_file.update(run_folder="")  # the launcher would write there how the run ended
        else:
            _end_with(error, folder.path, phases)
            _write_report(config, folder.path)
        raise
    status_file.update(outcome=str(stopped) if stopped else "done", phase="end", since=time.monotonic())
    controller.services.stop.effect = "training has ended, only the report is being written"
    _end(controller, stopped, phases)
    _write_report(config, folder.path)
    _close(controller)


def _carry_out(controller: "Controller") -> int:
    """Train or evaluate. Returns the number of the signal that stopped training, or 0."""
    from torchtitan_rl.observability.evaluation_results import print_results_of

    try:
        if not controller.config.eval_only:
            stopped = controller.run()
            if not stopped:
                controller.services.observer.check_rewarded()
            return stopped
        controller.services.stop.effect = "the evaluation goes on to its end"
        controller.evaluate_only()
        print_results_of(controller.services.run_folder, controller.state.step)
        return 0
    except BaseException:
        controller.services.observer.close()  # the metrics recorded so far help to find the cause
        raise


def _end_with(error: BaseException, run_folder: Path, phases: Phases) -> None:
    """Write to end.json that an error ends the run. A rank that only lost another one leaves this to the one that knows why."""
    if not _lost_a_rank(error):
        message, code = _message_and_code(error)
        message = masked(message)
        outcome = "stopped" if code == STOPPED else "failed"
        rank = int(os.environ["RANK"])
        write_end(run_folder, outcome, message, code=code, rank=rank, phase=phase_of(error), started_s=phases.started_s)


def _end(controller: "Controller", stopped: int, phases: Phases) -> None:
    """Write to end.json how a run ended that did what it was asked to. On rank 0."""
    if os.environ["RANK"] != "0":
        return
    folder, config, step = controller.services.run_folder, controller.config, controller.state.step
    outcome, message, code = ("evaluated" if config.eval_only else "done"), "", 0
    if stopped:
        outcome, code = "stopped", 128 + stopped
        newest = CheckpointFolder(folder).newest()
        goes_on = f"start again with --dump-folder {folder} to go on" if newest else "nothing is saved"
        message = f"{signal.Signals(stopped).name} after step {step}; {goes_on}"
    elif controller.evaluation.gives_up:
        message = f"evaluation.stop_after: {config.evaluation.best_by} stopped improving before step {step}"
    write_end(folder, outcome, message, code=code, started_s=phases.started_s)


def build_run(
    config: "RunConfig",
    run_folder: Path,
    *,
    task: "Task",
    scorers: "dict[str, Scorers] | None" = None,
    resume: "Resume | None" = None,
) -> "Controller":
    """Build and connect all parts of a run, and load its start or the checkpoint of `resume`. Collective.

    Args:
        config: validated, with its start prepared.
        task: built from `config.task`.
        scorers: see `build_grader`.
    """
    from torchtitan.distributed.utils import set_spmd_backend

    from torchtitan_rl.core.controller import Controller
    from torchtitan_rl.core.events import phase
    from torchtitan_rl.core.state import RunState
    from torchtitan_rl.proof.held_weights import HeldWeights
    from torchtitan_rl.proof.weight_proof import WeightProof
    from torchtitan_rl.setup.build_grader import build_grader
    from torchtitan_rl.setup.build_prompts import build_prompts
    from torchtitan_rl.setup.start_checkpoint import load_tokenizer
    from torchtitan_rl.setup.trial import try_objective

    set_spmd_backend(config.trainer.parallelism.spmd_backend)
    tokenizer = load_tokenizer(config.hf_assets_path)
    grader = build_grader(config.grader, task, scorers)
    prompts, held_out, environments = build_prompts(config, task, tokenizer)
    algorithm = config.algorithm.build(max_completion_tokens=config.sampling.max_tokens)
    evaluation = config.evaluation.build()
    try_objective(config, held_out[0], grader.reward_names)
    trainer, generator = _build_policy_and_engine(config, algorithm, tokenizer, environments, run_folder)
    recorder = _build_recorder(config, tokenizer, run_folder)
    in_flight = config.in_flight.build(prompt_at=prompts.at)
    state = RunState(algorithm=algorithm, recorder=recorder, evaluation=evaluation, in_flight=in_flight)
    checkpointer = _build_checkpointer(config, trainer, prompts, state, run_folder)
    proof = WeightProof.of(generator, HeldWeights(trainer.model, trainer.state_dict_adapter))
    weight_sync = config.weight_sync.build(proof=proof)
    generator.sleep()  # until the first sync: loading the optimizer's state needs the engine's memory
    if resume is not None:
        with phase(f"load {resume.checkpoint}"):
            checkpointer.load(resume.checkpoint)
    checkpointer.check_room()
    trainer.check_loaded()
    return Controller(
        config,
        trainer=trainer,
        generator=generator,
        in_flight=in_flight,
        grader=grader,
        algorithm=algorithm,
        evaluation=evaluation,
        state=state,
        held_out=held_out,
        services=_build_services(config, trainer, prompts, recorder, weight_sync, checkpointer, run_folder),
    )


def _build_policy_and_engine(
    config: "RunConfig",
    algorithm: "Algorithm",
    tokenizer: "PreTrainedTokenizerBase",
    environments: "Conversations",
    run_folder: Path,
) -> "tuple[Trainer, Generator]":
    from torchtitan.config import TORCH_DTYPE_MAP

    from torchtitan_rl.core.events import phase
    from torchtitan_rl.library.lora.engine import EngineAdapter
    from torchtitan_rl.observability.engine_stats import EngineStats
    from torchtitan_rl.setup.node import engine_start_note

    with phase(f"build and shard the policy ({config.model_spec.name} {config.model_spec.flavor})"):
        trainer = build_policy(config, algorithm, run_folder)
    engine = {"tp_size": config.generator.tensor_parallel_degree, "dtype": TORCH_DTYPE_MAP[config.generator.dtype]}
    lora = EngineAdapter(trainer.lora, **engine) if trainer.lora else None
    with phase("start the vLLM engine" + engine_start_note()):
        generator = config.generator.build(
            hf_assets_path=config.hf_assets_path,
            tokenizer=tokenizer,
            sampling=config.sampling,
            seed=config.seed,
            environments=environments,
            stats=EngineStats(),
            lora=lora,
        )
    if config.generator.tensor_parallel_degree > 1:
        from vllm.distributed.parallel_state import get_tp_group

        _set_timeouts(config, [get_tp_group().device_group, get_tp_group().cpu_group])
    return trainer, generator


def build_policy(config: "RunConfig", algorithm: "Algorithm", run_folder: Path) -> "Trainer":
    """Build the trainer and give its process groups the run's timeout. Collective."""
    import torch.distributed as dist
    from torchtitan.distributed import ParallelDims

    from torchtitan_rl.core.trainer.trainer import Trainer
    from torchtitan_rl.library.lora.adapters import Lora

    dims = ParallelDims.from_config(config.trainer.parallelism, dist.get_world_size())
    trainer = Trainer(
        config.trainer,
        model_spec=config.model_spec,
        hf_assets_path=config.hf_assets_path,
        parallel_dims=dims,
        algorithm=algorithm,
        num_steps=config.num_steps,
        max_model_len=config.generator.max_model_len,
        temperature=config.sampling.temperature,
        generator_dtype=config.generator.dtype,
        dump_folder=str(run_folder),
        lora=Lora.of(config.trainer.lora),
    )
    _set_timeouts(config, [mesh.get_group() for mesh in dims.get_all_one_dimensional_meshes().values()])
    return trainer


def _set_timeouts(config: "RunConfig", groups: "Sequence[ProcessGroup]") -> None:
    """Set comm.init_timeout_seconds, which otherwise rules the default group alone: NCCL's own is 10 minutes."""
    for group in groups:
        group.set_timeout(timedelta(seconds=config.comm.init_timeout_seconds))


def _build_recorder(config: "RunConfig", tokenizer: "PreTrainedTokenizerBase", run_folder: Path) -> "Recorder":
    import torch.distributed as dist

    from torchtitan_rl.setup.identity import described
    from torchtitan_rl.setup.run_folder import code_version
    from torchtitan_rl.setup.secrets import without_secrets

    return config.metrics.build(
        run_folder=run_folder,
        run_name=run_folder.name,
        run_config={"code": code_version(), **without_secrets(described(config))},
        total_steps=config.num_steps,
        rank=dist.get_rank(),
        gather=_gather if dist.get_world_size() > 1 else None,
        decode=tokenizer.decode,
        mask=masked,
    )


def _gather(value: Any) -> list[Any] | None:
    """Returns every rank's value on rank 0, None on other ranks."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def _build_checkpointer(
    config: "RunConfig", trainer: "Trainer", prompts: "PromptStream", state: "RunState", run_folder: Path
) -> "Checkpointer":
    from torchtitan_rl.resilience.checkpointer import Checkpointer
    from torchtitan_rl.setup.resume import config_fields
    from torchtitan_rl.setup.run_folder import RunFolderCheck

    return Checkpointer(
        config.checkpoint,
        trainer=trainer,
        prompts=prompts,
        run_state=state,
        run_folder=run_folder,
        config_fields=config_fields(config),
        check_folder=RunFolderCheck(run_folder),
    )


def _build_services(
    config: "RunConfig",
    trainer: "Trainer",
    prompts: "PromptStream",
    recorder: "Recorder",
    weight_sync: "WeightSync",
    checkpointer: "Checkpointer",
    run_folder: Path,
) -> "Services":
    """The controller's services. From here on a signal lets the step finish."""
    import torch.distributed as dist

    from torchtitan_rl.core.services import Services
    from torchtitan_rl.observability.observer import RunObserver
    from torchtitan_rl.resilience.rank_output import failure_marker
    from torchtitan_rl.resilience.replicated import check_replicated
    from torchtitan_rl.resilience.stop_signal import StopSignal
    from torchtitan_rl.setup.memory import footprint_of

    footprint = footprint_of(config, model=trainer.model, world_size=dist.get_world_size())
    return Services(
        prompts=prompts,
        observer=RunObserver(
            recorder,
            algorithm=trainer.algorithm,
            prompts=prompts,
            footprint=footprint,
            run_folder=run_folder,
            mask=masked,
        ),
        weight_sync=weight_sync,
        checkpoints=checkpointer,
        stop=StopSignal(failure_marker=failure_marker(run_folder)),
        check_replicated=check_replicated,
        run_folder=run_folder,
    )


def _write_report(config: "RunConfig", run_folder: Path) -> None:
    """Write report.html to a run's folder at its end, on rank 0. Logs a warning if that fails."""
    if os.environ["RANK"] != "0" or not (config.metrics.enabled and config.metrics.report):
        return
    path = run_folder / REPORT
    try:
        from torchtitan_rl import report  # only needed at the end of the run

        report.write_report([run_folder], path)
        events.progress(f"report: {path}")
    except Exception as error:
        message = f"the report could not be written ({error}); python -m torchtitan_rl.report tries again"
        shown = None if isinstance(error, OSError) else error  # a full disk or a deleted folder needs none
        logging.getLogger(__name__).warning(message, exc_info=shown)


def _close(controller: "Controller") -> None:
    """Close a finished run. Its last checkpoint is saved, so an error in the teardown must not make it look failed."""
    try:
        controller.close()
    except Exception:
        logging.getLogger(__name__).warning("the run is complete and saved, but its teardown failed", exc_info=True)


if __name__ == "__main__":
    main()
