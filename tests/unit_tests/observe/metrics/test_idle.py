import pytest

from tests.parts.observability import group, sample
from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.observe.metrics.idle import IdleNotice, likely_reason


def equal(**kwargs):
    return [group(0, sample(0, 0.0, **({"text": "a"} | kwargs)), sample(1, 0.0, **({"text": "b"} | kwargs)))]


def test_missing_signal_is_reported_after_one_and_three_steps_in_a_row(caplog):
    notice = IdleNotice()
    notice.see([group(0, sample(0, 0.0, advantage=-1.0), sample(1, 1.0, advantage=1.0))])
    assert caplog.messages == []
    for _ in range(4):
        notice.see(equal(correct=False))
    said = [message.partition(": every")[0] for message in caplog.messages]
    assert said == ["no learning signal for 1 step", "no learning signal for 3 steps"]
    assert "every advantage is 0. No completion is correct" in caplog.messages[0]


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([group(0, sample(0, None), sample(1, None))], "No completion has a reward"),
        (equal(text="same"), "identical: raise sampling.temperature"),
        (equal(finish_reason="length"), "truncated at sampling.max_tokens"),
        (equal(correct=False), "No completion is correct"),
        (equal(correct=False, answer=None), "the format rate is 0): ask for it in the prompts"),
        ([group(0, sample(0, 0.4, text="a"), sample(1, 0.4, text="b"))], "are equal, such as 0.4: use harder or"),
        (equal(correct=True), "Every completion is correct"),
        ([*equal(correct=True), *equal(correct=False)], "either always or never correctly"),
    ],
)
def test_missing_signal_report_has_the_likely_reason(groups, reason):
    assert reason in likely_reason(groups)


def test_run_without_any_reward_fails_and_says_where_the_reasons_are():
    notice = IdleNotice()
    notice.check_rewarded()  # an evaluation alone has no steps
    for _ in range(2):
        notice.see([group(0, sample(0, None), sample(1, None))])
    with pytest.raises(TrainingStopped, match="no completion of 2 steps had a reward.* extra/error/environment"):
        notice.check_rewarded()
    notice.see([group(0, sample(0, None), sample(1, 0.0))])
    notice.check_rewarded()
