"""Parse the options of a format spec; unknown options and invalid values are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fidelab.core import FormatSpec
from fidelab.core.errors import UsageError

# Canonical decimal numbers only: "032" would give an equal format another fingerprint than "32".
_POSITIVE = re.compile(r"[1-9][0-9]{0,8}")


def only(spec: FormatSpec, *known: str) -> None:
    """Refuse every option but ``known``.

    Raises:
        UsageError: If ``spec`` has another option.
    """
    for key, _ in spec.options:
        if key not in known:
            takes = f"it takes {' and '.join(known)}" if known else "it takes none"
            raise UsageError(f"KV format '{spec}': {spec.name} has no option {key!r}; {takes}")


def choice(spec: FormatSpec, key: str, allowed: Sequence[str]) -> str:
    """Return the value of ``key``, one of ``allowed``, or the first of them if the option is absent.

    Raises:
        UsageError: If the value is not allowed.
    """
    value = dict(spec.options).get(key, allowed[0])
    if value not in allowed:
        takes = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        raise UsageError(f"KV format '{spec}': option {key} of {spec.name} takes {takes}, not {value!r}")
    return value


def multiple(spec: FormatSpec, key: str, step: int, default: int) -> int:
    """Return the value of ``key``: a positive multiple of ``step``, or ``default`` if the option is absent.

    Raises:
        UsageError: If the value is not such a multiple.
    """
    value = dict(spec.options).get(key, str(default))
    if _POSITIVE.fullmatch(value) is None or int(value) % step:
        takes = f"a positive multiple of {step}" if step > 1 else "a positive number"
        raise UsageError(f"KV format '{spec}': option {key} of {spec.name} takes {takes}, not {value!r}")
    return int(value)
