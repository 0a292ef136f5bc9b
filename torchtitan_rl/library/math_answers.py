"""Whether two LaTeX answers say the same, by math-verify, in a process that can be killed.

sympy may take for ever over a short answer, in native code that no alarm interrupts (9^{9^{9^9}}). So comparisons are made by
this file run as a program of its own: a line of JSON in, "1" or "0" out. It imports nothing of this package.
"""

import functools
import json
import os
import select
import subprocess
import sys

LONGEST_SECONDS = 10.0
"""Of one comparison."""

_LONGEST_ANSWER = 1000
"""Characters; a longer one is no answer."""


class MathJudge:
    """Compares answers in another process, which is started when it is needed and anew after it was killed."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest_seconds = longest_seconds
        self._process: subprocess.Popen | None = None
        self._owner = 0
        # The reward and the judgement ask the same.
        self.equal = functools.lru_cache(maxsize=4096)(self._equal)

    def _equal(self, answer: str, expected: str) -> bool:
        r"""Whether math-verify finds both equal, as r"\frac{1}{2}" and "0.5"; False where it takes too long."""
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
        """This process's own: a forked copy of this object must not share its parent's."""
        if self._owner != os.getpid() or self._process.poll() is not None:
            # -P: or this file's neighbours, math.py among them, would be taken for the standard library.
            command = [sys.executable, "-P", __file__]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, text=True, **pipes)
            self._process.stdout.readline()  # it says when it is ready, so that no comparison pays for its start
            self._owner = os.getpid()
        return self._process


def _compare(answer: str, expected: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    found, right = (parse(f"\\boxed{{{text}}}", extraction_config=config) for text in (answer, expected))
    return bool(found and right) and verify(right, found)


def _main() -> None:
    """Answer until there are no more questions."""
    import math_verify  # noqa: F401  (slow to import)

    print("ready", flush=True)
    for line in sys.stdin:
        print(int(_compare(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
