"""Comparison of two LaTeX answers with math-verify, in a process that can be killed.

sympy can hang on a short answer such as 9^{9^{9^9}}, in native code that a signal cannot interrupt. So this file also
runs as a separate program: it reads one line of JSON per comparison and prints "1" or "0". It imports nothing from this
package.
"""

import functools
import json
import os
import select
import subprocess
import sys

LONGEST_SECONDS = 10.0
"""Time limit of one comparison."""

_LONGEST_ANSWER = 1000
"""Maximum characters of an answer. A longer one counts as wrong."""


class MathJudge:
    """Compares answers in another process, which is started on first use and restarted after it was killed."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest_seconds = longest_seconds
        self._process: subprocess.Popen | None = None
        self._owner = 0
        # The reward and the judgement compare the same pairs.
        self.equal = functools.lru_cache(maxsize=4096)(self._equal)

    def _equal(self, answer: str, expected: str) -> bool:
        r"""Returns whether math-verify finds both equal, such as \frac{1}{2} and 0.5; False after the time limit."""
        if answer.strip() == expected.strip():
            return True
        if len(answer) > _LONGEST_ANSWER:
            return False
        process = self._running()
        process.stdin.write(json.dumps([answer, expected]) + "\n")
        process.stdin.flush()
        if select.select([process.stdout], [], [], self._longest_seconds)[0]:
            return process.stdout.readline().strip() == "1"
        process.kill()
        process.wait()
        return False

    def _running(self) -> subprocess.Popen:
        """Returns this process's own comparison process: after a fork, the child must not share its parent's."""
        if self._owner != os.getpid() or self._process.poll() is not None:
            # -P: do not import modules of this folder in place of installed packages.
            command = [sys.executable, "-P", __file__]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, text=True, **pipes)
            self._process.stdout.readline()  # wait until it is ready, so that startup does not count as comparison time
            self._owner = os.getpid()
        return self._process


def _compare(answer: str, expected: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    found, right = (parse(f"\\boxed{{{text}}}", extraction_config=config) for text in (answer, expected))
    return bool(found and right) and verify(right, found)


def _main() -> None:
    """Compares pairs from stdin until it is closed."""
    import math_verify  # noqa: F401  (slow to import)

    print("ready", flush=True)
    for line in sys.stdin:
        print(int(_compare(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
