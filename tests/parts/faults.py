"""Faults of runs, the message of each and the test that causes it: the second half of docs/errors.md."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One row."""

    what: str
    says: str
    code: str
    test: str
    """Under tests/: file::function."""


def _read(paragraph: str) -> Fault:
    """Parse a paragraph: the fault, the message (indented), and in the last line the exit code and the test."""
    what, *says, last = (line.strip() for line in paragraph.splitlines())
    code, _, test = last.rpartition(" ")
    return Fault(what, " ".join(says), code, test)


PARAGRAPHS = """
a rank is killed
  rank 1 (node3) in step 3: grade was killed by signal 9 (SIGKILL). ... Its peak was ... The same command with --dump-folder
  RUN goes on after step-2.
  137 fault_injection/test_kills.py::test_killed_rank_of_two_is_named_and_the_job_resumes_bitwise

a rank is killed because memory ran out
  ...: out of memory, by its control group's counter. Its peak was 3.4 of the 6.5 GiB of memory that its control group allows ...
  Lower what the reward functions keep, ... --dump-folder RUN goes on after step-1.
  137 fault_injection/test_out_of_memory.py::test_rank_killed_for_out_of_memory_is_reported_with_settings_to_lower

a rank is refused memory (MemoryError)
  This process was refused memory in step 3: train. Lower trainer.max_tokens_per_microbatch, num_prompts_per_step or ...
  1 unit_tests/test_train.py::test_out_of_memory_error_names_settings_to_lower_by_phase

the launcher or torchrun's agent is killed
  torchrun's agent was killed by signal 9 (SIGKILL). ... The ranks ended with it.
  137 fault_injection/test_kills.py::test_no_process_outlives_a_killed_launcher_or_agent

a rank ends by itself, with code 0
  rank 1 (node3) in step 2: grade ended with code 0 before the end of training
  1 fault_injection/test_false_success.py::test_job_exits_with_1_if_one_of_two_ranks_exits_early_with_0

ranks have another config: a file, a variable or a random number that is not the same on every node
  error: config: it differs between the ranks: seed is 0 on rank 0, 1 on rank 1. Start every node with the same command, ...
  2 fault_injection/test_differing_ranks.py::test_differing_ranks_end_the_run_and_name_the_difference

ranks come to other prompts, completions, rewards or advantages
  stopped: step 1: the prompts differ between the ranks: they are not the same on ranks 0, 2 and on rank 1. Every rank must
  compute the same from the config, the seed and the step alone. ...
  3 fault_injection/test_differing_ranks.py::test_differing_ranks_end_the_run_and_name_the_difference

a run in which no completion ever has a reward
  stopped: no completion of 50 steps had a reward: every reward function failed or returned None, so nothing was learned.
  3 unit_tests/observability/metrics/test_idle.py::test_run_without_any_reward_fails

a reward function that fails in a dry run
  error: Reward function 'fails' failed on prompt 'What is ...': TypeError: ... Correct the function, or set grader.on_failure_of ...
  2 unit_tests/setup/test_dry_run.py::test_a_reward_that_fails_in_a_dry_run_is_an_error_as_in_the_run

an alarm that a reward function has set
  rank 0 (node3) in step 2: grade was killed by signal 14 (SIGALRM).
  142 fault_injection/test_false_success.py::test_alarm_signal_set_by_a_reward_is_named

importing the config never ends
  watchdog: rank 0 (node3) in read the config for 31 s; the job is ended at 300 s, with its stack
  1 fault_injection/test_stalls.py::test_config_with_endless_import_is_shown_with_its_stack

a rank does not end after its training, as in a close of the engine that never returns
  watchdog: rank 0 (node3) in end for 601 s: longer than the limit of this phase (600 s); the job is ended
  0 fault_injection/test_launcher.py::test_ranks_that_hang_after_training_are_killed_and_the_run_succeeds

importing the config calls sys.exit(0)
  error: --config = 'mine.py': expected Python that can be imported, but: SystemExit, as it calls sys.exit(0) (mine.py, line 3).
  2 unit_tests/test_train.py::test_config_that_exits_fails_the_run

the other nodes never come, or have another address
  error: the 2 nodes did not meet (DistStoreError: ...). Start the same command on every node, with the same NNODES, ...
  2 unit_tests/resilience/test_launch.py::test_nodes_that_do_not_meet_are_told_in_a_sentence

the disk is full while an evaluation is written
  evaluation/step-4.json is not written: [Errno 28] No space left on device; the run continues without it
  0 unit_tests/observability/test_disk.py::test_evaluation_without_disk_space_is_a_warning_and_leaves_no_file

a KL run is resumed with another start as its reference
  ... reference 5f0c... -> 81ab... (the KL term pulls towards other weights). ... accept it with --resume-changed.
  2 unit_tests/setup/test_resume.py::test_kl_run_with_another_reference_is_refused

a rank is stopped by a signal
  watchdog: rank 1 (node3) in step 3: train for 26 s; rank 0 (node3) waits in step 3: train; ... rank 1 is stopped by a
  signal: kill -CONT 712
  1 fault_injection/test_stalls.py::test_suspended_rank_is_named_with_a_remedy_and_the_job_ends_at_the_timeout

a reward function of grader.in_process hangs on one rank
  watchdog: rank 1 (node3) in step 2: grade for 26 s; ... the job is ended at 1500 s, with its stack
  1 fault_injection/test_stalls.py::test_hanging_reward_is_shown_with_its_stack

a node is lost
  watchdog: no news from rank 1 (node3) on node ... for 30 s; the job is ended at 180 s
  1 fault_injection/test_launcher.py::test_lost_node_ends_the_other_node_with_a_reason

a rank dies with --max-restarts
  ... was killed by signal 9 ... The ranks are started again and go on from the last checkpoint.
  0 fault_injection/test_launcher.py::test_max_restarts_restarts_the_ranks_and_reports_the_cause

Ctrl-C, SIGTERM
  SIGINT: saving a checkpoint after this step; a second signal stops at once
  130, 143 fault_injection/test_signals.py::test_first_stop_signal_saves_after_the_step_and_the_run_resumes_bitwise

a second signal
  stopped at once; earlier checkpoints are whole
  130, 143 fault_injection/test_signals.py::test_second_stop_signal_ends_the_run_at_once

a signal before the first step
  SIGINT before the first step: nothing new is saved
  130, 143, 138 fault_injection/test_signals.py::test_stop_signal_before_the_first_step_ends_at_once_without_a_traceback

a signal in the warm start
  SIGINT before the first step: nothing new is saved
  130 fault_injection/test_signals.py::test_stop_signal_in_the_warm_start_ends_at_once_and_leaves_no_partial_checkpoint

SIGUSR1 before a time limit
  SIGUSR1: saving a checkpoint after this step
  75 fault_injection/test_signals.py::test_first_stop_signal_saves_after_the_step_and_the_run_resumes_bitwise

the terminal of a run under nohup is closed
  nothing: the run continues
  0 unit_tests/resilience/test_stop_signal.py::test_sighup_is_ignored_under_nohup

a reward function calls sys.exit(0)
  stopped: Reward function 'exits' failed on prompt ...: SystemExit: 0
  3 fault_injection/test_false_success.py::test_reward_that_calls_exit_stops_the_run_with_a_message_and_keeps_the_checkpoint

a reward function forks and returns twice
  a reward or tool forked and returned in the child too: the child ends here
  0 fault_injection/test_false_success.py::test_reward_that_forks_and_returns_twice_is_counted_once

nobody reads its output any more (a closed terminal, head -1)
  WARNING: stdout cannot be written any more ([Errno 32] Broken pipe): training continues, and its logs are in the run's folder
  0 unit_tests/resilience/test_rank_output.py::test_closed_pipe_fails_no_print_and_is_reported_once

every reward fails, with on_failure none
  No completion got a reward: all 16 failed, such as ..., 3 times in a row
  3 unit_tests/core/grading/test_calls.py::test_run_stops_after_repeated_steps_without_any_reward

your own code raises
  a traceback, and: The last line of your own code in it: mine.py, line 7
  1 unit_tests/test_train.py::test_a_traceback_ends_with_the_last_line_that_is_the_users_own

the disk is full
  step 2 is not saved: the disk of RUN/checkpoint lacks 9,412,608 bytes (0.01 GiB). ...; tried again after each step, until
  step 3
  0, or 3 fault_injection/test_false_success.py::test_full_disk_is_reported_in_bytes_and_training_continues_once_there_is_room

a quota is reached
  step 1 is not saved: writing it failed: rank 0: ...
  0, or 3 fault_injection/test_false_success.py::test_file_size_limit_fails_a_save_and_keeps_earlier_checkpoints

the run folder is deleted
  stopped: the run folder RUN has vanished, with all that was saved.
  3 fault_injection/test_false_success.py::test_deleting_the_run_folder_stops_the_run_with_exit_code_3

the run folder is moved, and another run starts in its place
  stopped: the run folder RUN is another run's now: it was moved away, or its file system has no locks between nodes.
  3 unit_tests/setup/test_run_folder.py::test_a_folder_that_another_run_has_taken_ends_this_one_at_its_next_step

the disk is full at the start
  error: dump_folder: cannot write to RUN: No space left on device. Pass --dump-folder with a folder you may write to.
  2 unit_tests/observability/test_disk.py::test_full_disk_at_the_start_is_a_user_error

a checkpoint's file is flipped, torn or lost
  skipped step-3: __0_0.distcp is damaged: its bytes are not those that were written
  0 fault_injection/test_checkpoint_files.py::test_damaged_checkpoint_resumes_from_the_one_before_bitwise

all checkpoints are damaged
  error: no checkpoint in RUN/checkpoint can be used: step-2: ...; step-1: ...
  2 fault_injection/test_checkpoint_files.py::test_run_without_an_intact_checkpoint_refuses_to_start_over

a checkpoint's index or value names code
  the index names os.system, which no checkpoint of this program contains
  2 unit_tests/resilience/test_checkpointer.py::test_checkpoint_index_with_code_is_refused_without_running_it

another seed, model, task or batch on resume
  this config is not the one of step-2: seed 0 -> 5 (...). ... accept it with --resume-changed.
  2 fault_injection/test_checkpoint_files.py::test_resume_with_a_changed_config_is_refused_until_accepted

fewer steps on resume than are done
  num_steps = 19: expected at least 20, the steps done at step-20. Raise it, or --resume an earlier step.
  2 unit_tests/setup/test_resume.py::test_num_steps_below_the_finished_step_is_refused_before_anything_starts

a command that is refused in the folder of a finished run
  any of these messages; what is in the folder stays as it is: config.json, end.json, the report, the checkpoints
  2 unit_tests/setup/test_run_folder.py::test_a_start_that_is_refused_before_it_begins_leaves_a_finished_run_as_it_was

--resume 2, and the engine does not start
  a traceback; step-3 is still the newest checkpoint: later steps are set aside with the first step
  1 unit_tests/resilience/test_checkpointer.py::test_later_checkpoints_are_set_aside_with_the_first_step_after_going_back_and_not_before

--resume OTHER, in the folder of a run that was not forked from there
  resume = 'OTHER': expected auto or one of [10, 20]: RUN has checkpoints, and was not forked from there.
  2 unit_tests/resilience/test_checkpoint_folder.py::test_resume_path_of_an_unrelated_run_is_refused

--resume 77, which is not there
  resume = 77: expected a step with a checkpoint in RUN/checkpoint: one of [10, 20]
  2 unit_tests/resilience/test_checkpoint_folder.py::test_missing_step_is_named_with_the_existing_ones

--resume never, in a folder with checkpoints
  resume = 'never': expected a run folder without checkpoints
  2 unit_tests/resilience/test_checkpoint_folder.py::test_never_refuses_a_folder_with_checkpoints

a folder that another run is using
  dump_folder: another run is using RUN. Wait for it to end, or pass another --dump-folder.
  2 unit_tests/setup/test_run_folder.py::test_a_folder_in_use_is_refused_until_the_other_run_ends

NaN in the weights
  the weights of layers.3.feed_forward.w2.weight not finite
  3 unit_tests/proof/test_finite.py::test_non_finite_weights_always_stop_training

NaN in the gradient
  loss nan, gradient norm nan: the gradients not finite; the update was not applied. It is number 1 in a row
  3 unit_tests/proof/test_finite.py::test_non_finite_updates_are_skipped_up_to_a_limit_reset_by_a_good_one

NaN in a reward
  the prompt, the sample and the function, by name
  3 unit_tests/core/algorithm/test_nonfinite.py::test_non_finite_reward_is_reported_with_prompt_sample_and_function

NaN in the sampler's log-probabilities
  the prompt and the token
  3 unit_tests/core/algorithm/test_nonfinite.py::test_non_finite_sampler_logprob_is_reported_or_masked

sampler and trainer disagree
  sampler/logprob_diff/max is 0.2, over trainer.logprob_gate.max_diff 0.001: the sampler did not sample from the policy
  3 unit_tests/proof/test_gate.py::test_gate_stops_with_the_likely_causes
"""

FAULTS = [_read(paragraph) for paragraph in PARAGRAPHS.strip().split("\n\n")]


def section() -> list[str]:
    """Lines of docs/errors.md."""
    lines = [
        "## Faults of a run",
        "",
        "The message, shortened, and the exit code for each fault. [tests/parts/faults.py](../tests/parts/faults.py) names the test",
        "that causes it. [recovery.md](recovery.md) says what is on the disk then.",
        "",
        "| fault | message | code |",
        "|---|---|---|",
    ]
    return [*lines, *(f"| {fault.what} | {fault.says} | {fault.code} |" for fault in FAULTS), ""]
