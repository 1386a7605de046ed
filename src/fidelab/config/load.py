"""Read YAML into settings of any class, and write settings as YAML in canonical form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from fidelab.core import read_file, resume_line
from fidelab.core.errors import ConfigError, listed, nearest_first

Model = TypeVar("Model", bound=BaseModel)
_MOST_BYTES, _MOST_LEVELS, _MOST_VALUES = 1 << 20, 40, 100_000  # most values of settings: far more than people write

_EXPERIMENT = "an experiment file"


def read_yaml(
    path: Path,
    overrides: Sequence[str] = (),
    keys: str = "'model:' and 'candidates:'",
    kind: str = _EXPERIMENT,
) -> dict[str, Any]:
    """Return the keys of a settings file, with ``a.b=c`` overrides applied.

    ``keys``: examples of the expected keys; ``kind``: of file, as errors name it.

    Raises:
        ConfigError: If the file is missing, is not UTF-8 or YAML, or has no keys.  The message names the place.
    """
    data = parse_yaml(read_text(path, kind), path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys like {keys}, found {type(data).__name__}")
    apply_overrides(data, overrides)
    return data


def read_text(path: Path, kind: str = _EXPERIMENT) -> str:
    """Return the text of a settings file; ``kind``: of file, as errors name it.

    Raises:
        ConfigError: If the file is missing, is a folder, pipe or device, is longer than 1 MiB, or is not UTF-8.
    """
    try:
        return read_file(path, _MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name {kind}") from None
    except IsADirectoryError:
        resume = f", or resume a run with: {resume_line(path)}" if kind == _EXPERIMENT else ""
        raise ConfigError(f"{path} is a folder; name {kind}{resume}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def parse_yaml(text: str, where: object, *, texts: bool = False) -> Any:
    """Parse a YAML text that may come from anybody.

    ``texts``: every value is the text that was written (``on`` stays ``on``), and ``<<`` is a key.

    Raises:
        ConfigError: If the text is not YAML, or aliases (``*name``) and nesting expand to more values than settings can
            have.
    """
    try:
        loader = yaml.BaseLoader(text) if texts else yaml.SafeLoader(text)  # control characters are refused here
        node = loader.get_single_node()
        if node is None:
            return None
        _expanded(node, {}, 0)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else str(where)
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ConfigError(f"{place} is not YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested deeper than {_MOST_LEVELS} levels; settings are not") from None
    except (ValueError, OverflowError, LookupError, TypeError) as error:  # an impossible date, a number of base 60
        raise ConfigError(f"{where} is not YAML: {str(error)[:100]}") from None


def _expanded(node: yaml.Node, known: dict[int, int], level: int) -> int:
    """Return the number of values below a node, with aliases counted as often as they repeat them.

    ``known``: counts of nodes seen before.
    """
    if level > _MOST_LEVELS:  # also for an alias inside its own anchor
        raise RecursionError
    if id(node) not in known:
        match node:
            case yaml.MappingNode(value=pairs):
                inner = [part for pair in pairs for part in pair]
            case yaml.SequenceNode(value=inner):
                pass
            case _:
                inner = []
                str(node.value).encode()  # half a surrogate pair is not text: UnicodeEncodeError is a ValueError
        known[id(node)] = 1 + sum(_expanded(part, known, level + 1) for part in inner)
    if known[id(node)] > _MOST_VALUES:
        raise ValueError(f"aliases make more than {_MOST_VALUES:,} values of it")
    return known[id(node)]


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides: ``a.b=c`` sets ``data["a"]["b"]``, ``a.0.b=c`` sets ``b`` of the first entry of a list.

    Values are read as YAML.
    """
    for text in overrides:
        place, eq, value = text.partition("=")
        if not eq or not place:
            raise ConfigError(f"--set {text!r}: write a.b=value")
        *parents, last = place.split(".")
        node: Any = data
        for parent in parents:  # created if it is missing; ``None`` if there can be none
            if isinstance(node, list):
                node = node[int(parent)] if parent.isdecimal() and int(parent) < len(node) else None
            else:
                node = node.setdefault(parent, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise ConfigError(f"--set {text!r}: {'.'.join(parents)} is not a group of settings")
        try:
            node[last] = parse_yaml(value, "--set")
        except ConfigError:
            raise ConfigError(f"--set {text!r}: the value is not YAML") from None


def validate_as(model: type[Model], data: Mapping[str, Any], where: str, prefix: str = "") -> Model:
    """Turn plain data into settings of this class.

    Raises:
        ConfigError: If the data are invalid.  The message is one line about the first error, with its place in
            ``where``, below ``prefix``.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(explain_validation(error, where, model, prefix)) from None


def explain_validation(error: ValidationError, where: str, model: type[BaseModel], prefix: str = "") -> str:
    """Return one line for a pydantic error: the place, the fault, and for an unknown key the nearest known one."""
    first = error.errors()[0]
    # pydantic adds the alternatives of a union to the place; users did not write them
    tried = ("literal[", "function-", "ArmConfig", "EngineConfig")
    names = [str(part) for part in first["loc"] if not str(part).startswith(tried)]
    place = ".".join(([prefix] if prefix else []) + names)
    if first["type"] == "extra_forbidden":
        parent = model
        for name in names[:-1]:
            field = parent.model_fields.get(name)
            parent = (_settings_in(field.annotation) if field else None) or parent
        known = nearest_first(names[-1], parent.model_fields)
        return f"{where}: unknown key {place!r}; did you mean {known[0]!r}? {listed(known)}"
    if first["type"] == "missing":
        return f"{where}: {place!r} is missing"
    got = first.get("input")
    message = first["msg"].removeprefix("Value error, ")
    named = isinstance(got, dict) or got is None or message.startswith((f"{got} ", f"{got!r} "))
    shown = "" if named else f" (found {got!r:.100})"
    return f"{where}: {place + ': ' if place else ''}{message:.1000}{shown}"


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class in a field's annotation, such as that of a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _settings_in(part))), None)


def dump(experiment: BaseModel, extra: Mapping[str, Any] | None = None) -> str:
    """Write YAML with every default spelled out; ``extra`` is added as comments above it."""
    lines = {key: re.sub(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]+", " ", value) for key, value in (extra or {}).items()}
    head = "".join(f"# {key}: {value}\n" for key, value in lines.items())
    return head + yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
