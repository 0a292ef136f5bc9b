"""Wall time of conversations with slow tools: continuous rollouts against a lock-step loop, and against agents over HTTP.

    .venv/bin/torchrun --nproc_per_node=1 scripts/bench/conversations.py

A random small Qwen3 talks in 4 turns of some 30 tokens with a tool that takes 0 to 2 seconds. The lock-step loop is made of the
same parts and asks all tools of a turn at once, but samples the next turn only when the last one has answered. The agents use
the `openai` client, with the same tools and the continuous loop.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torchtitan.config import CommConfig  # noqa: E402

from torchtitan_rl.core import comm  # noqa: E402
from torchtitan_rl.core.generator import SamplingConfig  # noqa: E402
from torchtitan_rl.core.generator import generator as generators  # noqa: E402
from torchtitan_rl.core.types import Prompt, flat  # noqa: E402
from torchtitan_rl.library.agents import AgentEnvironment  # noqa: E402
from torchtitan_rl.library.agents.calculator import openai_client  # noqa: E402
from torchtitan_rl.library.environments import Environment, Turn  # noqa: E402
from torchtitan_rl.library.environments.factory import Conversations  # noqa: E402
from torchtitan_rl.library.models import new_hf_model, small_qwen3  # noqa: E402
from torchtitan_rl.library.starts.small_tokenizer import make_small_tokenizer  # noqa: E402
from torchtitan_rl.library.tasks import SumDigits  # noqa: E402

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


async def slow_agent(task: dict, *, base_url: str, api_key: str) -> None:
    """SlowTool as an agent."""
    dice, client = random.Random(task["seed"]), openai_client(base_url).with_options(api_key=api_key)
    messages = [{"role": "user", "content": "begin"}]
    for _ in range(TURNS):
        response = await client.chat.completions.create(model="policy", messages=messages)
        await asyncio.sleep(dice.uniform(0, task["most_seconds"]))
        messages += [response.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]


class AgentTalk(Talk):
    """The same with an agent in place of the environment."""

    def environment(self, prompt: Prompt, *, seed: int) -> Environment:
        return AgentEnvironment(slow_agent, task={"seed": seed, "most_seconds": self.most_seconds})


def lock_step(conversations, engine, environments, share, *, wait_for_answers, seeded) -> Iterator[int]:
    """In place of `roll_out`: one turn of all conversations after the other."""
    for answer in environments.answers(wait=True, all=True):
        conversations[answer.place].append_answer(answer)
    places = going = range(len(conversations))
    while going:
        for place in going:
            engine.add(place, conversations[place], seeded=True)
        while engine.busy:
            for sampled in engine.step():
                conversations[sampled.place].append_turn(sampled)
        for place in going:
            environments.step_async(place)
        answers = environments.answers(wait=True, all=True)
        for answer in answers:
            conversations[answer.place].append_answer(answer)
        going = [answer.place for answer in answers if answer.end is None]
    yield from places


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
    generator = config.build(hf_assets_path=str(folder), tokenizer=tokenizer, sampling=sampling, seed=0)
    generator.load_weights(load_file(folder / "model.safetensors").items(), policy_version=0)
    return generator, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="each with 8 conversations")
    parser.add_argument("--most-seconds", type=float, default=2.0, help="of the tool")
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
    continuous = generators.roll_out
    with closing(generator):
        for most_seconds in (0.0, args.most_seconds):
            seconds, tokens = {}, {}
            loops = (
                ("lock-step", lock_step, Talk),
                ("continuous", continuous, Talk),
                ("agents", continuous, AgentTalk),
            )
            for name, loop, task in loops:
                generators.roll_out = loop
                generator.environments = Conversations.Config().build(
                    members={"": task(most_seconds)}, tokenizer=tokenizer, end_token_ids=generator.end_token_ids,
                    template_options={},
                )  # fmt: skip
                generator.llm.reset_prefix_cache()
                begin = time.monotonic()
                groups = generator.generate(prompts)
                seconds[name] = time.monotonic() - begin
                tokens[name] = [completion.token_ids.tolist() for completion in flat(groups)]
            turns = sum(len(completion.turns) for completion in flat(groups))
            print(
                f"tool of 0 to {most_seconds:g} s, {len(tokens[name])} conversations, {turns} turns: lock-step "
                f"{seconds['lock-step']:.2f} s, continuous {seconds['continuous']:.2f} s, agents {seconds['agents']:.2f} s; "
                f"{'the same' if tokens['lock-step'] == tokens['continuous'] == tokens['agents'] else 'other'} tokens",
                flush=True,
            )


if __name__ == "__main__":
    os.environ.setdefault("RANK", "0")
    main()
