"""Engines in published images: the worker runs in a container of docker or podman, in which nothing is installed.

A container is one more command before the interpreter (:class:`~fidelab.environments.environment.Environment`).  Every
folder has the same path inside as outside, so that paths in jobs stay valid.  All but the store of captures are
read-only.  An image needs Python and numpy besides its engine.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from fidelab.core import plain_json
from fidelab.core.errors import EngineError, UsageError

CHOICE = "FIDELAB_CONTAINER"
_PROGRAMS = ("docker", "podman")
_LIMIT = 60.0  # seconds for an answer of docker while its daemon starts
_NVIDIA, _AMD, _DRI = "/dev/nvidiactl", "/dev/kfd", "/dev/dri"
_RENDER = f"{_DRI}/renderD128"
# Containers start with 64 MiB, which tensor parallelism exceeds; unused shared memory costs nothing.
_SHARED_MEMORY = "16g"
_HOST = "fidelab"  # resolves to the loopback, over which the ranks of an arm meet


@dataclass(frozen=True)
class Image:
    """A local image and the way to start containers of it.

    Attributes:
        name: as the user wrote it.
        id: containers are started by it, so that all of a run have the same content.
        digest: the published one where the image was pulled, else ``id``; the same on every machine that pulled it.
        program: ``docker`` or ``podman``.
        rootless: docker's daemon runs as the user, who is root in its containers.
        gpus: flags that pass the machine's GPUs on; empty without GPUs.
    """

    name: str
    id: str
    digest: str
    program: str
    podman: bool = False
    rootless: bool = False
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Container:
    """One container, and its access to this machine.

    ``writes``: folders in which it may write; ``reads``: read-only paths; ``devices``: whether it has the GPUs;
    ``network``: whether it has the machine's network.
    """

    image: Image
    name: str
    env: Mapping[str, str]
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    devices: bool = False
    network: bool = False

    def command(self, python: str, module: str) -> list[str]:
        """Return the command line that runs a module in the container."""
        user = "0:0" if self.image.rootless else f"{os.getuid()}:{os.getgid()}"
        words = [self.image.program, "run", "--rm", "--init", "--interactive", "--name", self.name]
        words += ["--pull", "never", "--user", user]
        if self.image.podman and os.getuid():  # without root: the user keeps the number inside
            words += ["--userns", "keep-id"]
        if self.network:
            words += ["--network", "host"]
        else:
            words += ["--network", "none", "--hostname", _HOST, "--add-host", f"{_HOST}:127.0.0.1"]
        words += ["--shm-size", _SHARED_MEMORY, "--security-opt", "label=disable", "--workdir", "/tmp"]
        if self.devices:
            words += self.image.gpus
        for path in (*self.writes, *self.reads):
            words += ["--mount", _mount(path, read_only=path not in self.writes)]
        # The user has no entry in the image's list of users: without a home and a name, caches have no place.
        for name, value in {"HOME": "/tmp", "USER": _HOST, **self.env}.items():
            words += ["--env", f"{name}={value}"]
        return [*words, "--entrypoint", python, self.image.id, "-m", module]

    def end(self) -> None:
        """End the container if it still runs, since it survives when only the client is killed."""
        words = [self.image.program, "rm", "--force", self.name]
        null = subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # In a session of its own: Ctrl-C ends this process and lets it finish.
            subprocess.run(words, stdin=null, stdout=null, stderr=null, timeout=_LIMIT, start_new_session=True)


def new_name() -> str:
    """Return a name that no other container has."""
    return f"fidelab-{uuid4().hex[:12]}"


def find_image(name: str) -> Image:
    """Return an image that was pulled or built.  Nothing is pulled.

    Args:
        name: a name that docker accepts: ``vllm/vllm-openai:v0.32.0``, a digest, an id.

    Raises:
        UsageError: If ``FIDELAB_CONTAINER`` names a missing program.
        EngineError: If the image is missing, docker and podman are, or they do not answer.  The message names the
            remedy.
    """
    program = _program()
    done = _run([program, "image", "inspect", name])
    if done.returncode:
        raise EngineError(_why_not(name, program, done))
    try:
        [record] = plain_json(done.stdout)
        identity, published = str(record["Id"]), [str(text) for text in record.get("RepoDigests") or []]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EngineError(f"{program} image inspect {name}: its answer cannot be read") from None
    podman = "podman" in _run([program, "--version"]).stdout.lower()  # docker may be an alias of podman
    rootless = not podman and "rootless" in _run([program, "info", "--format", "{{.SecurityOptions}}"]).stdout
    repository = name.partition("@")[0]
    repository = repository.rpartition(":")[0] if ":" in repository.rpartition("/")[2] else repository
    own = [text for text in published if text.partition("@")[0].endswith(repository)] or sorted(published)
    digest = own[0].rpartition("@")[2] if own else identity
    return Image(name, identity, digest, program, podman, rootless, _gpu_flags(podman))


def existing_paths(values: Iterable[str]) -> list[str]:
    """Return the absolute paths in option values, including those inside JSON, that exist on this machine."""
    return [text for value in values for text in _texts(value) if text.startswith("/") and Path(text).exists()]


def link_targets(path: str | Path) -> list[str]:
    """Return a file or folder and its link targets outside of it, which a container would not see otherwise."""
    root = Path(path)
    found = [str(root)]
    links = (child for child in (root, *(root.rglob("*") if root.is_dir() else ())) if child.is_symlink())
    for link in links:
        target = link.resolve()
        if target.exists() and not target.is_relative_to(root):
            found.append(str(target))
            step = Path(os.path.normpath(link.parent / link.readlink()))  # a chain of links needs each of them
            found += [] if step.is_relative_to(root) else [str(step)]
    return list(dict.fromkeys(found))


# ------------------------------------------------------------------------------------------------------- inside


def _texts(value: str) -> Iterator[str]:
    if not value.startswith(("{", "[")):
        yield value
        return
    try:
        waiting = [plain_json(value)]
    except ValueError:
        return
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str):
            yield item


def _mount(path: str, *, read_only: bool) -> str:
    """Return a bind mount under the same path.

    Unlike ``--volume``, it does not create a folder if the path does not exist.
    """
    row = io.StringIO()
    fields = ["type=bind", f"source={path}", f"target={path}", *(["readonly"] if read_only else [])]
    csv.writer(row, lineterminator="").writerow(fields)  # a path may hold commas
    return row.getvalue()


def _program() -> str:
    """Return docker or podman, whichever exists.

    Raises:
        UsageError, EngineError: As :func:`find_image`.
    """
    chosen = os.environ.get(CHOICE)
    for name in (chosen,) if chosen else _PROGRAMS:
        if shutil.which(name):
            return name
    if chosen:
        raise UsageError(f"{CHOICE}={chosen}: no such program; set it to docker or podman, or to a path")
    raise EngineError(f"an image needs docker or podman, and neither is there: install one, or name it in {CHOICE}")


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Return the output of a short command.

    Raises:
        EngineError: If it has no output, or cannot be started.
    """
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"{words[0]} did not answer within {_LIMIT:g} s: does its daemon run? ({words[0]} info)"
        ) from None
    except OSError as error:
        raise EngineError(f"{words[0]} cannot be started: {error.strerror}") from None


def _why_not(name: str, program: str, done: subprocess.CompletedProcess[str]) -> str:
    """Return why an image cannot be inspected, and the remedy."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    said = lines[-1][:300] if lines else f"it ended with status {done.returncode}"
    if any(words in said.lower() for words in ("no such", "not known", "not found", "unable to find")):
        return f"image {name} is not there: {program} pull {name} (fidelab pulls nothing by itself)"
    if any(words in said.lower() for words in ("daemon", "permission denied", "connect")):
        return f"{program} cannot be used: {said}; start its daemon, or join its group (try: {program} info)"
    return f"{program} image inspect {name}: {said}"


def _gpu_flags(podman: bool) -> tuple[str, ...]:
    """Return flags that pass on the GPUs of the machine where containers run."""
    listed = _run(["ls", "-dn", _NVIDIA, _AMD, _RENDER]).stdout  # existing device files, with their groups
    rows = {fields[-1]: fields for line in listed.splitlines() if len(fields := line.split()) > 4}
    if _NVIDIA in rows:
        return ("--device", "nvidia.com/gpu=all") if podman else ("--gpus", "all")
    if _AMD not in rows:
        return ()
    groups = ["keep-groups"] if podman else sorted({rows[file][3] for file in (_AMD, _RENDER) if file in rows})
    return ("--device", _AMD, "--device", _DRI, *(word for group in groups for word in ("--group-add", group)))
