"""Engines, the KV formats that each has, and axes: built-in ones and those that other packages add."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from typing import TYPE_CHECKING

from fidelab.doctor.check import CAUGHT, DoctorCheck, Finding, guarded, reason
from fidelab.engines import DEFAULT
from fidelab.results.numbers import one_line

if TYPE_CHECKING:
    from fidelab.core.registry import Registry
    from fidelab.engines.base import Engine
    from fidelab.environments.environment import Environment
    from fidelab.environments.listing import InstalledEngine

# What the main job asks for, by its defaults (engine ``DEFAULT``): k16v8 of a bfloat16 model is bf16 / fp8_e4m3.
_FORMATS = ("bf16", "fp8_e4m3")
_AXES = ("trajectory", "kld")

_TEST_ENGINE = "fake"
_COMPUTES = {"numpy", "torch"}  # packages that formats need
_SHAPE = (1, 2, 4, 64)  # batch, heads, tokens, head_dim
_TIMEOUT_SECONDS = 60.0  # seconds for one answer of an engine in another environment
_UPGRADE = "upgrade torch: pip install -U torch"
_BOUND_TOLERANCE = 1.001  # a GPU may round the bound itself otherwise


# ``unusable``: the required packages that do not work.  Where there are any, they already explain why the main job
# cannot run, and failures here follow from them.


@contextmanager
def query_engines() -> Iterator[Callable[[], list[InstalledEngine]]]:
    """Query engines in separate environments, in parallel processes.

    Yields a function that waits for their answers, and raises the reason if they cannot be asked at all.
    """
    from fidelab.engines import ENGINES

    with ExitStack() as stack:
        try:
            from fidelab.environments.listing import asking

            answers = stack.enter_context(asking(list(filter(_is_brought, ENGINES.names())), _TIMEOUT_SECONDS))
        except CAUGHT as error:
            problem = error

            def answers() -> list[InstalledEngine]:
                raise problem

        yield answers


def _is_brought(name: str) -> bool:
    from fidelab.engines import ENGINES

    try:
        return bool(ENGINES.load(name).packages)
    except (*CAUGHT, AttributeError):  # its check gives the reason
        return False


def engines_and_formats(
    unusable: Collection[str], answers: Callable[[], list[InstalledEngine]], trial: Callable[[str], None] | None = None
) -> list[DoctorCheck]:
    """Check each engine, then the formats of the engines that work.

    ``answers``: of the engines in separate environments (:func:`query_engines`).  ``trial``: the formats are tried, and
    this function receives a line for each.
    """
    from fidelab.engines import ENGINES

    names = [name for name in ENGINES.names() if name != _TEST_ENGINE]
    once = cache(answers)
    engines = [_engine(ENGINES, name, unusable, once, trial) for name in names]
    formats = [check for _, checks in engines for check in checks] if _COMPUTES.isdisjoint(unusable) else []
    return [*(check for check, _ in engines), guarded("own llama.cpp", "own programs", _own_llamacpp), *formats]


def _own_llamacpp() -> DoctorCheck:
    """Check for a ``llama-perplexity`` in PATH, which a comparison can run without torch."""
    from fidelab.engines.llamacpp.perplexity import PROGRAM, PerplexityTool

    check = partial(DoctorCheck, "own llama.cpp", "own programs")
    found = shutil.which(PROGRAM)
    if found is None:
        remedy = "compare MODEL.gguf --engine llamacpp --bin FOLDER runs a build of yours, without torch"
        return check("missing", f"no {PROGRAM} in PATH", remedy)
    tool = PerplexityTool.find(found)
    return check("ok", f"{PROGRAM} {tool.version}: compare MODEL.gguf --engine llamacpp --bin {tool.path.parent}")


def axes(unusable: Collection[str]) -> list[DoctorCheck]:
    """Check for each axis whether it can be loaded."""
    from fidelab.axes import AXES

    return [_axis(AXES, name, unusable) for name in AXES.names()]


def try_format(name: str, device: str) -> str | None:
    """Return why a small tensor does not round-trip through the format on this device; ``None`` if it does."""
    import torch

    from fidelab.core import FormatSpec
    from fidelab.formats import create

    try:
        x = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
        fmt = create(FormatSpec(name))
        scale = fmt.fit(x)
        out = fmt.decode(fmt.encode(x, scale), _SHAPE[-1], torch.float32, scale)
        good = out.shape == x.shape and bool(((out - x).abs() <= fmt.error_bound(x, scale) * _BOUND_TOLERANCE).all())
    except CAUGHT as error:
        return reason(error)
    return None if good else "values come back beyond the error that the format allows"


def _engine(
    registry: Registry,
    name: str,
    unusable: Collection[str],
    answers: Callable[[], list[InstalledEngine]],
    trial: Callable[[str], None] | None,
) -> tuple[DoctorCheck, list[DoctorCheck]]:
    """Check an engine, and the KV formats of an engine that works."""
    check = partial(DoctorCheck, name, "engines", needed=name == DEFAULT and not unusable)
    try:
        engine: type[Engine] = registry.load(name)
        if getattr(engine, "packages", ()):
            return _brought(name, answers(), trial)
        if getattr(engine, "is_server", False):
            return check("ok", "queries a server that runs elsewhere"), []
        versions = engine.versions()
        if lacking := [package for package in versions if package in unusable]:
            return check("broken", f"needs {' and '.join(lacking)}", "see packages above"), []
        formats = _formats(name)
    except CAUGHT as error:
        missing = isinstance(error, ModuleNotFoundError) or isinstance(error.__cause__, ModuleNotFoundError)
        why = reason(error).removeprefix(f"engine {name} ")
        return check("missing" if missing else "broken", why, _provider(registry, name)), []
    return check("ok", _listed(versions)), _tried(name, formats, trial) if trial else formats


def _tried(
    engine: str, formats: Sequence[DoctorCheck], say: Callable[[str], None], environment: Environment | None = None
) -> list[DoctorCheck]:
    """Check an engine's formats by a trial of those that it can run; ``None``: in this interpreter."""
    from fidelab.environments.environment import Environment
    from fidelab.environments.recipes import install_command
    from fidelab.environments.trial import faults_of, try_out
    from fidelab.models.cache import cache_dir

    remedy = _UPGRADE if environment is None else f"install it again: {install_command(engine, '--reinstall')}"
    environment = environment or Environment(engine, sys.executable)
    trials = try_out(environment, cache_dir() / "logs", lambda line: say(f"{engine}: {line}"))
    faults = faults_of(trials)

    def after_trial(check: DoctorCheck) -> DoctorCheck:
        if (reason := trials[check.name].reason) is None:
            return replace(check, status="ok", detail="runs", remedy=None)
        if check.name not in faults:
            return replace(check, status="missing", detail=f"not tried out: {reason}", remedy=None)
        return replace(check, status="broken", detail=reason, remedy=remedy)

    return [after_trial(check) if check.name in trials else check for check in formats]


def _brought(
    name: str, places: Sequence[InstalledEngine], trial: Callable[[str], None] | None
) -> tuple[DoctorCheck, list[DoctorCheck]]:
    """Check an engine that needs a package, in the environment where runs would find it."""
    from fidelab.environments.listing import chosen

    place = chosen(places)[name]
    if place.problem is not None:
        status: Finding = "missing" if place.environment is None else "broken"
        why = one_line(place.problem).removeprefix(f"engine {name} ")
        return DoctorCheck(name, "engines", status, why, place.remedy), []
    device = place.about.device.replace("hip", "rocm") if place.about else "cpu"
    detail = f"{_listed(place.versions)} ({place.build}) on {device}, in {place.label}"
    if place.update is not None:
        detail += f", installed from another recipe: {place.update}"
    formats = [_refused(name, kv, place.refused.get(kv)) or _check(name, kv, "ok", "runs") for kv in place.kv_names]
    if trial and place.environment is not None:
        formats = _tried(name, formats, trial, place.environment)
    return DoctorCheck(name, "engines", "ok", one_line(detail)), formats


def _check(engine: str, kv: str, status: Finding, detail: str, remedy: str | None = None) -> DoctorCheck:
    needed = engine == DEFAULT and kv in _FORMATS
    return DoctorCheck(kv, f"KV formats ({engine})", status, detail, remedy, needed=needed)


def _refused(engine: str, kv: str, why: str | None) -> DoctorCheck | None:
    """Return the check of a format that the engine has but runs would refuse, with the engine's own reason."""
    return _check(engine, kv, "missing", one_line(why)) if why else None


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def _formats(engine: str) -> list[DoctorCheck]:
    """Check the formats of a built-in engine; fidelab's formats are tried on a small tensor."""
    from fidelab.environments.environment import Environment
    from fidelab.environments.queries import ask

    with ask(Environment(engine, sys.executable)) as asked:
        return [_refused(engine, kv, why) or _format(engine, kv) for kv, why in asked.formats().items()]


def _format(engine: str, kv: str) -> DoctorCheck:
    from fidelab.core import KVSpec
    from fidelab.engines.k16v8 import meaning
    from fidelab.formats import FORMATS

    spec = meaning(KVSpec.parse(kv), "bf16")
    names = {spec.k.name, spec.v.name}
    if not names <= set(FORMATS.names()):
        return _check(engine, kv, "ok", "runs")
    pairs = [(name, device) for device in _devices() for name in sorted(names)]
    faults = [f"on {device}: {fault}" for name, device in pairs if (fault := try_format(name, device))]
    if faults:
        return _check(engine, kv, "broken", "; ".join(faults), f"use another format, or {_UPGRADE}")
    return _check(engine, kv, "ok", f"works on {' and '.join(_devices())}")


@cache
def _devices() -> tuple[str, ...]:
    import torch

    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def _axis(registry: Registry, name: str, unusable: Collection[str]) -> DoctorCheck:
    check = partial(DoctorCheck, name, "tests", needed=name in _AXES and not unusable)
    try:
        registry.load(name)
    except CAUGHT as error:
        missing = isinstance(error, ModuleNotFoundError)
        return check("missing" if missing else "broken", reason(error), _provider(registry, name))
    return check("ok", "can be loaded")


def _provider(registry: Registry, name: str) -> str | None:
    """Return advice about a part that another package adds; ``None`` for built-in parts, whose packages are checked."""
    for point in metadata.entry_points(group=registry.group or "", name=name):
        if point.dist is not None:
            return f"repair or remove the package {point.dist.name}, which adds it"
    return None
