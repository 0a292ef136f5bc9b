"""What of a conversation is recorded: metrics, rows, panels, traces."""

from dataclasses import replace

from torchtitan_rl.observe.metrics.completions import conversation_metrics
from torchtitan_rl.observe.sample_rows import episode_rows
from torchtitan_rl.types import Completion, Episode, Group, Prompt, ScoredCompletion, TurnRecord

CALL = TurnRecord(
    text="<tool_call>...</tool_call>", num_tokens=3, reward=-0.1, environment_seconds=0.2,
    columns={"tool_calls": 1, "tool_errors": 0}, messages=({"role": "tool", "name": "multiply", "content": "42"},),
)  # fmt: skip
LAST = TurnRecord(text="It is 42.", num_tokens=2, columns={"tool_calls": 0, "tool_errors": 0}, environment_seconds=0.4)


def group(*turns: TurnRecord, error: str | None = None) -> list[Group[Episode]]:
    mask = [True] * 3 + [False] * 4 + [True] * 2
    completion = Completion(
        sample_idx=0, policy_version=0, token_ids=range(9), sampler_logprobs=[-0.5 * m for m in mask], loss_mask=mask,
        text="\n".join(turn.text for turn in turns), finish_reason="stop", turns=turns, error=error,
    )  # fmt: skip
    messages = [{"role": "user", "content": "6 * 7?"}]
    prompt = Prompt(prompt_idx=0, text="6 * 7?", token_ids=[1], expected_answer="42", messages=messages)
    return [Group(prompt=prompt, samples=[Episode(scored=ScoredCompletion(completion=completion, reward=1.0))])]


def values(groups) -> dict[str, float]:
    return {name: metric.value for name, metric in conversation_metrics(groups).items()}


def test_conversation_metrics_count_turns_tools_seconds_and_tokens():
    found = values(group(CALL, LAST))
    assert found["conversations/turns/mean"] == 2
    assert found["conversations/tool_calls"] == 1
    assert found["conversations/tool_errors"] == 0
    assert found["conversations/environment_seconds/max"] == 0.4
    assert (found["conversations/tokens_sampled"], found["conversations/tokens_observed"]) == (5, 4)
    assert found["conversations/env_errors"] == 0


def test_an_environments_number_with_the_name_of_a_metric_does_not_replace_it():
    found = values(group(replace(CALL, columns={"count": 50, "turns/mean": 9, "wins": 1}), LAST))
    assert (found["conversations/count"], found["conversations/turns/mean"], found["conversations/wins"]) == (1, 2, 1)


def test_sample_row_stores_the_conversation_by_message():
    [row] = episode_rows(group(CALL, LAST), step=1, split="train")
    assert [message["role"] for message in row["conversation"]] == ["assistant", "tool", "assistant"]
    assert row["conversation"][0]["reward"] == -0.1
    assert (row["turns"], row["response_tokens"], row["observed_tokens"]) == (2, 5, 4)
    assert "conversation" not in episode_rows(group(), step=1, split="train")[0]
