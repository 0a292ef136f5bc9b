"""torchrun without its own report of a rank's failure: the rank has already said what was wrong, and its code is passed on.

python -m torchtitan_rl.launch --nproc_per_node=8 -m torchtitan_rl.train --config debug
"""

import logging
import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    """Run torchrun's command line; exit with the code of the rank that failed first, or as a signal's victim would."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Seconds from a forwarded SIGTERM to SIGKILL: long enough to end a step and save. torchrun's own default is 30.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "900")
    try:
        torchrun()
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as error:  # the ranks got it too, and have saved
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
