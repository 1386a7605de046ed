"""``fidelab bench serve`` and ``fidelab bench sweep``: load on any server that speaks the OpenAI protocol."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli.benches import counts
from fidelab.cli.compare import Json
from fidelab.cli.output import note, show_report

if TYPE_CHECKING:
    from fidelab.bench.serving import ServingSettings
    from fidelab.results.measurement import Measurement

__all__ = ["serve", "sweep"]

_server, _load, _read, _run_ = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Server", "Load", "What is read", "Run")
)

BaseURL = Annotated[str, _server("--base-url", help="The server, http://host:port or http://host:port/v1.")]
Model = Annotated[
    str | None, _server("--model", help="The model; its tokenizer, too. \\[default: the only one served]")
]
Served = Annotated[str | None, _server("--served-model-name", help="What the server calls it. \\[default: --model]")]
Key = Annotated[str | None, _server("--api-key", envvar="OPENAI_API_KEY", help="Sent as bearer token.")]
Endpoint = Annotated[str, _server("--endpoint", help="completions or chat.")]
TokenizerName = Annotated[
    str | None,
    _server(
        "--tokenizer",
        help="Name or folder of the model whose tokenizer makes prompts of exact length. "
        "\\[default: --model where it is on this machine, else words calibrated by the server's usage]",
    ),
]
Prompts = Annotated[str, _load("--prompts", help="ids, text, or auto: token ids where the server takes them.")]
OutputLen = Annotated[str, _load("--random-output-len", help="Tokens of each answer.")]
Rate = Annotated[str, _load("--request-rate", help="Requests per second; inf: closed loop.")]
ArrivalKind = Annotated[str, _load("--arrival", help="poisson or constant.")]
NumPrompts = Annotated[
    int | None, _load("--num-prompts", help="Requests per cell. \\[default: twice the concurrency, at least 8]")
]
Duration = Annotated[float | None, _load("--duration", help="Seconds after which no more is sent.")]
Warmup = Annotated[int, _load("--warmup", help="Requests sent first and not measured, per cell.")]
Ramp = Annotated[float, _load("--ramp", help="Seconds over which a closed loop reaches its concurrency.")]
Repeats = Annotated[int, _load("--repeats", help="Passes over all cells, with fresh prompts.")]
IgnoreEOS = Annotated[bool, _load("--ignore-eos/--no-ignore-eos", help="Answers have all their tokens.")]
Temperature = Annotated[float, _load("--temperature", help="Of the sampling.")]
Goodput = Annotated[
    list[str] | None,
    _read("--goodput", help="Targets in ms: ttft:500 tpot:50 e2el:5000; counts requests that meet all."),
]
More = Annotated[list[str] | None, typer.Argument(hidden=True)]  # "--goodput ttft:500 tpot:50" as vLLM's users write it
Metrics = Annotated[str, _read("--percentile-metrics", help="Of ttft, tpot, itl, e2el.")]
Percentiles = Annotated[str, _read("--metric-percentiles", help="Percentiles of these.")]
Seed = Annotated[int, _run_("--seed", help="Of prompts and arrivals.")]
Timeout = Annotated[float, _run_("--timeout", help="Seconds for one request.")]
Workers = Annotated[int | None, _run_("--workers", help="Client processes. \\[default: by the load]")]
OutputDir = Annotated[Path, _run_("--output-dir", help="Where runs are written.")]
Name = Annotated[str | None, _run_("--name", help="Name of the row in the report. \\[default: the model's]")]
KV = Annotated[str | None, _run_("--kv", help="KV format that the server was started with, as a label.")]


def serve(
    base_url: BaseURL,
    more: More = None,
    model: Model = None,
    served: Served = None,
    key: Key = None,
    endpoint: Endpoint = "completions",
    tokenizer: TokenizerName = None,
    prompts: Prompts = "auto",
    input_len: Annotated[str, _load("--random-input-len", help="Tokens of each prompt.")] = "1024",
    output_len: OutputLen = "128",
    concurrency: Annotated[
        int | None, _load("--max-concurrency", help="Requests in flight at most. \\[default: no limit]")
    ] = None,
    rate: Rate = "inf",
    arrival: ArrivalKind = "poisson",
    trace: Annotated[
        str | None,
        _load(
            "--trace", help="JSON lines with timestamp, input_length, output_length: lengths and times of the requests."
        ),
    ] = None,
    trace_unit: Annotated[str, _load("--trace-unit", help="Unit of its timestamps: ms or s.")] = "ms",
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
    concurrency: Annotated[str, _load("--concurrency", help="Requests in flight: 1,2,4,8.")] = "1,2,4,8",
    contexts: Annotated[str, _load("--contexts", help="Tokens of prompts: 128,1k,4k.")] = "1k",
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


def _measure(settings: ServingSettings, key: str | None, keeper: Any) -> Measurement:
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


def _gate(serving: Measurement) -> None:
    """A context that the server does not take is a finding; a cell that failed or is invalid is a fault."""
    from fidelab.bench.load_cell import why_invalid
    from fidelab.results.measurement import label

    bad = [cell for cell in serving.cells if not cell.valid and cell.status != "not_supported"]
    for cell in bad:
        note(f"fidelab: {label(cell.at)}: {why_invalid(cell)}")
    if serving.reason and serving.reason not in {cell.reason for cell in bad}:
        note(f"fidelab: {serving.reason}")
    if bad or serving.status != "ok":
        raise typer.Exit(1)


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
