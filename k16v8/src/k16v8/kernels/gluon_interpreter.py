"""The Gluon kernel without a GPU: the function itself, run by Python, with torch in place of Gluon's operations.

Gluon has no interpreter.  This one has what :mod:`k16v8.kernels.decode_gluon` uses of the language, for correctness
alone: layouts mean nothing, programs run one after another, and what depends on time is made as bad as it can be:

- an asynchronous copy spoils its target at once and arrives when it is waited for, so a read that comes too early,
  and a stage that is filled too early, give NaN;
- a load or store outside its tensor's storage raises an error;
- memory for stages begins as NaN.

What it cannot see: layouts that do not fit each other (the compiler refuses them), barriers that are missing, speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["launch"]

_UINT16 = torch.int16  # torch computes little with unsigned ones; bits are bits
_NAN = -1  # of every format that is held: all bits set


def launch(
    kernel: Any,
    programs: int,
    arguments: Sequence[object],
    constants: dict[str, object],
    *,
    order: Sequence[int] | None = None,
) -> None:
    """Run ``kernel`` (of ``@gluon.jit``) as ``programs`` programs, in ``order``, the first to the last unless told.

    Raises:
        IndexError: a load or a store outside its tensor's storage.
    """
    given = [_pointer(x) if isinstance(x, Tensor) else x for x in arguments]
    for program in range(programs) if order is None else order:
        _emulated(kernel, _Machine(program, programs))(*given, **constants)


@dataclass(frozen=True)
class _Pointer:
    """Numbers of a storage, and which of them: an offset, or a tensor of offsets."""

    numbers: Tensor
    offset: Any

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.numbers.dtype)

    def __add__(self, more: Any) -> _Pointer:
        return replace(self, offset=self.offset + more)

    def __getitem__(self, key: Any) -> _Pointer:
        return replace(self, offset=self.offset[key])

    def to(self, dtype: torch.dtype, *, bitcast: bool) -> _Pointer:
        assert bitcast
        size = self.numbers.element_size()
        wider = torch.empty(0, dtype=dtype).element_size()
        whole = self.numbers[: len(self.numbers) * size // wider * wider // size]
        return _Pointer(whole.view(dtype), self.offset * size // wider)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Offsets and which of them are meant; all of these lie in the storage."""
        offset = torch.as_tensor(self.offset)
        wanted = torch.ones((), dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        shape = torch.broadcast_shapes(offset.shape, wanted.shape)  # type: ignore[no-untyped-call]
        offset, wanted = offset.expand(shape), wanted.expand(shape)
        beyond = wanted & ((offset < 0) | (offset >= len(self.numbers)))
        if bool(beyond.any()):
            raise IndexError(f"offset {int(offset[beyond][0])} of a storage of {len(self.numbers)}")
        return offset.masked_fill(~wanted, 0), wanted


def _pointer(x: Tensor) -> _Pointer:
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return _Pointer(whole, x.storage_offset())


@dataclass(frozen=True)
class _Shared:
    """Shared memory."""

    numbers: Tensor

    def index(self, at: Any) -> _Shared:
        return _Shared(self.numbers[int(at)])

    def permute(self, order: list[int]) -> _Shared:
        return _Shared(self.numbers.permute(order))

    def load(self, layout: Any) -> Tensor:
        return self.numbers.clone()


class _Machine:
    """The operations of one program; names are Gluon's."""

    float16, float32, int64, uint16 = torch.float16, torch.float32, torch.int64, _UINT16

    def __init__(self, program: int, programs: int) -> None:
        self._program, self._programs = program, programs
        self._open: list[Callable[[], object]] = []  # copies of the group that is not committed yet
        self._groups: list[list[Callable[[], object]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *args, **kwargs: None
        raise AttributeError(f"the interpreter has no {name}")

    def program_id(self, axis: int) -> int:
        return self._program

    def num_programs(self, axis: int) -> int:
        return self._programs

    def barrier(self) -> None:
        pass

    static_range = staticmethod(range)
    exp2, log2, where = staticmethod(torch.exp2), staticmethod(torch.log2), staticmethod(torch.where)

    def pointer_type(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def to_tensor(self, x: Any) -> Tensor:
        return torch.as_tensor(x)

    def arange(self, start: int, end: int, layout: Any = None) -> Tensor:
        return torch.arange(start, end)

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: Any = None) -> Tensor:
        return torch.full(shape, value, dtype=dtype)

    def convert_layout(self, x: Tensor, layout: Any) -> Tensor:
        return x

    def maximum(self, a: Any, b: Any) -> Tensor:
        return torch.maximum(*_alike(a, b))

    def minimum(self, a: Any, b: Any) -> Tensor:
        return torch.minimum(*_alike(a, b))

    def max(self, x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    def sum(self, x: Tensor, axis: int) -> Tensor:
        return x.sum(axis)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> _Shared:
        numbers = torch.empty(shape, dtype=dtype)
        numbers.view(torch.int16).fill_(_NAN)
        return _Shared(numbers)

    def load(self, pointer: _Pointer, mask: Any = None, other: float = 0.0, *, cache_modifier: str = "") -> Tensor:
        places, wanted = pointer.places(mask)
        found = pointer.numbers[places]
        return found if mask is None else torch.where(wanted, found, torch.as_tensor(other).to(found.dtype))

    def store(self, pointer: _Pointer, value: Any, mask: Any = None) -> None:
        places, wanted = pointer.places(mask)
        value = torch.as_tensor(value).to(pointer.numbers.dtype).expand(places.shape)
        pointer.numbers[places[wanted]] = value[wanted]

    def atomic_add(self, pointer: _Pointer, value: int, *, sem: str, scope: str) -> Tensor:
        old = self.load(pointer).clone()
        self.store(pointer, old + value)
        return old

    def async_load(self, target: _Shared, pointer: _Pointer) -> None:
        found = self.load(pointer).view(target.numbers.dtype)
        target.numbers.view(torch.int16).fill_(_NAN)
        self._open.append(lambda: target.numbers.copy_(found))

    def commit_group(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait_group(self, outstanding: int) -> None:
        while len(self._groups) > outstanding:
            for arrive in self._groups.pop(0):
                arrive()


def _alike(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    kind = torch.promote_types(a.dtype, b.dtype)
    return a.to(kind), b.to(kind)


def _mma_v2(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    return acc + a.float() @ b.float()


def _halves(raw: Tensor, odd: bool) -> Tensor:
    """What the instruction does with pairs of codes."""
    codes = ((raw.int() >> (8 * odd)) & 0xFF).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn).half()


def _emulated(kernel: Any, machine: _Machine) -> Callable[..., None]:
    """The kernel's own code, with other operations behind the same names."""
    names: dict[str, Any] = {
        "gl": machine, "async_copy": machine, "mma_v2": _mma_v2, "halves": _halves, "range": range,
        "__builtins__": __builtins__,
    }  # fmt: skip
    for name in ("pages_of", "copy_tile"):
        names[name] = FunctionType(kernel.fn.__globals__[name].fn.__code__, names)
    return FunctionType(kernel.fn.__code__, names)
