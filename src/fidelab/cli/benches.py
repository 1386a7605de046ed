"""Flags → benches and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fidelab.cli.axes import chosen_names

__all__ = ["bench_settings", "counts"]

_PRESETS = {"offline": ("startup", "prefill", "decode", "memory")}


def bench_settings(benches: str, flags: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """The chosen benches with what flags say about them.

    ``flags``: setting as the flag names it → bench → its name there and the value; ``None`` where the flag was not
    given.  A flag that no chosen bench knows is an error, not a wish ignored.

    Raises:
        UsageError: a flag without its bench.
    """
    from fidelab.errors import UsageError

    chosen: dict[str, dict[str, Any]] = {name: {} for name in chosen_names(benches, _PRESETS)}
    for flag, owners in (flags or {}).items():
        given = {name: value for name, value in owners.items() if value is not None}
        known = [name for name in given if name.partition(".")[0] in chosen]
        if given and not known:
            wanted = " or ".join(name.partition(".")[0] for name in given)
            raise UsageError(f"--{flag} belongs to bench {wanted}, which --benches {benches} leaves out")
        for name in known:
            bench, _, setting = name.partition(".")
            chosen[bench][setting] = given[name]
    return chosen


def counts(flag: str, text: str, *, least: int = 1) -> tuple[int, ...]:
    """``128,1k`` → (128, 1024).

    Raises:
        UsageError: a part is no number, or below ``least``.
    """
    from fidelab.errors import UsageError

    numbers = []
    for part in text.lower().split(","):
        digits, thousand = part.strip().removesuffix("k"), part.strip().endswith("k")
        if not (digits.isascii() and digits.isdigit() and int(digits) >= least):
            above = " above 0" if least else ""
            raise UsageError(f"{flag} {text!r}: write numbers{above}, separated by commas, as in 128,1k")
        numbers.append(int(digits) * (1024 if thousand else 1))
    return tuple(numbers)
