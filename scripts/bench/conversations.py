"""Wall time of conversations with slow tools: continuous rollouts against a lock-step loop, and against agents over HTTP.

    .venv/bin/torchrun --nproc_per_node=1 scripts/bench/conversations.py

A random small Qwen3 talks in 4 turns of some 30 tokens with a tool that takes 0 to 2 seconds. The lock-step loop is made of the
same parts and asks all tools of a turn at once, but samples the next turn only when the last one has answered. The agents use
the `openai` client, with the same tools and the continuous loop: as coroutines of this process, and in a process of their own.
"""

import argparse
import asyncio
import atexit
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)
from torchtitan_rl.generator.generator import Generator  # noqa: E402

# isort: split
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torchtitan.config import CommConfig  # noqa: E402

from scripts.bench.agent_server import slow_agent  # noqa: E402
from torchtitan_rl import comm  # noqa: E402
from torchtitan_rl.configs.toys.calculator_agent import openai_client  # noqa: E402
from torchtitan_rl.configs.toys.small_models import new_hf_model, small_qwen3  # noqa: E402
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer  # noqa: E402
from torchtitan_rl.configs.toys.sum_digits import SumDigits  # noqa: E402
from torchtitan_rl.environments import Environment, Turn  # noqa: E402
from torchtitan_rl.environments.agents import AgentEnvironment  # noqa: E402
from torchtitan_rl.environments.factory import Conversations  # noqa: E402
from torchtitan_rl.generator import generator as generators  # noqa: E402
from torchtitan_rl.sampling import SamplingConfig  # noqa: E402
from torchtitan_rl.sync.in_process import begin_sampling, load_base  # noqa: E402
from torchtitan_rl.types import Prompt, flat  # noqa: E402

TURNS = 4
STOP_TOKENS = list(range(200, 210))
"""One token in 32 of the vocabulary: a random policy's turns are some 30 tokens long."""


class SlowTool(Environment):
    def __init__(self, seed: int, most_seconds: float) -> None:
        self._random = random.Random(seed)
        self._most_seconds = most_seconds
        self._turns = 0

    async def step(self, message: dict) -> Turn:
        await asyncio.sleep(self._random.uniform(0, self._most_seconds))
        self._turns += 1
        return Turn(messages=[{"role": "user", "content": "go on"}], done=self._turns == TURNS)


class Talk(SumDigits):
    """Every prompt has a slow tool; equal latencies for equal calls, however they are scheduled."""

    def __init__(self, most_seconds: float) -> None:
        super().__init__(SumDigits.Config(max_integers=2))
        self.most_seconds = most_seconds

    def environment(self, prompt: Prompt, *, seed: int) -> Environment:
        return SlowTool(seed, self.most_seconds)


async def agent_here(task: dict, *, base_url: str, api_key: str) -> None:
    """SlowTool as an agent in this process."""
    await slow_agent(openai_client(base_url).with_options(api_key=api_key), task)


async def agent_apart(task: dict, **address: str) -> None:
    """The same in the process of agent_server.py, to which it hands the address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", agents_port())
    writer.write(json.dumps({"task": task, "address": address}).encode() + b"\n")
    await reader.readline()
    writer.close()


@functools.cache
def agents_port() -> int:
    """Starts agent_server.py, which ends with this process, and returns its port."""
    command = [sys.executable, str(Path(__file__).with_name("agent_server.py"))]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return int(server.stdout.readline())


class AgentTalk(Talk):
    """Talk with an agent in place of the environment."""

    agent = staticmethod(agent_here)

    def environment(self, prompt: Prompt, *, seed: int) -> Environment:
        task = {"seed": seed, "most_seconds": self.most_seconds, "turns": TURNS, "says": "go on"}
        return AgentEnvironment(self.agent, task=task)


class AgentTalkApart(AgentTalk):
    """The same with agents in a process of their own."""

    agent = staticmethod(agent_apart)


def lock_step(conversations, engine, environments, share, *, wait_for_answers, seeded) -> Iterator[int]:
    """In place of `roll_out`: one turn of all conversations after the other."""
    for answer in environments.answers(wait=True, all=True):
        conversations[answer.conversation_idx].append_answer(answer)
    going = range(len(conversations))
    while going:
        for index in going:
            engine.add(index, conversations[index], seeded=True)
        while engine.busy:
            for sampled in engine.step():
                conversations[sampled.conversation_idx].append_turn(sampled)
        for index in going:
            environments.step_async(index)
        answers = environments.answers(wait=True, all=True)
        for answer in answers:
            conversations[answer.conversation_idx].append_answer(answer)
        going = [answer.conversation_idx for answer in answers if answer.end is None]
    yield from range(len(conversations))


def make_generator(folder: Path, *, max_model_len: int = 512):
    """An engine with random weights, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = make_small_tokenizer(["go on"], vocab_size=320, chat=True)
    new_hf_model(small_qwen3(vocab_size=320, max_seq_len=max_model_len), tie_word_embeddings=False).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    sampling = SamplingConfig(n=8, max_tokens=440, stop_token_ids=STOP_TOKENS)
    config = generators.Generator.Config(dtype="float32", max_model_len=max_model_len, sleep=False)
    generator = Generator(config, hf_assets_path=str(folder), tokenizer=tokenizer, sampling=sampling, seed=0)
    load_base(generator, load_file(folder / "model.safetensors").items())
    begin_sampling(generator, 0)
    return generator, tokenizer


LOOPS = {
    "lock-step": (lock_step, Talk),
    "continuous": (generators.roll_out, Talk),
    "agents": (generators.roll_out, AgentTalk),
    "agents apart": (generators.roll_out, AgentTalkApart),
}


class Played(NamedTuple):
    """One call of `Generator.generate`."""

    wall: float
    cpu: float
    """Seconds of this process."""
    turns: int
    tokens: list[list[int]]


def play(name: str, generator, tokenizer, prompts: list[Prompt], most_seconds: float) -> Played:
    """Plays all conversations with one of the loops."""
    generators.roll_out, task = LOOPS[name]
    generator.environments = Conversations.Config().build(
        members={"": task(most_seconds)},
        tokenizer=tokenizer,
        end_token_ids=generator.end_token_ids,
        template_options={},
    )
    generator.llm.reset_prefix_cache()
    wall, cpu = time.monotonic(), time.process_time()
    completions = flat(generator.generate(prompts))
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    turns = sum(len(completion.turns) for completion in completions)
    return Played(wall, cpu, turns, [completion.token_ids.tolist() for completion in completions])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="each with 8 conversations")
    parser.add_argument("--most-seconds", type=float, nargs="+", default=[0.0, 2.0], help="of the tool")
    parser.add_argument("--loops", nargs="+", choices=list(LOOPS), default=list(LOOPS), help="played in turn")
    parser.add_argument("--repeats", type=int, default=1, help="of each loop; medians are printed")
    args = parser.parse_args()
    comm.init_process_group(CommConfig(trace_buf_size=0))
    with tempfile.TemporaryDirectory() as folder:
        generator, tokenizer = make_generator(Path(folder))
    messages = [{"role": "user", "content": "begin"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text)["input_ids"]
    prompts = [
        Prompt(prompt_idx=i, text=text, token_ids=ids, expected_answer="", messages=messages)
        for i in range(args.prompts)
    ]
    with closing(generator):
        for name in args.loops:  # what the first call of each starts is not counted
            play(name, generator, tokenizer, prompts[:1], 0.0)
        for most_seconds in args.most_seconds:
            found: dict[str, list[Played]] = {name: [] for name in args.loops}
            for number in range(args.repeats):
                for name in args.loops[:: 1 if number % 2 == 0 else -1]:
                    found[name].append(play(name, generator, tokenizer, prompts, most_seconds))
            report(found, most_seconds)


def report(found: dict[str, list[Played]], most_seconds: float) -> None:
    """Prints the medians of each loop, and each loop's wall time against that of the continuous loop beside it."""
    played = [one for calls in found.values() for one in calls]
    same = "the same" if len({str(one.tokens) for one in played}) == 1 else "other"
    print(
        f"tool of 0 to {most_seconds:g} s, {len(played[0].tokens)} conversations, {played[0].turns} turns, {same} tokens"
    )
    for name, calls in found.items():
        line = f"{name:12} {median(one.wall for one in calls):6.2f} s, {median(one.cpu for one in calls):6.2f} s of CPU"
        if name != "continuous" and "continuous" in found:
            ratios = [one.wall / beside.wall for one, beside in zip(calls, found["continuous"], strict=True)]
            line += f", {median(ratios):.3f} x continuous ({', '.join(f'{ratio:.3f}' for ratio in ratios)})"
        print(line, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("RANK", "0")
    main()
