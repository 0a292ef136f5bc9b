"""A reward for random models, which shows the tokens that were sampled: their text does not tell which they are."""


def even(completion_ids, logprobs, log_extra, **_):
    """The share of even token ids."""
    log_extra("ids", completion_ids)
    log_extra("logprobs", logprobs)
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
