"""Builds the run's task, what scores it and what is sampled from it: a wrong one is named before anything starts."""

from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_rl.algorithm.losses.sft import check_demonstrated
from torchtitan_rl.build.start_checkpoint import check_tokenizer, unlike_its_file
from torchtitan_rl.data.end_tokens import end_token_ids, folder_end_token_ids
from torchtitan_rl.data.renderer import template_options
from torchtitan_rl.data.task import Example, Task
from torchtitan_rl.errors import expect
from torchtitan_rl.events import progress
from torchtitan_rl.fields.references import tried
from torchtitan_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.config import RunConfig
    from torchtitan_rl.data.stream import PromptStream
    from torchtitan_rl.environments.factory import Conversations


def build_task(config: Task.Config) -> Task:
    """Build the task.

    Raises:
        UserError: if a method of a user's task raises, or returns another type than the interface says.
    """
    task = tried(config, "build")
    members = tried(task, "members")
    by_name = (
        isinstance(members, dict)
        and members
        and all(isinstance(member, Task) for member in members.values())
    )
    expect(
        bool(by_name),
        f"{type(task).__name__}.members()",
        members,
        "tasks by name",
        'Return {"": self}.',
    )
    for member in dict.fromkeys(members.values()):
        name = type(member).__name__
        example, held_out = (
            tried(member, "train_example", 0, seed=0),
            tried(member, "held_out_examples", 1),
        )
        expect(
            isinstance(example, Example),
            f"{name}.train_example(0)",
            example,
            "an Example",
            "Return one.",
        )
        again = tried(member, "train_example", 0, seed=0)
        equal = (example.text, example.messages, example.expected_answer) == (
            again.text,
            again.messages,
            again.expected_answer,
        )
        expect(
            equal, f"{name}.train_example(0)", example.text[:80], "the same example at every call with one index and seed",
            'Draw chance from random.Random(f"{seed}/{index}"): ranks and resumed runs ask again.',
        )  # fmt: skip
        listed = (
            _is_list(held_out) and held_out and all(isinstance(each, Example) for each in held_out)
        )
        expect(
            bool(listed),
            f"{name}.held_out_examples(1)",
            held_out,
            "a list with an Example",
            "Return one.",
        )
        for method in ("reward_functions", "tools"):
            functions = tried(member, method)
            listed = _is_list(functions) and all(map(callable, functions))
            expect(
                listed,
                f"{name}.{method}()",
                functions,
                "a list of functions",
                "Return one; [] for none.",
            )
    return task


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


class PromptParts(NamedTuple):
    stream: "PromptStream"
    held_out: "list[Prompt]"
    environments: "Conversations"


def build_prompts(
    config: "RunConfig", task: Task, tokenizer: "PreTrainedTokenizerBase"
) -> PromptParts:
    """Build and check them. Needs the start's tokenizer, and none of its weights.

    Raises:
        UserError: if task, tokenizer, chat template and environments do not fit each other.
    """
    check_tokenizer(tokenizer, config.model_spec.model.vocab_size)
    if said := unlike_its_file(tokenizer):
        progress(said)
    ends = end_token_ids(config.hf_assets_path, tokenizer)
    for end in set(ends).difference(folder_end_token_ids(config.hf_assets_path, tokenizer)):
        progress(
            f"{tokenizer.decode([end])!r} ends a turn too: the chat template ends an assistant's turn with it, and it is none "
            "of the end tokens of tokenizer, generation_config.json and config.json"
        )
    if config.prompts.apply_chat_template and "strftime_now" in str(tokenizer.chat_template):
        day = config.prompts.date or "today's"
        progress(
            f"the chat template writes the date: {day}, which stays the same if the run is resumed (prompts.date)"
        )
    longest = config.sampling.max_tokens
    options = {"end_token_ids": ends, "max_completion_tokens": longest}
    stream = tried(
        config.prompts, "build", task=task, tokenizer=tokenizer, seed=config.seed, **options
    )
    if not config.samples_training:
        check_demonstrated(stream.at(0))
    evaluates = (
        config.evaluation.every or config.eval_only
    )  # otherwise one prompt, for the check of the weight sync
    held_out = tried(stream, "held_out", config.evaluation.num_prompts if evaluates else 1)
    if (epochs := stream.epoch(config.num_prompts_per_step) or 0) > 1:
        progress(
            f"num_prompts_per_step {config.num_prompts_per_step} is {epochs:.1f} x the task's prompts: a step repeats them"
        )
    environments = config.conversations.build(
        members=task.members(),
        tokenizer=tokenizer,
        end_token_ids=ends,
        template_options=template_options(config.prompts),
    )
    environments.check(held_out, in_flight=config.in_flight.prompts)
    return PromptParts(stream, held_out, environments)
