"""Options that a command line has several times. argparse and tyro take the last one without a word."""

import re
import sys
from collections import Counter
from collections.abc import Sequence


def tell_repeated(arguments: Sequence[str]) -> None:
    """Prints to stderr each option that is given several times, also as --x and --no-x.

    It is no error: people append options to a saved command.
    """
    options = [word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")]
    counts = Counter(re.sub(r"^(--|.*\.)no-", r"\1", option) for option in options)
    for option, count in counts.items():
        if count > 1:
            print(f"{option} is given {count} times: the last one counts", file=sys.stderr)
