"""Options that several commands share: each is declared once, with its help and its default.

Options that belong together are fields of a class derived from :class:`Options`.  A command decorated with
:func:`expand_options` names the class as the type of a parameter and receives an object of it, while typer sees the
fields.  A subclass may redeclare a field with another default or help text.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from copy import copy
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from fidelab.cli import completion, values
from fidelab.cli.axes import axis_settings
from fidelab.engines import DEFAULT, engine_name

# ------------------------------------------------------------------------------------------------- groups

ENV = "env."  # prefix of an environment variable's name
SERVE = "serve."  # prefix of an option that only the server has


class Options:
    """Base of the groups.  Fields are class attributes, ``Annotated`` with a typer option or argument.

    They are not dataclasses, because creating one takes a millisecond at every start of the command line.

    Args:
        panel: title of the frame in which ``--help`` shows the group.
    """

    _panel = ""

    def __init_subclass__(cls, *, panel: str = "") -> None:
        super().__init_subclass__()
        cls._panel = panel or cls._panel

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    @classmethod
    @functools.cache
    def parameters(cls) -> tuple[Parameter, ...]:
        """Return the fields as parameters of a command, those of base classes first."""
        parameters = []
        for name, annotation in get_type_hints(cls, include_extras=True).items():
            if cls._panel:
                hint, declared = get_args(annotation)
                declared = copy(declared)
                declared.rich_help_panel = cls._panel
                annotation = Annotated[hint, declared]
            default = getattr(cls, name, Parameter.empty)
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
        return tuple(parameters)

    def settings(self) -> dict[str, Any]:
        """Return the options as data of an experiment; by default the fields under their own names."""
        return dict(vars(self))


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the fields of groups in its signature, while ``function`` itself takes the groups.

    Raises:
        ValueError: If two parameters have the same name.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type[Options]] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(hints[name], type) and issubclass(hints[name], Options):
            groups[name] = hints[name]
            parameters += hints[name].parameters()
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
    signature = inspect.Signature(parameters, return_annotation=None)

    @functools.wraps(function)
    def command(**values: Any) -> None:
        grouped = {
            name: group(**{parameter.name: values.pop(parameter.name) for parameter in group.parameters()})
            for name, group in groups.items()
        }
        function(**grouped, **values)

    # typer reads the signature, and resolves names by the annotations
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


# --------------------------------------------------------------------------------- single options and arguments

ARMS, MEASURED, ENGINE, SCORING = "Configurations", "Measurement", "Engine", "Scoring"  # panels of --help


_MODEL = typer.Argument(help="smollm2-135m, hub id, folder or .gguf file.")
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]

FloatModel = Annotated[str, typer.Argument(help="Model with floating-point weights: name, hub id or folder.")]
WindowTokens = Annotated[int, typer.Option(parser=values.tokens, metavar="N", min=8, help="Tokens per window.")]


def find_run(name: Path | None, usable: Callable[[Path], bool] | None = None, wanted: str = "finished run") -> Any:
    """Like :func:`fidelab.results.store.find_run`, in the user's folder of runs; the run that is found is named.

    ``None`` for an option or argument that was omitted.
    """
    from fidelab.cli.output import note
    from fidelab.config.user import runs_folder
    from fidelab.results import store

    if name is None:
        return None
    return store.find_run(
        name, usable or store.has_report, wanted=wanted, runs=runs_folder(), say=lambda line: note(f"fidelab: {line}")
    )


def finished(name: Path | None) -> Any:
    """Return the run that is named, where ``latest`` is the newest finished one."""
    return find_run(name)


def compared(name: Path | None) -> Any:
    """Return the run that is named, where ``latest`` is the newest finished one that compares configurations."""
    return find_run(name, lambda folder: bool(measured_in(folder)["compared"]), "finished run of compare")


def unfinished(name: Path | None) -> Any:
    """Return the run that is named, where ``latest`` is the newest one that was stopped."""
    from fidelab.results.store import is_unfinished

    return find_run(name, is_unfinished, "run that was stopped")


def any_run(name: Path | None) -> Any:
    """Return the run that is named, where ``latest`` is the newest one, finished or not."""
    return find_run(name, lambda folder: True)


def measured_in(folder: Path) -> dict[str, set[str]]:
    """Return the names of tests (``compared``) and benches (``benches``) in a run's report; empty without one."""
    from fidelab.core import read_file, strict_json
    from fidelab.results.store import REPORT

    try:
        report = strict_json(read_file(folder / REPORT, 1 << 30))
        arms = [report["reference"], *report["candidates"]]
        return {
            "compared": {name for arm in arms[1:] for name in arm["axes"]},
            "benches": {name for arm in arms for name in arm["benches"]},
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {"compared": set(), "benches": set()}


_RUN_DIR_HELP = "Run folder, report.json, or 'latest' (newest in runs that fits)."
RunDir = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help=_RUN_DIR_HELP, callback=finished, autocompletion=completion.run)
]
ComparedRunDir = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help=_RUN_DIR_HELP, callback=compared, autocompletion=completion.run)
]
AnyRunDir = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR",
        help="Run folder, or 'latest' (newest in runs).",
        callback=any_run,
        autocompletion=completion.run,
    ),
]
NamedRunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help=_RUN_DIR_HELP, autocompletion=completion.run)]
Reference = Annotated[
    str | None, typer.Option(help="Reference: KV format or KEY=VALUE,…. \\[default: native]", rich_help_panel=ARMS)
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Preset (name or file) with model, engine and options. It is the reference unless --reference is given.",
        autocompletion=completion.preset,
        rich_help_panel=ARMS,
    ),
]
Benches = Annotated[
    str,
    typer.Option(
        help="Benchmarks, comma-separated: startup, prefill, decode, memory, serving, offline (the first four).",
        show_default=False,
        autocompletion=completion.benches,
        rich_help_panel=MEASURED,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Any other setting, e.g. axes.rniah.lengths=\\[512]. Repeatable.", rich_help_panel=MEASURED
    ),
]


def _show_all(context: typer.Context, value: bool) -> None:
    if value:
        context.meta["help_all"] = True
        print(context.get_help())
        raise typer.Exit


HelpAll = Annotated[bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print a line of figures per configuration as CSV.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print jobs, tokens, disk space and time without running.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown for a pull request.")]
Trusted = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust", metavar="FILE", help="Trust this settings file (it may run commands and read files). Remembered."
    ),
]

Python = Annotated[str | None, typer.Option(help="Python of the engine's environment (default: auto-detect).")]
Image = Annotated[str | None, typer.Option(help="Container image with the engine, for docker or podman.")]
PythonPath = Annotated[list[str] | None, typer.Option(help="Folder of modules to put first on PYTHONPATH. Repeatable.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:0 … or auto.", autocompletion=completion.device)]
Threads = Annotated[int | None, typer.Option(help="CPU threads per worker. \\[default: all usable cores]")]
EngineArg = Annotated[list[str] | None, typer.Option(help="Engine option K=V, or variable env.NAME=V. Repeatable.")]
Dtype = Annotated[str, typer.Option(help="Compute type: auto, float32, bfloat16, float16.")]

ServerUrl = Annotated[str, typer.Option(help="Server URL, http://host:port or http://host:port/v1.")]
ApiKey = Annotated[str | None, typer.Option(help="API key, sent as a bearer token.")]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Environment variable with the API key. \\[default: OPENAI_API_KEY, only to this machine]",
    ),
]
RequestTimeout = Annotated[float, typer.Option(parser=values.seconds, metavar="TIME", help="Time limit per request.")]
RowName = Annotated[str | None, typer.Option(help="Name of the row in the report. \\[default: the model's]")]
PageFile = Annotated[Path, typer.Option("--output", "-o", help="Output file.")]
Policy = Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file with limits on any metric.")]
Baseline = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN", help="Also compare with this run folder or report.json.", autocompletion=completion.run
    ),
]

# -------------------------------------------------------------------------------------- parts of an experiment


class EngineOptions(Options, panel=ENGINE):
    """Options for an engine, its location, and its computation."""

    engine: Annotated[
        str, typer.Option(help="Engine that runs all configurations.", autocompletion=completion.engine)
    ] = DEFAULT
    python: Python = None
    image: Image = None
    pythonpath: PythonPath = None
    engine_arg: EngineArg = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    deadline: Annotated[
        float | None,
        typer.Option(
            parser=values.seconds,
            metavar="TIME",
            help="Time limit per configuration, e.g. 30m, model load included. \\[default: 4h]",
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        given = self._engine_args()
        return {
            "engine": {
                "name": engine_name(self.engine),
                "python": self.python,
                "image": self.image,
                "pythonpath": self.pythonpath or [],
            },
            "engine_args": {key: value for key, value in given.items() if not key.startswith(ENV)},
            "env": {key.removeprefix(ENV): value for key, value in given.items() if key.startswith(ENV)},
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            **({} if self.deadline is None else {"deadline": self.deadline}),
        }

    def _engine_args(self) -> dict[str, str]:
        return split_engine_args(self.engine_arg or [])


def split_engine_args(given: Sequence[str]) -> dict[str, str]:
    """Return the options of ``--engine-arg``; those of the environment have the prefix ``env.``.

    Raises:
        UsageError: If one is not ``KEY=VALUE``.
    """
    from fidelab.core.errors import UsageError

    pairs = {}
    for argument in given:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise UsageError(f"--engine-arg {argument!r}: write key=value")
        pairs[key.strip()] = value.strip()
    return pairs


class ServableEngineOptions(EngineOptions):
    """Options for an engine, or for a server by its address."""

    base_url: Annotated[str | None, typer.Option(help="Engine openai: server URL, http://host:port/v1.")] = None
    served: Annotated[str | None, typer.Option("--model", help="Engine openai: model name on the server.")] = None

    def _engine_args(self) -> dict[str, str]:
        flags = {"base-url": self.base_url, "model": self.served}
        return super()._engine_args() | {name: value for name, value in flags.items() if value is not None}


Programs = Annotated[
    Path | None,
    typer.Option(
        "--bin",
        metavar="FOLDER",
        help="Engine llamacpp: folder of your own llama.cpp, whose llama-perplexity runs. Needs no torch.",
    ),
]


class ComparedEngineOptions(ServableEngineOptions):
    """Options for an engine of a comparison, which may be the user's own programs."""

    programs: Programs = None

    def settings(self) -> dict[str, Any]:
        data = super().settings()
        return data if self.programs is None else {**data, "engine": {**data["engine"], "bin": str(self.programs)}}


class ExecutorOptions(Options, panel=ENGINE):
    """Options for the placement of the arms' processes."""

    executor: Annotated[str, typer.Option(help="Where configurations run: local or ray.")] = "local"
    address: Annotated[
        str | None, typer.Option(help="Ray cluster: auto, HOST:PORT, or local (start one for this run).")
    ] = None
    gpus_per_configuration: Annotated[
        float | None,
        typer.Option(
            help="GPUs per configuration on a cluster. A value below 1 shares a GPU. "
            "\\[default: the tensor parallel size]"
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        given = {"name": self.executor, "address": self.address, "gpus": self.gpus_per_configuration}
        return {} if given == {"name": "local", "address": None, "gpus": None} else {"executor": given}


class TextOptions(Options, panel=MEASURED):
    """Options for the text that is evaluated."""

    text: Annotated[str, typer.Option(help="Text: default, domains, agents, wikitext-2, or a UTF-8 file.")] = "default"


Prompts = Annotated[str, typer.Option(help="Prompts: 'default', a .jsonl or a .txt file.")]
NewFolder = Annotated[Path, typer.Option("--out", "-o", help="Output folder. It must not exist.")]


Windows = Annotated[
    int | None, typer.Option(help="KLD: number of text windows. \\[default: 32, or fewer where all is decided]")
]
Contexts = Annotated[
    Any,
    typer.Option(parser=values.token_lengths, metavar="N[,N…]", help="KLD: tokens per window. \\[default: 512,2048]"),
]


class AxesOptions(TextOptions):
    """Options for the axes, their settings and their inputs."""

    text: Annotated[
        str,
        typer.Option(
            help="Text: agents, default, domains, wikitext-2, or a UTF-8 file. \\[default: by device]",
            show_default=False,
            autocompletion=completion.text,
        ),
    ] = "auto"
    axes: Annotated[
        str | None,
        typer.Option(
            help="Tests, such as trajectory,kld; or core, full, all. \\[default: core]", autocompletion=completion.axes
        ),
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Measure KLD only, with fewer windows.")] = False
    windows: Windows = None
    n_ctx: Contexts = None
    protocol: Annotated[
        str | None,
        typer.Option(help="KLD: rows scored: half, full, sliding or depth. \\[default: half; text agents: depth]"),
    ] = None
    stride: Annotated[
        int | None,
        typer.Option(
            parser=values.tokens, metavar="N", help="KLD, sliding: tokens between windows. \\[default: n-ctx / 4]"
        ),
    ] = None
    prompts: Prompts = "default"
    traffic: Annotated[str | None, typer.Option(help="Log of requests: OpenAI .jsonl, or plain .txt.")] = None
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Traffic: skip and count bad records.")] = False
    keep_text: Annotated[bool, typer.Option("--keep-text", help="Include traffic text in reports.")] = False
    n_predict: Annotated[
        int | None,
        typer.Option(parser=values.tokens, metavar="N", help="Trajectory: tokens per prompt. \\[default: 64]"),
    ] = None
    template: Annotated[str | None, typer.Option(help="Trajectory: chat or raw. \\[default: chat]")] = None
    limit: Annotated[
        list[str] | None, typer.Option(help="First items only: N (every test with a limit) or TEST=N. Repeatable.")
    ] = None

    def settings(self) -> dict[str, Any]:
        protocol = "depth" if self.protocol is None and self.text == "agents" and not self.quick else self.protocol
        flags = {
            "kld": {"windows": self.windows, "n_ctx": self.n_ctx, "protocol": protocol, "stride": self.stride},
            "trajectory": {"n_predict": self.n_predict, "template": self.template},
        }
        chosen = ("kld" if self.quick else "core") if self.axes is None else self.axes
        axes = axis_settings(chosen, flags, self.limit or [], self.quick)
        log = {"traffic": self.traffic, "skip_bad": self.skip_bad, "keep_text": self.keep_text}
        asked = {name: value for name, value in log.items() if value}
        return {"axes": axes, "text": self.text, "prompts": self.prompts, **asked}


class SeedOptions(Options, panel=SCORING):
    """Option for the seed of everything that is computed from captures."""

    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 42


class ScoringOptions(SeedOptions):
    """Options for scoring captures."""

    bands: Annotated[str, typer.Option(help="Score bands: fidelab or refract.")] = "fidelab"


MaxKLD = Annotated[
    float | None,
    typer.Option(parser=values.nats, metavar="NATS", help="Maximum mean KLD for a recommendation, in nats."),
]
Memory = Annotated[str | None, typer.Option(help="Memory per device, e.g. 80G.")]
Overhead = Annotated[str | None, typer.Option(help="Measured memory overhead of the engine, e.g. 2GiB.")]
Sharing = Annotated[int, typer.Option("--tp", help="Tensor parallel size.")]


class CapacityOptions(Options, panel=SCORING):
    """Options for the memory that configurations need."""

    sequence: Annotated[
        int | None,
        typer.Option(
            "--context",
            parser=values.tokens,
            metavar="TOKENS",
            help="Report memory for this context, e.g. 32k. \\[default: the server's or model's limit]",
        ),
    ] = None
    fit: Annotated[
        str | None,
        typer.Option(metavar="MEMORY", help="Report how many users fit: 24GiB or RTX-4090. \\[default: the GPU found]"),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the given options as data of an experiment."""
        given = {"context": self.sequence, "fit": self.fit}
        return {name: value for name, value in given.items() if value is not None}


class LimitOptions(Options, panel=SCORING):
    """Options for the requirements of the recommendation."""

    max_kld: MaxKLD = None
    max_flips: Annotated[str | None, typer.Option(help="Maximum share of flips (changed top tokens), e.g. 1%.")] = None
    max_accuracy_loss: Annotated[str | None, typer.Option(help="Maximum net loss of correct predictions, e.g. 1%.")] = (
        None
    )
    min_saving: Annotated[str | None, typer.Option(help="Minimum memory saving, e.g. 40%.")] = None
    min_tokens_per_s: Annotated[float | None, typer.Option(help="Minimum generated tokens per second.")] = None

    def settings(self) -> dict[str, Any]:
        """Return the given options as data of an experiment."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {"limits": given} if given else {}


Margin = Annotated[
    str | None, typer.Option(help="Non-inferiority margin: loss of accuracy to rule out. \\[default: 1%]")
]


class MarginOptions(LimitOptions):
    """The same requirements, for commands that compute scores."""

    margin: Margin = None


class ShowOptions(Options):
    """Options for showing a report."""

    as_json: Json = False
    details: Annotated[bool, typer.Option("--details", help="Print all measurements.")] = False
    markdown: Markdown = False


class RunsOptions(Options):
    """Option for the folder of runs."""

    output_dir: Annotated[Path, typer.Option(help="Folder for runs.")] = Path("runs")

    def settings(self) -> dict[str, Any]:
        return {"output_dir": str(self.output_dir)}


class CapturedRunsOptions(RunsOptions):
    """Option for the folder of runs that keep captures."""

    output_dir: Annotated[Path, typer.Option(help="Folder for runs and saved outputs.")] = RunsOptions.output_dir
