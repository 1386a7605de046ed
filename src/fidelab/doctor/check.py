"""One fact about the machine, and checks whose exceptions become facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fidelab.core.errors import FidelabError
from fidelab.results.numbers import one_line

Finding = Literal["ok", "warning", "missing", "broken"]
CAUGHT = (Exception, SystemExit)  # exceptions that the import of a foreign package may raise

_MAX_MESSAGE_CHARS = 160  # characters of a foreign message
_KINDS = {"engines": "engine ", "tests": "test ", "KV formats": "KV format "}


@dataclass(frozen=True)
class DoctorCheck:
    """One finding: subject, status and advice.

    ``missing`` means that the subject is absent, ``broken`` that it does not work (or is too old), and ``warning`` that
    it works with a reservation.  ``needed``: whether the main job needs it.
    """

    name: str
    group: str
    status: Finding
    detail: str
    remedy: str | None = None
    needed: bool = False

    @property
    def blocks(self) -> bool:
        """Whether the main job cannot run because of this finding."""
        return self.needed and self.status in ("missing", "broken")

    @property
    def label(self) -> str:
        """The name with its kind, such as ``engine hf``."""
        return _KINDS.get(self.group.partition(" (")[0], "") + self.name

    def record(self) -> dict[str, Any]:
        """Return plain data; only the whole diagnosis shows ``needed``."""
        return {key: getattr(self, key) for key in ("name", "group", "status", "detail", "remedy")}


def guarded(name: str, group: str, examine: Callable[[], DoctorCheck], *, needed: bool = False) -> DoctorCheck:
    """Return the findings of ``examine``.

    An exception is also a finding, which blocks the main job only if ``needed``.
    """
    try:
        return examine()
    except CAUGHT as error:
        return DoctorCheck(name, group, "broken", f"cannot be checked: {reason(error)}", needed=needed)


def guarded_section(name: str, examine: Callable[[], Iterable[DoctorCheck]]) -> list[DoctorCheck]:
    """Return the checks of a whole section, which raises only if fidelab itself is damaged."""
    try:
        return list(examine())
    except CAUGHT as error:
        return [
            DoctorCheck(name, "fidelab", "broken", reason(error), "pip install --force-reinstall fidelab", needed=True)
        ]


def reason(error: BaseException) -> str:
    """Return the message of an exception in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"needs {one_line(error.name)}"
    message = next(iter(str(error).strip().splitlines()), "").rstrip(". ")
    kind = "" if isinstance(error, FidelabError) and message else type(error).__name__
    text = one_line(": ".join(filter(None, (kind, message))))
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[: _MAX_MESSAGE_CHARS - 3]}..."
