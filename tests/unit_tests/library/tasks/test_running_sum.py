"""running_sum: more numbers than fit into the window can only be added where the history is compacted."""

from tests.parts.conversations import ScriptedEngine, TaskWith
from tests.parts.talk import chat_tokenizer
from torchtitan_rl.core.generator import SamplingConfig
from torchtitan_rl.core.generator.conversation import Conversation, Sampled
from torchtitan_rl.core.generator.rollout import roll_out
from torchtitan_rl.library.environments.factory import Conversations
from torchtitan_rl.library.prompts.stream import PromptStream
from torchtitan_rl.library.tasks import RunningSum


class Adder(ScriptedEngine):
    """A policy that says the right sums."""

    def __init__(self, made, example) -> None:
        super().__init__(made, "00")
        self.made, self.total, self.numbers = made, example["start"], list(example["numbers"])

    def step(self) -> list[Sampled]:
        self.total = (self.total + self.numbers.pop(0)) % 100
        ids = self.made(f"{self.total:02d}{self.made.eos_token}")["input_ids"]
        indices, self.asked = self.asked, []
        return [Sampled(index, ids, [-0.5] * len(ids), f"{self.total:02d}", "stop") for index in indices]


def play(compact_tokens: int | None, most_tokens: int) -> tuple[Conversation, RunningSum]:
    made, task = chat_tokenizer(), RunningSum.Config(compact_tokens=compact_tokens).build()
    [prompt] = PromptStream.Config(max_prompt_tokens=100).build(task=task, tokenizer=made, seed=0).next_batch(1)
    one = Conversation(
        prompt=prompt, sample_idx=0, sampling=SamplingConfig(max_tokens=100), most_in_turn=10, most_tokens=most_tokens
    )
    pool = Conversations.Config().build(
        members=TaskWith(task.environment).members(), tokenizer=made, end_token_ids=[made.eos_token_id],
        template_options={},
    ).start([one])  # fmt: skip
    list(roll_out([one], Adder(made, prompt.columns), pool, lambda value: value, wait_for_answers=True))
    return one, task


def reward(one: Conversation, task: RunningSum) -> float:
    [value] = task.correct(completions=[one.completion(0).messages], expected_answer=[one.prompt.expected_answer])
    return value


def test_a_sum_that_outgrows_the_window_needs_compaction():
    whole, task = play(None, most_tokens=1000)
    assert (whole.finish_reason, len(whole.traces), reward(whole, task)) == ("stop", 1, 1.0)
    longest = len(whole.context) * 2 // 3
    cut, task = play(None, most_tokens=longest)
    assert (cut.finish_reason, reward(cut, task)) == ("max_tokens", -1.0)
    compacted, task = play(longest // 2, most_tokens=longest)
    assert (compacted.finish_reason, reward(compacted, task)) == ("stop", 1.0)
    assert len(compacted.traces) >= 3
    assert [turn.text for turn in compacted.turns] == [turn.text for turn in whole.turns]


def test_the_compacted_context_is_the_policys_last_sum():
    one, _ = play(1, most_tokens=1000)
    for trace, turn, more in zip(one.traces[1:], one.turns, one.prompt.columns["numbers"][1:], strict=False):
        assert trace.origin.messages == ({"role": "user", "content": f"Sum {turn.text}. Add {more}."},)
        assert trace.origin.reason == "compacted"
