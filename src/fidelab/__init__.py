"""fidelab: which quantized configuration may I run on my engine, and what do I lose and gain?

The Python API is the command line's: ``fidelab.compare(model, engine=..., reference=..., candidates=[...])``
returns a :class:`~fidelab.results.record.Report`, and ``fidelab.load("latest")`` reads one.  Everything heavy is
imported at first use, so that ``import fidelab`` stays cheap.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers know it; the module typing takes as long to import as Python to start
if TYPE_CHECKING:
    from typing import Any

    from fidelab.results.record import Report
    from fidelab.run.api import compare, load

__version__ = "0.2.0"
__all__ = ["Report", "__version__", "compare", "load"]

_LAZY = {"compare": "fidelab.run.api", "load": "fidelab.run.api", "Report": "fidelab.results.record"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fidelab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
