"""``fidelab eval``: is the model on a server sane?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fidelab.cli import options, values
from fidelab.cli.bench_serve import in_flags
from fidelab.cli.options import ENV, SERVE, Json, Options, RunsOptions, expand_options, split_engine_args
from fidelab.cli.output import command_line, exit_on, note, show_report

if TYPE_CHECKING:
    from fidelab.bench.eval import EvalSettings, EvalWatch
    from fidelab.config.schema import Preset
    from fidelab.results.record import Report

_START_SECONDS = 1800.0  # a first start may compile
_KINDS_HELP = (
    "Kinds, comma-separated: serving, arithmetic, word-problems, sql, json, program-output, reasoning, instructions, "
    "tools, images, retrieval. \\[default: all]"
)


class _ServerOptions(Options, panel="Server"):
    """Options for a running server."""

    base_url: Annotated[str | None, get_args(options.ServerUrl)[1]] = None
    api_key: options.ApiKey = None
    api_key_env: options.ApiKeyEnv = None


class _StartOptions(Options, panel="Server that is started"):
    """Options for a server that is started and ended here."""

    engine: Annotated[str | None, typer.Option(help="Engine: llamacpp, vllm or sglang.")] = None
    kv: Annotated[str | None, typer.Option(help="KV format.")] = None
    engine_arg: options.EngineArg = None
    dtype: options.Dtype = "auto"
    python: options.Python = None
    pythonpath: options.PythonPath = None
    device: options.Device = "auto"
    threads: options.Threads = None
    start_timeout: Annotated[
        float, typer.Option(parser=values.seconds, metavar="TIME", help="Time limit for the start.")
    ] = _START_SECONDS

    def given(self) -> list[str]:
        """Return the flags that have another value than by default."""
        defaults = {parameter.name: parameter.default for parameter in self.parameters()}
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value != defaults[name]]

    def changes(self) -> dict[str, Any]:
        """Return the fields of a preset that they change, without the engine."""
        pairs = split_engine_args(self.engine_arg or [])
        own = {key: value for key, value in pairs.items() if not key.startswith((ENV, SERVE))}
        changes: dict[str, Any] = {
            "engine_args": own,
            "serve": {key.removeprefix(SERVE): value for key, value in pairs.items() if key.startswith(SERVE)},
            "env": {key.removeprefix(ENV): value for key, value in pairs.items() if key.startswith(ENV)},
            "kv": self.kv,
            "dtype": None if self.dtype == "auto" else self.dtype,
        }
        return {key: value for key, value in changes.items() if value}


class _QuestionOptions(Options, panel="Questions"):
    """Options for the questions."""

    kinds: Annotated[str | None, typer.Option(help=_KINDS_HELP)] = None
    parallel: Annotated[int, typer.Option(help="Requests in flight.", min=1)] = 4
    time_limit: Annotated[
        float, typer.Option(parser=values.seconds, metavar="TIME", help="Time limit for all requests.")
    ] = 600.0
    timeout: options.RequestTimeout = 600.0

    def settings(self) -> dict[str, Any]:
        kinds = {} if self.kinds is None else {"kinds": tuple(filter(None, map(str.strip, self.kinds.split(","))))}
        return {**kinds, "parallel": self.parallel, "time_limit": self.time_limit, "timeout": self.timeout}


class _JudgeOptions(Options, panel="Limits"):
    """Options for the exit code."""

    policy: options.Policy = None
    baseline: options.Baseline = None


class _RunOptions(RunsOptions, panel="Run"):
    """Options for storing the run."""

    name: options.RowName = None


@expand_options
def evaluate(
    *,
    model: Annotated[
        str | None, typer.Argument(help="Model on the server; or a model or preset whose server is started.")
    ] = None,
    server: _ServerOptions,
    start: _StartOptions,
    questions: _QuestionOptions,
    judge: _JudgeOptions,
    run: _RunOptions,
    as_json: Json = False,
) -> None:
    r"""Check a model on a server: short questions with exact answers, and faults of serving.

    Exit code 1 means that a serving check failed, or that less than half of a kind is right, 3 that something was not
    reached within the time limit. With --baseline, only losses against the earlier run count.

    [bold]Examples[/bold]

      fidelab eval --base-url http://127.0.0.1:8000/v1

      fidelab eval smollm2-135m --engine llamacpp --kv q8_0

      fidelab eval --base-url http://127.0.0.1:8000 --baseline latest
    """
    from fidelab.core.errors import UsageError

    if server.base_url is not None and (given := start.given()):
        raise UsageError(f"{given[0]} is for a server that is started here: leave it out, or leave out --base-url")
    if server.base_url is None and model is None:
        raise UsageError("name a running server by --base-url URL, or a model and --engine to start one")
    policy, baseline = _read(judge)
    with _running(server, start, model) as url:
        from fidelab.bench.eval import EvalSettings

        served = model if server.base_url is not None else None
        settings = EvalSettings.of(base_url=url, model=served, **questions.settings())
        _evaluate(settings, server, run, model, start.kv, policy, baseline, as_json)


def _has_answers(folder: Path) -> bool:
    """Whether a run has answers to the questions of ``fidelab eval``."""
    return "eval" in options.measured_in(folder)["benches"]


def _read(judge: _JudgeOptions) -> tuple[Any, Report | None]:
    """Return policy and baseline, read before anything is asked."""
    from fidelab.bench.eval import answers_of
    from fidelab.cli.check import read_policy
    from fidelab.results.store import read_run

    policy = None if judge.policy is None else read_policy(judge.policy, {}, ())
    if judge.baseline is None:
        return policy, None
    answers_of(baseline := read_run(options.find_run(judge.baseline, _has_answers, "finished run of eval")))
    return policy, baseline


# ---------------------------------------------------------------------------------------------------- server


@contextmanager
def _running(server: _ServerOptions, start: _StartOptions, model: str | None) -> Iterator[str]:
    """Yield the address of the server, which is started first and ended afterwards unless it runs already."""
    if server.base_url is not None:
        yield server.base_url
        return
    from fidelab.environments.launch import arm_of, check, check_servable, launch, plan
    from fidelab.environments.servers import end

    assert model is not None
    preset = _preset(model, start)
    arm = arm_of(preset, device=start.device, threads=start.threads)
    check_servable(preset, arm)
    planned = plan(preset, arm, "127.0.0.1", None, check(preset, arm))
    with launch(planned, start.start_timeout, note) as launched:
        try:
            yield launched.server.url
        finally:
            end(launched.server)


def _preset(model: str, start: _StartOptions) -> Preset:
    """Return a preset of this name with other values for some fields, or one made of the options."""
    from fidelab.config.load import validate_as
    from fidelab.config.presets import listing, load_preset
    from fidelab.config.schema import Preset, merged_fields
    from fidelab.core import slug
    from fidelab.core.errors import UsageError

    if model.startswith(("http://", "https://")):
        raise UsageError(f"{model} is the address of a server: write --base-url {model}")
    found = listing()
    name = next((one for one in (f"{model}-{start.engine}", model) if one in found), None)
    fields: dict[str, Any] = {"name": slug(Path(model).name), "model": model}
    if name is not None:
        fields = load_preset(found[name]).model_dump(mode="json", exclude_defaults=True)
    else:
        if start.engine is None:
            raise UsageError(f"{model}: name the engine whose server is started: --engine llamacpp, vllm or sglang")
        fields["engine"] = start.engine
    changes = start.changes()
    if start.engine is not None or start.python or start.pythonpath:
        known = fields["engine"] if isinstance(fields["engine"], str) else fields["engine"]["name"]
        place = {"name": start.engine or known, "python": start.python, "pythonpath": start.pythonpath or []}
        changes["engine"] = place
    return validate_as(Preset, merged_fields(fields, changes), "eval")


# ---------------------------------------------------------------------------------------------------- the run


def _evaluate(
    settings: EvalSettings,
    server: _ServerOptions,
    run: _RunOptions,
    model: str | None,
    kv: str | None,
    policy: Any,
    baseline: Report | None,
    as_json: bool,
) -> None:
    """Ask, report, and set the exit code; on any exception the finished kinds are kept."""
    from fidelab.bench.eval import EvalKeeper, compare_with, decide_change, evaluate, faults_of, open_of, serving_faults
    from fidelab.core.errors import EngineError, UsageError
    from fidelab.engines.openai.http import read_key

    keeper = None
    try:
        key = server.api_key or read_key(settings.base_url, server.api_key_env)
        command = command_line().replace(key, "KEY") if key else command_line()
        keeper = EvalKeeper(run.output_dir, command, settings, _lines(), model=model, name=run.name, kv=kv)
        evaluated = evaluate(settings, key, watch=keeper)
        change = None if baseline is None else compare_with(evaluated, baseline)
    except BaseException as error:
        if keeper is not None and keeper.report is not None and keeper.folder is not None:
            keeper.finish()
            note(f"fidelab: the results so far are in {keeper.folder.path}")
        if isinstance(error, EngineError | UsageError):  # words of engine openai, which has other flags
            raise type(error)(in_flags(str(error), "MODEL")) from None
        raise
    report = keeper.keep(evaluated, change)
    keeper.finish()
    assert keeper.folder is not None
    show_report(report, as_json=as_json, folder=keeper.folder.path)
    faults, open_ = faults_of(evaluated), list(open_of(evaluated))
    if change is not None:
        note(change.sentence)
        faults, undecided = decide_change(change)
        open_ += undecided
    if policy is not None:
        more, undecided = _by_policy(report, policy)  # in place of the default limits of kinds
        faults = [*(faults if change is not None else serving_faults(evaluated)), *more]
        open_ += undecided
    exit_on(faults, open_)


def _by_policy(report: Report, policy: Any) -> tuple[list[str], list[str]]:
    """Return (faults, open points) of the rules of a policy."""
    from fidelab.report.check import rule_line
    from fidelab.results.check import check

    found = check(report, policy, (report.reference,))
    decided = [one for one in found.results if one.tier == "critical"]
    return tuple(
        [rule_line(one) for one in decided if one.decision == decision] for decision in ("NO-GO", "INCONCLUSIVE")
    )  # type: ignore[return-value]


def _lines() -> EvalWatch:
    """A watch that prints the server, and each kind as it begins."""
    from fidelab.bench.eval import EvalWatch
    from fidelab.results.numbers import one_line

    class Lines(EvalWatch):
        def reached(self, server: Any, url: str) -> None:
            version = f" {server.version}" if server.version else ""
            note(one_line(f"{url} serves {server.model} ({server.kind}{version})"))

        def begin(self, name: str) -> None:
            note(one_line(f"asking: {name}"))

    return Lines()
