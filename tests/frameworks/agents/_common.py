"""What all agents here share: the question, the tool and the result."""

import json
import os

with open(os.environ["AGENT_TASK"]) as file:
    QUESTION = json.load(file)
SCENARIO = os.environ.get("SCENARIO", "")
STREAMS = SCENARIO == "stream"
TRIMS = SCENARIO == "trimmed history"


def multiply(a: int, b: int) -> str:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return str(int(a) * int(b))


def finish(answer: object) -> None:
    """Write the result: reward 1 for the right answer."""
    with open(os.environ["AGENT_RESULT"], "w") as file:
        json.dump({"reward": float("12" in str(answer))}, file)
