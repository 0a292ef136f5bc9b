"""Builds what a run samples from: the stream of prompts, the held-out prompts and the environments."""

from typing import TYPE_CHECKING, NamedTuple

from torchtitan_rl.core.generator.sampling import end_token_ids
from torchtitan_rl.library.demonstrations import check_demonstrated
from torchtitan_rl.setup.start_checkpoint import check_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.core.types import Prompt
    from torchtitan_rl.library.environments.factory import Conversations
    from torchtitan_rl.library.prompts.stream import PromptStream
    from torchtitan_rl.library.task import Task
    from torchtitan_rl.setup.run_config import RunConfig


class PromptParts(NamedTuple):
    stream: "PromptStream"
    held_out: "list[Prompt]"
    environments: "Conversations"


def build_prompts(config: "RunConfig", task: "Task", tokenizer: "PreTrainedTokenizerBase") -> PromptParts:
    """Build and check them. Needs the start's tokenizer, and none of its weights.

    Raises:
        UserError: if task, tokenizer, chat template and environments do not fit each other.
    """
    check_tokenizer(tokenizer, config.model_spec.model.vocab_size)
    ends = end_token_ids(config.hf_assets_path, tokenizer)
    longest = config.sampling.max_tokens
    stream = config.prompts.build(
        task=task, tokenizer=tokenizer, seed=config.seed, end_token_ids=ends, max_completion_tokens=longest
    )
    if not config.samples_training:
        check_demonstrated(stream.at(0))
    evaluates = config.evaluation.every or config.eval_only  # otherwise one prompt, for the check of the weight sync
    held_out = stream.held_out(config.evaluation.num_prompts if evaluates else 1)
    environments = config.conversations.build(
        members=task.members(),
        tokenizer=tokenizer,
        end_token_ids=ends,
        template_options={"enable_thinking": config.prompts.enable_thinking},
    )
    environments.check(held_out, in_flight=config.in_flight.prompts)
    return PromptParts(stream, held_out, environments)
