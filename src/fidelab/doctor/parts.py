"""Engines, the KV formats that each has, and axes: built-in ones and those that other packages add."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache, partial
from importlib import metadata
from typing import TYPE_CHECKING

from fidelab.doctor.check import CAUGHT, Check, reason

if TYPE_CHECKING:
    from fidelab.engines.base import Engine
    from fidelab.registry import Registry

__all__ = ["axes", "engines_and_formats", "try_format"]

# What the main job asks for, by its defaults: k16v8 of a bfloat16 model is bf16 / fp8_e4m3.
_ENGINE = "hf"
_FORMATS = ("bf16", "fp8_e4m3")
_AXES = ("trajectory", "kld")

_TEST_ENGINE = "fake"
_COMPUTES = {"numpy", "torch"}  # what formats are computed with
_SHAPE = (1, 2, 4, 64)  # batch, heads, tokens, head_dim
_SLACK = 1.001  # a GPU may round the bound itself otherwise


# In both, ``unusable`` are the required packages that do not work.  Where there are any, they are the reason why the
# main job cannot run, and what fails here follows from them.


def engines_and_formats(unusable: Collection[str]) -> list[Check]:
    """Each engine, then the formats of those that work."""
    from fidelab.engines import ENGINES

    checks: list[Check] = []
    formats: list[Check] = []
    for name in ENGINES.names():
        if name != _TEST_ENGINE:
            check, names = _engine(ENGINES, name, unusable)
            checks.append(check)
            formats += _formats(name, names) if _COMPUTES.isdisjoint(unusable) else []
    return [*checks, *formats]


def axes(unusable: Collection[str]) -> list[Check]:
    """Each axis: whether it can be loaded."""
    from fidelab.axes import AXES

    return [_axis(AXES, name, unusable) for name in AXES.names()]


def try_format(name: str, device: str) -> str | None:
    """Why a small tensor does not survive the format on this device; ``None`` where it does."""
    import torch

    from fidelab.core import FormatSpec
    from fidelab.formats import create

    try:
        x = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
        fmt = create(FormatSpec(name))
        scale = fmt.fit(x)
        out = fmt.decode(fmt.encode(x, scale), _SHAPE[-1], torch.float32, scale)
        good = out.shape == x.shape and bool(((out - x).abs() <= fmt.error_bound(x, scale) * _SLACK).all())
    except CAUGHT as error:
        return reason(error)
    return None if good else "values come back beyond the error that the format allows"


def _engine(registry: Registry, name: str, unusable: Collection[str]) -> tuple[Check, list[str]]:
    """The check, and the KV formats of an engine that works."""
    check = partial(Check, name, "engines", needed=name == _ENGINE and not unusable)
    try:
        engine: type[Engine] = registry.load(name)
        versions, names = engine.versions(), [str(kv) for kv in engine.kv_names()]
        shown = ", ".join(f"{package} {version}" for package, version in versions.items())
    except CAUGHT as error:
        missing = isinstance(error, ModuleNotFoundError) or isinstance(error.__cause__, ModuleNotFoundError)
        why = reason(error).removeprefix(f"engine {name} ")
        return check("missing" if missing else "broken", why, _provider(registry, name)), []
    if lacking := [package for package in versions if package in unusable]:
        return check("broken", f"needs {' and '.join(lacking)}", "see packages above"), []
    return check("ok", shown), names


def _formats(engine: str, names: Iterable[str]) -> list[Check]:
    """The engine's formats that fidelab computes itself; an engine's own cannot be tried without a model."""
    from fidelab.formats import FORMATS

    known = set(FORMATS.names())
    return [_format(engine, name) for name in names if name in known]


def _format(engine: str, name: str) -> Check:
    check = partial(Check, name, f"KV formats ({engine})", needed=engine == _ENGINE and name in _FORMATS)
    faults = [f"on {device}: {fault}" for device in _devices() if (fault := try_format(name, device))]
    if faults:
        return check("broken", "; ".join(faults), "use another format, or upgrade torch: pip install -U torch")
    return check("ok", f"works on {' and '.join(_devices())}")


@cache
def _devices() -> tuple[str, ...]:
    import torch

    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def _axis(registry: Registry, name: str, unusable: Collection[str]) -> Check:
    check = partial(Check, name, "axes", needed=name in _AXES and not unusable)
    try:
        registry.load(name)
    except CAUGHT as error:
        missing = isinstance(error, ModuleNotFoundError)
        return check("missing" if missing else "broken", reason(error), _provider(registry, name))
    return check("ok", "can be loaded")


def _provider(registry: Registry, name: str) -> str | None:
    """What to do about a part that another package adds; ``None`` for our own, whose packages are checked."""
    for point in metadata.entry_points(group=registry.group or "", name=name):
        if point.dist is not None:
            return f"repair or remove the package {point.dist.name}, which adds it"
    return None
