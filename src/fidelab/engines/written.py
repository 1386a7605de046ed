"""Find out which parameters of a model are written while a checkpoint is loaded, with any loader.

Loaders copy into parameters, into slices of them or into ``.data``, or replace them by new tensors.  All but the last
end in an operation that mutates an argument, and PyTorch's dispatcher shows those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class Ledger:
    """Addresses of storages that were written, and of the parameters' storages before loading."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before = {name: _place(parameter) for name, parameter in model.named_parameters()}
        self.written: set[int] = set()

    def untouched(self) -> list[str]:
        """Parameters that have values but were neither written nor replaced."""
        return [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.numel()
            and _place(parameter) == self._before.get(name)
            and _place(parameter) not in self.written
        ]


@contextmanager
def watched(model: Any) -> Iterator[Ledger]:
    """Record writes to a model's parameters while the context lasts, those of pool threads included."""
    ledger = Ledger(model)
    submit = ThreadPoolExecutor.submit

    def watching(pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with _mode(ledger.written):  # modes are a thread's own
                return call(*args, **kwargs)

        return submit(pool, inside, *args, **kwargs)

    ThreadPoolExecutor.submit = watching  # type: ignore[assignment, method-assign]
    try:
        with _mode(ledger.written):
            yield ledger
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _mode(written: set[int]) -> Any:
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            named = dict(kwargs or {})
            for index, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    target = args[index] if index < len(args) else named.get(argument.name)
                    if isinstance(target, Tensor):
                        written.add(_place(target))
            return func(*args, **named)

    return Watch()  # type: ignore[no-untyped-call]


def _place(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())
