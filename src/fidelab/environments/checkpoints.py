"""The distribution fidelab-checkpoints, found by its entry point and imported at first use.

Other rooms read its names from :data:`checkpoints`.  Type checkers see the module itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fidelab.core.errors import MissingPackageError
from fidelab.core.registry import Registry

if TYPE_CHECKING:
    from fidelab_checkpoints import interface as checkpoints

__all__ = ["checkpoints"]

_PACKAGE, _NAME = "fidelab_checkpoints", "interface"
_REGISTRY = Registry("part of fidelab-checkpoints", {}, group="fidelab.checkpoints")
_MISSING = 'this command needs fidelab-checkpoints: pip install "fidelab[checkpoints]"'


class _Interface:
    """Stand-in for the module ``fidelab_checkpoints.interface``.

    Reading a name raises MissingPackageError if the distribution is not installed, cannot be imported or lacks it.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by tools that inspect objects, not by code that uses this one
            raise AttributeError(name)
        if _NAME not in _REGISTRY.names():
            raise MissingPackageError(_MISSING)
        try:
            value = getattr(_REGISTRY.load(_NAME), name)
        except Exception as error:  # whatever a broken installation raises
            if isinstance(error, ModuleNotFoundError) and error.name == _PACKAGE:  # removed, but for its entry point
                raise MissingPackageError(_MISSING) from None
            raise MissingPackageError(
                f"fidelab-checkpoints cannot be loaded ({type(error).__name__}: {error}); install it again: "
                "pip install --force-reinstall fidelab-checkpoints"
            ) from error
        setattr(self, name, value)  # the next look-up is an ordinary one
        return value


if not TYPE_CHECKING:
    checkpoints = _Interface()
