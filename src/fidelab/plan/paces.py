"""How fast the user's own programs read in their last starts here, for the estimate of the next run."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from fidelab.core import cache_dir, strict_json, write_atomically
from fidelab.core.errors import OutputError
from fidelab.core.serial import from_json, to_json

_KEPT = 64
"""Last paces that are stored: a program with a few models and options each."""


@dataclass(frozen=True)
class Reading:
    """A model as a program reads it.

    ``how``: digest of all that its speed depends on but the model: the program's build, options, threads.
    ``model``: path of the file; ``model_bytes``: its size.
    """

    how: str
    model: str
    model_bytes: int


@dataclass(frozen=True)
class _Pace:
    reading: Reading
    tokens_per_second: float


class Paces:
    """Paces by what was read, newest last, stored in ``path``.  An unreadable file counts as empty."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_dir() / "own_paces.json"
        self._known: list[_Pace] = []
        with contextlib.suppress(OSError, ValueError):
            stored = from_json(list[_Pace], strict_json(self._path.read_bytes()))
            self._known = [pace for pace in stored if pace.tokens_per_second > 0 and pace.reading.model_bytes > 0]

    def seconds(self, reading: Reading, tokens: int) -> tuple[float, str] | None:
        """Return the seconds that so many tokens take, and whose pace that is; ``None`` if nothing like it has run.

        Another model's pace is scaled by the size of the files, which a program reads whole for each batch.
        """
        near = [pace for pace in self._known if pace.reading.how == reading.how]
        for pace in reversed(near):
            if pace.reading == reading:
                return tokens / pace.tokens_per_second, "at the pace of its last run here"
        if not near:
            return None
        scale = reading.model_bytes / near[-1].reading.model_bytes
        return scale * tokens / near[-1].tokens_per_second, f"at the pace of {Path(near[-1].reading.model).name} here"

    def add(self, reading: Reading, tokens: int, seconds: float) -> None:
        """Store the pace of a start that read so many tokens.  A cache that cannot be written costs no run."""
        others = [pace for pace in self._known if pace.reading != reading]
        self._known = [*others, _Pace(reading, tokens / seconds)][-_KEPT:]
        with contextlib.suppress(OutputError):
            write_atomically(self._path, json.dumps(to_json(self._known)))
