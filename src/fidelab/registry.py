"""Name → object, imported on first use.

Each pluggable room holds a plain table ``{"name": "package.module:Object"}`` in its ``__init__``; a
third-party package adds a row through an entry point (groups ``fidelab.engines``, ``fidelab.axes``,
``fidelab.benches``, ``fidelab.formats``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from fidelab.errors import UnknownNameError

__all__ = ["Registry"]


class Registry:
    """One table of implementations.

    ``kind`` is the word used in error messages ("engine"); ``group`` the entry-point group, or ``None``.
    """

    def __init__(self, kind: str, table: Mapping[str, str], group: str | None = None) -> None:
        self.kind = kind
        self.group = group
        self._table = dict(table)

    @property
    def built_in(self) -> list[str]:
        """The built-in names in table order."""
        return [*self._table]

    def names(self) -> list[str]:
        """All names: the built-in ones in table order, then third-party ones in alphabetical order."""
        return [*self._table, *sorted(set(_foreign(self.group)) - set(self._table))]

    def load(self, name: str) -> Any:
        """The object behind ``name``.

        Raises:
            UnknownNameError: no table and no entry point has this name.
        """
        target = self._table.get(name) or _foreign(self.group).get(name)
        if target is None:
            raise UnknownNameError(self.kind, name, self.names())
        module, _, attribute = target.partition(":")
        return getattr(import_module(module), attribute)


@cache
def _foreign(group: str | None) -> dict[str, str]:
    if group is None:
        return {}
    from importlib.metadata import entry_points  # slow, and built-in names do not need it

    return {point.name: point.value for point in entry_points(group=group)}
