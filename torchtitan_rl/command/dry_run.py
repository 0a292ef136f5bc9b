"""--dry-run: shows what a run would do, without an engine or an update. It makes the start if that is missing, and starts the reward
functions' workers."""

from contextlib import closing
from itertools import cycle, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from torchtitan_rl.build import build_prompts, resolve
from torchtitan_rl.data.end_tokens import THINKING_TAGS
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.data.tool_calls import opened_thinking
from torchtitan_rl.errors import UserError
from torchtitan_rl.rewards import RewardError
from torchtitan_rl.run.dump_folder import check_writable, lock, unlock
from torchtitan_rl.run.memory import checkpoint_bytes, fsdp_shards, parameter_count, teacher_spec
from torchtitan_rl.run.resume import choose_resume, config_fields
from torchtitan_rl.run.run_end import LOCK
from torchtitan_rl.run.start_checkpoint import load_tokenizer
from torchtitan_rl.text import head_and_tail, visible
from torchtitan_rl.trainer.teachers.hints import Hints, column
from torchtitan_rl.types import Completion, Group, Prompt, ScoredCompletion

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig
    from torchtitan_rl.data.tasks import Task
    from torchtitan_rl.rewards import Grader

NUM_PROMPTS, NUM_DEMONSTRATIONS = 5, 3
ANSWER_CHARACTERS = 10_000
"""Answers are shown and tokenized up to this length."""
_FORMS = {
    "": "{}",
    "<answer>": "<answer>{}</answer>",
    "\\boxed": "\\boxed{{{}}}",
    "####": "#### {}",
    "[ANSWER]": "[ANSWER] {}",
}
"""Forms of an answer by their sign, tried until the task accepts one as correct."""


def show_run(config: "RunConfig", *, world_size: int) -> None:
    """Print layout, memory, and a few prompts, with what is learned of each or with the rewards of answers to the first.

    Raises the errors of a run.
    """
    resolved = resolve(config, world_size=world_size)
    config, task, algorithm = resolved.config, resolved.task, resolved.algorithm
    samples, learns = config.needs_engine(algorithm), not algorithm.policy_loss.from_engine
    tokenizer = load_tokenizer(config.hf_assets_path)
    if config.teacher:
        spec = teacher_spec(config)
        named = f"{spec.name} {spec.flavor} from {config.teacher}"
        _show("teacher", f"{named}, with the policy's vocabulary")
    _show("run folder", _run_folder(config, config_fields(config, algorithm)))
    _show("layout", _layout(config, world_size, samples=samples, learns=learns))
    _show("memory", "\n".join(filter(None, [resolved.dtype_choice, resolved.memory])))
    stream, _, _ = build_prompts(resolved, tokenizer)
    num = NUM_DEMONSTRATIONS if learns else NUM_PROMPTS
    prompts = stream.next_batch(num)
    for number, prompt in enumerate(prompts, start=1):
        number_and_task = ", ".join(filter(None, [f"{number} of {num}", prompt.task]))
        shown = prompt.text
        if learns:
            shown += f"\n{_learned(prompt.demonstration, tokenizer)}"
        elif samples:
            shown += f"\n-- expected answer: {head_and_tail(prompt.expected_answer, ANSWER_CHARACTERS)!r}"
        _show(f"prompt {number_and_task}: {len(prompt.token_ids)} tokens", shown)
    if config.teacher_hint:
        _show("prompt 1 as the teacher reads it", _hinted(config, stream, prompts[0]))
    rehearsed = False
    for member in dict.fromkeys(task.members().values()):
        for line in member.rehearse():
            print(line, flush=True)
            rehearsed = True
    if samples and not rehearsed:
        with closing(config.grader.build(scorers=resolved.scorers)) as grader:
            rewards = _rewards(config, grader, task, prompts, tokenizer)
            _show("rewards of answers to prompt 1", rewards)


def _hinted(config: "RunConfig", stream: PromptStream, prompt: Prompt) -> str:
    """The prompt with its hint, which a run checks in the same way. A function's hints are known after sampling."""
    Hints(config.teacher_hint, stream, config.generator.max_model_len)
    if ":" in config.teacher_hint:
        return f"with what {config.teacher_hint} says of each sample"
    [hint] = column(config.teacher_hint, Group(prompt=prompt, samples=[None]))
    if not hint:
        return "as the policy reads it: the row has no hint"
    return stream.hinted(prompt, hint).text


def _learned(demonstration: Completion, tokenizer: PreTrainedTokenizerBase) -> str:
    """The demonstration's text as it is trained, with its end tokens: a line for each part that is learned, or read between them."""
    lines: list[str] = []
    tokens = zip(demonstration.loss_mask, demonstration.token_ids, strict=True)
    for learned, run in groupby(tokens, key=itemgetter(0)):
        ids = [int(token) for _, token in run]
        text = head_and_tail(tokenizer.decode(ids), ANSWER_CHARACTERS)
        use = "learned" if learned else "read"
        lines.append(f"-- {use}, {_plural(len(ids), 'token')}: {text!r}")
    return "\n".join(lines)


def _run_folder(config: "RunConfig", fields: dict[str, Any]) -> str:
    """The folder that the run would write to, and the checkpoint that it would go on from, as text."""
    folder = Path(config.dump_folder or "outputs/NAME-TIME")
    if (folder / LOCK).exists():
        unlock(lock(folder))
    check_writable(folder.absolute())
    found = choose_resume(config, fields, folder)
    how = "a new run"
    if found is not None:
        how = f"{'a new run, forked from' if found.fork else 'goes on from'} {found.checkpoint}"
    return f"{folder}: {how}\n{_checkpoints(config)}"


def _checkpoints(config: "RunConfig") -> str:
    """How often the run saves, and the room that this takes at most, as text."""
    saves, size = config.checkpoint, checkpoint_bytes(config)
    if not saves.enable:
        return "no checkpoints"
    most = saves.keep_latest_k + 1 + bool(config.evaluation.best_by)  # one is being written
    room = f"up to {_size(most * size)}" if saves.keep_latest_k else "all are kept"
    return f"a checkpoint every {_plural(saves.interval, 'step')}: {_size(size)} each, {room}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"


def _layout(config: "RunConfig", world_size: int, *, samples: bool, learns: bool) -> str:
    """The model, the ranks of policy and engines, and a step's sequences and updates. `learns`: from demonstrations."""
    p, tp = config.trainer.parallelism, config.generator.tensor_parallel_degree
    own = config.generator.ranks
    samplers, trainers = own or world_size, world_size - own
    shards, spec = fsdp_shards(config, trainers), config.model_spec
    prompts, n = config.num_prompts_per_step, config.sampling.n
    updates = config.trainer.num_epochs * config.trainer.num_minibatches
    engines = (
        f"{_plural(samplers // tp, 'engine')} on {_plural(tp, 'rank')}{' each' if samplers > tp else ''}"
        if samples
        else "no engine, as nothing is sampled"
    )
    ranks = (
        f"{_plural(trainers, 'rank')}{' that only train, and ' + str(own) + ' that only sample' if own else ''}: the policy is sharded FSDP {shards} x TP {p.tensor_parallel_degree}, in "
        f"{_plural(p.data_parallel_replicate_degree, 'replica')}; {engines}"
    )
    if world_size == 1:
        ranks = f"one process trains{' and samples' if samples else '; nothing is sampled'}"
    sequences = f"{_plural(prompts, 'prompt')} x {n} completions = {prompts * n} sequences"
    layers, width = spec.flavor.split("x")
    millions = parameter_count(spec) / 1e6
    return (
        f"{config.hf_assets_path}: {millions:,.1f} million parameters, {layers} layers of width {width}\n{ranks}\n"
        f"a step: {_plural(prompts, 'demonstration') if learns else sequences} of up to "
        f"{config.prompts.max_prompt_tokens} + {config.sampling.max_tokens} tokens, {_plural(updates, 'optimizer step')}; "
        f"{_plural(config.num_steps, 'step')} in all"
    )


def _rewards(
    config: "RunConfig",
    grader: "Grader",
    task: "Task",
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """A line each for a right, a wrong and an empty answer to the first prompt: each function's value, the reward, the judgement.

    The functions get `sampling.n` of them, in turn.

    Raises UserError for a function that fails where a run would stop.
    """
    prompt = prompts[0]
    member = task.members()[prompt.task]

    def judged(text: str) -> bool | None:
        try:
            return member.judge(member.answer(text), prompt)
        except Exception:  # the grader says it below, or leaves it out, as grader.on_failure asks
            return False

    # An answer follows the thinking.
    begin = dict(THINKING_TAGS).get(opened_thinking(prompt.text), "")
    signs = sorted(_FORMS, key=lambda sign: (sign not in prompt.text, not sign))  # asked for first
    forms = {sign: begin + _FORMS[sign] for sign in signs}
    accepted = [sign for sign in signs if judged(forms[sign].format(prompt.expected_answer))]
    sign = accepted[0] if accepted else ""
    form = forms[sign]
    expected = [form.format(each.expected_answer[:ANSWER_CHARACTERS]) for each in prompts]
    wrong = next((text for text in expected[1:] if not judged(text)), form.format("wrong"))
    answers = {"right": expected[0], "wrong": wrong, "empty": ""}
    size = max(config.sampling.n, len(answers))  # as in a run: a function may count on it
    texts = islice(cycle(answers.values()), size)
    samples = [_completion(i, text, tokenizer) for i, text in enumerate(texts)]
    try:
        [group] = grader.grade([Group(prompt=prompt, samples=samples)])
    except RewardError as error:
        raise UserError(str(error)) from error
    lines = [_line(kind, scored) for kind, scored in zip(answers, group.samples)]
    if not accepted:
        lines.append("(the task accepts no known form of the expected answer: line 1 is a guess)")
    if sign not in prompt.text and not prompt.demonstration:
        has_kinds = hasattr(config.task, "answer_kind")
        other_kind = ", or choose another --task.answer-kind" if has_kinds else ""
        lines.append(
            f"(an answer counts only with {sign}, and the prompt does not ask for it: a policy that does not write it by itself is "
            f"always wrong. Ask for it with --prompts.system-prompt{other_kind})"
        )
    # The environment's reward needs a conversation.
    if "environment_reward" not in grader.reward_names and _is_turned_round(*group.samples[:2]):
        lines.append("(the right answer gets no more than the wrong one: is a sign wrong?)")
    return "\n".join(lines)


def _is_turned_round(right: ScoredCompletion, wrong: ScoredCompletion) -> bool:
    """Whether the answer that is judged right has no higher reward than the wrong one."""
    rewarded = None not in (right.reward, wrong.reward)
    return bool(right.correct) and rewarded and right.reward <= wrong.reward


def _completion(index: int, text: str, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """A completion with `text` and the end token, so that rewards see the length of a real answer."""
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    zeros = [0.0] * len(ids)
    return Completion(
        sample_idx=index,
        policy_version=0,
        token_ids=ids,
        sampler_logprobs=zeros,
        text=text,
        finish_reason="stop",
    )


def _line(kind: str, scored: ScoredCompletion) -> str:
    parts = ", ".join(f"{name} {_number(value)}" for name, value in scored.reward_breakdown.items())
    judged = {True: "judged right", False: "judged wrong", None: "not judged"}[scored.correct]
    reward = f"reward {_number(scored.reward)} ({parts})"
    return f"{kind:6} {scored.completion.text!r}: {reward}; {judged}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value + 0.0:.4g}"


def _plural(count: int, word: str) -> str:
    """Example: "1 rank", "2 ranks"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _show(title: str, text: str) -> None:
    print(f"--- {title}\n{visible(text)}\n", flush=True)
