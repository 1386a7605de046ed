"""Turn the command line of a server that already runs into the settings of an experiment.

``vllm serve …``, ``python -m vllm.entrypoints.openai.api_server …``, ``python -m sglang.launch_server …``, ``sglang
serve …``, ``llama-server …``, the same after ``NAME=value`` or ``docker run … IMAGE``, or a file with such a command.
:func:`fidelab.config.pasted.read_pasted` finds the command in scripts, units and manifests. Nothing is run.

The command is the reference.  Each change (flags and variables as on that command line) is a candidate.  Flags that
only concern serving, and options that fidelab must control itself, become part of no arm.  They are listed with the
reason, and appear again in the commands that the report shows.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fidelab.config.load import read_text
from fidelab.config.pasted import read_pasted, read_pasted_flags, unwrap_pasted
from fidelab.config.pasted.notes import SECRET_FLAGS, SECRET_REASON, is_secret_name, shorten
from fidelab.core import plain_json
from fidelab.core.errors import UsageError
from fidelab.core.paths import expand
from fidelab.engines.base import engine_class, engines
from fidelab.engines.dialect import Dialect

Controlled = Callable[[str], Mapping[str, str]]
"""Engine → option → why fidelab has to set that option itself."""

_ONLY_SERVING = "only concerns serving"
_CHATS = "concerns how the server reads and writes chats; prompts are rendered with the checkpoint's own template"
_GREEDY = "answers here are greedy"
_LOGS = "concerns logs and metrics"

# Names that several servers share; the first match counts.
_IGNORED: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile("|".join(SECRET_FLAGS)), SECRET_REASON),
    (
        re.compile(
            r"host|port|uds|root-path|path|api-prefix|api-key-file|ssl-.*|enable-ssl-refresh|uvicorn-.*|middleware|h11-.*"
            r"|(disable-)?uvicorn-access-log|disable-access-log-for-endpoints|allow-credentials|allowed-.*|cors-.*"
            r"|served-model-name|alias|tags|headless|api-server-count|(data-parallel-supervisor|grpc|sidecar)-port"
            r"|grpc|grpc-mode|fastapi-root-path|disable-fastapi-docs|enable-offline-docs|enable-request-id-headers"
            r"|enable-server-load-tracking|enable-tokenizer-info-endpoint|enable-force-include-usage|tokenizer-worker-num"
            r"|enable-prompt-tokens-details|sse-.*|return-tokens-as-token-ids|disable-frontend-multiprocessing"
            r"|skip-server-warmup|warmups|warmup|watchdog-timeout|soft-watchdog-timeout|enable-http2|http2-.*"
            r"|shutdown-timeout|timeout|threads-http|slots|props|slot-.*|webui.*|ui.*|media-path|tools.*|mcp-.*|agent"
            r"|parallel|cont-batching|reuse-port|sleep-idle-seconds|weight-version|file-storage-path|max-queued-requests"
            r"|max-num-queued-(reqs|tokens)|stream-interval|perf|offline"
        ),
        _ONLY_SERVING,
    ),
    (
        re.compile(
            r"chat-template.*|trust-request-.*|default-chat-template-kwargs|response-role|tool-.*|enable-auto-tool-choice"
            r"|exclude-tools-when-tool-choice-none|reasoning.*|completion-template|hf-chat-template-name|jinja|skip-chat-.*"
            r"|prefill-assistant|strip-thinking-cache|enable-strict-thinking|structured-outputs-config|grammar-backend"
            r"|constrained-json-.*|cohere-.*|anthropic-.*"
        ),
        _CHATS,
    ),
    (
        re.compile(
            r"seed|random-seed|generation-config|override-generation-config|sampling-defaults|preferred-sampling-params"
            r"|samplers|sampl(er|ing)-seq|temp|temperature|top-k|top-p|min-p|top-n-?sigma|xtc-.*|typical(-p)?|repeat-.*"
            r"|presence-penalty|frequency-penalty|dry-.*|mirostat.*|dynatemp-.*|predict|n-predict|ignore-eos|keep"
        ),
        _GREEDY,
    ),
    (
        re.compile(
            r"(disable-|enable-)?log-.*|log|(disable|enable)-log-.*|max-log-len|verbose|verbosity|otlp-.*|show-.*metrics.*"
            r"|collect-detailed-traces|(enable-)?[a-z-]*metrics(-.*)?|decode-log-interval|show-time-cost|enable-trace"
            r"|enable-cache-report|kv-events-config|aggregate-engine-logging|crash-dump-folder|uvicorn-access-log-.*"
        ),
        _LOGS,
    ),
)
_DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
# Flags that may have several values.
_LIST_FLAGS = re.compile(
    r"lora-(modules|paths)|kv-cache-dtype-skip-layers|served-model-name|api-key|cudagraph-capture-sizes|cuda-graph-bs-.*"
)
_NUMBER = re.compile(r"-\d+(\.\d+)?$")

_REFUSED = {
    "config": "reads options from a file; write them on the command line",
}


@dataclass
class _FlagValues:
    """Meaning of flags and variables: fields and options of an arm, and the rest.

    ``words``: ignored words as written, without secrets; ``taken``: the others, as written; ``unset``: options and
    fields that ``--no-NAME`` removes.
    """

    fields: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    model_flag: str = ""
    given: dict[str, tuple[str, str]] = field(default_factory=dict)  # flag → as written, and the meaning


@dataclass(frozen=True)
class ServeCommand:
    """A parsed server command.

    ``program``: its words before the flags, none if the image starts the server; ``wrapper``: ``docker run … IMAGE``;
    ``mounts``: folder in the image → folder here; ``secrets``: values that no record may hold; ``file``: the file that
    held the command; ``translated``: parts as pasted → as they were read.
    """

    engine: str
    said: _FlagValues
    program: tuple[str, ...]
    wrapper: tuple[str, ...] = ()
    mounts: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    translated: Mapping[str, str] = field(default_factory=dict)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values of keys and tokens in the command."""
        return tuple(filter(None, self.said.secrets))

    @property
    def image(self) -> str | None:
        """The image in which the arms run; ``None`` for the installed engine."""
        return self.wrapper[-1] if self.wrapper and _dialect(self.engine).in_image else None

    def settings(self) -> dict[str, Any]:
        """Return plain data of an experiment with this command as reference, without candidates."""
        fields, dialect = self.said.fields, _dialect(self.engine)
        revision = fields.get("revision")
        kv = _kv(fields, {}, self.engine)
        return {
            "model": fields["model"] + (f"@{revision}" if revision else ""),
            "engine": {"name": self.engine, "image": self.image} if self.image else self.engine,
            "engine_args": {**dialect.unsaid, **self.said.options},
            "env": dict(self.said.env),
            **({"reference": {"kv": kv}} if kv else {}),
            **{key: fields[key] for key in ("dtype", "device", "threads") if key in fields},
            "serve": {
                "program": list(self.program),
                "wrapper": list(self.wrapper),
                "model_flag": self.said.model_flag,
                "words": list(self.said.words),
                "mounts": dict(self.mounts),
                "ignored": dict(self.said.ignored),
                "taken": list(self.said.taken),
                "translated": dict(self.translated),
            },
        }


def read_served(text: str, controlled: Controlled) -> ServeCommand:
    """Read a server's command line, or the file ``@FILE`` or path that contains it.

    Raises:
        UsageError: If it is not the command of a supported server, needs a shell, or names no model.
        ConfigError: If the file cannot be read.
    """
    file = text.removeprefix("@").strip()
    where, place = "--serve", None
    if "\n" not in file and (text.startswith("@") or _is_file(file)):
        place = Path(file)
        text, where = read_text(expand(file)), file
    pasted = read_pasted(text, where)
    assigned, secrets, translated = dict(pasted.variables), [*pasted.secrets], dict(pasted.translated)
    program, rest = _program(pasted.words, where)
    run = _Container()
    if program[-1:] == ["run"]:
        run = _container(["docker" if program[1:] == ["container", "run"] else program[0], "run"], rest, where)
        inner = unwrap_pasted([*run.entry, *run.words], run.env, where)
        if run.entry and list(inner.words[:1]) != run.entry:  # a shell that started the server: started directly
            run.start_with(inner.words[0] if inner.words else "")
        run.env |= inner.variables
        run.ignored |= inner.ignored
        secrets += inner.secrets
        translated |= inner.translated
        program, rest = _program(
            inner.words, where, run.image, own=not run.entry and "--entrypoint=" not in run.wrapper
        )
        if program[-1:] == ["run"]:
            raise UsageError(f"{where}: a container inside of a container is not read; paste the inner command")
    engine = _engine_of(program, run.image, where)
    if run.image and not _dialect(engine).in_image:
        run.ignored[run.image] = "runs in the engine's installed environment: this engine's images have no Python"
    said = _flags(engine, rest, controlled(engine), where, {}, positional=True)
    others = _server_variables(said, engine, {**assigned, **run.env}, controlled(engine), where, {}, said.given)
    _variables(said, others, "-e " if run.image else "")
    if "model" not in said.fields:
        raise UsageError(f"{where}: the command does not name a model, which every configuration needs")
    said.fields["model"] = move_folders(said.fields["model"], run.mounts)
    for values in (said.options, said.env):
        values.update({name: move_folders(value, run.mounts) for name, value in values.items()})
    said.secrets += secrets
    said.ignored = _without(said.secrets, {**pasted.ignored, **run.ignored, **said.ignored})
    translated = _without(said.secrets, translated)
    words = tuple(program[len(run.entry) :])
    return ServeCommand(engine, said, words, tuple(run.wrapper), run.mounts, place, translated)


def _without(secrets: Sequence[str], notes: Mapping[str, str]) -> dict[str, str]:
    """Return notes with ``…`` for the values of secrets."""
    values = [re.escape(value) for value in sorted(filter(None, secrets), key=len, reverse=True)]
    hidden = re.compile("|".join(values)) if values else None
    return {hidden.sub("…", key): hidden.sub("…", text) for key, text in notes.items()} if hidden else dict(notes)


def _is_file(text: str) -> bool:
    """Whether a word is the path of a file, and no command."""
    try:
        return " " not in text and expand(text).is_file()
    except OSError:  # longer than a path can be
        return False


def program_python(pasted: ServeCommand) -> str | None:
    """Return the interpreter of the environment that a command's program belongs to, from the script's first line.

    ``None`` if the program is not on PATH or is not a Python script, if it is started by an interpreter or in a
    container, or if a file names it by a path.
    """
    name = pasted.program[0] if pasted.program and not pasted.wrapper else ""
    found = shutil.which(name) if pasted.file is None or os.sep not in name else None
    if found is None:
        return None
    with Path(found).open("rb") as script:
        first, _, rest = script.read(4096).decode("utf-8", "replace").partition("\n")
    if first == "#!/bin/sh":  # pip's second line, where the path is too long for the first
        match = re.match(r"'''exec' \"?([^\"]+?)\"? \"\$0\"", rest)
        words = [match[1]] if match else []
    else:
        words = first.removeprefix("#!").split() if first.startswith("#!") else []
        words = words[1:] if words and Path(words[0]).name == "env" else words
    return shutil.which(words[0]) if words and Path(words[0]).name.startswith("python") else None


def read_change(text: str, pasted: ServeCommand, controlled: Controlled) -> dict[str, Any]:
    """Return a candidate's settings: flags and variables that replace or extend the pasted command's.

    ``NAME=value`` sets a variable, ``--no-NAME`` removes a flag.

    Raises:
        UsageError: If it contains no flags, or nothing in which an arm can differ.
    """
    where = f"--change {text!r}"
    read = read_pasted_flags(text, where)
    assigned, words = read.variables, read.words
    stray = next((word for word in words[:1] if not word.startswith("-")), None)
    if stray is not None:
        raise UsageError(f"{where}: {stray!r} is neither a flag nor NAME=value; write as on the server's command line")
    engine, base = pasted.engine, pasted.said
    change = _flags(engine, words, controlled(engine), where, base.options, positional=False)
    given = {**base.given, **change.given}
    _variables(change, _server_variables(change, engine, assigned, controlled(engine), where, base.options, given), "")
    if change.secrets or any(is_secret_name(name) for name in change.env):
        raise UsageError("--change: a key or token cannot differ between configurations; set it for all of fidelab")
    shared = {**_dialect(engine).unsaid, **base.options}
    fields: dict[str, Any] = {}
    if {*change.fields, *change.unset} & {"kv", "k", "v", "skip"}:
        kept = {key: value for key, value in base.fields.items() if key not in change.unset}
        native = engine_class(engine).native_kv
        kv = _kv(change.fields, kept, engine) or native
        if kv != (_kv(base.fields, {}, engine) or native):
            fields["kv"] = kv
    dtype = change.fields.get("dtype", "auto" if "dtype" in change.unset else base.fields.get("dtype", "auto"))
    if dtype != base.fields.get("dtype", "auto"):
        fields["dtype"] = dtype
    if {"model", "revision"} & change.fields.keys():
        revision = change.fields.get("revision")
        model = move_folders(change.fields.get("model", base.fields["model"]), pasted.mounts)
        fields["model"] = model + (f"@{revision}" if revision else "")
    for key in ("device", "threads"):
        if key in change.fields:
            raise UsageError(f"{where}: {key} is the same for all configurations; change the command itself")
    options = {key: move_folders(value, pasted.mounts) for key, value in change.options.items()}
    options = {key: value for key, value in options.items() if shared.get(key) != value}
    env = {key: value for key, value in change.env.items() if base.env.get(key) != value}
    without = [name for name in change.unset if name in base.options]
    fields |= {"engine_args": options} if options else {}
    fields |= {"env": env} if env else {}
    fields |= {"without": without} if without else {}
    if not fields:
        reasons = "; ".join(f"{words} ({reason})" for words, reason in change.ignored.items())
        raise UsageError(f"{where} changes nothing that is compared: {reasons or 'the pasted command says the same'}")
    return {"name": " ".join(text.split()), **fields}


def variable_settings(engine: str, env: Mapping[str, str], where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that variables of an engine's server mean, and the other variables.

    The settings are ``kv``, ``engine_args``, and in ``serve`` flags that only the server has.

    Raises:
        UsageError: If a variable is unknown, or cannot be set for a configuration.
    """
    if engine_class(engine).dialect is None:
        return {}, dict(env)
    said = _FlagValues()
    others: dict[str, str] = {}
    served: dict[str, str] = {}
    for name, value in env.items():
        said.words.clear()
        others |= _server_variables(said, engine, {name: value}, {}, where, {}, {})
        if said.words:  # a flag of the server, with its value unless it is a switch
            flag, *values = said.words
            served[flag.removeprefix("--")] = values[0] if values else "yes"
    if stray := {*said.fields, *said.unset} - {"k", "v"}:
        raise UsageError(f"{where}: write {', '.join(sorted(stray))} as a setting of its own, not as a variable")
    kv = _kv(said.fields, {}, engine)
    settings = {"engine_args": dict(said.options), "serve": served}
    return {**({"kv": kv} if kv else {}), **{name: value for name, value in settings.items() if value}}, others


def _kv(fields: Mapping[str, str], base: Mapping[str, str], engine: str) -> str | None:
    """Return the KV format that fields name: one for both, or keys and values separately."""
    merged, native = {**base, **fields}, engine_class(engine).native_kv
    if "skip" in merged:
        return f"{merged.get('kv', native)}[skip-layers={merged['skip']}]"
    if "kv" in fields:
        return fields["kv"]
    if "k" in merged or "v" in merged:
        k, v = merged.get("k", native), merged.get("v", native)
        return k if k == v else f"{k}/{v}"
    return merged.get("kv")


# ----------------------------------------------------------------------------------------------- programs


_CONTAINERS = r"(docker|podman|nerdctl) (container )?run"


def _dialects() -> dict[str, Dialect]:
    """Engine → the command line of its server, of all engines that have one."""
    return {cls.name: cls.dialect for cls in engines() if cls.dialect is not None}


def _dialect(engine: str) -> Dialect:
    dialect = engine_class(engine).dialect
    assert dialect is not None, "it was recognized by its dialect"
    return dialect


def _program(words: Sequence[str], where: str, image: str = "", *, own: bool = False) -> tuple[list[str], list[str]]:
    """Return the words of the program, which is ``docker run`` for a container, and the words after it.

    ``image``: the image that gets the words.  ``own``: its own program gets them, which may take a model as a word.
    """
    line = " ".join([Path(words[0]).name, *words[1:]]) if words else ""
    patterns = "|".join((_CONTAINERS, *(dialect.program for dialect in _dialects().values())))
    if (match := re.match(rf"({patterns})(?!\S)", line)) or (
        image and (match := re.match(r"((--)?server|serve)(?!\S)", line))
    ):
        n = len(match[0].split())
        return list(words[:n]), list(words[n:])
    if image and (line[:1] in ("", "-") or (own and _takes_model(image, words[0]))):
        return [], list(words)
    known = ", ".join(program for dialect in _dialects().values() for program in dialect.programs)
    raise UsageError(
        f"{where}: {shorten(shlex.join(words[:3])) or 'nothing'} is not a known server; supported: {known}, "
        "and docker run with one of them"
    )


def _takes_model(image: str, word: str) -> bool:
    """Whether a word is a model for the program of an image, as for ``vllm serve``."""
    if re.fullmatch(r"(\S*/)?(python[\d.]*|\w*sh)", word):
        return False
    engine = next((name for name, each in _dialects().items() if re.search(each.mark, image.lower())), None)
    return engine is not None and _dialect(engine).positional_model


def _engine_of(program: Sequence[str], image: str, where: str) -> str:
    words = " ".join([Path(program[0]).name, *program[1:]]) if program else image
    places = (words, image)  # a program such as "serve" is one of the image's own
    marked = (
        engine for place in places for engine, dialect in _dialects().items() if re.search(dialect.mark, place.lower())
    )
    found = next(marked, None)
    if found is None:
        raise UsageError(f"{where}: image {image} does not say which server it starts; write its command after it")
    return found


_CONTAINER_SWITCHES = re.compile(
    r"-[ditPq]+|--(detach|rm|interactive|tty|init|privileged|read-only|no-healthcheck|oom-kill-disable|publish-all|quiet"
    r"|sig-proxy|replace)"
)


@dataclass
class _Container:
    """``docker run`` and its flags: words up to the image, their meaning, and the words after it."""

    wrapper: list[str] = field(default_factory=list)
    mounts: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    entry: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    @property
    def image(self) -> str:
        """Name of the image; empty outside of a container."""
        return self.wrapper[-1] if self.wrapper else ""

    def start_with(self, program: str) -> None:
        """Replace the program that ``--entrypoint`` names."""
        at = self.wrapper.index("--entrypoint")
        self.entry = [program] if program else []
        self.wrapper[at : at + 2] = ["--entrypoint", program] if program else []


def _container(wrapper: list[str], words: Sequence[str], where: str) -> _Container:
    found, rest = _Container(list(wrapper)), list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if packed := re.fullmatch(r"(-[evp])(.+)", word):  # -eNAME=VALUE
            flag, value = packed.groups()
        elif not equals and rest and not _CONTAINER_SWITCHES.fullmatch(flag):
            value = rest.pop(0)
        given = [flag, value] if value else [flag]
        if flag in ("-e", "--env"):
            name, written, text = value.partition("=")
            if written or name in os.environ:
                found.env[name] = text if written else os.environ[name]
            # without a value, a secret is taken from the environment of the command
            given = ["-e", name] if is_secret_name(name) else []
        elif flag == "--env-file":
            found.ignored[" ".join(given)] = "a file of variables, which is not read; write those that matter with -e"
        elif flag in ("-v", "--volume"):
            source, _, target = value.partition(":")
            if target and source.startswith(("/", ".", "~")):
                found.mounts[target.partition(":")[0].rstrip("/") or "/"] = str(expand(source))
        elif flag == "--mount":
            parts = dict(part.partition("=")[::2] for part in value.split(","))
            source = parts.get("source") or parts.get("src", "")
            target = parts.get("target") or parts.get("dst") or parts.get("destination", "")
            if parts.get("type") == "bind" and source and target:
                found.mounts[target.rstrip("/")] = str(expand(source))
        elif flag == "--entrypoint":
            found.entry = [value] if value else []
            given = given if value else ["--entrypoint="]
        elif flag not in ("--rm", "-d", "--detach", "-i", "-t", "-it", "-ti"):
            found.ignored[" ".join(given)] = "concerns the container"
        found.wrapper += given
    if not rest:
        raise UsageError(f"{where}: {wrapper[0]} run names no image")
    found.wrapper.append(rest[0])
    found.words = rest[1:]
    return found


def move_folders(text: str, folders: Mapping[str, str]) -> str:
    """Replace folders in a path, or in a text that contains paths.

    ``folders`` maps a folder in the image to the folder on this machine.
    """
    if not folders:
        return text
    names = "|".join(re.escape(folder) for folder in sorted(folders, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])({names})(?=/|\"|$)", lambda match: folders[match[1]], text)


# ------------------------------------------------------------------------------------------- flags and variables


def _variables(said: _FlagValues, assigned: Mapping[str, str], mark: str) -> None:
    for name, value in assigned.items():
        if is_secret_name(name):
            said.ignored[f"{mark}{name}"] = SECRET_REASON
            said.secrets += [] if value.startswith("$") else [value]
        elif name == "OMP_NUM_THREADS" and value.isdecimal() and int(value) > 0:
            said.fields.setdefault("threads", value)
            said.taken.append(f"{name}={value}")
        else:
            said.env[name] = value
            said.taken.append(f"{name}={value}")


def _flags(
    engine: str,
    words: Sequence[str],
    controlled: Mapping[str, str],
    where: str,
    base: Mapping[str, str],
    *,
    positional: bool,
) -> _FlagValues:
    """Return the meaning of the flags of an engine's server; ``base``: options of the command that they change."""
    dialect, said = _dialect(engine), _FlagValues()
    reasons = {name.replace("_", "-"): reason for name, reason in controlled.items()}
    switch, switch_name = "", ""  # the flag before a word, if it takes no value
    for flag, name, values in _split_flags(words, dialect, where):
        if switch and not flag and values[0].lower() in _TRUTH_VALUES:
            raise UsageError(f"{where}: {_no_value(switch, switch_name, values[0], dialect)}")
        takes_none = flag and dialect.switches.fullmatch(name) is not None
        if takes_none and values:
            raise UsageError(f"{where}: {_no_value(flag, name, values[0], dialect)}")
        switch, switch_name = (flag, name) if takes_none else ("", "")
        if not flag:
            if not positional or not dialect.positional_model or "model" in said.fields:
                raise UsageError(f"{where}: {values[0]!r} does not belong to a flag; quote values with spaces")
            said.fields["model"] = values[0]
            said.taken.append(values[0])
            continue
        if refused := dialect.refused.get(name) or _REFUSED.get(name):
            raise UsageError(f"{where}: {flag} {refused}")
        try:
            _apply_flag(said, engine, reasons, base, flag, name, values)
        except ValueError as error:
            raise UsageError(f"{where}: {flag} {' '.join(values)}: {error}") from None
        said.given[name if name in dialect.values else name.removeprefix("no-")] = (
            " ".join([flag, *values]),
            _meaning(name, values, dialect),
        )
    return said


_TRUTH_VALUES = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _no_value(flag: str, name: str, value: str, dialect: Dialect) -> str:
    """Text of the error for a value after a flag that takes none."""
    opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
    exists = opposite in dialect.spellings.values() if dialect.spellings else dialect.negates
    off = _TRUTH_VALUES.get(value.lower()) is False
    instead = f" or write --{opposite}" if off and exists else f", or the flag with it, for {value!r}" if off else ""
    return f"{flag} takes no value: leave out {value!r}{instead}"


def _meaning(name: str, values: Sequence[str], dialect: Dialect) -> str:
    """One spelling of a flag with its values, to compare it with another way to give it."""
    convert = dialect.conversions.get(name)
    return " ".join([name, *(str(convert(value)) if convert else value for value in values)])


def _server_variables(
    said: _FlagValues,
    engine: str,
    assigned: Mapping[str, str],
    controlled: Mapping[str, str],
    where: str,
    base: Mapping[str, str],
    given: Mapping[str, tuple[str, str]],
) -> dict[str, str]:
    """Store variables that the server reads as flags. Returns the other variables.

    Args:
        given: flags that win over variables: as written, and their meaning.

    Raises:
        UsageError: If the server has no such variable, its value is invalid, or a flag says something else.
    """
    dialect, others = _dialect(engine), {}
    for variable, value in assigned.items():
        written = f"{variable}={value}"
        if (name := dialect.variables.get(variable)) is None:
            if dialect.variable_prefix and variable.startswith(dialect.variable_prefix):
                near = get_close_matches(variable, dialect.variables, n=2)
                meant = f"; did you mean {' or '.join(near)}?" if near else ""
                raise UsageError(f"{where}: {dialect.programs[0]} reads no variable {variable}{meant}")
            others[variable] = value
            continue
        head, values = name.removeprefix("no-") if name not in dialect.values else name, [value]
        if dialect.switches.fullmatch(name):
            values = []
            on = True if head != name else dialect.switch(value)
            if on is None:
                raise UsageError(f"{where}: {written}: write 1 or 0")
            name = name if on else f"no-{name}"
        try:
            meaning = _meaning(name, values, dialect)
            if head in given:
                flag, other = given[head]
                if meaning != other and head not in dialect.ignored:
                    raise UsageError(
                        f"{where}: {written} and {flag} differ, and {dialect.programs[0]} takes the flag: "
                        "write the flag alone"
                    )
                said.ignored[written] = f"{dialect.programs[0]} takes the flag {flag}"
                continue
            if refused := dialect.refused.get(name):
                raise UsageError(f"{where}: {written} {refused}")
            _apply_flag(said, engine, controlled, base, f"--{name}", name, values, written)
        except ValueError as error:
            raise UsageError(f"{where}: {written}: {error}") from None
    return others


def _split_flags(words: Sequence[str], dialect: Dialect, where: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each flag as written, its long name, and its values; a word of no flag has none.

    Raises:
        UsageError: If the dialect knows all flags of its server and this is none of them, or it lacks its value.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or _NUMBER.match(word):
            yield "", "", [word]
            continue
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
        if dialect.spellings:
            name = _spelled(flag, dialect, where)
        elif not flag.startswith("--"):
            if (packed := re.fullmatch(r"(-O)(\d)", flag)) is not None:
                flag, values = packed[1], [packed[2]]
            head, dot, tail = flag.partition(".")
            name = dialect.short.get(head, head.lstrip("-")) + dot + tail
        else:
            name = flag.removeprefix("--")
        head, dot, tail = name.partition(".")
        name = head.replace("_", "-") + dot + tail
        if not values and not dialect.switches.fullmatch(name):
            many = _LIST_FLAGS.fullmatch(name) is not None or dialect.values.get(name, 1) > 1
            while rest and (not rest[0].startswith("-") or _NUMBER.match(rest[0])):
                values.append(rest.pop(0))
                if not many:
                    break
            if not values and name in dialect.values and name != "flash-attn":  # older servers take -fa alone
                raise UsageError(f"{where}: {flag} needs a value")
        yield flag, name, values


def _spelled(flag: str, dialect: Dialect, where: str) -> str:
    """Return the long name of a flag; ``--no-NAME`` may also remove a flag that the server cannot negate.

    Raises:
        UsageError: If the server has no such flag. The message names the nearest ones.
    """
    dashed = flag.replace("_", "-") if flag.startswith("--") else flag
    if (name := dialect.spellings.get(dashed)) is not None:
        return name
    if dashed.startswith("--no-") and (name := dialect.spellings.get(f"--{dashed[5:]}")) is not None:
        return f"no-{name}"
    near = get_close_matches(dashed, dialect.spellings, n=3)
    program = dialect.programs[0]
    raise UsageError(
        f"{where}: {program} has no flag {flag}"
        + (f"; did you mean {' or '.join(near)}?" if near else f"; see {program} --help")
    )


def _apply_flag(
    said: _FlagValues,
    engine: str,
    controlled: Mapping[str, str],
    base: Mapping[str, str],
    flag: str,
    name: str,
    values: list[str],
    written: str = "",
) -> None:
    """Store one flag where it belongs.  ``written``: the variable that stands for it.

    Raises:
        ValueError: If the flag does not have this value.
    """
    dialect = _dialect(engine)
    negated = name.startswith("no-") and not values and name not in dialect.values
    plain = name.removeprefix("no-") if negated else name
    head, _, inner = plain.partition(".")
    target = dialect.names.get(head, head)
    value = values[0] if values else "on" if plain == "flash-attn" else "yes"
    if len(values) > 1:
        value = ",".join(values) if target == "@skip" else json.dumps(values)
    option = target if isinstance(target, str) else target[0]
    converted: str | None = value
    if not negated and (convert := dialect.conversions.get(head)) is not None:
        converted = convert(value)
    # A flag that says an option in other words is judged by that option.
    reason = dialect.ignored.get(head) or controlled.get(option)
    reason = reason or (None if head in dialect.names else controlled.get(head)) or _unimportant(head)
    if reason is None or option.startswith("@"):
        said.taken.append(written or " ".join([flag, *values]))
    if option.startswith("@"):
        key = option[1:]
        if negated:
            said.unset.append(key)
        elif key == "dtype":
            said.fields[key] = _DTYPES.get(value, value)
        elif value != "auto" or key not in ("kv", "device"):
            said.fields[key] = value
        elif key == "kv":
            said.fields[key] = engine_class(engine).native_kv
        if key == "model" and not negated:
            said.model_flag = flag
    elif reason is not None:
        secret = head in SECRET_FLAGS
        said.ignored[flag if secret else written or " ".join([flag, *values])] = reason
        said.secrets += values if secret else []
        said.words += [] if secret else [flag, *values]
    elif not isinstance(target, str):
        said.options[option] = target[2] if negated else target[1]
    elif inner:
        said.options[option] = _with_leaf(said.options.get(option, base.get(option, "{}")), inner, value)
    elif negated and option in base and (base[option] not in ("yes", "no") or not dialect.negates):
        said.unset.append(option)
    elif converted is None:
        said.unset.append(option)
        said.options.pop(option, None)
    else:
        said.options[option] = "no" if negated else converted


def _unimportant(name: str) -> str | None:
    return next((reason for pattern, reason in _IGNORED if pattern.fullmatch(name)), None)


def _with_leaf(text: str, place: str, value: str) -> str:
    """Add one value to JSON: ``--speculative-config.method ngram``."""
    try:
        leaf: Any = plain_json(value)
    except ValueError:
        leaf = value
    try:
        data = plain_json(text) if text.startswith("{") else {}
        node = data
        *parents, last = place.replace("-", "_").split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    except (AttributeError, TypeError, ValueError):
        raise UsageError(f"{place} cannot be set in {text[:60]!r}: that is not a JSON object there") from None
    return json.dumps(data)
