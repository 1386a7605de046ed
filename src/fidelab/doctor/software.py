"""Python, fidelab and the packages that it requires, from fidelab's metadata."""

from __future__ import annotations

import platform
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module, metadata
from pathlib import Path

import fidelab
from fidelab.doctor.check import CAUGHT, DoctorCheck, guarded, reason

_MODULES = {"pyyaml": "yaml"}  # all other modules have the package's name
# Name, extras in brackets, and the floor. An upper bound is not enforced here: newer versions are reported as untested.
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^\]]*\])?(?:.*?>=\s*(?P<floor>[\w.]+))?")
_MAIN_JOB = "extra == 'hf'"
_CONSTRAINTS_FILE = Path(__file__).with_name("constraints.txt")


def versions() -> list[DoctorCheck]:
    """Check the versions of Python and fidelab."""
    return [guarded("python", "python", _python, needed=True), guarded("fidelab", "python", _fidelab)]


def contender() -> DoctorCheck:
    """Check the package k16v8, which some arms need but the main job does not."""
    return guarded("k16v8", "packages", _k16v8)


def checkpoint_package() -> DoctorCheck:
    """Check the package fidelab-checkpoints, which ``fidelab checkpoint`` needs but the main job does not."""
    return guarded("fidelab-checkpoints", "packages", _checkpoints)


def packages() -> list[DoctorCheck]:
    """Check for each required package that it is installed, new enough, and importable.

    A package that fails together with one of its requirements is not a separate reason.
    """
    matches = [match for text in _requires("fidelab") if (match := _REQUIREMENT.match(text))]
    checks = [guarded(match["name"], "packages", partial(_installed, match), needed=True) for match in matches]
    errors = {check.name: error for check in checks if check.status == "ok" and (error := _import_error(check.name))}
    failing = {_canonical(check.name) for check in checks if check.blocks or check.name in errors}
    return [
        _unimportable(check, errors[check.name], sorted(failing & _requirement_names(_requires(check.name))))
        if check.name in errors
        else check
        for check in checks
    ]


def untested() -> list[DoctorCheck]:
    """Return a warning that names each required package whose minor version is newer than the one in the lock file.

    The result is empty if there is none.
    """
    tested = dict(line.split("==") for line in _CONSTRAINTS_FILE.read_text().split())
    newer = {}
    for name in sorted(_requirement_names(_requires("fidelab"))):
        try:
            version = str(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
        if name in tested and release(version)[:2] > release(tested[name])[:2]:
            newer[name] = version
    if not newer:
        return []
    detail = ", ".join(f"{name} {version} (tested with {tested[name]})" for name, version in newer.items())
    pins = " ".join(f'"{name}=={tested[name]}"' for name in newer)
    return [DoctorCheck("untested versions", "packages", "warning", detail, f"pip install {pins}")]


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version that decide whether it is new enough: (2, 13) for ``2.13.0+cpu``, else ().

    Zeros at the end and the text after the numbers (pre-releases, local builds) do not count.
    """
    match = re.match(r"\s*v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    text = re.sub(r"(\.0+)+$", "", match[1]) if match else ""
    return tuple(int(number) for number in text.split(".") if number)


def _python() -> DoctorCheck:
    version = platform.python_version()
    detail = f"{version}, {platform.system()} {platform.machine()}"
    try:
        floor = (metadata.metadata("fidelab")["Requires-Python"] or "").removeprefix(">=")
    except metadata.PackageNotFoundError:
        floor = ""
    check = partial(DoctorCheck, "python", "python", needed=True)
    if release(version) < release(floor):
        return check("broken", f"{detail}; {floor} or newer is needed", f"install fidelab with Python {floor} or newer")
    return check("ok", detail)


def _fidelab() -> DoctorCheck:
    try:
        metadata.version("fidelab")
    except metadata.PackageNotFoundError:
        detail = f"{fidelab.__version__}, not installed: its required packages are not checked"
        return DoctorCheck("fidelab", "python", "warning", detail, "pip install fidelab")
    return DoctorCheck("fidelab", "python", "ok", fidelab.__version__)


def _k16v8() -> DoctorCheck:
    from fidelab.engines.k16v8 import installed_version

    if version := installed_version():
        return DoctorCheck("k16v8", "packages", "ok", version)
    needs = "attention=k16v8, pairs on vLLM and SGLang (--kv k16v8, bf16/int8), and k16v8 need it"
    return DoctorCheck("k16v8", "packages", "missing", f"not installed; {needs}", "pip install k16v8")


def _checkpoints() -> DoctorCheck:
    name = "fidelab-checkpoints"
    try:
        return DoctorCheck(name, "packages", "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        detail = "not installed; fidelab checkpoint needs it"
        return DoctorCheck(name, "packages", "missing", detail, 'pip install "fidelab[checkpoints]"')


def _requires(package: str) -> list[str]:
    """Return the unconditional requirements of a package by its metadata; a marker makes a requirement optional.

    The main job of fidelab, comparing arms of engine hf, needs the packages of an extra as well.
    """
    try:
        stated = [text.partition(";") for text in metadata.requires(package) or []]
    except metadata.PackageNotFoundError:  # not installed; for fidelab itself: run from its sources
        return []
    needed = {"", _MAIN_JOB} if package == "fidelab" else {""}
    return [text.strip() for text, _, marker in stated if marker.replace('"', "'").strip() in needed]


def _requirement_names(requirements: list[str]) -> set[str]:
    return {_canonical(match["name"]) for text in requirements if (match := _REQUIREMENT.match(text))}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(requirement: re.Match[str]) -> DoctorCheck:
    name, floor = requirement["name"], requirement["floor"] or ""
    check = partial(DoctorCheck, name, "packages", needed=True)
    install = f'pip install "{name}>={floor}"' if floor else f"pip install {name}"
    requirement_text = f"{floor} or newer is needed" if floor else "it is required"
    try:
        version = str(metadata.version(name))
    except metadata.PackageNotFoundError:
        return check("missing", f"not installed; {requirement_text}", install)
    if release(version) < release(floor):
        return check("broken", f"{version} is too old; {requirement_text}", install)
    return check("ok", version)


def _module(package: str) -> str:
    return _MODULES.get(_canonical(package), package.replace("-", "_"))


def _import_error(name: str) -> BaseException | None:
    try:
        with _uninterrupted():
            import_module(_module(name))
    except CAUGHT as error:
        return error
    return None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block.

    Native packages run Python code while they are imported.  A ``KeyboardInterrupt`` in that code aborts the process if
    C++ cannot pass it on.
    """
    raises = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not raises:
        yield  # nothing here becomes a KeyboardInterrupt
        return
    stops: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: stops.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, raises)
        if stops:
            raise KeyboardInterrupt


def _unimportable(check: DoctorCheck, error: BaseException, others: list[str]) -> DoctorCheck:
    """Return the check of an installed package that cannot be imported; ``others``: failing packages that it
    requires.
    """
    if others:
        remedy = f"fix {' and '.join(others)} first"
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != _module(check.name):
        remedy = f"pip install {check.name}"  # keeps the package and adds what it lacks
    else:
        remedy = f"pip install --force-reinstall {check.name}"
    detail = f"{check.detail} cannot be imported: {reason(error)}"
    return replace(check, status="broken", detail=detail, remedy=remedy, needed=not others)
