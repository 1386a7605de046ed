"""Profiles: experiment files that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from fidelab.errors import ConfigError, nearest_first

__all__ = ["find_experiment", "names"]

_HERE = Path(__file__).parent


def names() -> list[str]:
    """The bundled profiles."""
    return sorted(path.stem for path in _HERE.glob("*.yaml"))


def find_experiment(path: Path) -> Path:
    """The file that a user means: one that exists, else the bundled profile NAME or profiles/NAME.yaml.

    Raises:
        ConfigError: neither; lists the profiles.
    """
    if path.exists():
        return path
    if path.parent in (Path(), Path("profiles")) and path.suffix in ("", ".yaml") and path.stem in names():
        return _HERE / f"{path.stem}.yaml"
    known = ", ".join(nearest_first(path.stem, names()))
    raise ConfigError(f"{path} does not exist; name an experiment file or a bundled profile: {known}")
