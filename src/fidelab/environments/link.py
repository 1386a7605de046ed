"""The folder on PYTHONPATH through which an engine's environment sees fidelab, and nothing else of ours.

It holds a link to the package, and metadata with its entry points: vLLM and SGLang find our plug-ins by those.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import fidelab
from fidelab.core import digest
from fidelab.models.cache import build_once, cache_dir

__all__ = ["link_folder"]

_PLUGINS = ("vllm.general_plugins", "sglang.srt.plugins")


def link_folder() -> Path:
    """The folder, made at first use; another one for each place and version of the package.

    Raises:
        OutputError: the cache cannot be written.
    """
    package = Path(fidelab.__file__).resolve().parent
    entries = _entry_points()

    def build(scratch: Path) -> Path:
        folder = scratch / "link"
        info = folder / f"fidelab-{fidelab.__version__}.dist-info"
        info.mkdir(parents=True)
        (folder / "fidelab").symlink_to(package, target_is_directory=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fidelab\nVersion: {fidelab.__version__}\n")
        (info / "entry_points.txt").write_text(entries)
        return folder

    name = digest(str(package), fidelab.__version__, entries)[:16]
    return build_once(cache_dir() / "link" / name, build)


def _entry_points() -> str:
    """Our plug-ins for engines, as the installed package declares them; none where it runs from its sources."""
    try:
        points = metadata.distribution("fidelab").entry_points
    except metadata.PackageNotFoundError:
        return ""
    lines = []
    for group in _PLUGINS:
        rows = sorted(f"{point.name} = {point.value}" for point in points if point.group == group)
        lines += [f"[{group}]", *rows] if rows else []
    return "".join(f"{line}\n" for line in lines)
