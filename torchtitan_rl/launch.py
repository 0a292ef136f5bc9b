"""torchrun without its own report of a rank's failure: the rank has already said what was wrong, and its code is passed on.

    python -m torchtitan_rl.launch --nproc_per_node=8 -m torchtitan_rl.train --config debug
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    """Run torchrun's command line; exit with the code of the rank that failed first."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun()
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)


if __name__ == "__main__":
    main()
