# mypy: disable-error-code="override, assignment, no-any-return, no-untyped-call"
# What stands in for torch's own has its names, and torch's signatures are loose.
"""CUDA devices that are not there: tensors that say ``cuda:0``, lie in the host's memory, and keep CUDA's manners.

::

    with pretend_cuda() as cuda:
        x = torch.ones(3, device="cuda")
        x + torch.ones(3)  # RuntimeError: two devices
        x.tolist()
    assert cuda.synchronizations[0].what == "tolist"

What makes the host wait for the device is recorded with its place: numbers that are read, indices and shapes that
depend on values, copies between pageable memory and the device.  Copies from pinned memory with ``non_blocking`` are
not.
Whatever runs on the device runs on the CPU, at once: of streams, speed and races it says nothing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["PretendCuda", "PretendTensor", "Synchronization", "pretend_cuda"]

_ATEN = torch.ops.aten
_PUT = {_ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default}
_INDEX = {_ATEN.index.Tensor, *_PUT}
_COPY = {_ATEN.copy_.default, _ATEN._to_copy.default}
_WAITS = {  # the size of the result, or the result itself, is a number of the device's that the host needs
    _ATEN._local_scalar_dense.default: "item",
    _ATEN.nonzero.default: "nonzero",
    _ATEN.masked_select.default: "masked_select",
    _ATEN.equal.default: "equal",
    _ATEN.bincount.default: "bincount",
    _ATEN._unique2.default: "unique",
}
# files whose frames are passed over on the way to the place that synchronized
_PLAIN_GENERATOR = torch.Generator
_INNER = (str(Path(torch.__file__).parent), __file__, "<frozen")


class Synchronization(NamedTuple):
    """One wait of the host for the device; ``file``: the name without its folder."""

    what: str
    file: str
    line: int


@dataclass(frozen=True)
class _Properties:
    """What ``torch.cuda.get_device_properties`` says."""

    name: str
    major: int
    minor: int
    multi_processor_count: int = 132
    total_memory: int = 80 << 30
    L2_cache_size: int = 50 << 20


class PretendTensor(Tensor):
    """A tensor of a pretend device.  For torch's own code, which has no CUDA here, its device is ``meta``."""

    held: Tensor

    @staticmethod
    def __new__(cls: Any, held: Tensor, index: int) -> PretendTensor:
        shape: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        device = torch.device("meta", index)
        made: Any = Tensor._make_wrapper_subclass(cls, held.size(), dtype=held.dtype, device=device, **shape)
        made.held, made.place = held, torch.device("cuda", index)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # results are not made PretendTensors unasked
    device = property(lambda self: self.place)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of a pretend device outlived it")

    def as_subclass(self, cls: Any) -> Any:
        return PretendTensor.__new__(type(cls.__name__, (cls, PretendTensor), {}), self.held, self.device.index)

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self.held!r}, device={self.device})"


class PretendCuda:
    """``synchronizations``: all that there were; ``entered``: devices that ``torch.cuda.device`` made the current one.

    ``current``: its number; ``asynchronous``: copies between host and device that nobody waited for.
    """

    def __init__(self, devices: int, capability: tuple[int, int]) -> None:
        self.devices = devices
        self.properties = _Properties("Pretend H100", *capability)
        self.synchronizations: list[Synchronization] = []
        self.entered: list[int] = []
        self.asynchronous = 0
        self.current = 0
        self.generators: dict[int, torch.Generator] = {}
        self._pinned: dict[int, torch.UntypedStorage] = {}  # held, so that no other takes its address

    @contextmanager
    def recorded(self) -> Iterator[list[Synchronization]]:
        """The synchronizations of a block, known at its end."""
        before, found = len(self.synchronizations), list[Synchronization]()
        try:
            yield found
        finally:
            found += self.synchronizations[before:]

    def note(self, what: str) -> None:
        """Record a wait of the code that is running.  The copies of Triton's interpreter are its own affair."""
        frames = traceback.extract_stack()
        place = next(frame for frame in reversed(frames) if not frame.filename.startswith(_INNER))
        if "triton" not in Path(place.filename).parts:
            self.synchronizations.append(Synchronization(what, Path(place.filename).name, place.lineno or 0))

    def index(self, device: Any) -> int | None:
        """The number of a device here, ``None`` for the CPU."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type not in ("cuda", "meta"):
            return None
        found: int = self.current if device.index is None else device.index
        if found >= self.devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {found} of {self.devices}")
        return found

    def exchange(self, index: int) -> int:
        """Make a device the current one; which was it?"""
        before = self.current
        if index >= 0:
            self.current = index
            self.entered.append(index)
        return before

    def pin(self, x: Tensor) -> Tensor:
        """Call the memory of a CPU tensor pinned."""
        self._pinned[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    def pinned(self, x: Tensor) -> bool:
        """Whether it is."""
        return not isinstance(x, PretendTensor) and x.untyped_storage().data_ptr() in self._pinned

    def copies(self, source: Tensor, onto_device: bool, *, non_blocking: bool, onto_pinned: bool = True) -> None:
        """Record a copy between host and device, unless it is one that nobody waits for."""
        if isinstance(source, PretendTensor) != onto_device:
            pinned = self.pinned(source) if onto_device else onto_pinned
            if non_blocking and pinned:
                self.asynchronous += 1
            else:
                self.note("copy to the device" if onto_device else "copy to the host")

    def to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.to``, which torch itself refuses for devices that it was not built for."""
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        held, here = (x.held, x.device.index) if isinstance(x, PretendTensor) else (x, None)
        there = here if device is None else self.index(device)
        self.copies(x, there is not None, non_blocking=non_blocking)
        found = held.to(held.dtype if dtype is None else dtype, copy=copy or here != there)
        return x if found is held else self.wrapped(found, there)

    def wrapped(self, x: Any, index: int | None) -> Any:
        """Tensors as those of a device."""
        if index is None or not isinstance(x, Tensor):
            return x
        return PretendTensor(x, index)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation of torch's dispatcher."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        ours = [x for x in tensors if isinstance(x, PretendTensor)]
        device = kwargs.get("device")
        index = (ours[0].device.index if ours else None) if device is None else self.index(device)
        if ours and func not in _COPY:
            self._refuse_mixed(func, args, ours, [x for x in tensors if not isinstance(x, PretendTensor)])
        if ours:
            self._waits(func, args, kwargs)
        non_blocking = bool(kwargs.get("non_blocking"))
        if func is _ATEN._to_copy.default:
            self.copies(args[0], index is not None, non_blocking=non_blocking)
        if func is _ATEN.copy_.default:
            onto, non_blocking = isinstance(args[0], PretendTensor), non_blocking or args[2:3] == (True,)
            self.copies(args[1], onto, non_blocking=non_blocking, onto_pinned=self.pinned(args[0]))
        generator = kwargs.get("generator")
        if generator is not None and (index is not None) != (generator._cdata in self.generators):
            raise RuntimeError(f"Expected a '{'cpu' if index is None else 'cuda'}' device type for generator")
        plain = {**kwargs, "device": torch.device("cpu")} if device is not None else kwargs
        on_host = tree_map(lambda x: x.held if isinstance(x, PretendTensor) else x, (args, plain))
        if func is _ATEN.mm.dtype:  # results of another type than the factors': CUDA's alone
            a, b, dtype = on_host[0]
            found = a.to(dtype) @ b.to(dtype)
        else:
            found = func(*on_host[0], **on_host[1])
        if ours and torch.Tag.inplace_view in func.tags:  # squeeze_ and its like change what the wrapper says, too
            with no_dispatch():
                func(*args, **kwargs)
        written = self._written(func, args, kwargs)
        if written:
            return (written[0] if len(written) == 1 else tuple(written)) if func._schema.returns else None
        return tree_map(lambda x: self.wrapped(x, index), found)

    def _refuse_mixed(self, func: Any, args: Any, ours: list[PretendTensor], others: list[Tensor]) -> None:
        if func in _INDEX and isinstance(args[0], PretendTensor):
            others = [args[2]] if func in _PUT and not isinstance(args[2], PretendTensor) else []
            if any(not isinstance(x, PretendTensor) for x in args[1] if x is not None):
                self.note("index from the host")
        devices = {x.device for x in ours} | {x.device for x in others if x.dim() > 0}
        if len(devices) > 1:
            named = ", ".join(sorted(map(str, devices)))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {named} ({func})")

    def _waits(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if func in _WAITS:
            self.note(_WAITS[func])
        elif func is _ATEN.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.note("repeat_interleave without output_size")
        elif func in _INDEX and _by_mask(args):
            self.note("boolean index")

    def _written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that an operation writes to and returns."""
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = [
            named[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named
        ]
        for x in written:
            if isinstance(x, PretendTensor) and (x.shape, x.stride()) != (x.held.shape, x.held.stride()):
                raise NotImplementedError(f"{func} changes the shape of a tensor of a pretend device")
        return written


def _by_mask(args: Any) -> bool:
    """Whether an index is a mask whose true places must be counted; one number is filled in without that."""
    masks = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return masks and (len(args) < 3 or args[2].numel() != 1)


class _Operations(TorchDispatchMode):
    def __init__(self, cuda: PretendCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.cuda.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions that torch was not built for, or that it refuses for subclasses."""

    def __init__(self, cuda: PretendCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cuda = dict(kwargs or {}), self.cuda
        if func is Tensor.to:
            return func(*args, **kwargs) if _is_of_other_kind(args[0]) else cuda.to(*args, **kwargs)
        if func is Tensor.cuda:
            return cuda.to(args[0], *(args[1:] or ("cuda",)), **kwargs)
        if func is Tensor.cpu:
            return cuda.to(args[0], "cpu")
        if func is Tensor.tolist and isinstance(args[0], PretendTensor):
            cuda.note("tolist")
            return args[0].held.tolist()
        if func is Tensor.is_pinned:
            return cuda.pinned(args[0])
        if func is Tensor.pin_memory:
            return cuda.pin(args[0].clone())
        pinned = kwargs.pop("pin_memory", False)
        if func in (torch.tensor, torch.as_tensor):
            device = kwargs.pop("device", None)
            made = func(*args, **kwargs)
            made = cuda.pin(made) if pinned else made
            return made if device is None else cuda.to(made, device)
        if func is Tensor.new_tensor and "device" not in kwargs and isinstance(args[0], PretendTensor):
            return cuda.to(torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}), args[0].device)
        made = func(*args, **kwargs)
        return cuda.pin(made) if pinned else made


def _is_of_other_kind(x: Tensor) -> bool:
    """Subclasses with functions of their own."""
    return type(x) not in (Tensor, PretendTensor, torch.nn.Parameter)


class _Generator(torch.Generator):
    """What ``torch.Generator`` is meanwhile: one of a device has the CPU's numbers, and is known by its address."""

    cuda: ClassVar[PretendCuda]

    def __new__(cls, device: Any = "cpu") -> Any:
        index = cls.cuda.index(device)
        made: Any = super().__new__(_PLAIN_GENERATOR if index is None else cls)
        if index is not None:
            made.device_here = torch.device("cuda", index)
            cls.cuda.generators[made._cdata] = made
        return made

    device = property(lambda self: self.device_here)


def _forget() -> None:
    """What k16v8 keeps of devices that it has met."""
    for module, names in (
        ("k16v8.kernels.launch", ("target_of",)),
        ("k16v8.plugins.shared", ("_PLANS", "_BUFFERS", "_WORKSPACES")),
    ):
        for name in names if module in sys.modules else ():
            kept = getattr(sys.modules[module], name)
            (kept.clear if isinstance(kept, dict) else kept.cache_clear)()


@contextmanager
def pretend_cuda(devices: int = 1, capability: tuple[int, int] = (9, 0)) -> Iterator[PretendCuda]:
    """``devices`` GPUs for a block; afterwards torch is as before, and their tensors cannot be used."""
    cuda = PretendCuda(devices, capability)
    only_lift = torch._C._only_lift_cpu_tensors()
    replaced: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: devices,
        "current_device": lambda: cuda.current,
        "set_device": lambda device: cuda.exchange(cuda.index(device) or 0),
        "_exchange_device": cuda.exchange,
        "_maybe_exchange_device": cuda.exchange,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
        "get_device_properties": lambda device=None: cuda.properties,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: cuda.properties.name,
    }
    _forget()
    with ExitStack() as patches:
        for name, function in replaced.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, function))
        generator = type("Generator", (_Generator,), {"cuda": cuda})
        patches.enter_context(mock.patch.object(torch, "Generator", generator))
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with _Functions(cuda), _Operations(cuda):
                yield cuda
        finally:
            torch._C._set_only_lift_cpu_tensors(only_lift)
            _forget()
