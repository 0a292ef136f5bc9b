from torchtitan_rl.evaluation import Evaluation
from torchtitan_rl.generator import SamplingConfig


def test_due_before_the_first_step_every_so_many_and_after_the_last():
    evaluation = Evaluation.Config(every=10).build()
    assert [step for step in range(26) if evaluation.due(step, 25)] == [0, 10, 20, 25]
    assert not any(Evaluation.Config(every=0).build().due(step, 25) for step in range(26))


def test_a_sampled_pass_has_names_of_its_own():
    [greedy] = Evaluation.Config().build().passes
    assert (greedy.prefix, greedy.split, greedy.sampling.temperature) == ("evaluation", "eval_greedy", 0)
    _, sampled = Evaluation.Config(sampled=SamplingConfig(n=4)).build().passes
    assert (sampled.prefix, sampled.split, sampled.sampling.n) == ("evaluation/sampled", "eval_sampled", 4)
