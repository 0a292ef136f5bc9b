"""The group of the trainers' first rank and a generator, for a rehearsal of both of its ends in one process."""

from collections import deque
from contextlib import contextmanager

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan_rl.link import Link


class Wire:
    """Takes what one end broadcasts, and gives it to the other, in order. As NCCL, it takes only the device's tensors."""

    def __init__(self) -> None:
        self._sent: deque[Tensor] = deque()
        self._place = 0

    @contextmanager
    def link(self, place: int):  # noqa: ANN201
        """An end of the link: 0 sends, 1 receives."""
        self._place = place
        end = object.__new__(Link)
        end._weights = self
        yield end

    def rank(self) -> int:
        return self._place

    def broadcast(self, tensor: Tensor, root: int) -> "Wire":
        assert (tensor.device.type, tensor.is_contiguous()) == ("cuda", True), tensor
        if self._place == root:
            self._sent.append(tensor)
            return self
        sent = self._sent.popleft()
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype), "NCCL would wait for ever"
        with _disable_current_modes():
            tensor._true = getattr(sent, "_true", None)
        return self

    def wait(self) -> None:
        """The stream waits, not the host."""
