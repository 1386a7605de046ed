"""A golden run on disk: ``data/NAME.json`` with all that is text, ``data/NAME.npz`` with arrays.

The format is the tests' own, so that it outlives fidelab's formats.  The text holds the experiment, every arm's
outcome, the requests with their token ids, and for each capture which array its answers lie in.  Answers of all items
of a capture are one array, item after item; ``lengths`` says how many rows each has, ``null`` for an item without any.
Equal arrays are stored once.  A bfloat16 array lies there as ``uint16`` and is named in ``bfloat16``.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent / "data"
_LONGEST = 110  # characters of a value that stays on one line
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass
class Bundle:
    """The text and the arrays of a golden run."""

    text: dict[str, Any]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def keep(self, array: NDArray[Any]) -> str:
        """Name of an array, which is stored unless an equal one is."""
        array = np.ascontiguousarray(array)
        content = f"{array.dtype.str}{array.shape}".encode() + array.tobytes()
        name = hashlib.sha256(content).hexdigest()[:12]
        self.arrays[name] = array
        return name

    def write(self, name: str, folder: Path = DATA) -> None:
        """Write both files; equal content gives equal bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text("".join(_lines(self.text)) + "\n", encoding="utf-8")
        with zipfile.ZipFile(folder / f"{name}.npz", "w") as file:
            for key in sorted(self.arrays):
                content = io.BytesIO()
                np.lib.format.write_array(content, self.arrays[key], allow_pickle=False)
                info = zipfile.ZipInfo(f"{key}.npy", _EPOCH)
                file.writestr(info, content.getvalue(), zipfile.ZIP_DEFLATED, 9)

    @classmethod
    def read(cls, name: str, folder: Path = DATA) -> Bundle:
        """The golden run of a name."""
        text = json.loads((folder / f"{name}.json").read_text("utf-8"))
        with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
            return cls(text, {key: file[key] for key in file.files})


def names(folder: Path = DATA) -> list[str]:
    """Names of the stored runs."""
    return sorted(path.stem for path in folder.glob("*.json"))


def _lines(value: Any, indent: int = 0) -> Iterator[str]:
    """JSON with one entry on a line as far as entries are short."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    leaves = not isinstance(value, dict | list) or all(not isinstance(part, dict | list | str) for part in value)
    if not isinstance(value, Mapping | list) or len(flat) <= _LONGEST or (leaves and isinstance(value, list)):
        yield flat
        return
    pad = " " * (indent + 1)
    named = isinstance(value, Mapping)
    yield "{\n" if named else "[\n"
    for n, part in enumerate(value):
        yield f"{pad}{json.dumps(part, ensure_ascii=False)}: " if named else pad
        yield from _lines(value[part] if named else part, indent + 1)
        yield ",\n" if n + 1 < len(value) else "\n"
    yield " " * indent + ("}" if named else "]")
