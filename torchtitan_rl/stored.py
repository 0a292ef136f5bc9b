"""Scored completions and plain values as text, for a checkpoint. Reading it cannot execute code."""

import base64
import io
from typing import Any

import numpy as np
import torch

from torchtitan_rl.types import Completion, ScoredCompletion, Trace, TurnRecord

_TYPES = [Completion, ScoredCompletion, Trace, TurnRecord, np.ndarray, np.dtype]
_TYPES += [type(np.dtype(name)) for name in ("f4", "f8", "i4", "i8", "u1", "?")]
_TYPES += [value.__reduce__()[0] for value in (np.zeros(0), np.float32(0))]  # in a private module


def to_text(value: Any) -> str:
    """Returns scored completions, plain values and arrays as text. Raises UnpicklingError if there is anything else."""
    data = io.BytesIO()
    torch.save(value, data)
    text = base64.b64encode(data.getvalue()).decode()
    from_text(text)
    return text


def from_text(text: str) -> Any:
    """Returns what `to_text` was given."""
    with torch.serialization.safe_globals(_TYPES):
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
