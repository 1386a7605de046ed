"""Turn flags into axes and benches, and their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_AXES = {"core": ("trajectory", "kld"), "full": ("trajectory", "kld", "rniah", "plad")}
_BENCHES = {"offline": ("startup", "prefill", "decode", "memory")}
_SMALLER = {
    "windows": "8",
    "lengths": "[512]",
    "trials": "1",
    "contexts": "[512]",
}  # settings that limit the number of items


def axis_settings(
    axes: str, flags: Mapping[str, Mapping[str, Any]], limit: Sequence[str] = (), quick: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the settings of the chosen axes, as given by flags.

    ``flags``: axis → setting → value, ``None`` where the flag was not given.  A flag of an axis that is not measured is
    an error.  ``limit``: ``N`` for every axis that has a setting ``limit``, or ``TEST=N``.

    Raises:
        UsageError: If a name is not an axis, a flag's axis is not chosen, or a limit is not a number.
    """
    from fidelab.axes import AXES
    from fidelab.core.errors import UsageError

    presets = {**_AXES, "all": AXES.names()}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in _expand_presets(axes, presets)}
    if not chosen:
        raise UsageError("--axes is empty; name at least one, as in --axes trajectory,kld")
    if quick:
        chosen = {name: dict(AXES.load(name).quick) for name in chosen}
    for axis, values in flags.items():
        settings = {key: value for key, value in values.items() if value is not None}
        if settings and axis not in chosen:
            flag = next(iter(settings)).replace("_", "-")
            raise UsageError(f"--{flag} belongs to test {axis}, which --axes {axes} leaves out")
        chosen.get(axis, {}).update(settings)
    for text in sorted(limit, key=lambda text: "=" in text):  # that of one axis is set last
        axis, _, number = text.rpartition("=")
        if not (number.isascii() and number.isdigit()):
            raise UsageError(f"--limit {text!r}: write a number, or TEST=N")
        owners = [axis] if axis else [name for name in chosen if _has_limit(name)]
        if not owners or owners[0] not in chosen:
            owner = axis or next(filter(_has_limit, AXES.names()))
            raise UsageError(f"--limit belongs to test {owner}, which --axes {axes} leaves out")
        for owner in owners:
            fields = AXES.load(owner).Settings.model_fields
            if "limit" not in fields:
                ways = ", ".join(f"--set axes.{owner}.{name}={_SMALLER[name]}" for name in fields if name in _SMALLER)
                smaller = f"it gets smaller with {ways or 'its own settings'}"
                raise UsageError(f"--limit {text}: test {owner} has no limit; {smaller}")
            chosen[owner]["limit"] = int(number)
    return chosen


def _has_limit(axis: str) -> bool:
    from fidelab.axes import AXES

    return "limit" in AXES.load(axis).Settings.model_fields


def bench_settings(benches: str, flags: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """Return the settings of the chosen benches, as given by flags.

    ``flags``: flag → ``bench.setting`` → value, ``None`` where the flag was not given.  A flag that no chosen bench
    knows is an error.

    Raises:
        UsageError: If a flag's bench is not chosen.
    """
    from fidelab.core.errors import UsageError

    chosen: dict[str, dict[str, Any]] = {name: {} for name in _expand_presets(benches, _BENCHES)}
    for flag, owners in (flags or {}).items():
        values = {tuple(name.split(".")): value for name, value in owners.items() if value is not None}
        if values and not any(bench in chosen for bench, _ in values):
            names = " or ".join(bench for bench, _ in values)
            raise UsageError(f"--{flag} belongs to bench {names}, which --benches {benches} leaves out")
        for (bench, setting), value in values.items():
            if bench in chosen:
                chosen[bench][setting] = value
    return chosen


def counts(flag: str, text: str, *, least: int = 1) -> tuple[int, ...]:
    """Parse a list of numbers: ``128,1k`` becomes (128, 1024).

    Raises:
        UsageError: If a part is not a number, or below ``least``.
    """
    from fidelab.core.amounts import parse_counts
    from fidelab.core.errors import UsageError

    try:
        return parse_counts(text, least)
    except ValueError as error:
        raise UsageError(f"{flag} {error}") from None


def _expand_presets(text: str, presets: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names in a comma-separated list, with presets spelled out and each name once."""
    words = (part.strip() for part in text.split(","))
    return list(dict.fromkeys(name for word in words if word for name in presets.get(word, (word,))))
