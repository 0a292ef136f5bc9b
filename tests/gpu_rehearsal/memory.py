"""Memory of the pretended device: its peak, and memory that one stream frees while another still uses it."""

import weakref
from dataclasses import dataclass, field

import torch

from tests.gpu_rehearsal import streams
from tests.gpu_rehearsal.places import place


@dataclass
class _Block:
    """The memory of one storage."""

    home: streams.Stream
    """The stream that allocated it. When it is freed, the allocator may give it to this stream's next operator at once."""
    made: str
    size: int = 0
    uses: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Stream -> the time and the place of its last operator that used this memory."""


class Memory:
    """Follows every storage on the device, as PyTorch's caching allocator does, without its fragmentation."""

    def __init__(self) -> None:
        self.now = self.peak = 0  # bytes
        self.races: dict[str, int] = {}
        """What was in use on one stream when another got its memory -> bytes."""
        self._blocks: dict[int, _Block] = {}
        self._freed: list[_Block] = []
        """Blocks that were freed while another stream had yet to use them."""

    def use(self, tensor: torch.Tensor, operator: str) -> None:
        """Note that the current stream's operator uses `tensor`, or only makes a view or an empty tensor if it is ""."""
        storage, stream = tensor.untyped_storage(), streams.current()
        key = storage._cdata
        if key not in self._blocks:
            self._blocks[key] = _Block(stream, place())
            weakref.finalize(storage, self._drop, key)
            self._allocate(stream)
        block = self._blocks[key]
        self._resize(block, storage.nbytes())
        if operator and (stream is not block.home):
            block.uses[stream.number] = stream.clock[stream.number], f"{operator} at {place()}"

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage was resized in place, as FSDP2 does to free and to allocate gathered weights."""
        block = self._blocks.get(storage._cdata)
        if block is None:
            return
        if storage.nbytes() == 0:
            self._free(block)
        elif block.size == 0:
            block.home, block.made, block.uses = streams.current(), place(), {}
            self._allocate(block.home)
        self._resize(block, storage.nbytes())

    def _resize(self, block: _Block, size: int) -> None:
        size = -(-size // 512) * 512  # the allocator's granularity
        self.now += size - block.size
        self.peak = max(self.peak, self.now)
        block.size = size

    def _drop(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._free(block)
        self._resize(block, 0)

    def _free(self, block: _Block) -> None:
        late = {n: use for n, use in block.uses.items() if not block.home.has_seen(n, use[0])}
        if late and block.size:
            self._freed.append(_Block(block.home, block.made, block.size, late))
        block.uses = {}

    def _allocate(self, home: streams.Stream) -> None:
        """The next operator on `home` may get what was freed there. It must have waited for the other streams by then."""
        for block in [block for block in self._freed if block.home is home]:
            self._freed.remove(block)
            for number, (time, user) in block.uses.items():
                if not home.has_seen(number, time):
                    race = f"memory made at {block.made} is given away while another stream uses it: {user}"
                    self.races[race] = max(self.races.get(race, 0), block.size)
