"""What each turn of a conversation costs: the tokens of its context, and those of them that the engine computed anew.

    .venv/bin/torchrun --nproc_per_node=1 scripts/bench/prefix_cache.py

A random small Qwen3 has a prompt of some 1,000 tokens and talks in turns of some 30 tokens with an environment whose answers have
some 150. One conversation at a time, so that the time to a turn's first token is its own.
"""

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
from torchtitan.config import CommConfig  # noqa: E402

from scripts.bench.conversations import TURNS, Talk, make_generator  # noqa: E402
from torchtitan_rl.core import comm  # noqa: E402
from torchtitan_rl.core.generator import SamplingConfig  # noqa: E402
from torchtitan_rl.core.generator import generator as generators  # noqa: E402
from torchtitan_rl.core.types import Prompt  # noqa: E402
from torchtitan_rl.library.environments import Environment, Turn  # noqa: E402
from torchtitan_rl.library.environments.factory import Conversations  # noqa: E402


class LongAnswers(Environment):
    def __init__(self) -> None:
        self._turns = 0

    def step(self, message: dict) -> Turn:
        self._turns += 1
        answer = {"role": "user", "content": f"{self._turns} is what came out. " * 8}
        return Turn(messages=[answer], done=self._turns == TURNS)


class LongTalk(Talk):
    def environment(self, prompt: Prompt) -> Environment:
        return LongAnswers()


class KeptEngine(generators.TurnEngine):
    """Leaves its outputs where they can be read when the conversations are over."""

    kept: list = []

    def close(self) -> None:
        KeptEngine.kept = self.outputs
        super().close()


def prompt(tokenizer, number: int) -> Prompt:
    """A prompt of about 1,000 tokens that shares no prefix with another one."""
    messages = [{"role": "user", "content": f"{number} is what we begin with. " * 45}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(
        prompt_idx=number, text=text, token_ids=tokenizer(text)["input_ids"], expected_answer="", messages=messages
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20)
    args = parser.parse_args()
    comm.init_process_group(CommConfig(trace_buf_size=0))
    with tempfile.TemporaryDirectory() as folder:
        generator, tokenizer = make_generator(Path(folder), max_model_len=2048)
    generators.TurnEngine = KeptEngine
    generator.environments = Conversations.Config(wait_for_answers=True).build(
        members={"": LongTalk(0.0)}, tokenizer=tokenizer, end_token_ids=generator.end_token_ids, template_options={}
    )
    sampling = SamplingConfig(n=1, max_tokens=440, stop_token_ids=generator.sampling.stop_token_ids)
    with closing(generator):
        talks = []
        for number in range(10, 10 + args.conversations):
            list(generator.generate([prompt(tokenizer, number)], sampling_config=sampling))
            talks.append(KeptEngine.kept)
    block = generator.llm.llm_engine.vllm_config.cache_config.block_size
    print(f"cache blocks of {block} tokens; means of {len(talks)} conversations")
    for turn in range(TURNS):
        outputs = [talk[turn] for talk in talks if turn < len(talk)]
        context = statistics.mean(len(output.prompt_token_ids) for output in outputs)
        computed = context - statistics.mean(output.num_cached_tokens for output in outputs)
        first = statistics.median(output.metrics.first_token_ts - output.metrics.scheduled_ts for output in outputs)
        print(
            f"turn {turn + 1}: context {context:,.0f} tokens, computed {computed:,.0f}, first token {1000 * first:.1f} ms"
        )


if __name__ == "__main__":
    os.environ.setdefault("RANK", "0")
    main()
