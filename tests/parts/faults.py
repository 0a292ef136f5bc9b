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
  Lower trainer.max_tokens_per_microbatch, ... --dump-folder RUN goes on after step-1.
  137 fault_injection/test_out_of_memory.py::test_rank_killed_for_out_of_memory_is_reported_with_settings_to_lower

torchrun's agent is killed
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
  3 unit_tests/observe/metrics/test_idle.py::test_run_without_any_reward_fails_and_names_what_failed

the other nodes never come, or have another address
  error: the 2 nodes did not meet (DistStoreError: ...). Start the same command on every node, with the same NNODES, ...
  2 unit_tests/run/test_launch.py::test_nodes_that_do_not_meet_are_told_in_a_sentence

a KL run is resumed with another start as its reference
  ... reference 5f0c... -> 81ab... (the KL term pulls towards other weights). ... accept it with --resume-changed.
  2 unit_tests/run/test_resume.py::test_kl_run_with_another_reference_is_refused

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

Ctrl-C, SIGTERM
  SIGINT: saving a checkpoint after this step; a second signal stops at once
  130, 143 fault_injection/test_signals.py::test_first_stop_signal_saves_after_the_step_and_the_run_resumes_bitwise

a reward function calls sys.exit(0)
  stopped: Reward function 'exits' failed on prompt ...: SystemExit: 0
  3 fault_injection/test_false_success.py::test_reward_that_calls_exit_stops_the_run_with_a_message_and_keeps_the_checkpoint

every reward fails, with on_failure none
  No completion got a reward: all 16 failed, such as ..., 3 times in a row
  3 unit_tests/rewards/test_calls.py::test_run_stops_after_repeated_steps_without_any_reward

your own code raises
  a traceback, and: The last line of your own code in it: mine.py, line 7
  1 unit_tests/test_train.py::test_a_traceback_ends_with_the_last_line_that_is_the_users_own

the disk is full
  step 2 is not saved: the disk of RUN/checkpoint lacks 9,412,608 bytes (0.01 GiB). ...; tried again after each step, until
  step 3
  0, or 3 unit_tests/run/test_checkpointer.py::test_missing_disk_space_is_reported_in_bytes_before_writing

the run folder is deleted
  stopped: the run folder RUN has vanished, with all that was saved.
  3 fault_injection/test_false_success.py::test_deleting_the_run_folder_stops_the_run_with_exit_code_3

the run folder is moved, and another run starts in its place
  stopped: the run folder RUN is another run's now: it was moved away, or its file system has no locks between nodes.
  3 unit_tests/run/test_run_folder.py::test_a_folder_that_another_run_has_taken_ends_this_one_at_its_next_step

a checkpoint's file is flipped, torn or lost
  skipped step-3: __0_0.distcp is damaged: its bytes are not those that were written
  0 fault_injection/test_checkpoint_files.py::test_damaged_checkpoint_resumes_from_the_one_before_bitwise

all checkpoints are damaged
  error: no checkpoint in RUN/checkpoint can be used: step-2: ...; step-1: ...
  2 unit_tests/run/test_checkpoint_folder.py::test_without_a_complete_checkpoint_each_is_named_and_no_new_run_starts

a checkpoint's index or value names code
  the index names os.system, which no checkpoint of this program contains
  2 unit_tests/run/test_checkpointer.py::test_checkpoint_index_with_code_is_refused_without_running_it

another seed, model, task or batch on resume
  this config is not the one of step-2: seed 0 -> 5 (...). ... accept it with --resume-changed.
  2 fault_injection/test_checkpoint_files.py::test_resume_with_a_changed_config_is_refused_until_accepted

NaN in the weights
  the weights of layers.3.feed_forward.w2.weight not finite
  3 unit_tests/trainer/test_finite.py::test_non_finite_weights_always_stop_training

NaN in the gradient
  loss nan, gradient norm nan: the gradients not finite; the update was not applied. It is number 1 in a row
  3 unit_tests/trainer/test_finite.py::test_non_finite_updates_are_skipped_up_to_a_limit_reset_by_a_good_one

NaN in a reward
  the prompt, the sample and the function, by name
  3 unit_tests/algorithm/test_nonfinite.py::test_non_finite_reward_is_reported_with_prompt_sample_and_function

NaN in the sampler's log-probabilities
  the prompt and the token
  3 unit_tests/algorithm/test_nonfinite.py::test_non_finite_sampler_logprob_is_reported_or_masked

a push leaves wrong weights in the engine
  Weight sync 16 left the engine with other weights than the policy's: model.layers.1.mlp.down_proj.weight arrived with other
  values than the policy holds
  3 integration/sabotage.py::sabotages

sampler and trainer disagree
  sampler/logprob_diff/max is 0.2, over trainer.logprob_gate.max_diff 0.001: the sampler did not sample from the policy
  3 unit_tests/trainer/test_gate.py::test_gate_stops_with_the_likely_causes
"""

FAULTS = [_read(paragraph) for paragraph in PARAGRAPHS.strip().split("\n\n")]


def section() -> list[str]:
    """Lines of docs/errors.md."""
    lines = [
        "## Faults of a run",
        "",
        "The message, shortened, and the exit code for each fault. [tests/parts/faults.py](../tests/parts/faults.py) names the test",
        "that causes it. [recovery.md](recovery.md) says what is on the disk then, and what signals and `--resume` do.",
        "",
        "| fault | message | code |",
        "|---|---|---|",
    ]
    return [*lines, *(f"| {fault.what} | {fault.says} | {fault.code} |" for fault in FAULTS), ""]
