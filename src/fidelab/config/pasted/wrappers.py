"""Take off the programs that start a server: sudo, numactl, srun, uv run, docker exec, bash -c and others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath

from fidelab.config.pasted.notes import Notes, shorten, without_secrets
from fidelab.config.pasted.shell import Command, read_script
from fidelab.core.errors import UsageError

_PLACES = "places the server on cores, memory or nodes; configurations run without it"
_STARTS = "only starts the server"
_LIMITS = "changes the server's priority, time or output; configurations run without it"
_ENVIRONMENT = "names the server's environment; configurations run in the engine's own (--python names another)"
_INSIDE = "starts the server in a running container; configurations run in the engine's own environment"
_CONTAINER = "the server's container has no image that runs here; configurations run in the engine's own environment"


@dataclass(frozen=True)
class Wrapper:
    """A program that runs the words after its own.

    ``values``: flags that have a value in the next word.  ``operands``: words without a flag before the command.
    ``sets``: flags whose value is ``NAME=VALUE``.  ``switches``: flags without a value, if all others have one.
    ``assigns``: variables may stand before the command.  ``ends``: flag whose value is the command.
    """

    why: str
    values: frozenset[str] = frozenset()
    operands: int = 0
    sets: frozenset[str] = frozenset()
    switches: frozenset[str] | None = None
    assigns: bool = False
    two_values: frozenset[str] = frozenset()

    def takes(self, flag: str) -> int:
        """Number of words after a flag that are its values."""
        if flag in self.two_values:
            return 2
        if self.switches is not None:
            return int(flag not in self.switches)
        return int(flag in self.values or flag in self.sets)


def _flags(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SUDO = _flags("-u -g -h -p -C -T -D -R -r -t -U --user --group --host --prompt --chdir --chroot --close-from")
_CONDA = _flags("-n --name -p --prefix --cwd")
_UV = _flags(
    "--with --with-editable --with-requirements --python -p --extra --group --only-group --no-group --project "
    "--directory --package --env-file --index --default-index --index-url --extra-index-url --find-links -f "
    "--cache-dir --from --torch-backend --index-strategy --prerelease --resolution --link-mode --python-platform -w"
)
_EXEC = Wrapper(_INSIDE, _flags("-u --user -w --workdir --env-file --detach-keys"), 1, _flags("-e --env"))
_MPI = Wrapper(
    _PLACES,
    _flags(
        "-np -n -c -N -H -host --host -hostfile --hostfile -machinefile --machinefile --map-by --bind-to --rank-by "
        "-wdir --prefix --npernode -npernode -ppn -f --np --timeout --output-filename"
    ),
    sets=_flags("-x"),
    two_values=_flags("-mca --mca -gmca --gmca -genv --genv"),
)
_APPTAINER = Wrapper(
    _CONTAINER,
    _flags("-B --bind -H --home --pwd --workdir -W --overlay -S --scratch --network --security"),
    1,
    _flags("--env"),
)
_RUN = Wrapper(_ENVIRONMENT)
_WRAPPERS: Mapping[str, Wrapper] = {
    "sudo": Wrapper(_STARTS, _SUDO, assigns=True),
    "doas": Wrapper(_STARTS, _flags("-u -C"), assigns=True),
    "env": Wrapper(_STARTS, _flags("-u --unset -C --chdir"), assigns=True),
    **dict.fromkeys(("nohup", "setsid", "command", "builtin", "noglob", "winpty", "catatonit"), Wrapper(_STARTS)),
    "exec": Wrapper(_STARTS, _flags("-a")),
    **dict.fromkeys(("tini", "dumb-init"), Wrapper(_STARTS, _flags("-p -e --rewrite -r"))),
    **dict.fromkeys(("gosu", "su-exec"), Wrapper(_STARTS, operands=1)),
    "time": Wrapper(_LIMITS, _flags("-f --format -o --output"), assigns=True),
    "nice": Wrapper(_LIMITS, _flags("-n --adjustment")),
    "ionice": Wrapper(_LIMITS, _flags("-c -n --class --classdata")),
    "chrt": Wrapper(_LIMITS, _flags("-T -P -D"), 1),
    "timeout": Wrapper(_LIMITS, _flags("-k -s --kill-after --signal"), 1),
    "stdbuf": Wrapper(_LIMITS, _flags("-i -o -e --input --output --error")),
    "unbuffer": Wrapper(_LIMITS),
    "numactl": Wrapper(
        _PLACES,
        _flags("-i -m -N -C -p -P -w --interleave --membind --cpunodebind --physcpubind --preferred --preferred-many"),
    ),
    "taskset": Wrapper(_PLACES, operands=1),  # -c says how the list of cores is written
    "srun": Wrapper(
        _PLACES,
        sets=frozenset(),
        switches=_flags(
            "--pty -l --label --exclusive --overlap -u --unbuffered -v --verbose -Q --quiet -K --kill-on-bad-exit -s "
            "--oversubscribe -E --preserve-env --mpi-combine -H --hold -X --disable-status -Z --no-allocate "
            "--no-container-mount-home --container-writable --container-remap-root"
        ),
    ),
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun"), _MPI),
    "uv run": Wrapper(_ENVIRONMENT, _UV),
    **dict.fromkeys(("uvx", "uv tool run"), Wrapper(_ENVIRONMENT, _UV)),
    "pipx run": Wrapper(_ENVIRONMENT, _flags("--spec --python --pip-args --index-url -i")),
    **dict.fromkeys(("poetry run", "pdm run", "pipenv run", "rye run", "hatch run"), _RUN),
    "pixi run": Wrapper(_ENVIRONMENT, _flags("-e --environment --manifest-path")),
    **dict.fromkeys((f"{name} run" for name in ("conda", "mamba", "micromamba")), Wrapper(_ENVIRONMENT, _CONDA)),
    **dict.fromkeys((f"{name} exec" for name in ("docker", "podman", "nerdctl")), _EXEC),
    **dict.fromkeys(("docker container exec", "docker compose exec", "docker-compose exec"), _EXEC),
    "kubectl exec": Wrapper(_INSIDE, _flags("-c --container -n --namespace --context --kubeconfig"), 1),
    **dict.fromkeys(("apptainer exec", "singularity exec"), _APPTAINER),
}
_FRESH = ("uvx", "uv tool run", "pipx run")  # the program may have a version: vllm@0.11
_SHELLS = ("sh", "bash", "zsh", "dash", "ash", "ksh")
_COMPOSE = re.compile(r"docker(-| )compose")
_PYTHON_SWITCHES = re.compile(r"-[bBdEiIOPqsSuvx]+")
_SHOWN = 3


def unwrap(words: Sequence[str], where: str, notes: Notes, variables: Mapping[str, str] | None = None) -> Command:
    """Return a server's words without the programs that start it, and the variables that these set.

    ``numactl -N 0 python3 -u -m sglang.launch_server …`` is ``python3 -m sglang.launch_server …``.
    ``variables``: those that a script in ``bash -c`` may use.

    Raises:
        UsageError: If a shell runs a file, or a tool starts servers of another file.
    """
    rest, sets = list(words), dict[str, str]()
    while rest:
        if rest[0].lower().endswith(".exe") or "\\" in rest[0]:  # the folder and the ending that Windows gives it
            program = re.sub(r"(?i)\.exe$", "", PureWindowsPath(rest[0]).name)
            notes.translated[rest[0]] = program
            rest[0] = program
        line = [_first(rest), *rest[1:_SHOWN]]
        begins = (" ".join(line[:n]) for n in (3, 2, 1))  # a wrapper's name has up to three words
        if name := next((begin for begin in begins if begin in _WRAPPERS), ""):
            rest = _without(name, rest, sets, notes)
        elif _first(rest) in _SHELLS:
            script = _script_of(rest, where)
            notes.translated[f"{rest[0]} -c '…'"] = "the command in it"
            inner = read_script(script, where, notes, variables={**(variables or {}), **sets})
            sets |= inner.variables
            rest = inner.words
        elif _COMPOSE.match(" ".join(rest)):
            shown = shorten(" ".join(rest[:_SHOWN]))
            raise UsageError(f"{where}: {shown} starts the services of a file; paste the file: @compose.yaml")
        else:
            break
    return Command(sets, _without_switches(rest, notes))


def _first(words: Sequence[str]) -> str:
    return PurePosixPath(words[0]).name if words else ""


def _without(name: str, words: list[str], sets: dict[str, str], notes: Notes) -> list[str]:
    """Return the words after a wrapper and its flags.  ``sets`` takes the variables that it sets."""
    wrapper, at = _WRAPPERS[name], len(name.split())
    taken, rest, operands = list(words[:at]), list(words[at:]), 0
    module = False
    while rest:
        word = rest[0]
        flag, equals, value = word.partition("=")
        if word == "--":
            rest.pop(0)
            if operands >= wrapper.operands:
                break
        elif name == "uv run" and word in ("-m", "--module"):
            module = True
            rest.pop(0)
            break
        elif word.startswith("-") and len(word) > 1:
            known = wrapper.values | wrapper.sets
            if wrapper.switches is not None:
                known = frozenset({word[:2]}) - wrapper.switches
            # ``-n10``: a flag of one letter has its value in the same word
            packed = not word.startswith("--") and len(word) > 2 and word not in known and word[:2] in known
            count = 0 if equals or packed else wrapper.takes(flag)
            given = [rest.pop(0) for _ in range(min(1 + count, len(rest)))]
            if flag in wrapper.sets and (pair := value if equals else given[-1]):
                variable, _, text = pair.partition("=")
                sets |= {variable: text} if "=" in pair else {}
            else:
                taken += given
        elif wrapper.assigns and (match := re.fullmatch(r"(?s)([A-Za-z_]\w*)=(.*)", word)):
            sets[match[1]] = match[2]
            rest.pop(0)
        elif operands < wrapper.operands:
            operands += 1
            taken.append(rest.pop(0))
        else:
            break
    if name in _FRESH and rest and "@" in rest[0]:
        notes.translated[rest[0]] = rest[0].partition("@")[0]
        rest[0] = notes.translated[rest[0]]
    notes.ignored[without_secrets(shlex.join(taken))] = wrapper.why
    return ["python", "-m", *rest] if module else rest


def _script_of(words: Sequence[str], where: str) -> str:
    """Return the text of ``bash -c TEXT``.

    Raises:
        UsageError: If the shell reads a file.
    """
    for n, word in enumerate(words[1:], 1):
        if re.fullmatch(r"-[a-z]*c[a-z]*", word) and n + 1 < len(words):
            return words[n + 1]
        if not word.startswith("-"):
            raise UsageError(
                f"{where}: {words[0]} runs the script {shorten(word)}; give the script itself: --serve @FILE"
            )
    raise UsageError(f"{where}: {words[0]} is a shell; paste only the server's command")


def _without_switches(words: list[str], notes: Notes) -> list[str]:
    """Return the words without the interpreter's switches before ``-m``: ``-u``, ``-O``, ``-X dev``."""
    if not re.fullmatch(r"python[\d.]*", _first(words)):
        return words
    at = 1
    while at < len(words):
        word = words[at]
        if word in ("-X", "-W"):
            at += 2
        elif word.endswith("m") and _PYTHON_SWITCHES.fullmatch(word[:-1]):  # -um
            words = [*words[:at], word[:-1], "-m", *words[at + 1 :]]
        elif _PYTHON_SWITCHES.fullmatch(word) or re.match(r"-[XW].", word):
            at += 1
        else:
            break
    if at > 1:
        notes.ignored[" ".join([_first(words), *words[1:at]])] = "switches of the interpreter"
    return [words[0], *words[at:]]
