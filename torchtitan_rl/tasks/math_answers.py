"""Whether two LaTeX answers say the same, by math-verify."""

from torchtitan_rl.run.errors import UserError

_LONGEST = 1000
"""Characters of an answer; a longer one is no answer."""


def equal_math(answer: str, expected: str) -> bool:
    r"""Whether math-verify finds two LaTeX answers equal: equal_math(r"\frac{1}{2}", "0.5") is True.

    math-verify's own limit of 5 s cannot end native code: call it in a worker process (grading/worker.py).
    """
    if answer.strip() == expected.strip():
        return True
    if len(answer) > _LONGEST:
        return False
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    found, right = (parse(f"\\boxed{{{text}}}", extraction_config=config) for text in (answer, expected))
    return bool(found and right) and verify(right, found)


def check_installed() -> None:
    """Raise UserError unless math-verify can be imported."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise UserError("task: expected math-verify to be installed. pip install 'torchtitan_rl[tasks]'.") from error
