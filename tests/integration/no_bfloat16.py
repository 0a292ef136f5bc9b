"""A run that fails at its first operation in bfloat16: `torchrun -m tests.integration.no_bfloat16 --config debug ...`"""

from tests.parts.bfloat16 import NoBfloat16
from torchtitan_rl.train import main

if __name__ == "__main__":
    with NoBfloat16():
        main()
