"""CPU time that the agents' gateway takes for a request.

    .venv/bin/python scripts/bench/gateway.py

64 agents with the `openai` client, in a process of their own, talk to the real gateway at the same time. A script takes the
engine's place. Counted is the CPU time of two places: the gateway's thread, which speaks HTTP, and `AgentEnvironment`, which reads
each request, compares its history with the traces and writes the answer. Rendering the messages with the chat template and
tokenising them is left out, because an environment in process needs it too, and so are the agents.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
from scripts.bench.conversations import agent_apart  # noqa: E402
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer  # noqa: E402
from torchtitan_rl.configs.toys.sum_digits import SumDigits  # noqa: E402
from torchtitan_rl.conversation import Conversation, Sampled  # noqa: E402
from torchtitan_rl.environments.agents import AgentEnvironment  # noqa: E402
from torchtitan_rl.environments.agents.gateway import gateway  # noqa: E402
from torchtitan_rl.environments.factory import Conversations  # noqa: E402
from torchtitan_rl.generator.rollout import roll_out  # noqa: E402
from torchtitan_rl.sampling import SamplingConfig  # noqa: E402
from torchtitan_rl.types import Prompt  # noqa: E402

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "run", "description": "Run a command.", "parameters": SCHEMA}}]
CALL = 'I look. <tool_call>{"name": "run", "arguments": {"command": "sed -n 1,80p main.py"}}</tool_call>'


class Talk(NamedTuple):
    """A kind of conversation."""

    name: str
    turns: int
    policy: str
    """What the policy says in each turn."""
    says: str
    """What the agent answers."""
    tools: list[dict] | None = None


TALKS = [
    Talk("4 short turns", 4, "42", "go on"),
    Talk("10 calls, answers of 1,000 characters", 10, CALL, "x = 1 # so\n" * 91, TOOLS),
    Talk("30 calls, answers of 2,000 characters", 30, CALL, "x = 1 # so\n" * 182, TOOLS),
]


class CountedEnvironment(AgentEnvironment):
    """Notes the CPU time of its calls."""

    seconds: list[float] = []

    def reset(self):
        began = time.thread_time()
        opening = super().reset()
        self.seconds.append(time.thread_time() - began)
        return opening

    def step(self, message):
        began = time.thread_time()
        turn = super().step(message)
        self.seconds.append(time.thread_time() - began)
        return turn

    def close(self, finish_reason):
        began = time.thread_time()
        reward = super().close(finish_reason)
        self.seconds.append(time.thread_time() - began)
        return reward


class AgentTask(SumDigits):
    """Every prompt has an agent that plays the talk."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(SumDigits.Config(max_integers=2))
        self.talk = talk

    def environment(self, prompt: Prompt) -> AgentEnvironment:
        task = {"seed": 0, "most_seconds": 0.0, "turns": self.talk.turns, "says": self.talk.says}
        return CountedEnvironment(agent_apart, task={**task, "tools": self.talk.tools}, role="tool")


class Script:
    """In place of `TurnEngine`: a policy that says one text in every turn."""

    def __init__(self, tokenizer, text: str) -> None:
        self._ids, self._text, self._asked = tokenizer(text + tokenizer.eos_token)["input_ids"], text, []

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def add(self, index: int, conversation: Conversation, *, seeded: bool) -> None:
        self._asked.append(index)

    def step(self) -> list[Sampled]:
        indices, self._asked = self._asked, []
        return [Sampled(index, self._ids, [-0.5] * len(self._ids), self._text, "stop") for index in indices]


def gateway_seconds() -> float:
    """CPU time of the gateway's thread so far."""

    async def now() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(now(), gateway().loop).result()


def play(talk: Talk, agents: int) -> tuple[int, float, float]:
    """Plays the talk with this many agents. Returns requests, and seconds in the gateway's thread and in the environments."""
    tokenizer = make_small_tokenizer(["go on"], vocab_size=320, chat=True)
    messages = [{"role": "user", "content": "begin"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = Prompt(
        prompt_idx=0, text=text, token_ids=tokenizer(text)["input_ids"], expected_answer="", messages=messages
    )
    conversations = [
        Conversation(
            prompt=prompt, sample_idx=i, sampling=SamplingConfig(max_tokens=10**6), most_in_turn=1000, most_tokens=10**7
        )
        for i in range(agents)
    ]
    config = Conversations.Config(max_turns=talk.turns + 1)
    environments = config.build(
        members={"": AgentTask(talk)}, tokenizer=tokenizer, end_token_ids=[tokenizer.eos_token_id], template_options={}
    )
    began, CountedEnvironment.seconds = gateway_seconds(), []
    pool = environments.start(conversations)
    for _ in roll_out(conversations, Script(tokenizer, talk.policy), pool, lambda value: value, wait_for_answers=False):
        pass
    pool.close()
    requests = sum(len(conversation.turns) for conversation in conversations)
    assert requests == agents * talk.turns, f"{requests} requests; expected {agents * talk.turns}"
    return requests, gateway_seconds() - began, sum(CountedEnvironment.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64, help="at once")
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each kind of conversation; the smallest sum is printed"
    )
    args = parser.parse_args()
    play(TALKS[0], args.agents)  # what the first requests start is not counted
    for talk in TALKS:
        found = [play(talk, args.agents) for _ in range(args.repeats)]
        requests, http, environment = min(found, key=lambda one: one[1] + one[2])
        print(
            f"{talk.name:40} {1e3 * (http + environment) / requests:.2f} ms a request: "
            f"HTTP {1e3 * http / requests:.2f}, AgentEnvironment {1e3 * environment / requests:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
