"""Grader: TRL reward functions unchanged, weights and breakdown, and what happens when one of them fails."""

import dataclasses
import functools

import pytest

from tests.parts.grading import TaskOf, build_grader, constant, grader, group, length, rewards, score
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.errors import UserError
from torchtitan_rl.rewards import Grader, RewardError
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.types import Completion, Group, TurnRecord


def test_sum_digits_group_gets_rewards_breakdown_and_answers():
    built = build_grader(Grader.Config(), SumDigits.Config().build())
    scored = score(built, "[ANSWER] 46", "[ANSWER] 36", "46", "[ANSWER] [ANSWER] 46")
    assert rewards(scored) == [1.2, -0.8, -1.0, 1.0]
    assert [s.correct for s in scored] == [True, False, False, True]
    assert scored[0].reward_breakdown == {"correct": 1.0, "format": 0.2}
    assert [s.answer for s in scored] == ["46", "36", None, "46"]
    assert [s.completion.sample_idx for s in scored] == [0, 1, 2, 3]


def test_plain_prompt_is_passed_with_trls_keywords():
    seen = {}

    def everything(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0] * len(prompts)

    score(grader(everything, in_process=["everything"]), "ab", "c", columns={"operands": [12, 34]})
    assert seen["prompts"] == ["What is 12 + 34?\n"] * 2
    assert seen["completions"] == ["ab", "c"]
    assert seen["completion_ids"] == [[0, 1], [0]]
    assert seen["expected_answer"] == ["46", "46"]
    assert seen["operands"] == [[12, 34], [12, 34]]
    assert callable(seen["log_extra"])
    assert callable(seen["log_metric"])


def test_unknown_keyword_of_a_reward_function_is_named():
    def needy(completions, difficulty):
        return difficulty

    with pytest.raises(UserError, match=r"the arguments of reward function needy = \['difficulty'\]: .* operands"):
        grader(needy)
    with pytest.raises(
        RewardError, match=r"'operand'.*missing 1 required .*operands"
    ):  # a row without the others' column
        score(grader(operand), "a")


def operand(completions, operands):
    return [0.0] * len(completions)


def test_callable_objects_partials_and_coroutines_are_reward_functions():

    class Judge:
        def __call__(self, completions, **_):
            return [1.0] * len(completions)

    def scaled(completions, by, **_):
        return [by] * len(completions)

    async def slow_judge(completions, **_):
        return [0.5] * len(completions)

    class AsyncJudge:
        async def __call__(self, completions, **_):
            return [0.25] * len(completions)

    scored = score(grader(Judge(), functools.partial(scaled, by=4.0), slow_judge, AsyncJudge()), "a")
    assert scored[0].reward_breakdown == {"Judge": 1.0, "scaled": 4.0, "slow_judge": 0.5, "AsyncJudge": 0.25}


def test_watching_function_gives_no_reward_where_the_others_gave_none():
    def hard(completions, **_):
        return [3.0, 2.0, None, 4.0]

    watched = grader(hard, constant(0.5, "watch"), weights={"watch": 0.0})
    scored = score(watched, "a", "b", "c", "d")
    assert rewards(scored) == [3.0, 2.0, None, 4.0]
    assert [one.reward_breakdown["watch"] for one in scored] == [0.5] * 4
    assert rewards(score(grader(constant(0.5, "watch"), length, weights={"watch": 0.0}), "ab")) == [2.0]


def test_none_omits_a_function_and_all_none_gives_no_reward():
    def sometimes(completions, **_):
        return [None if text == "skip" else 2.0 for text in completions]

    scored = score(grader(sometimes), "skip", "x")
    assert rewards(scored) == [None, 2.0]
    assert rewards(score(grader(sometimes, constant(1.0)), "skip", "x")) == [1.0, 3.0]
    assert scored[0].extra == {}


def test_correctness_is_judged_by_the_task_and_not_by_the_reward_sign():
    class Even(TaskOf):
        def extract_answer(self, text):
            return text or None

        def is_correct(self, answer, expected_answer):
            return answer is not None and int(answer) % 2 == int(expected_answer) % 2

    scored = score(build_grader(Grader.Config(), Even(constant(5.0))), "2", "3", "")
    assert [s.correct for s in scored] == [True, False, False]
    assert rewards(scored) == [5.0, 5.0, 5.0]


@pytest.mark.parametrize(("prompt", "opened"), [("What is 12 + 34?", "<think>"), ("What is 12 + 34?<think>\n", "")])
def test_an_own_extract_answer_reads_what_follows_the_thinking(prompt, opened):
    class LastWord(SumDigits):
        def extract_answer(self, text):
            return (text.split() or [None])[-1]

    task = LastWord(SumDigits.Config())
    scored = score(build_grader(Grader.Config(), task), f"{opened}7</think> 46", f"{opened}is it 46", text=prompt)
    assert [(s.answer, s.correct, s.reward_breakdown["correct"]) for s in scored] == [
        ("46", True, 1),
        (None, False, -1),
    ]


@pytest.mark.parametrize(
    ("method", "value", "reason"),
    [
        ("extract_answer", 46, "extract_answer returned 46, expected a text or None"),
        ("is_correct", "no", "judge returned 'no', expected True, False or None"),
    ],
)
def test_a_judgement_of_another_type_is_an_error_because_it_would_grade_wrongly(method, value, reason):
    counts = type("Counts", (TaskOf,), {method: lambda *_: value})
    with pytest.raises(RewardError, match=reason):
        score(build_grader(Grader.Config(), counts(constant(5.0))), "46")


def test_reward_function_receives_finish_reasons_token_ids_logprobs_and_turns():
    seen = {}

    def curious(finish_reasons, logprobs, loss_masks, completion_ids, trainer_state, turn_columns):
        seen.update(locals())
        turn_columns[0][0]["tests"] = 9  # its own copy
        return [0.0, 0.0]

    prompt = group("a").prompt
    fields = {"policy_version": 0, "text": ""}
    turns = tuple(TurnRecord(text="", num_tokens=1, columns={"tests": n}) for n in (2, 3))
    cut = {"token_ids": [5, 6], "sampler_logprobs": [-0.5, -2], "finish_reason": "length", "turns": turns}
    with_tool = {"token_ids": [5, 8, 9], "sampler_logprobs": [-1, 0, -0.25], "finish_reason": "stop"}
    with_tool["loss_mask"] = [True, False, True]
    groups = [
        Group(
            prompt=prompt, samples=[Completion(sample_idx=i, **one, **fields) for i, one in enumerate((cut, with_tool))]
        )
    ]
    graded = grader(curious, in_process=["curious"])
    graded.grade(groups, state=TrainerState(global_step=4, max_steps=50))
    assert seen["turn_columns"] == [[{"tests": 9}, {"tests": 3}], []]
    assert turns[0].columns == {"tests": 2}
    assert seen["finish_reasons"] == ["length", "stop"]
    assert seen["logprobs"] == [[-0.5, -2.0], [-1.0, -0.25]]
    assert seen["loss_masks"] == [[True, True], [True, False, True]]
    assert seen["completion_ids"] == [[5, 6], [5, 8, 9]]
    assert (seen["trainer_state"].global_step, seen["trainer_state"].max_steps) == (4, 50)
    graded.grade(groups)
    assert seen["trainer_state"].global_step == 0


def test_trainer_state_uses_transformers_field_names(build):
    import transformers

    state = TrainerState(global_step=4, max_steps=50, epoch=0.25)
    theirs = transformers.TrainerState()
    names = {f.name for f in dataclasses.fields(theirs)}
    assert {f.name for f in dataclasses.fields(state)} == names
    assert all(type(getattr(state, name)) in (type(getattr(theirs, name)), float) for name in names)

    def scheduled(completions, trainer_state, **_):
        assert not trainer_state.log_history
        return [trainer_state.epoch * trainer_state.is_world_process_zero]

    [scored] = build(scheduled).grade([group("a")], state=state)
    assert rewards(scored.samples) == [0.25]


def test_duplicate_function_names_and_settings_of_unknown_functions_are_errors():
    with pytest.raises(UserError, match=r"constant.*: expected names that no other function"):
        grader(constant(1.0), constant(2.0))
    with pytest.raises(UserError, match=r"grader.rewards = \['judgement'\]"):
        grader(constant(1.0, "judgement"))
    for setting in ({"weights": {"lenght": 1.0}}, {"scope_of": {"lenght": "batch"}}):
        with pytest.raises(UserError, match=r"lenght.*expected names of.*\['length'\]"):
            grader(length, **setting)
