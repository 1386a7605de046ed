"""``fidelab bench serve`` and ``fidelab bench sweep``: load on any server that speaks the OpenAI protocol."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli.benches import counts
from fidelab.cli.compare import Json
from fidelab.cli.output import note, show_report

if TYPE_CHECKING:
    from fidelab.bench.serving import ServingSettings
    from fidelab.results.serving_record import LoadCell, Serving

__all__ = ["serve", "sweep"]

_SERVER, _LOAD, _READ, _RUN = "Server", "Load", "What is read", "Run"

BaseURL = Annotated[
    str,
    typer.Option("--base-url", help="The server, http://host:port or http://host:port/v1.", rich_help_panel=_SERVER),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="The model; its tokenizer, too. \\[default: the only one served]", rich_help_panel=_SERVER
    ),
]
Served = Annotated[
    str | None,
    typer.Option("--served-model-name", help="What the server calls it. \\[default: --model]", rich_help_panel=_SERVER),
]
Key = Annotated[
    str | None,
    typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Sent as bearer token.", rich_help_panel=_SERVER),
]
Endpoint = Annotated[str, typer.Option("--endpoint", help="completions or chat.", rich_help_panel=_SERVER)]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Name or folder of the model whose tokenizer makes prompts of exact length. "
        "\\[default: --model where it is on this machine, else words calibrated by the server's usage]",
        rich_help_panel=_SERVER,
    ),
]
Prompts = Annotated[
    str,
    typer.Option("--prompts", help="ids, text, or auto: token ids where the server takes them.", rich_help_panel=_LOAD),
]
OutputLen = Annotated[str, typer.Option("--random-output-len", help="Tokens of each answer.", rich_help_panel=_LOAD)]
Rate = Annotated[
    str, typer.Option("--request-rate", help="Requests per second; inf: closed loop.", rich_help_panel=_LOAD)
]
ArrivalKind = Annotated[str, typer.Option("--arrival", help="poisson or constant.", rich_help_panel=_LOAD)]
NumPrompts = Annotated[
    int | None,
    typer.Option(
        "--num-prompts", help="Requests per cell. \\[default: twice the concurrency, at least 8]", rich_help_panel=_LOAD
    ),
]
Duration = Annotated[
    float | None, typer.Option("--duration", help="Seconds after which no more is sent.", rich_help_panel=_LOAD)
]
Warmup = Annotated[
    int, typer.Option("--warmup", help="Requests sent first and not measured, per cell.", rich_help_panel=_LOAD)
]
Ramp = Annotated[
    float,
    typer.Option("--ramp", help="Seconds over which a closed loop reaches its concurrency.", rich_help_panel=_LOAD),
]
Repeats = Annotated[
    int, typer.Option("--repeats", help="Passes over all cells, with fresh prompts.", rich_help_panel=_LOAD)
]
IgnoreEOS = Annotated[
    bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Answers have all their tokens.", rich_help_panel=_LOAD)
]
Temperature = Annotated[float, typer.Option("--temperature", help="Of the sampling.", rich_help_panel=_LOAD)]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        "--goodput",
        help="Targets in ms: ttft:500 tpot:50 e2el:5000; counts requests that meet all.",
        rich_help_panel=_READ,
    ),
]
More = Annotated[list[str] | None, typer.Argument(hidden=True)]  # "--goodput ttft:500 tpot:50" as vLLM's users write it
Metrics = Annotated[str, typer.Option("--percentile-metrics", help="Of ttft, tpot, itl, e2el.", rich_help_panel=_READ)]
Percentiles = Annotated[str, typer.Option("--metric-percentiles", help="Percentiles of these.", rich_help_panel=_READ)]
Seed = Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.", rich_help_panel=_RUN)]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds for one request.", rich_help_panel=_RUN)]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Client processes. \\[default: by the load]", rich_help_panel=_RUN)
]
OutputDir = Annotated[Path, typer.Option("--output-dir", help="Where runs are written.", rich_help_panel=_RUN)]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Name of the row in the report. \\[default: the model's]", rich_help_panel=_RUN),
]
KV = Annotated[
    str | None,
    typer.Option("--kv", help="KV format that the server was started with, as a label.", rich_help_panel=_RUN),
]


def serve(
    base_url: BaseURL,
    more: More = None,
    model: Model = None,
    served: Served = None,
    key: Key = None,
    endpoint: Endpoint = "completions",
    tokenizer: TokenizerName = None,
    prompts: Prompts = "auto",
    input_len: Annotated[
        str, typer.Option("--random-input-len", help="Tokens of each prompt.", rich_help_panel=_LOAD)
    ] = "1024",
    output_len: OutputLen = "128",
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency", help="Requests in flight at most. \\[default: no limit]", rich_help_panel=_LOAD
        ),
    ] = None,
    rate: Rate = "inf",
    arrival: ArrivalKind = "poisson",
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            help="JSON lines with timestamp, input_length, output_length: lengths and times of the requests.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    trace_unit: Annotated[
        str, typer.Option("--trace-unit", help="Unit of its timestamps: ms or s.", rich_help_panel=_LOAD)
    ] = "ms",
    num_prompts: NumPrompts = None,
    duration: Duration = None,
    warmup: Warmup = 2,
    ramp: Ramp = 0.0,
    repeats: Repeats = 1,
    ignore_eos: IgnoreEOS = True,
    temperature: Temperature = 0.0,
    goodput: Goodput = None,
    metrics: Metrics = "ttft,tpot,itl,e2el",
    percentiles: Percentiles = "50,95,99",
    seed: Seed = 0,
    timeout: Timeout = 600.0,
    workers: Workers = None,
    name: Name = None,
    kv: KV = None,
    output_dir: OutputDir = Path("runs"),
    as_json: Json = False,
) -> None:
    r"""Put one load on a server and read latencies, rates and goodput.

    [bold]Examples[/bold]

      fidelab bench serve --base-url http://127.0.0.1:8000 --model NAME --max-concurrency 8 --num-prompts 64

      fidelab bench serve --base-url http://127.0.0.1:8000 --request-rate 4 --duration 60 --goodput ttft:500 tpot:50

      fidelab bench serve --base-url http://127.0.0.1:8000 --trace requests.jsonl --json
    """
    given = _common(locals())
    given |= {
        "contexts": (_single("--random-input-len", input_len),),
        "concurrency": () if concurrency is None else (concurrency,),
        "trace": trace,
        "trace_unit": trace_unit,
    }
    _run(given, key, output_dir, name, kv, as_json)


def sweep(
    base_url: BaseURL,
    more: More = None,
    model: Model = None,
    served: Served = None,
    key: Key = None,
    endpoint: Endpoint = "completions",
    tokenizer: TokenizerName = None,
    prompts: Prompts = "auto",
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests in flight: 1,2,4,8.", rich_help_panel=_LOAD)
    ] = "1,2,4,8",
    contexts: Annotated[
        str, typer.Option("--contexts", help="Tokens of prompts: 128,1k,4k.", rich_help_panel=_LOAD)
    ] = "1k",
    output_len: OutputLen = "128",
    rate: Rate = "inf",
    arrival: ArrivalKind = "poisson",
    num_prompts: NumPrompts = None,
    duration: Duration = None,
    warmup: Warmup = 2,
    ramp: Ramp = 0.0,
    repeats: Repeats = 1,
    ignore_eos: IgnoreEOS = True,
    temperature: Temperature = 0.0,
    goodput: Goodput = None,
    metrics: Metrics = "ttft,tpot,itl,e2el",
    percentiles: Percentiles = "50,95,99",
    seed: Seed = 0,
    timeout: Timeout = 600.0,
    workers: Workers = None,
    name: Name = None,
    kv: KV = None,
    output_dir: OutputDir = Path("runs"),
    as_json: Json = False,
) -> None:
    r"""Put loads of every context and concurrency on a server; say where more requests stop paying.

    [bold]Examples[/bold]

      fidelab bench sweep --base-url http://127.0.0.1:8000 --model NAME --concurrency 1,2,4,8,16 --contexts 128,1k,4k

      fidelab bench sweep --base-url http://127.0.0.1:8000 --repeats 3 --random-output-len 64 --name awq --json
    """
    given = _common(locals())
    given |= {"contexts": counts("--contexts", contexts), "concurrency": counts("--concurrency", concurrency)}
    _run(given, key, output_dir, name, kv, as_json)


# ----------------------------------------------------------------------------------------- flags → settings


def _common(flags: dict[str, Any]) -> dict[str, Any]:
    """The settings that both commands share."""
    same = ("base_url", "model", "tokenizer", "prompts", "arrival", "num_prompts", "duration", "warmup", "ramp")
    more = ("repeats", "ignore_eos", "temperature", "seed", "timeout", "workers")
    endpoint = str(flags["endpoint"]).removeprefix("/v1/").removesuffix("/completions")
    return {
        **{name: flags[name] for name in (*same, *more)},
        "served_model_name": flags["served"],
        "endpoint": endpoint,
        "output": _single("--random-output-len", flags["output_len"]),
        "request_rate": _rate(flags["rate"]),
        "goodput": _targets(flags["goodput"] or [], flags["more"] or []),
        "percentile_metrics": tuple(part.strip() for part in flags["metrics"].split(",")),
        "metric_percentiles": tuple(_number("--metric-percentiles", part) for part in flags["percentiles"].split(",")),
    }


def _single(flag: str, text: str) -> int:
    from fidelab.errors import UsageError

    first, *more = counts(flag, text)
    if more:
        raise UsageError(f"{flag} {text!r}: write one number (for several contexts: fidelab bench sweep --contexts)")
    return first


def _number(flag: str, text: str) -> float:
    from fidelab.errors import UsageError

    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag} {text.strip()!r}: not a number") from None


def _rate(text: str) -> float | None:
    from fidelab.errors import UsageError

    rate = _number("--request-rate", text)
    if not rate > 0:
        raise UsageError(f"--request-rate {text}: write requests per second above 0, or inf")
    return None if rate == float("inf") else rate


def _targets(goodput: list[str], more: list[str]) -> dict[str, float]:
    """``["ttft:500 tpot:50"]`` → {"ttft": 500, "tpot": 50}; ``more``: words behind the option."""
    from fidelab.errors import UsageError

    if more and not goodput:
        raise UsageError(f"unexpected {more[0]!r}: all settings are options (see: fidelab bench serve --help)")
    found = {}
    for word in " ".join([*goodput, *more]).replace(",", " ").split():
        metric, colon, limit = word.partition(":")
        if not colon or metric not in ("ttft", "tpot", "e2el"):
            raise UsageError(f"--goodput {word!r}: write ttft:MS, tpot:MS or e2el:MS")
        found[metric] = _number("--goodput", limit)
    return found


# ------------------------------------------------------------------------------------------------- the run


def _run(
    given: dict[str, Any], key: str | None, output_dir: Path, name: str | None, kv: str | None, as_json: bool
) -> None:
    from fidelab.bench.serving import Keeper, ServingSettings
    from fidelab.cli.bench_watch import watcher
    from fidelab.errors import EngineError, UsageError

    try:
        settings = ServingSettings.of(**given)
        keeper = Keeper(output_dir, _command(key), watcher(), name=name, kv=kv)
        serving = _measure(settings, key, keeper)
    except (EngineError, UsageError) as error:  # words of engine openai, which has other flags
        raise type(error)(_in_flags(str(error))) from None
    report = keeper.keep(serving)
    keeper.finish()
    assert keeper.folder is not None
    show_report(report, as_json=as_json, folder=keeper.folder.path)
    _gate(serving)


def _measure(settings: ServingSettings, key: str | None, keeper: Any) -> Serving:
    """The load; whatever stops it, the cells so far are kept."""
    from fidelab.bench.serving import measure_serving

    try:
        return measure_serving(settings, key, watch=keeper)
    except BaseException:
        keeper.close()
        if keeper.report is not None:
            keeper.finish()
            note(f"fidelab: the cells so far are in {keeper.folder.path}")
        raise


def _gate(serving: Serving) -> None:
    """A context that the server does not take is a finding; a cell that failed or is invalid is a fault."""
    from fidelab.bench.load_cell import why_invalid

    bad = [cell for cell in serving.cells if not cell.valid and cell.status != "not_supported"]
    for cell in bad:
        note(f"fidelab: {_name(cell)}: {why_invalid(cell)}")
    if serving.reason and serving.reason not in {cell.reason for cell in bad}:
        note(f"fidelab: {serving.reason}")
    if bad or serving.status != "ok":
        raise typer.Exit(1)


def _name(cell: LoadCell) -> str:
    parts = [] if cell.context is None else [f"context {cell.context:,}"]
    parts += [] if cell.request_rate is None else [f"{cell.request_rate:g} requests/s"]
    parts += [] if cell.concurrency is None else [f"concurrency {cell.concurrency}"]
    return ", ".join(parts) or cell.arrival


def _command(key: str | None) -> str:
    """The command that repeats the run, without the key."""
    words = [word.replace(key, "KEY") if key else word for word in sys.argv[1:]]
    return shlex.join(["fidelab", *words])


def _in_flags(text: str) -> str:
    for theirs, ours in (
        ("engine openai: base-url", "--base-url"),
        ("correct base-url or model", "correct --base-url or --model"),
        ("correct base-url", "correct --base-url"),
        ("as base-url", "as --base-url"),
        ("is base-url", "is --base-url"),
        (
            "put it in an environment variable and name that by --engine-arg api-key-env=NAME",
            "give it by --api-key, or in the environment variable OPENAI_API_KEY",
        ),
        ("give the key by api-key-env=NAME", "give the key by --api-key"),
        ("--engine-arg timeout=SECONDS", "--timeout SECONDS"),
        ("--engine-arg model=NAME", "--model NAME"),
        (", start it again, then --resume", ", start it again"),
    ):
        text = text.replace(theirs, ours)
    return text
