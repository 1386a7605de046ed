"""Packages that can be imported but not used: every attribute and submodule resolves, every call raises.

SGLang imports ``sgl_kernel`` and ``torchvision`` on every platform; the first needs a CUDA driver, the second its own
torch.  On a CPU with the ``torch_native`` backend neither is called: a call would be an error, and raises one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Type(type):
    """Metaclass with which ``standin.A.B`` resolves, too."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(cls.__qualname__, name)


def _attribute(owner: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Type(f"{owner}.{name}", (), {"__new__": _refuse})


def _refuse(cls: type, *args: object, **kwargs: object) -> Any:
    raise RuntimeError(f"{cls.__qualname__} is an import stand-in: it must not be called")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._root + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        stand_in(module.__name__, vars(module))


def stand_in(name: str, namespace: dict[str, Any]) -> None:
    """Make a module's namespace resolve every attribute; of a top-level module every submodule, too."""
    namespace.setdefault("__version__", "0.0.0")
    namespace["__getattr__"] = lambda attribute: _attribute(name, attribute)
    if "." not in name:
        sys.meta_path.append(_Finder(name))
