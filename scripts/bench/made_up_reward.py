"""A reward in TRL's signature that differs within every group of an even number, so that all completions are learnt from."""


def made_up(completions, **_):
    """0, 1, 0, 1, ..."""
    return [float(place % 2) for place in range(len(completions))]
