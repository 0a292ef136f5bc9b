"""A tiny random Qwen3 with a chat tokenizer in a real engine, and environments to talk to."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from safetensors.torch import load_file

from tests.parts.only_rank import only_rank
from tests.parts.pushes import fill
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.conversation import Conversation, Sampled
from torchtitan_rl.environments import Environment, Turn
from torchtitan_rl.environments.factory import Conversations
from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.generator.rollout import roll_out
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import Prompt


class Says(Environment):
    """Answers every message with the next of these turns; the last one ends the conversation."""

    def __init__(self, *turns: Turn | str) -> None:
        self.turns = [turn if isinstance(turn, Turn) else said(turn) for turn in turns]
        self.heard: list[str] = []
        self.closed: list[str] = []

    def step(self, message):
        self.heard.append(message["content"])
        turn = self.turns[len(self.heard) - 1]
        return (
            turn if len(self.heard) < len(self.turns) else Turn(messages=turn.messages, reward=turn.reward, done=True)
        )

    def close(self, finish_reason):
        self.closed.append(finish_reason)


def said(text: str, **facts) -> Turn:
    return Turn(messages=[{"role": "user", "content": text}], **facts)


class ScriptedEngine:
    """In place of `TurnEngine`: a policy that says one of these texts at each step, and the last one again when none is left."""

    def __init__(self, made, *texts: str) -> None:
        self.made, self.asked, self.said = made, [], []
        self.texts = [made(text + made.eos_token)["input_ids"] for text in texts]

    @property
    def busy(self) -> bool:
        return bool(self.asked)

    def add(self, index, conversation, *, seeded) -> None:
        self.asked.append(index)

    def step(self) -> list[Sampled]:
        indices, self.asked = self.asked, []
        ids = self.texts[min(len(self.said), len(self.texts) - 1)]
        self.said.append(ids)
        text = self.made.decode(ids, skip_special_tokens=True)
        return [Sampled(index, ids, [-0.5] * len(ids), text, "stop") for index in indices]


class TaskWith(SumDigits):
    """sum_digits whose prompts have the environments that `make(prompt)` makes."""

    def __init__(self, make) -> None:
        super().__init__(SumDigits.Config(max_integers=2))
        self.make = make

    def environment(self, prompt):
        return self.make(prompt)


def conversations(make, made, *, workers=None, **config) -> Conversations:
    return Conversations.Config(**config).build(
        members={"": TaskWith(make)},
        tokenizer=made,
        end_token_ids=[made.eos_token_id],
        template_options={},
        worker_pool=workers,
    )


def prompts(made, num: int = 3) -> list[Prompt]:
    found = []
    for i in range(num):
        messages = [{"role": "user", "content": f"guess {i}" + "!" * i}]
        text = made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = made(text, add_special_tokens=False)["input_ids"]
        found.append(Prompt(prompt_idx=i, text=text, token_ids=ids, expected_answer="", messages=messages))
    return found


def conversation(prompt: Prompt, sample_idx: int = 0, **more) -> Conversation:
    """One without a turn, with much room."""
    limits = {"sampling": SamplingConfig(max_tokens=10_000), "most_in_turn": 1000, "most_tokens": 20_000}
    return Conversation(prompt=prompt, sample_idx=sample_idx, **{**limits, **more})


def play(factory: Conversations, policy, played: list[Conversation]) -> list[int]:
    """Plays conversations to their end with a policy in place of `TurnEngine`. Returns the order in which they ended."""
    with closing(factory.start(played)) as pool:
        waits = factory.config.wait_for_answers
        return list(roll_out(played, policy, pool, lambda value: value, wait_for_answers=waits))


@contextmanager
def engine(folder: Path, made, **sampling) -> Iterator[Generator]:
    """The engine of one rank, which this process becomes until the end."""
    with only_rank():
        generator = Generator(
            Generator.Config(dtype="float32", max_model_len=256, sleep=False),
            hf_assets_path=str(folder),
            tokenizer=made,
            sampling=SamplingConfig(**{"n": 4, "max_tokens": 48, **sampling}),
            seed=0,
        )
        fill(generator, load_file(folder / "model.safetensors"))
        yield generator
        generator.close()
