"""``fidelab bench serve`` and ``sweep``: load on any server that speaks the OpenAI protocol."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options, values
from fidelab.cli.axes import counts
from fidelab.cli.options import Json, Options, RunsOptions, expand_options
from fidelab.cli.output import exit_on, note, show_report

if TYPE_CHECKING:
    from fidelab.results.measurement import Measurement


class _ServerOptions(Options, panel="Server"):
    """Options for the server and the model on it."""

    base_url: options.ServerUrl
    model: Annotated[str | None, typer.Option(help="Model and tokenizer. \\[default: the only one served]")] = None
    served_model_name: Annotated[str | None, typer.Option(help="Model name on the server. \\[default: --model]")] = None
    api_key: options.ApiKey = None
    api_key_env: options.ApiKeyEnv = None
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions"
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Model name or folder of the tokenizer that makes prompts of exact length. "
            "\\[default: --model where it is on this machine]"
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        return {
            "base_url": self.base_url,
            "model": self.model,
            "served_model_name": self.served_model_name,
            "endpoint": self.endpoint.removeprefix("/v1/").removesuffix("/completions"),
            "tokenizer": self.tokenizer,
        }


_Prompts = Annotated[str, typer.Option(help="ids, text, or auto (token ids if the server accepts them).")]
_OutputTokens = Annotated[str, typer.Option(help="Output tokens per request.")]
_IgnoreEos = Annotated[bool, typer.Option(help="Generate all output tokens.")]


class _LoadOptions(Options, panel="Load"):
    """Options for the requests, without their concurrency."""

    prompts: _Prompts = "auto"
    random_output_len: _OutputTokens = "128"
    request_rate: Annotated[str, typer.Option(help="Requests per second. inf means a closed loop.")] = "inf"
    arrival: Annotated[str, typer.Option(help="poisson or constant.")] = "poisson"
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests per cell. \\[default: twice the concurrency, at least 8]")
    ] = None
    duration: Annotated[
        float | None, typer.Option(parser=values.seconds, metavar="TIME", help="Stop sending after this time.")
    ] = None
    warmup: Annotated[int, typer.Option(help="Unmeasured warm-up requests per cell.")] = 2
    repeats: Annotated[int, typer.Option(help="Passes over all cells, with fresh prompts.")] = 1
    ignore_eos: _IgnoreEos = True

    def settings(self) -> dict[str, Any]:
        from fidelab.core.errors import UsageError

        named = ("prompts", "arrival", "num_prompts", "duration", "warmup", "repeats", "ignore_eos")
        output = _single("--random-output-len", self.random_output_len)
        rate = _number("--request-rate", self.request_rate)
        if not rate > 0:
            raise UsageError(f"--request-rate {self.request_rate}: write requests per second above 0, or inf")
        return {
            **{name: getattr(self, name) for name in named},
            "output": output,
            "request_rate": None if rate == float("inf") else rate,
        }


class _OneLoadOptions(_LoadOptions):
    """Options for one load."""

    random_input_len: Annotated[str, typer.Option(help="Input tokens per request.")] = "1024"
    max_concurrency: Annotated[int | None, typer.Option(help="Maximum requests in flight. \\[default: no limit]")] = (
        None
    )

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "contexts": (_single("--random-input-len", self.random_input_len),),
            "concurrency": () if self.max_concurrency is None else (self.max_concurrency,),
            "fit": False,  # one load runs with exactly the requested size
        }


class _ManyLoadsOptions(_LoadOptions):
    """Options for a load for every context and concurrency."""

    concurrency: Annotated[str, typer.Option(help="Requests in flight: 1,2,4,8.")] = "1,2,4,8"
    contexts: Annotated[str, typer.Option(help="Tokens of prompts: 128,1k,4k. 0: the shortest one.")] = "1k"
    fit: Annotated[bool, typer.Option(help="Skip cells whose requests do not fit into the server's cache.")] = True

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "contexts": counts("--contexts", self.contexts, least=0),
            "concurrency": counts("--concurrency", self.concurrency),
            "fit": self.fit,
        }


class _FigureOptions(Options, panel="Metrics"):
    """Options for limits on the metrics."""

    goodput: Annotated[
        list[str] | None, typer.Option(help="Targets of the goodput in ms: ttft:500,tpot:50,e2el:5000.")
    ] = None

    def settings(self) -> dict[str, Any]:
        from fidelab.core.errors import UsageError

        targets = {}  # `["ttft:500,tpot:50"]` becomes {"ttft": 500, "tpot": 50}
        for word in " ".join(self.goodput or []).replace(",", " ").split():
            metric, colon, limit = word.partition(":")
            if not colon or metric not in ("ttft", "tpot", "e2el"):
                raise UsageError(f"--goodput {word!r}: write ttft:MS, tpot:MS or e2el:MS")
            targets[metric] = _number("--goodput", limit)
        return {"goodput": targets}


class _RunOptions(RunsOptions, panel="Run"):
    """Options for sending requests and storing the run."""

    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0
    timeout: options.RequestTimeout = 600.0
    name: options.RowName = None
    kv: Annotated[str | None, typer.Option(help="KV format of the server, as a label.")] = None

    def settings(self) -> dict[str, Any]:
        return {"seed": self.seed, "timeout": self.timeout}


@expand_options
def serve(
    *,
    server: _ServerOptions,
    load: _OneLoadOptions,
    figures: _FigureOptions,
    run: _RunOptions,
    as_json: Json = False,
) -> None:
    r"""Run one load on a server and measure latency, throughput and goodput.

    [bold]Examples[/bold]

      fidelab bench serve --base-url http://host:8000 --max-concurrency 8

      fidelab bench serve --base-url http://host:8000 --request-rate 4 --duration 60

      fidelab bench serve --base-url http://host:8000 --goodput ttft:500,tpot:50

      fidelab bench serve --base-url http://host:8000 --num-prompts 64 --json
    """
    _gate(_run(server, load, figures, run, as_json))


@expand_options
def sweep(
    *,
    server: _ServerOptions,
    load: _ManyLoadsOptions,
    figures: _FigureOptions,
    run: _RunOptions,
    as_json: Json = False,
) -> None:
    r"""Sweep context lengths and concurrency on a server and find its saturation point.

    [bold]Examples[/bold]

      fidelab bench sweep --base-url http://host:8000 --concurrency 1,2,4,8

      fidelab bench sweep --base-url http://host:8000 --contexts 128,1k,4k --json
    """
    _gate(_run(server, load, figures, run, as_json))


# ----------------------------------------------------------------------------------------- flags → settings


def _single(flag: str, text: str) -> int:
    from fidelab.core.errors import UsageError

    first, *rest = counts(flag, text)
    if rest:
        raise UsageError(f"{flag} {text!r}: write one number (for several contexts: fidelab bench sweep --contexts)")
    return first


def _number(flag: str, text: str) -> float:
    from fidelab.core.errors import UsageError

    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag} {text.strip()!r}: not a number") from None


# ------------------------------------------------------------------------------------------------- the run


def _run(
    server: _ServerOptions, load: _LoadOptions, figures: _FigureOptions, run: _RunOptions, as_json: bool
) -> Measurement:
    """Measure and report; on any exception the finished cells are kept."""
    from fidelab.bench.serving import Keeper, ServingSettings, measure_serving
    from fidelab.cli.bench_lines import CellLines
    from fidelab.core.errors import EngineError, UsageError
    from fidelab.engines.openai.http import read_key

    keeper = None
    try:
        key = server.api_key or read_key(server.base_url, server.api_key_env)
        settings = ServingSettings.of(**server.settings(), **load.settings(), **figures.settings(), **run.settings())
        # The command that repeats the run, without the API key
        words = [word.replace(key, "KEY") if key else word for word in sys.argv[1:]]
        from fidelab.core import shell_line

        keeper = Keeper(run.output_dir, shell_line("fidelab", *words), CellLines(), name=run.name, kv=run.kv)
        serving = measure_serving(settings, key, watch=keeper)
    except BaseException as error:
        if keeper is not None and keeper.report is not None and keeper.folder is not None:
            keeper.finish()
            note(f"fidelab: the cells so far are in {keeper.folder.path}")
        if isinstance(error, EngineError | UsageError):  # words of engine openai, which has other flags
            raise type(error)(in_flags(str(error))) from None
        raise
    report = keeper.keep(serving)
    keeper.finish()
    assert keeper.folder is not None
    show_report(report, as_json=as_json, folder=keeper.folder.path)
    return serving


def _gate(serving: Measurement) -> None:
    """Set the exit code.

    A context that the server does not accept is a finding.  A cell that failed or is invalid is a fault.
    """
    from fidelab.bench.load_cell import why_invalid
    from fidelab.results.measurement import label

    bad = [cell for cell in serving.cells if not cell.valid and cell.status != "not_supported"]
    faults = [f"{label(cell.at)}: {why_invalid(cell)}" for cell in bad]
    if serving.reason and serving.reason not in {cell.reason for cell in bad}:
        faults.append(serving.reason)
    exit_on(faults)
    if serving.status != "ok":
        raise typer.Exit(1)


def in_flags(text: str, model: str = "--model") -> str:
    """Return an error of engine openai in the words of a command whose model is named by ``model``."""
    for option, flag in (
        ("engine openai: environment variable", "environment variable"),
        ("(api-key-env)", "(--api-key-env)"),
        ("engine openai: base-url", "--base-url"),
        ("correct base-url or model", f"correct --base-url or {model}"),
        ("correct base-url", "correct --base-url"),
        ("as base-url", "as --base-url"),
        ("is base-url", "is --base-url"),
        (
            "put it in an environment variable and name that by --engine-arg api-key-env=NAME",
            "give it by --api-key, or name its environment variable by --api-key-env",
        ),
        ("give the key by api-key-env=NAME", "give the key by --api-key"),
        ("--engine-arg timeout=SECONDS", "--timeout SECONDS"),
        ("--engine-arg model=NAME", f"{model} NAME" if model.startswith("-") else model),
        (", start it again, then --resume", ", start it again"),
    ):
        text = text.replace(option, flag)
    return text
