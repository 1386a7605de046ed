"""Candidates that name several files: ``model=dir/*.gguf`` becomes a candidate per GGUF model.

The reference's own file, further parts of split models and files without a language model are left out.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fidelab.config.arms import arm_fields
from fidelab.core.errors import ConfigError, InputError
from fidelab.core.paths import expand
from fidelab.models.local import SPLIT, local_model

_WILD = re.compile(r"[*?\[]")
_PIECES = re.compile(r"[-.]")


def expand_files(data: Mapping[str, Any], where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return settings with a candidate per file, and a line for each file that holds no language model.

    Files are sorted.  Their candidates are named by the shortest part of the file's name in which they differ.  A path
    that exists as it is written stays one model.

    Raises:
        ConfigError: If a pattern matches no model, or a candidate of several files has a name.
    """
    candidates = data.get("candidates")
    if not isinstance(candidates, list):
        return dict(data), ()
    expanded: list[Any] = []
    notes: list[str] = []
    for candidate in candidates:
        fields = _fields(candidate)
        pattern = fields.get("model")
        if not isinstance(pattern, str) or not _WILD.search(pattern) or expand(pattern).exists():
            expanded.append(candidate)
            continue
        base = data.get("model")
        files, left = _models(pattern, base if isinstance(base, str) else "", where)
        notes += left
        if "name" in fields and len(files) > 1:
            raise ConfigError(f"{where}: name={fields['name']} would name {len(files)} files of {pattern}: omit name")
        others = " ".join(_words(fields))
        for file, name in zip(files, _names(files, base if isinstance(base, str) else ""), strict=True):
            own = {"name": f"{name} {others}".strip(), **fields, "model": str(file)}
            expanded.append(own)
    return {**data, "candidates": expanded}, tuple(dict.fromkeys(notes))


def _fields(candidate: Any) -> dict[str, Any]:
    if isinstance(candidate, Mapping):
        return dict(candidate)
    try:
        return arm_fields(candidate) if isinstance(candidate, str) else {}
    except ValueError:  # the schema refuses it with its place
        return {}


def _words(fields: Mapping[str, Any]) -> list[str]:
    """Return what a candidate differs in besides its model, in words."""
    given = {key: value for key, value in fields.items() if key not in ("model", "name", "engine_args", "env")}
    words = [str(value) for value in given.values() if isinstance(value, str)]
    options = {**(fields.get("engine_args") or {}), **(fields.get("env") or {})}
    return words + [f"{key}={value}" for key, value in options.items()]


def _models(pattern: str, base: str, where: str) -> tuple[list[Path], list[str]]:
    """Return the models of a pattern without the reference's, and a line for each file that is left out."""
    own = _resolved(base)
    files, left = list[Path](), list[str]()
    found = sorted(Path(name).absolute() for name in glob.glob(str(expand(pattern)), recursive=True))  # noqa: PTH207
    for path in found:
        if path.resolve() == own:
            continue
        part = SPLIT.fullmatch(path.name)
        if part is not None and int(part["number"]) > 1:
            continue
        if path.suffix != ".gguf":
            left.append(f"{path.name} is left out: it is not a .gguf file")
            continue
        try:
            local_model(str(path))
        except InputError as error:
            why = str(error).replace(f"{path.parent}/", "").partition(": pass ")[0]  # advice for a file that was named
            left.append(f"left out: {why}")
            continue
        files.append(path)
    if not files:
        but = " but the reference's own" if own in {path.resolve() for path in found} else ""
        others = f" ({'; '.join(left[:2])})" if left else ""
        raise ConfigError(
            f"{where}: model={pattern} matches no GGUF model{but}{others}: check the folder and the pattern"
        )
    return files, left


def _resolved(base: str) -> Path | None:
    """Return the reference's file, if it is a path; of a folder the one model in it."""
    if not base:
        return None
    try:
        path = local_model(base)
    except InputError:  # refused later, with its reason
        return None
    return path.resolve() if path is not None else None


def _names(files: Sequence[Path], base: str) -> list[str]:
    """Return the shortest part of each file's name in which all differ; without one, the file names or the paths."""
    stems = [_stem(file) for file in files]
    if len({*stems}) < len(stems):
        return [f"{file.parent.name}/{stem}" for file, stem in zip(files, stems, strict=True)]
    peers = [*stems, _stem(Path(base))] if base.endswith(".gguf") else stems
    short = _cut(stems, peers)
    if short == stems and len(stems) > 1:  # the reference's name has nothing in common with them
        short = _cut(stems, stems)
    return short if len({*short}) == len(short) else stems


def _stem(file: Path) -> str:
    match = SPLIT.fullmatch(file.name)
    return match["stem"] if match else file.name.removesuffix(".gguf")


def _cut(stems: Sequence[str], peers: Sequence[str]) -> list[str]:
    """Remove the pieces, separated by ``-`` or ``.``, with which all peers begin; the last piece always stays."""
    pieces = [_PIECES.split(peer) for peer in peers]
    if len(peers) == 1:
        common = len(pieces[0]) - 1
    else:
        shortest = min(map(len, pieces)) - 1
        common = next((n for n in range(shortest) if len({parts[n] for parts in pieces}) > 1), shortest)
    return [stem[sum(len(piece) + 1 for piece in _PIECES.split(stem)[:common]) :] for stem in stems]
