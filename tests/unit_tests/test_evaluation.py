import json

from tests.parts.grading import group
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.evaluation import Evaluation
from torchtitan_rl.observe.evaluation_results import failures_of, print_results, write_results
from torchtitan_rl.observe.observer import record_evaluation
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import EvaluationPass, Group, ScoredCompletion


def test_sampled_evaluation_has_its_own_metric_names():
    [(greedy, sampling)] = Evaluation.Config().build().passes.items()
    assert (greedy.prefix, greedy.split, sampling.temperature) == ("evaluation", "eval_greedy", 0)
    _, (sampled, sampling) = Evaluation.Config(sampled=SamplingConfig(n=4)).build().passes.items()
    assert (sampled.prefix, sampled.split, sampling.n) == ("evaluation/sampled", "eval_sampled", 4)


def test_evaluations_sample_as_many_tokens_as_training_unless_they_set_their_own():
    config = Evaluation.Config(sampled=SamplingConfig(n=4, max_tokens=7)).like(SamplingConfig(max_tokens=48))
    assert (config.sampling.max_tokens, config.sampling.n, config.sampled.max_tokens) == (48, 1, 7)


def concluded(evaluation, *accuracies):
    """Which of these results were the best so far."""
    best = []
    for accuracy in accuracies:
        evaluation.conclude({"evaluation/accuracy": accuracy, "evaluation/length": 100 * accuracy}, step=10)
        best.append(evaluation.is_best)
    return best


def test_best_result_and_early_stopping():
    evaluation = Evaluation.Config(best_by="evaluation/accuracy", stop_after=2).build()
    assert concluded(evaluation, 0.5, 0.4, 0.6, 0.6) == [True, False, True, False]
    assert not evaluation.gives_up
    resumed = Evaluation.Config(best_by="evaluation/accuracy", stop_after=2).build()
    resumed.load_state_dict(json.loads(json.dumps(evaluation.state_dict())))
    assert concluded(resumed, 0.1) == [False]
    assert resumed.gives_up
    by_length = Evaluation.Config(best_by="-evaluation/length", stop_after=2).build()
    by_length.load_state_dict(evaluation.state_dict())
    assert (by_length.best, concluded(by_length, 0.5)) == (None, [True])
    shortest = Evaluation.Config(best_by="-evaluation/length").build()
    assert concluded(shortest, 0.5, 0.4, 0.6) == [True, True, False]
    assert (shortest.best, shortest.best_step) == (40.0, 10)
    assert concluded(Evaluation.Config().build(), 0.5) == [False]


def test_nan_is_never_the_best_result_wherever_it_comes():
    nan = float("nan")
    evaluation = Evaluation.Config(best_by="evaluation/accuracy", stop_after=2).build()
    assert concluded(evaluation, nan, 1.0, 2.0, nan) == [False, True, True, False]
    assert not evaluation.gives_up
    assert evaluation.best == 2.0
    old = Evaluation.Config(best_by="evaluation/accuracy").build()
    old.load_state_dict({"best": nan, "worse": 0})  # from a checkpoint of before
    assert concluded(old, 0.5) == [True]


def evaluated(*correct, idx=0, task=""):
    """A group of one prompt with these judgements."""
    asked = group(*("46" if one else "45" for one in correct), prompt_idx=idx, task=task)
    samples = [ScoredCompletion(completion=c, reward=0.0, answer=c.text, correct=c.text == "46") for c in asked.samples]
    return Group(prompt=asked.prompt, samples=samples)


def test_results_are_printed_overall_and_by_task_with_wrong_answers(one_rank, tmp_path, capsys):
    told = [(True, "a"), (False, "a"), (True, "b")]
    groups = draft_episodes([evaluated(right, idx=i, task=task) for i, (right, task) in enumerate(told)])
    metrics = record_evaluation(groups, EvaluationPass("evaluation", "eval_greedy"), step=40)
    results = {"metrics": metrics, "failures": {"evaluation": failures_of(groups)}}
    assert metrics["evaluation/accuracy"] == 2 / 3
    assert (metrics["evaluation/a/accuracy"], metrics["evaluation/b/accuracy"]) == (0.5, 1.0)
    assert metrics["evaluation/accuracy_low"] < 2 / 3 < metrics["evaluation/accuracy_high"]
    [failure] = failures_of(groups)
    assert (failure["answer"], failure["expected_answer"], failure["completion"]) == ("45", "46", "45")
    write_results(tmp_path / "evaluation", 40, results)
    assert json.loads((tmp_path / "evaluation" / "step-40.json").read_text()) == results
    print_results(tmp_path / "evaluation", 40)
    printed = capsys.readouterr().out
    assert "accuracy=66.7% (" in printed
    assert "expected_answer=46" in printed
