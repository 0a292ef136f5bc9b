"""Executes every operator on the pretended device, and records what a GPU would be asked to do.

Fake tensors have no data. Values that follow from host data alone (token ids, positions, masks) are computed beside them on the
CPU, so that nonzero(), item() and numpy() answer. A value that depends on weights is unknown: item() gives 0 for it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu_rehearsal import streams
from tests.gpu_rehearsal.memory import Memory
from tests.gpu_rehearsal.places import place

aten = torch.ops.aten
MOST_KNOWN = 1 << 24
"""Values of the largest tensor whose true values are kept."""
ASKS_VALUES = {
    aten.nonzero.default, aten._local_scalar_dense.default, aten.masked_select.default, aten._unique2.default,
    aten.bincount.default, aten.equal.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
"""The host waits for their result, whose size or value it needs."""
INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
CREATES = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros.default, aten.ones.default, aten.full.default,
    aten.eye.default, aten.scalar_tensor.default,
}  # fmt: skip


class Collective(NamedTuple):
    """One call of a collective by this rank."""

    operator: str
    ranks: tuple[int, ...]
    shapes: tuple[tuple, ...]
    """(dtype, sizes) of each tensor."""
    at: str
    on_cpu: bool
    group: str = ""
    """The process group's name: groups of the same ranks have different ones, and each has a communicator."""


class Device(TorchDispatchMode):
    """The innermost mode, above FakeCuda. Its attributes are the record."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.collectives: list[Collective] = []
        self.syncs: Counter[str] = Counter()
        """Where the host waited for the device, by line."""
        self.operators: Counter[str] = Counter()
        """How often each operator was launched."""
        self.exchanges = 0
        """Calls of an all-to-all whose sizes depend on the routers: the host waits to know them."""
        self._stale: dict[int, Tensor] = {}
        """True values of which a part has since become unknown, by storage. They are kept, so no other gets their place."""

    def sync(self) -> None:
        """Note that the host waits for the device here."""
        self.syncs[place()] += 1

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Record and execute one operator."""
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)  # which torch's CPU build cannot
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace in ("c10d", "_c10d_functional"):
            if func is torch.ops._c10d_functional.wait_tensor.default:
                return args[0]  # the fake one makes another tensor
            self._note_collective(func, tensors, args)
        if not any(isinstance(t, FakeTensor) for t in tensors) and not _names_cuda(args, kwargs):
            with _disable_current_modes():  # the host's own
                return func(*args, **kwargs)
        stream = streams.current()
        stream.tick()
        self._note_sync(func, tensors, args, kwargs)
        if func in ASKS_VALUES and tensors:
            out = self._answer(func, tensors, args, kwargs)
        else:
            if func in INDEXES:
                args = (args[0], self._without_masks(args[1]), *args[2:])
            out = func(*args, **kwargs)
            self._keep_true(func, tensors, args, kwargs, out)
        idle = (
            func.is_view
            or func.namespace == "prim"
            or any(x in func.__name__ for x in ("empty", "detach", "_unsafe_view"))
        )
        if not idle:
            self.operators[func.__name__] += _kernels(func, tensors)
        for tensor in (*tensors, *tree_leaves(out)):
            if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
                self.memory.use(tensor, "" if idle else func.__name__)
        return out

    def true(self, tensor: Tensor) -> Tensor | None:
        """Returns the values of a tensor on the CPU; None if they are unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        values = getattr(tensor, "_true", None)
        return None if values is None or values.untyped_storage()._cdata in self._stale else values

    def known(self, values: Any, device: torch.device) -> Any:
        """Returns fake tensors on `device` with these values."""
        if not isinstance(values, Tensor):
            return values
        out = torch.empty(values.shape, dtype=values.dtype, device=device)
        out._true = values
        return out

    def host_values(self, tensor: Tensor) -> Tensor:
        """Returns the values that the host reads, zeros if they are unknown."""
        values = self.true(tensor)
        with _disable_current_modes():
            return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype) if values is None else values

    def _note_collective(self, func: Callable, tensors: list[Tensor], args: tuple) -> None:
        shapes = tuple((str(t.dtype), tuple(t.shape)) for t in tensors)
        on_cpu = any(t.device.type == "cpu" for t in tensors) and func.__name__ != "barrier.default"
        ranks, group = _group(args)
        self.collectives.append(Collective(func.__name__, ranks, shapes, place(), on_cpu, group))

    def _note_sync(self, func: Callable, tensors: list[Tensor], args: tuple, kwargs: dict) -> None:
        from_device = bool(tensors) and tensors[0].device.type == "cuda"
        if func is aten._to_copy.default:
            waits = from_device and str(kwargs.get("device")) == "cpu" and not kwargs.get("non_blocking")
        elif func is aten.copy_.default:
            to_host = not from_device and tensors[1].device.type == "cuda"
            waits = to_host and not (args[2:] or (kwargs.get("non_blocking"),))[0]
        else:
            waits = from_device and func in ASKS_VALUES and kwargs.get("output_size") is None
        if waits:
            self.sync()

    def _answer(self, func: Callable, tensors: list[Tensor], args: tuple, kwargs: dict) -> Any:
        values = [self.true(t) for t in tensors]
        if all(v is not None for v in values):
            with _disable_current_modes():
                out = func(*self._on_cpu(args), **self._on_cpu(kwargs))
            return tree_map(lambda v: self.known(v, tensors[0].device), out)
        if func is aten._local_scalar_dense.default:
            dtype = tensors[0].dtype
            return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        raise RuntimeError(f"{func} of values that depend on weights, at {place()}")

    def _without_masks(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Replace boolean masks by indices, as CUDA does: the host waits for their number."""
        out: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                out.append(index)
                continue
            if index.device.type == "cuda":
                self.sync()
            values = self.true(index)
            with _disable_current_modes():
                mask = torch.ones(tuple(index.shape), dtype=torch.bool) if values is None else values
                columns = mask.nonzero().unbind(1)
            out += [self.known(column, index.device) for column in columns]
        return out

    def _keep_true(self, func: Callable, tensors: list[Tensor], args: tuple, kwargs: dict, out: Any) -> None:
        """Compute the true values of results whose arguments are known; forget those of arguments that are not any more."""
        values = [self.true(t) for t in tensors]
        outs = [t for t in tree_leaves(out) if isinstance(t, FakeTensor)]
        known = all(v is not None for v in values) if tensors else func in CREATES
        small = sum(t.numel() for t in (*values, *outs)) <= MOST_KNOWN if known else False
        if known and small and func.namespace == "aten":
            with _disable_current_modes():
                trues = tree_leaves(func(*self._on_cpu(args), **self._on_cpu(kwargs)))
            for fake, true in zip(outs, (t for t in trues if isinstance(t, Tensor)), strict=True):
                fake._true = true
        for tensor in () if known and small else _written(func, args, kwargs):
            if (value := getattr(tensor, "_true", None)) is not None:
                self._stale[value.untyped_storage()._cdata] = value

    def _on_cpu(self, tree: Any) -> Any:
        def of(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.true(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        return tree_map(of, tree)


def _written(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors among an operator's arguments that it writes into."""
    named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    names = [one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]
    return [leaf for name in names for leaf in tree_leaves(named.get(name)) if isinstance(leaf, Tensor)]


def _kernels(func: Callable, tensors: list[Tensor]) -> int:
    """How many kernels CUDA launches for an operator. One over lists takes at most 64 pairs and 320 chunks of 65,536 elements."""
    if not func.__name__.startswith("_foreach"):
        return 1
    written = tensors[: len(tensors) // 2]
    chunks = sum(-(-tensor.numel() // 65536) for tensor in written)
    return max(-(-len(written) // 64), -(-chunks // 320))


def _names_cuda(args: tuple, kwargs: dict) -> bool:
    return any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in tree_leaves((args, kwargs)))


def _group(args: tuple) -> tuple[tuple[int, ...], str]:
    """The ranks and the name of the group among a collective's arguments: an object for c10d, a name for functional
    collectives."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            group = dist.ProcessGroup.unbox(argument)
            return tuple(dist.get_process_group_ranks(group)), group.group_name
    names = [a for a in args if isinstance(a, str)]
    if not names:
        return (), ""
    group = dist.distributed_c10d._resolve_process_group(names[-1])
    return tuple(dist.get_process_group_ranks(group)), names[-1]


@contextmanager
def recording(device: Device) -> Iterator[Device]:
    """Within this context host reads and resized storages are recorded by `device`."""
    resize, numpy, tolist = torch.UntypedStorage.resize_, Tensor.numpy, Tensor.tolist
    fakes_tolist = FakeTensor.tolist

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        device.memory.resized(storage)
        return out

    def fake_numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return numpy(tensor, *args, **kwargs)
        if tensor.device.type != "cpu":
            raise TypeError(f"can't convert a cuda tensor to numpy, at {place()}")
        return numpy(device.host_values(tensor))

    def fake_tolist(tensor: Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return tolist(tensor)
        if tensor.device.type == "cuda":
            device.sync()
        return tolist(device.host_values(tensor))

    torch.UntypedStorage.resize_, Tensor.numpy = resize_, fake_numpy
    Tensor.tolist = FakeTensor.tolist = fake_tolist
    streams.host_waits = device.sync
    try:
        yield device
    finally:
        torch.UntypedStorage.resize_, Tensor.numpy, Tensor.tolist = resize, numpy, tolist
        FakeTensor.tolist = fakes_tolist
        streams.host_waits = lambda: None
