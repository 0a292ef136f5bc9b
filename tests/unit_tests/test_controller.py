"""The controller's order of calls, with fakes of its parts that record each call."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tests.parts.algorithm import MAX_TOKENS, prompt, scored
from torchtitan_rl.algorithm import Algorithm, MaxRl
from torchtitan_rl.controller import Controller
from torchtitan_rl.errors import SamplerFault, UserError
from torchtitan_rl.evaluation import Evaluation
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.sampler import Sampler
from torchtitan_rl.state import RunState
from torchtitan_rl.types import Completion, Episode, Group, ScoredCompletion

DIFFERENT, EQUAL = (1.0, 0.0), (1.0, 1.0)
SIGTERM = 15


@dataclass
class Run:
    """Plays every part of a run that the controller calls, and records the calls in order."""

    rewards: list = field(default_factory=list)
    """The rewards of each training group, in the order of sampling. Afterwards they differ."""
    accuracies: list = field(default_factory=list)
    """The accuracy of each evaluation."""
    held_out: tuple = (1.0,)
    """The reward of each held-out prompt."""
    stop_in_step: int = -1
    """The step in which a signal arrives."""
    fault: Exception | None = None
    """Raised by the update."""
    calls: list = field(default_factory=list)
    given: dict = field(default_factory=dict)
    """The rewards of each sampled group by its prompt_idx."""
    states: list = field(default_factory=list)
    """What the grader was told of the run, for each step."""
    kept: list = field(default_factory=list)
    """What the observer keeps in case the step fails: split, type of the samples, number of groups."""

    rank_in_replica: int = 0

    optimizer_steps = 0
    trained_tokens = 8

    def say(self, *words):
        self.calls.append(" ".join(str(word) for word in words))

    # Prompts, and the groups of a step
    def observe(self, groups):
        self.say("observe", len(groups), "credited groups")

    def epoch(self, num_seen):
        return None

    def num_new(self, needed):
        return needed

    def next_batch(self, num_prompts, *, first_idx):
        self.say("prompts", first_idx, "to", first_idx + num_prompts - 1)
        return [prompt(first_idx + number) for number in range(num_prompts)]

    @contextmanager
    def step_groups(self, new, needed, *, step, round):
        assert needed == len(new)
        yield self.sample(new, round)
        self.say("carry the others")

    def sample(self, prompts, round):
        self.say("sample in round", round)
        for one in prompts:
            rewards = self.rewards.pop(0) if self.rewards else DIFFERENT
            self.given[one.prompt_idx] = rewards
            yield Group(prompt=one, samples=[scored(i, None).completion for i in range(len(rewards))])

    # Generator and trainer
    def generate(self, prompts, *, sampling_config, seeded):
        assert seeded  # otherwise an evaluation depends on the number of replicas
        self.say("sample held-out prompts")
        for one in prompts:
            self.given[one.prompt_idx] = self.held_out
            yield Group(prompt=one, samples=[scored(0, None).completion])

    def sleep(self):
        self.say("engine sleeps")

    def update(self, groups, teacher):
        self.say("update with", len(groups), "groups")
        self.optimizer_steps = 1
        if self.fault:
            raise self.fault
        return self

    # A frozen model
    name = "reference"

    def add_logprobs(self, groups):
        self.say("score", len(groups), "groups, first advantage", groups[0].samples[0].credit.advantage)

    # Grader
    def round(self, state):
        self.states.append(state)
        graded = []

        def begin(group):
            rewards = self.given[group.prompt.prompt_idx]
            graded.append(Group(prompt=group.prompt, samples=[scored(i, reward) for i, reward in enumerate(rewards)]))

        return SimpleNamespace(begin=begin, scored_groups=lambda: graded)

    def drain_metrics(self):
        return []

    # Weight sync, checkpoints, stop, observer
    def push(self, *, policy_version):
        self.say("push weights of step", policy_version)
        return 0

    def evidence(self):
        return "The engine holds the policy's weights."

    def save(self, step, *, last_step=False):
        self.say("save step", step, *(["as the last"] if last_step else []))
        return last_step

    def keep_best(self, step):
        self.say("keep step", step, "as the best")

    def stop_requested(self):
        return SIGTERM if f"push weights of step {self.stop_in_step}" in self.calls else 0

    def keep(self, groups, *, step, split):
        if groups:
            self.kept.append((split, type(groups[0].samples[0]), len(groups)))

    def step(self, groups, update, state):
        self.say("observe", state.prompts_seen, "prompts")

    def evaluation(self, passes, state, measured):
        return {"evaluation/accuracy": self.accuracies.pop(0)}

    def flush(self, step):
        self.say("flush step", step)

    def close(self):
        self.say("close")


pytestmark = pytest.mark.usefixtures("one_rank")


def controller(run, *, num_steps=1, resumed_at=0, algorithm=None, **evaluation):
    algorithm = algorithm or Algorithm.Config()
    evaluation = Evaluation.Config(**{"every": 0, **evaluation})
    config = Controller.Config(num_steps=num_steps, num_prompts_per_step=2, algorithm=algorithm, evaluation=evaluation)
    state = RunState()
    state.step = resumed_at
    return Controller(
        config=config, tokenizer=None, grader=None, tool_workers=None,
        prompts=run, held_out=[prompt(0)], generator=run, sampler=Sampler(run, run, run, run.keep), sources=[run], trainer=run, weight_sync=run,
        evaluation=evaluation.build(), state=state, algorithm=algorithm.build(max_completion_tokens=MAX_TOKENS),
        observer=run, checkpoints=run, stop_requested=run.stop_requested, teacher=None,
    )  # fmt: skip


def test_step_samples_updates_pushes_flushes_and_saves_in_order():
    run = Run()
    assert controller(run).run() == 0
    assert run.calls == [
        "push weights of step 0",
        "prompts 0 to 1",
        "sample in round 0",
        "carry the others",
        "engine sleeps",
        "score 2 groups, first advantage 0.0",
        "observe 2 credited groups",
        "update with 2 groups",
        "push weights of step 1",
        "observe 2 prompts",
        "flush step 1",
        "save step 1 as the last",
        "close",
    ]


def test_groups_are_kept_as_sampled_graded_and_credited_in_case_their_step_fails():
    run = Run(accuracies=[0.1], fault=SamplerFault("The difference is 3."))
    with pytest.raises(SamplerFault):
        controller(run, num_steps=2, every=2).run()
    assert run.kept == [
        ("eval_greedy", Completion, 1),
        ("eval_greedy", ScoredCompletion, 1),
        ("train", Completion, 1),
        ("train", Completion, 1),
        ("train", ScoredCompletion, 2),
        ("train", Episode, 2),
    ]


@pytest.mark.parametrize(
    ("rewards", "rounds", "asked"),
    [([DIFFERENT, EQUAL, EQUAL], 3, ["0 to 1", "2 to 2", "3 to 3"]), ([EQUAL] * 10, 1, ["0 to 1", "2 to 3"])],
)
def test_refill_samples_as_many_prompts_as_groups_have_equal_rewards_for_some_rounds(rewards, rounds, asked):
    run = Run(rewards=rewards)
    controller(run, algorithm=Algorithm.Config(zero_variance="refill", refill_rounds=rounds)).run()
    calls = [call for call in run.calls if call.startswith(("prompts", "update"))]
    assert calls == [*(f"prompts {numbers}" for numbers in asked), "update with 4 groups"]


def test_reward_functions_are_told_the_step_the_runs_length_and_the_tokens_so_far():
    run = Run()
    controller(run, num_steps=2).run()
    told = [(one.global_step, one.max_steps, one.train_batch_size, one.num_input_tokens_seen) for one in run.states]
    assert told == [(1, 2, 16, 0), (2, 2, 16, 8)]


def test_one_rank_of_an_engine_grades_its_groups():
    run = Run(rank_in_replica=1)
    sampler = Sampler(run, run, run, run.keep)
    assert sampler.training_groups(run.next_batch(2, first_idx=0), 2, round=0, state=TrainerState(global_step=1)) == []


def test_stop_signal_ends_the_run_after_its_step_with_a_checkpoint():
    run = Run(stop_in_step=2)
    assert controller(run, num_steps=5).run() == SIGTERM
    assert run.calls[-4:] == ["flush step 2", "save step 2", "save step 2 as the last", "close"]


def test_stop_signal_in_the_last_step_saves_it_once():
    run = Run(stop_in_step=1)
    assert controller(run).run() == SIGTERM
    assert run.calls.count("save step 1 as the last") == 1


def test_resumed_run_pushes_the_weights_of_its_step_and_continues_with_the_next(capsys):
    run = Run(accuracies=[0.5])
    controller(run, num_steps=4, resumed_at=3, every=4).run()
    assert run.calls[:2] == ["push weights of step 3", "prompts 0 to 1"]
    assert [call for call in run.calls if call.startswith("flush")] == ["flush step 4"]
    assert "resuming after step 3" in capsys.readouterr().out


def test_finished_run_pushes_and_trains_nothing(capsys):
    run = Run()
    controller(run, num_steps=3, resumed_at=3).run()
    assert run.calls == ["close"]
    assert "already at step 3: raise num_steps (3) to go on" in capsys.readouterr().out


def test_evaluation_runs_before_the_first_step_at_its_interval_and_after_the_last():
    run = Run(accuracies=[0.1, 0.2, 0.3])
    controller(run, num_steps=3, every=2).run()
    shown = [call for call in run.calls if call.startswith(("sample held-out", "push", "flush"))]
    assert shown == [
        "push weights of step 0",
        "sample held-out prompts",
        "flush step 0",
        "push weights of step 1",
        "flush step 1",
        "push weights of step 2",
        "sample held-out prompts",
        "flush step 2",
        "push weights of step 3",
        "sample held-out prompts",
        "flush step 3",
    ]


@pytest.mark.parametrize("held_out", [(-1.0,), (1.0,)])
def test_maxrl_refuses_a_reward_below_its_lowest_as_soon_as_one_is_graded(held_out):
    run = Run(rewards=[EQUAL, (-1.0, -1.0)], accuracies=[0.1], held_out=held_out)
    with pytest.raises(UserError, match=r"algorithm.advantage.lowest = 0.0: expected at most -1, .*Set it to the"):
        controller(run, num_steps=3, every=3, algorithm=Algorithm.Config(advantage=MaxRl.Config())).run()
    assert run.calls[-1] == ("sample held-out prompts" if held_out == (-1.0,) else "carry the others")


def test_best_step_is_kept_before_it_is_saved_and_the_start_is_not_kept():
    run = Run(accuracies=[0.1, 0.3, 0.2])
    controller(run, num_steps=2, every=1, best_by="evaluation/accuracy").run()
    shown = [call for call in run.calls if call.startswith(("keep", "save"))]
    assert shown == ["keep step 1 as the best", "save step 1", "save step 2 as the last"]


def test_run_that_had_given_up_is_not_saved_once_more_when_it_is_started_again():
    run = Run()
    again = controller(run, num_steps=9, resumed_at=4, every=1, best_by="evaluation/accuracy", stop_after=1)
    again.evaluation.load_state_dict({"best": 0.5, "worse": 1})
    assert again.run() == 0
    assert run.calls == ["push weights of step 4", "close"]


def test_run_stops_and_saves_when_the_evaluation_gives_up():
    run = Run(accuracies=[0.5, 0.4, 0.3])
    assert controller(run, num_steps=9, every=1, best_by="evaluation/accuracy", stop_after=2).run() == 0
    assert run.calls[-3:] == ["save step 2", "save step 2 as the last", "close"]


def test_sampler_fault_has_the_evidence_of_the_weight_sync():
    class GateError(SamplerFault):
        """A kind of SamplerFault, which stays what it is."""

    run = Run(fault=GateError("The difference is 3."))
    with pytest.raises(GateError, match=r"^The difference is 3\. The engine holds the policy's weights\.$"):
        controller(run).run()
    assert run.calls[-1] == "update with 2 groups"
