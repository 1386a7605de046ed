"""Registries of objects by name, imported on first use; optional packages, and the extra that installs each.

Each pluggable room holds a plain table ``{"name": "package.module:Object"}`` in its ``__init__``; a third-party package
adds a row through an entry point (groups ``fidelab.engines``, ``fidelab.axes``, ``fidelab.benches``,
``fidelab.formats``).  The group ``fidelab.checkpoints`` has no table: the distribution fidelab-checkpoints fills it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fidelab.core.errors import MissingPackageError, UnknownNameError

# package → its display name, the extra of fidelab that installs it
_EXTRAS = {
    "accelerate": ("Accelerate", "hf"),
    "llama_cpp": ("llama-cpp-python", "llamacpp"),
    "matplotlib": ("matplotlib", "plot"),
    "pandas": ("pandas", "pandas"),
    "pyarrow": ("pyarrow", "parquet"),
    "ray": ("Ray", "ray"),
    "tokenizers": ("tokenizers", "hf"),
    "torch": ("PyTorch", "hf"),
    "transformers": ("Transformers", "hf"),
}


# extra → the extras that it installs as well
_CONTAINS = {"hf": ("parquet",), "llamacpp": ("hf", "parquet"), "pandas": ("parquet",)}


class Registry:
    """One table of implementations.

    ``kind`` is the word used in error messages ("engine"); ``group`` the entry-point group, or ``None``; ``hint`` says
    what is known of a name that is not here, or returns an empty text.
    """

    def __init__(
        self,
        kind: str,
        table: Mapping[str, str],
        group: str | None = None,
        hint: Callable[[str], str] = lambda name: "",
    ) -> None:
        self.kind = kind
        self.group = group
        self._table = dict(table)
        self._hint = hint

    @property
    def built_in(self) -> list[str]:
        """The built-in names in table order."""
        return [*self._table]

    def names(self) -> list[str]:
        """Return all names: the built-in ones in table order, then third-party ones in alphabetical order."""
        return [*self._table, *sorted(set(_foreign(self.group)) - set(self._table))]

    def load(self, name: str) -> Any:
        """Return the object called ``name``, importing its module; an entry point may name a whole module.

        Raises:
            UnknownNameError: If no table and no entry point has this name.
        """
        target = self._table.get(name) or _foreign(self.group).get(name)
        if target is None:
            raise UnknownNameError(self.kind, name, self.names(), self._hint(name))
        module, _, attribute = target.partition(":")
        found = import_module(module)
        return getattr(found, attribute) if attribute else found

    def available(self) -> dict[str, Any]:
        """Return all objects by name, in the order of :meth:`names`.

        One of another package that cannot be imported is left out. Its own use shows the error.
        """
        found = {name: self.load(name) for name in self._table}
        for name in self.names()[len(found) :]:
            with suppress(Exception):  # whatever the import of another package raises
                found[name] = self.load(name)
        return found


@cache
def _foreign(group: str | None) -> dict[str, str]:
    if group is None:
        return {}
    from importlib.metadata import entry_points  # slow, and built-in names do not need it

    return {point.name: point.value for point in entry_points(group=group)}


def require(module: str, user: str = "this command") -> Any:
    """Import ``module`` of an optional package and return it.

    ``user``: the feature that needs it, the subject of the message.

    Raises:
        MissingPackageError: If the package, or an optional package that it imports, is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (found := missing_package(error, user)) is None:
            raise
        raise found from None


def require_all(modules: Collection[str], user: str) -> None:
    """Check that optional packages are installed, without importing them; all that are missing are named at once.

    ``user``: the feature that needs them, the subject of the message.

    Raises:
        MissingPackageError: If one is not installed.
    """
    missing = [_EXTRAS[module] for module in sorted(modules, key=str.lower) if not _is_installed(module)]
    if missing:
        titles = sorted((title for title, _ in missing), key=str.lower)
        named = " and ".join([*filter(None, [", ".join(titles[:-1])]), titles[-1]])
        extras = {extra for _, extra in missing}
        extras -= {inner for extra in extras for inner in _CONTAINS.get(extra, ())}
        raise MissingPackageError(f"{user} needs {named}: pip install 'fidelab[{','.join(sorted(extras))}]'")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def missing_package(error: ImportError, user: str = "this command") -> MissingPackageError | None:
    """Return the message for a failed import of an optional package; ``None`` for any other import."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in _EXTRAS:
        return None
    title, extra = _EXTRAS[package]
    return MissingPackageError(f"{user} needs {title}: pip install 'fidelab[{extra}]'")


def late(module: str) -> Any:
    """Return a stand-in for ``module`` of an optional package, which is imported when an attribute is first read.

    Raises:
        MissingPackageError: On first use, if the package is not installed.
    """
    return _Late(module)


class _Late(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by tools that inspect modules, not by code that uses this one
            raise AttributeError(name)
        value = getattr(require(self.__name__), name)
        setattr(self, name, value)  # the next look-up is an ordinary one
        return value
