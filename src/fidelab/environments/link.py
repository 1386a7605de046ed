"""The folder on PYTHONPATH through which an engine's environment sees fidelab and k16v8, and nothing else of ours.

It holds a link to each package (to k16v8 where that is installed beside fidelab), and metadata with its entry points:
vLLM and SGLang find plug-ins by those.
"""

from __future__ import annotations

from importlib import import_module, metadata
from pathlib import Path

from fidelab.core import digest
from fidelab.engines.k16v8 import K16V8, missing
from fidelab.models.cache import build_once, cache_dir

__all__ = ["link_folder"]

_PLUGINS = ("vllm.general_plugins", "sglang.srt.plugins")


def link_folder() -> Path:
    """The folder, made at first use; another one for each place and version of the packages.

    Raises:
        OutputError: the cache cannot be written.
    """
    packages = [_about(name) for name in ("fidelab", *([] if missing() else [K16V8]))]

    def build(scratch: Path) -> Path:
        folder = scratch / "link"
        for name, version, place, entries in packages:
            info = folder / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (folder / name).symlink_to(place, target_is_directory=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (info / "entry_points.txt").write_text(entries)
        return folder

    return build_once(cache_dir() / "link" / digest(*(part for about in packages for part in about))[:16], build)


def _about(name: str) -> tuple[str, str, str, str]:
    """Name, version, folder and entry points of a package."""
    package = import_module(name)
    return name, package.__version__, str(Path(str(package.__file__)).resolve().parent), _entry_points(name)


def _entry_points(name: str) -> str:
    """A package's plug-ins for engines, as it declares them; none where it runs from its sources."""
    try:
        points = metadata.distribution(name).entry_points
    except metadata.PackageNotFoundError:
        return ""
    lines = []
    for group in _PLUGINS:
        rows = sorted(f"{point.name} = {point.value}" for point in points if point.group == group)
        lines += [f"[{group}]", *rows] if rows else []
    return "".join(f"{line}\n" for line in lines)
