"""Read a REFRACT report: its schema, and the places of its values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Final

from fidelab.core import KVSpec
from fidelab.core.errors import FidelabError, InputError
from fidelab.imports.json_file import JsonFile, Node, read_json

READABLE: Final = ("refract.report.v0.2", "refract.report.v0.3")


@dataclass(frozen=True)
class RefractFile:
    """A report of REFRACT."""

    json: JsonFile
    schema: str

    @property
    def root(self) -> Node:
        """Root node of the file."""
        return self.json.root

    @property
    def model(self) -> str:
        """The model's name, without the folders of the machine that ran it."""
        return PureWindowsPath(self.root["model"].text()).name or "unnamed model"  # reads both kinds of separators

    @property
    def backend(self) -> str:
        """The engine; files up to schema 0.2 do not name it, since llama.cpp was the only one."""
        named = self.root["environment"]["backend"].text()
        return named or ("llamacpp" if self.schema.startswith(READABLE[0]) else "unknown")

    @property
    def version(self) -> str | None:
        """REFRACT's version, which older files do not hold."""
        return self.root["framework_version"].text() or None

    def kv(self, side: str) -> KVSpec | None:
        """Cache formats of ``reference`` or ``candidate``: ``ctk=q8_0,ctv=turbo4`` or a fidelab spec."""
        text = self.root[side].text().strip() or "unknown"
        pairs = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
        k, v = pairs.get("ctk"), pairs.get("ctv")
        try:
            return KVSpec.parse(f"{k or 'unknown'}/{v or 'unknown'}" if k or v else text)
        except FidelabError:
            return None

    def axis(self, name: str) -> Node | None:
        """Return an axis that was measured; the trajectory is also found under its old name, gtm."""
        for alias in _aliases(name):
            skipped = f"{alias}_score" in self.detail and self.detail[f"{alias}_score"].value is None
            if alias in self.root["axes"] and not skipped:
                return self.root["axes"][alias]
        return None

    @property
    def detail(self) -> Node:
        """The breakdown of the composite."""
        return self.root["composite_detail"]

    def score(self, name: str) -> float | None:
        """Return the score that the file gives for an axis."""
        axis = self.axis(name)
        stated = [self.detail[f"{alias}_score"].number() for alias in _aliases(name)]
        return next((score for score in stated if score is not None), axis["score"].number() if axis else None)


def _aliases(name: str) -> tuple[str, ...]:
    return ("trajectory", "gtm") if name == "trajectory" else (name,)


def read_refract(path: Path) -> RefractFile:
    """Read a report of REFRACT 0.2 or 0.3.

    Raises:
        InputError: If the file cannot be read, is not JSON, or has another schema.  The message names the place.
    """
    file = read_json(path, "report")
    readable = " and ".join(f"{name}.*" for name in READABLE)
    if not isinstance(file.root.value, dict) or not isinstance(file.root["schema"].value, str):
        raise InputError(f"{path}: not a REFRACT report (it names no schema); supported: {readable}")
    schema = file.root["schema"].text()
    if not any(schema == name or schema.startswith(f"{name}.") for name in READABLE):
        raise InputError(f"{path}: has schema {schema!r}; read are {readable}")
    if not file.root["axes"].value:
        raise InputError(f"{path}: has no test; make the report with at least one")
    return RefractFile(file, schema)
