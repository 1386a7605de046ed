"""Read a container of a Compose file or a Kubernetes manifest as ``docker run … IMAGE …``."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fidelab.config.load import parse_yaml
from fidelab.config.pasted.notes import Notes, is_secret_name, secret_words, without_secrets
from fidelab.config.pasted.shell import Command, check_length
from fidelab.core.errors import UsageError
from fidelab.engines.base import engines

_FIRST_KEY = re.compile(
    r"""\s*(?:---\s*)?(?:-[ \t]+)*["']?[A-Za-z_][\w./-]*["']?:(?:[ \t]+\S|[ \t]*(?:\n|\Z)|[ \t]*[|>&])"""
)
_COMMENTS = re.compile(r"(?:[ \t]*(?:#[^\n]*|---|%YAML[^\n]*)?\n)*")
_KUBERNETES_KEYS = frozenset(
    (
        *("args", "env", "envFrom", "volumeMounts", "resources", "livenessProbe", "readinessProbe", "startupProbe"),
        *("imagePullPolicy", "securityContext", "lifecycle"),
    )
)
_COMPOSE_KEYS = frozenset(
    ("environment", "entrypoint", "volumes", "deploy", "env_file", "ipc", "shm_size", "runtime", "gpus", "restart")
)
_VARIABLE = re.compile(
    r"\$\$|\$\{(?P<braced>\w+)(?:(?P<operator>:?[-?+])(?P<other>(?:[^{}]|\{[^{}]*\})*))?\}|\$(?P<name>[A-Za-z_]\w*)"
)
_SHORT = 60  # characters
_IN_CLUSTER = "the value lies in the cluster (Secret, ConfigMap or field), which is not read; write it if it matters"
_OF_CONTAINER = "concerns the container"
_ENV_FILE = "a file of variables, which is not read; write those that matter"


def is_manifest(text: str) -> bool:
    """Whether a text begins like YAML or JSON: with ``key:``, ``- key:``, ``{`` or ``["``."""
    start = text[_COMMENTS.match(text).end() :]  # type: ignore[union-attr]
    return (
        _FIRST_KEY.match(start) is not None
        or re.match(r"""\s*(\{\s*["']|\[\s*["'{]|-[ \t]+["']?-)""", start) is not None
    )


@dataclass
class _Container:
    """One container: its image, words, variables, and flags of ``docker run``.

    ``entrypoint``: words that replace the image's own; ``None`` if it is kept.
    """

    name: str
    image: str = ""
    entrypoint: list[str] | None = None
    words: list[str] = field(default_factory=list)
    variables: dict[str, str | None] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)


class _Form(NamedTuple):
    """The form of a file: its name in messages, and its containers."""

    name: str
    containers: list[_Container]


def read_manifest(text: str, where: str, notes: Notes) -> Command:
    """Return the container that starts a server as ``docker run``; without an image, its variables and its command.

    Raises:
        ConfigError: If it is not YAML.
        UsageError: If it is YAML of another kind, or none or several of its containers start a server.
    """
    documents = [parse_yaml(part, where, texts=True) for part in re.split(r"(?m)^---[^\n]*$", text) if part.strip()]
    documents = [document for document in documents if document not in (None, "")]
    if len(documents) == 1 and _is_list_of_texts(documents[0]):
        notes.translated["list of words"] = "the command that it holds"
        return Command({}, list(documents[0]))
    form = _form_of(documents, where, notes)
    container = _the_server(form, where, notes)
    notes.ignored.update(container.ignored)
    words = [*(container.entrypoint or []), *container.words]
    if not container.image:
        if not words or words[0].startswith("-"):
            raise UsageError(f"{where}: {form.name} without an image; add its line image: NAME")
        return Command({key: value or "" for key, value in container.variables.items()}, words)
    command = _docker_run(container)
    notes.translated[f"{form.name}, container {container.name}" if container.name else form.name] = without_secrets(
        shlex.join(command)
    )
    return Command({}, command)


def _is_list_of_texts(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(word, str) for word in data)


def _docker_run(container: _Container) -> list[str]:
    """Return the command that starts a container by itself."""
    words = ["docker", "run", *container.flags]
    for name, value in container.variables.items():
        words += ["-e", name if value is None else f"{name}={value}"]
    rest = list(container.words)
    if container.entrypoint == []:  # the image's own is removed
        words.append("--entrypoint=")
    if container.entrypoint:
        words += ["--entrypoint", container.entrypoint[0]]
        rest = [*container.entrypoint[1:], *rest]
    return [*words, container.image, *rest]


def _form_of(documents: Sequence[Any], where: str, notes: Notes) -> _Form:
    """Return the containers of a file, by its form.

    Raises:
        UsageError: If it has none.
    """
    first = documents[0] if documents else None
    if isinstance(first, dict) and "services" in first:
        services = first["services"]
        if not isinstance(services, dict):
            raise UsageError(f"{where}: services is not a group of keys")
        return _Form("Compose file", [_service(name, _merged(data), where, notes) for name, data in services.items()])
    if any(isinstance(each, dict) and "kind" in each for each in documents):
        found = [pod for each in documents for pod in _pods(each)]
        for each in documents:
            if isinstance(each, dict) and not any(True for _ in _pods(each)):
                notes.ignored[f"kind: {each.get('kind', 'unknown')}"] = "has no container"
        kinds = ", ".join(str(each["kind"]) for each in documents if isinstance(each, dict) and "kind" in each)
        if not found:
            raise UsageError(
                f"{where}: a Kubernetes manifest of kind {kinds} has no container; "
                "paste the image with its arguments: docker run IMAGE ARGUMENTS"
            )
        return _Form("Kubernetes manifest", [container for pod in found for container in _of_pod(pod, where)])
    if isinstance(first, dict) and "containers" in first:
        return _Form("Kubernetes fragment", _of_pod(first, where))
    if isinstance(first, list) and all(isinstance(each, dict) for each in first):
        return _Form("Kubernetes fragment", [_kubernetes(_merged(each), {}, where) for each in first])
    if isinstance(first, dict) and first.keys() & _KUBERNETES_KEYS:
        return _Form("Kubernetes fragment", [_kubernetes(first, {}, where)])
    if isinstance(first, dict) and ("image" in first or "command" in first or first.keys() & _COMPOSE_KEYS):
        return _Form("Compose service", [_service("", _merged(first), where, notes)])
    if isinstance(first, dict) and first and all(isinstance(each, dict) and "image" in each for each in first.values()):
        return _Form("Compose file", [_service(name, _merged(data), where, notes) for name, data in first.items()])
    keys = ", ".join(list(first)[:4]) if isinstance(first, dict) else type(first).__name__
    raise UsageError(
        f"{where}: a file with {keys} is neither a Compose file nor a Kubernetes manifest; paste the server's command"
    )


def _the_server(form: _Form, where: str, notes: Notes) -> _Container:
    """Return the only container that starts a known server.

    Raises:
        UsageError: If there is none, or several.
    """
    serving = [each for each in form.containers if _serves(each)]
    if not serving and len(form.containers) == 1:
        serving = form.containers  # whatever it is, the message names it
    names = ", ".join(each.name or "without a name" for each in serving or form.containers)
    if not serving:
        raise UsageError(f"{where}: no container of this {form.name} starts a known server (there are {names})")
    if len(serving) > 1:
        raise UsageError(f"{where}: several containers of this {form.name} start a server ({names}); keep one")
    for each in form.containers:
        if each is not serving[0]:
            notes.ignored[f"container {each.name}"] = "starts no known server"
    return serving[0]


def _serves(container: _Container) -> bool:
    marks = [cls.dialect.mark for cls in engines() if cls.dialect is not None]
    line = " ".join([container.image.rpartition("@")[0] or container.image, *(container.entrypoint or [])])
    text = " ".join([line, *container.words[:3]]).lower()
    return any(re.search(mark, place) for mark in marks for place in (text, *text.split())) and "ollama" not in line


def _merged(data: Any) -> dict[str, Any]:
    """Return a group of keys with those of its ``<<: *anchor``."""
    if not isinstance(data, dict):
        return {}
    base = data.get("<<", [])
    merged: dict[str, Any] = {}
    for each in base if isinstance(base, list) else [base]:
        merged |= _merged(each)
    return {**merged, **{key: value for key, value in data.items() if key != "<<"}}


# ------------------------------------------------------------------------------------------------ Compose


def _service(name: str, data: Mapping[str, Any], where: str, notes: Notes) -> _Container:
    """Return a service of a Compose file.  A service that is not the server may have variables that are not set."""
    found = _Container(name)
    try:
        found.image = _filled(str(data.get("image", "")), where)
        if "entrypoint" in data:
            found.entrypoint = _words(data["entrypoint"], where)
        found.words = _words(data.get("command", ""), where)
        found.variables = dict(_environment(data.get("environment", {}), where))
        for key, value in data.items():
            if key in ("image", "entrypoint", "command", "environment"):
                continue
            if key == "env_file":
                found.ignored[f"env_file: {_shown(value)}"] = _ENV_FILE
            elif key == "build":
                found.ignored[f"build: {_shown(value)}"] = "an image that is built is not read; name it by image:"
            elif not _add_flags(found, key, value, where):
                found.ignored[f"{key}: {_shown(value)}"] = _OF_CONTAINER
    except UsageError:
        found.image = str(data.get("image", ""))
        if _serves(found) or _serves(_Container(name, "", None, str(data.get("command", "")).split())):
            raise
    return found


def _add_flags(found: _Container, key: str, value: Any, where: str) -> bool:
    """Add the flags of ``docker run`` that a key of a service stands for.  Returns whether it stands for any."""
    if key == "volumes" and isinstance(value, list):
        for each in value:
            if isinstance(each, str):
                found.flags += ["-v", _filled(each, where)]
            elif isinstance(each, dict) and {"source", "target"} <= each.keys():
                found.flags += ["-v", _filled(f"{each['source']}:{each['target']}", where)]
    elif key == "ports" and _is_list_of_texts(value):
        for each in value:
            found.flags += ["-p", _filled(each, where)]
    elif key in ("ipc", "shm_size", "runtime", "network_mode", "gpus") and isinstance(value, str):
        found.flags.append(
            f"--{ {'shm_size': 'shm-size', 'network_mode': 'network'}.get(key, key) }={_filled(value, where)}"
        )
    elif key == "deploy" and (gpus := _gpus(value)):
        found.flags += ["--gpus", gpus]
    else:
        return False
    return True


def _gpus(deploy: Any) -> str:
    """Return the value of ``--gpus`` for the devices that a service reserves; empty if it reserves none."""
    try:
        device = deploy["resources"]["reservations"]["devices"][0]
        ids = device.get("device_ids")
        return f'"device={",".join(ids)}"' if ids else str(device.get("count", "all"))
    except (AttributeError, KeyError, IndexError, TypeError):
        return ""


def _words(value: Any, where: str) -> list[str]:
    """Return the words of a command that is a text or a list."""
    if isinstance(value, list):
        words = [str(word) for word in value]
    else:
        try:
            text = re.sub(r"\\[ \t]*(?:\n|\Z)", " ", str(value))
            words = shlex.split(text, comments=False)
        except ValueError as error:
            raise UsageError(f"{where}: the command cannot be split into words: {str(error).lower()}") from None
    return [word if secret else _filled(word, where) for word, secret in zip(words, secret_words(words), strict=True)]


def _environment(value: Any, where: str) -> Iterator[tuple[str, str | None]]:
    """Yield variables of a list ``NAME=value`` or of a group; ``None``: the value of this process."""
    if isinstance(value, list):
        pairs = [str(each).partition("=") for each in value]
        items = [(name, text if equals else None) for name, equals, text in pairs]
    else:
        items = [(name, str(text)) for name, text in _merged(value).items()]
    for name, text in items:
        yield name, text if text is None or is_secret_name(name) else _filled(text, where)


def _filled(text: str, where: str) -> str:
    """Replace ``${NAME:-default}`` as Compose does, with this process's variables.

    Raises:
        UsageError: If a variable is neither set nor has a default.
    """

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name, operator = match["braced"] or match["name"], match["operator"] or ""
        found = os.environ.get(name)
        if is_secret_name(name):
            raise UsageError(f"{where}: ${name} is a secret, which the report would show; remove that flag")
        missing = found is None or (not found and operator.startswith(":"))
        if operator.endswith("+"):
            return "" if missing else _filled(match["other"], where)
        if missing and operator.endswith("-"):
            return _filled(match["other"], where)
        if found is None or (missing and operator):
            raise UsageError(f"{where}: ${name} is not set here; write its value")
        return found

    return _VARIABLE.sub(value, text)


def _shown(value: Any) -> str:
    """Return a short value; a longer one or a group is cut, since it may hold a key."""
    return without_secrets(value) if isinstance(value, str) and len(value) < _SHORT and "\n" not in value else "…"


# ------------------------------------------------------------------------------------------------ Kubernetes


def _pods(data: Any, level: int = 0) -> Iterator[dict[str, Any]]:
    """Yield each group of keys with ``containers``, wherever it is."""
    if isinstance(data, dict):
        if isinstance(data.get("containers"), list):
            yield data
            return
        for value in data.values():
            yield from _pods(value, level + 1)
    elif isinstance(data, list):
        for value in data:
            yield from _pods(value, level + 1)


def _of_pod(pod: Mapping[str, Any], where: str) -> list[_Container]:
    volumes = [each for each in pod.get("volumes") or [] if isinstance(each, dict)]
    paths = {
        str(each.get("name")): str(each["hostPath"].get("path", ""))
        for each in volumes
        if isinstance(each.get("hostPath"), dict)
    }
    return [_kubernetes(each, paths, where) for each in pod["containers"] if isinstance(each, dict)]


def _kubernetes(data: Mapping[str, Any], paths: Mapping[str, str], where: str) -> _Container:
    """Return a container of a pod.  ``paths``: volume → folder of the node."""
    found = _Container(str(data.get("name", "")), str(data.get("image", "")))
    elsewhere: set[str] = set()
    for each in data.get("env") or []:
        if not isinstance(each, dict) or "name" not in each:
            raise UsageError(f"{where}: env is not a list of name and value")
        name = str(each["name"])
        if "valueFrom" in each:
            elsewhere.add(name)
            found.ignored[f"env {name}"] = _IN_CLUSTER
        else:
            value = str(each.get("value", ""))
            found.variables[name] = value if is_secret_name(name) else _references(value, found, elsewhere, where)
    for key in ("command", "args"):
        if not isinstance(words := data.get(key) or [], list):
            raise UsageError(f"{where}: {key} of a Kubernetes container is a list of words")
        texts = [str(word) for word in words]
        filled = [
            word if secret else _references(word, found, elsewhere, where)
            for word, secret in zip(texts, secret_words(texts), strict=True)
        ]
        if key == "command" and filled:
            found.entrypoint = filled
        else:
            found.words += filled
    for each in data.get("volumeMounts") or []:
        if isinstance(each, dict) and (folder := paths.get(str(each.get("name")))):
            found.flags += ["-v", f"{folder}:{each.get('mountPath', '')}"]
        elif isinstance(each, dict):
            found.ignored[f"volume {each.get('name')} at {each.get('mountPath')}"] = (
                "lies in the cluster: paths in it are read as they are written"
            )
    for key in data.keys() - {"name", "image", "env", "command", "args", "volumeMounts"}:
        found.ignored[f"{key}: {_shown(data[key])}"] = _IN_CLUSTER if key == "envFrom" else _OF_CONTAINER
    return found


def _references(text: str, container: _Container, elsewhere: set[str], where: str) -> str:
    """Replace ``$(NAME)`` by the container's variable as Kubernetes does; ``$$(NAME)`` is kept as ``$(NAME)``.

    Raises:
        UsageError: If the value is not in the file.
    """

    def value(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        name = match[1]
        if name in elsewhere or (name in container.variables and is_secret_name(name)):
            raise UsageError(f"{where}: $({name}) is not in this file; write its value")
        found = container.variables.get(name)
        return match[0] if found is None else found

    filled = re.sub(r"\$?\$\(([A-Za-z_][\w.-]*)\)", value, text)
    check_length(filled, where)
    return filled
