"""From scored completions to episodes: sorted, grouped, shaped."""

from itertools import groupby

from torchtitan_rl.types import Episode, Normalizers, Prompt, ScoredCompletion, TrainBatch


def build_episodes(
    prompts: list[Prompt], scored: list[ScoredCompletion], reference_logprobs: list[list[float]] | None
) -> list[Episode]:
    """One episode for each scored completion, ordered by (prompt_idx, sample_idx), without advantages.

    Args:
        prompts: the step's prompts, any order.
        scored: any order.
        reference_logprobs: one list for each of `scored`, in the same order, as long as its completion; or None.

    Raises:
        ValueError: an unknown prompt_idx, a (prompt_idx, sample_idx) that comes twice, or lists whose lengths differ.
    """
    prompt_of = {prompt.prompt_idx: prompt for prompt in prompts}
    references = [None] * len(scored) if reference_logprobs is None else reference_logprobs
    if len(references) != len(scored):
        raise ValueError(
            f"reference_logprobs has {len(references)} lists for {len(scored)} completions; give one for each."
        )
    group_sizes: dict[int, int] = {}
    for one in scored:
        index = one.completion.prompt_idx
        group_sizes[index] = group_sizes.get(index, 0) + 1
    episodes = [
        build_episode(prompt_of, one, reference, group_sizes) for one, reference in zip(scored, references, strict=True)
    ]
    episodes.sort(key=lambda episode: (episode.prompt_idx, episode.sample_idx))
    for before, after in zip(episodes, episodes[1:]):
        if (before.prompt_idx, before.sample_idx) == (after.prompt_idx, after.sample_idx):
            raise ValueError(
                f"prompt {after.prompt_idx} has two completions with sample_idx {after.sample_idx}; "
                "sample_idx must be unique inside a prompt's group."
            )
    return episodes


def build_episode(
    prompt_of: dict[int, Prompt], scored: ScoredCompletion, reference: list[float] | None, group_sizes: dict[int, int]
) -> Episode:
    """The episode of one completion; raises ValueError as `build_episodes` says."""
    completion = scored.completion
    name = f"prompt {completion.prompt_idx}, sample {completion.sample_idx}"
    if completion.prompt_idx not in prompt_of:
        raise ValueError(f"{name}: there is no prompt with this prompt_idx; the step has {sorted(prompt_of)}.")
    for what, values in (("token_logprobs", completion.token_logprobs), ("reference_logprobs", reference)):
        if values is not None and len(values) != len(completion.token_ids):
            raise ValueError(f"{name}: {len(values)} {what} for {len(completion.token_ids)} tokens; give one for each.")
    prompt = prompt_of[completion.prompt_idx]
    return Episode(
        policy_version=completion.policy_version,
        prompt_idx=completion.prompt_idx,
        sample_idx=completion.sample_idx,
        prompt=prompt.text,
        response=completion.text,
        expected_answer=prompt.expected_answer,
        answer=scored.answer,
        prompt_token_ids=completion.prompt_token_ids,
        token_ids=completion.token_ids,
        sampler_logprobs=completion.token_logprobs,
        finish_reason=completion.finish_reason,
        reward=scored.reward,
        reward_breakdown=dict(scored.reward_breakdown),
        extra=dict(scored.extra),
        group_size=group_sizes[completion.prompt_idx],
        shaped_reward=scored.reward,
        reference_logprobs=reference,
        messages=prompt.messages,
    )


def grouped(episodes: list[Episode]) -> list[list[Episode]]:
    """The episodes of each prompt; `episodes` must be sorted by prompt_idx, as `build_episodes` leaves them."""
    return [list(group) for _, group in groupby(episodes, key=lambda episode: episode.prompt_idx)]


def count_normalizers(episodes: list[Episode], max_completion_tokens: int) -> Normalizers:
    """The counts the losses divide by, over one update's episodes; only completions with loss tokens count."""
    in_loss = [episode for episode in episodes if episode.in_loss and episode.token_ids]
    return Normalizers(
        num_tokens=sum(len(episode.token_ids) for episode in in_loss),
        num_sequences=len(in_loss),
        num_groups=len({episode.prompt_idx for episode in in_loss}),
        max_completion_tokens=max_completion_tokens,
    )


def check_whole_groups(batch: TrainBatch) -> None:
    """Raise ValueError unless the weights of each group's sequences with loss tokens sum to 1 in this micro-batch.

    A listwise loss over half a group is another loss, and nothing else would tell.
    """
    lengths = batch.weights.new_zeros(len(batch.group_ids) + 1)  # [S + 1]
    lengths = lengths.index_add(0, batch.sequence_ids, batch.loss_mask.to(lengths.dtype))[:-1]  # [S]
    present = lengths > 0  # [S]
    same_group = batch.group_ids[:, None] == batch.group_ids[None, :]  # [S, S]
    mass = (same_group * (batch.weights * present)[None, :]).sum(dim=1)  # [S]
    broken = present & ((mass - 1).abs() > 1e-3)  # [S]
    if broken.any():
        first = int(broken.nonzero()[0])
        raise ValueError(
            f"prompt {int(batch.group_ids[first])}: its weights sum to {float(mass[first]):.4f} in this micro-batch, "
            "expected 1. The loss spans whole groups: the packer must keep a prompt's completions together "
            "(Algorithm.requires_whole_groups)."
        )
