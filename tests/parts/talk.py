"""A run that needs no warm start: a random small policy plays a guessing game badly, in turns, and the run is all there is to see.

.venv/bin/python -m torchtitan_rl.run.launch --standalone --nproc_per_node=1 -m torchtitan_rl.command.train --config tests/parts/talk.py:talk

`talk_dapo` and `talk_maxent` put around it what else a step may have: groups that are replaced, a length penalty, a reference.
"""

import json
import tempfile
from pathlib import Path

import torch

from torchtitan_rl.algorithm import KL, Algorithm, Clip, Grpo, MaxEnt, SeqMeanTokenMean, TauController, Truncation
from torchtitan_rl.configs.debug_conversations import debug_guess
from torchtitan_rl.configs.toys.calculator_agent import openai_client
from torchtitan_rl.configs.toys.guess_number import GuessNumber
from torchtitan_rl.configs.toys.small_models import new_hf_model, small_qwen3
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.environments import Context, Environment, Turn
from torchtitan_rl.environments.agents import AgentEnvironment

END_TOKENS = list(range(40, 90))
"""Besides the tokenizer's: so many that a random policy ends its turns."""


def chat_tokenizer():
    """As the small policies of configs/debug_conversations.py have it."""
    return make_small_tokenizer(["higher", "lower", "a number"], vocab_size=320, chat=True)


def save_talker(folder: Path, **dimensions: int) -> Path:
    """A Hugging Face folder with random weights, a chat template, and a generation_config.json with many end tokens."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    spec = small_qwen3(**{**dimensions, "vocab_size": 320})
    new_hf_model(spec, tie_word_embeddings=False, initializer_range=0.05).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_TOKENS}))
    return folder


def talk():
    config = debug_guess()
    config.hf_assets_path = str(save_talker(Path(tempfile.mkdtemp())))
    config.task.warm_start = ""
    # Random guesses never find the number: without another reward there would be nothing to learn.
    config.grader.rewards = ["torchtitan_rl.rewards:script(name='latin')"]
    config.num_prompts_per_step = 4
    config.trainer.optimizer.lr = 1e-4
    config.trainer.lr_scheduler.warmup_steps = 0
    config.trainer.lr_scheduler.decay_ratio = (
        0.0  # the same whatever num_steps is: a run that goes on was told of fewer
    )
    config.sampling.n = 4
    config.evaluation.num_prompts = 8
    config.evaluation.every = 2
    config.checkpoint.interval = 2
    return config


def talk_dapo():
    """Credit by turns with fresh prompts for groups without preference, DAPO's penalty on half of the conversations' lengths, a
    reference, and two updates a batch."""
    config = talk()
    config.algorithm = Algorithm.Config(
        advantage=Grpo.Config(),
        loss=Clip.Config(eps_low=0.2, eps_high=0.28),
        credit="turn",
        kl=KL.Config(coef=0.02),
        truncation=Truncation.Config(mode="penalty", cache_tokens=48, cut_reward=-0.1),
        zero_variance="refill",
    )
    config.trainer.num_minibatches = 2
    return config


class AgentGuess(GuessNumber):
    """The game with an agent in place of the environment."""

    def environment(self, prompt):
        """Returns an agent that answers by the number of characters."""
        return AgentEnvironment(answer_by_length, task=prompt.messages)


_DIGIT = {
    "type": "object",
    "properties": {"1": {"enum": [*range(10)]}},
    "required": ["1"],
    "additionalProperties": False,
}
NUMBERED = {"type": "json_schema", "json_schema": {"name": "guess", "schema": _DIGIT}}
"""A form without letters, which end a turn of the random policy."""


async def answer_by_length(task, *, base_url, api_key):
    """An agent that goes on as long as the policy is heard, and asks for every other turn in a form."""
    client, messages = openai_client(base_url).with_options(api_key=api_key), [*task]
    while True:
        asked = {} if len(messages) % 4 == 1 else {"response_format": NUMBERED}
        reply = (await client.chat.completions.create(model="policy", messages=messages, **asked)).choices[0].message
        answer = {"role": "user", "content": "higher" if len(reply.content) % 2 else "lower"}
        messages += [reply.model_dump(exclude_none=True), answer]


def talk_agent():
    """talk with agents that speak HTTP."""
    config = talk()
    config.task = AgentGuess.Config(span=7)
    config.algorithm.credit = "episode"
    return config


class Forgetful(Environment):
    """Every other answer is a new context."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, message):
        """Answers by the number of characters."""
        self.steps += 1
        answer = "higher" if len(message["content"]) % 2 else "lower"
        if self.steps % 2:
            opening = {"role": "user", "content": f"You said {message['content'][:6]!r}: {answer}"}
            return Turn(messages=Context([opening], reason="compacted"))
        return Turn(messages=[{"role": "user", "content": answer}])


class ForgetfulGuess(GuessNumber):
    """The game with a history that is compacted."""

    def environment(self, prompt):
        """Returns an environment that compacts."""
        return Forgetful()


def talk_traces():
    """talk with rollouts of three traces, and an advantage for each turn."""
    config = talk()
    config.task = ForgetfulGuess.Config(span=7)
    config.algorithm.aggregation = SeqMeanTokenMean.Config()
    config.conversations.max_turns = 5
    config.conversations.max_turn_tokens = 16
    return config


class CompactingGuess(GuessNumber):
    """The game with an agent that compacts its history."""

    def environment(self, prompt):
        """Returns an agent that begins anew after every other answer."""
        return AgentEnvironment(forget_every_other, task=prompt.messages)


async def forget_every_other(task, *, base_url, api_key):
    """An agent that does over HTTP what `Forgetful` does in process."""
    client, messages, turns = openai_client(base_url).with_options(api_key=api_key), [*task], 0
    while True:
        reply = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        turns += 1
        answer = "higher" if len(reply.content) % 2 else "lower"
        if turns % 2:
            messages = [{"role": "user", "content": f"You said {reply.content[:6]!r}: {answer}"}]
        else:
            messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": answer}]


def talk_agent_traces():
    """talk_traces with an agent in place of the environment."""
    config = talk_traces()
    config.task = CompactingGuess.Config(span=7)
    config.algorithm.credit = "episode"
    return config


def talk_maxent():
    """A listwise loss: a prompt's conversations in one micro-batch, weighed by rewards and a reference."""
    config = talk()
    controller = TauController.Config(target=1.5)
    config.algorithm = Algorithm.Config(loss=MaxEnt.Config(beta=0.05, tau_controller=controller))
    return config
