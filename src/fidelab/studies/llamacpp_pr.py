"""Figures that llama.cpp's CONTRIBUTING asks of a new quantization, by its own programs, as Markdown to paste.

Four things: a GGUF file in the new format; its perplexity next to that of Q8_0 and of the formats around it; their KL
divergence from Q8_0; their speed on processors alone.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelab.config.schema import Experiment
from fidelab.core import format_bytes, shell_line, write_atomically
from fidelab.core.errors import FidelabError, UsageError
from fidelab.core.serial import to_json
from fidelab.engines.llamacpp.llama_bench import BenchRates, BenchTool, timed
from fidelab.report.markdown import code_block, code_span, escaped, pipe_table
from fidelab.results.measurement import DECIDING, Metric
from fidelab.results.numbers import ABSENT, format_interval, format_kld, format_percent
from fidelab.results.record import ArmRecord
from fidelab.results.store import RunFolder
from fidelab.run.own_llamacpp import OwnPlan, plan_own
from fidelab.run.pipeline import execute
from fidelab.run.runner import Listener

PROMPT, GENERATED = 512, 128
"""Tokens that are read, and written, for a rate: llama-bench's own defaults, by which rates are compared in public."""
_ROUNDS = 2  # starts of llama-bench per file, in turn and back: drift of the machine shows as a spread
_REPEATS = 3  # of each start


@dataclass(frozen=True)
class FileFigures:
    """One file: its weights, perplexity with its standard error, KLD from the base, and rates in tok/s.

    ``rates``: ``pp512`` and ``tg128`` → all repetitions.  ``fault``: why a figure is missing.
    """

    role: str
    file: str
    bytes: int
    bits_per_weight: float | None
    sha256: str
    perplexity: tuple[float, float] | None
    kld: Mapping[str, float | None]
    kld_interval: tuple[float, float | None] | None
    rates: Mapping[str, tuple[float, ...]]
    fault: str = ""


@dataclass(frozen=True)
class NewQuantization:
    """All figures, smallest file first, and how they were measured."""

    files: tuple[FileFigures, ...]
    tool: str
    cpu: str
    threads: int
    text: str
    windows: int
    n_ctx: int
    commands: tuple[str, ...]
    url: str = ""

    def to_json(self) -> str:
        """Return the figures as JSON."""
        return json.dumps(to_json(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def faults(self) -> list[str]:
        """Why figures are missing, a line per file."""
        return [f"{one.file}: {one.fault}" for one in self.files if one.fault]


def starts(plan: OwnPlan) -> int:
    """Return how often llama-bench is started."""
    return _ROUNDS * len(plan.jobs)


def plan_pull_request(experiment: Experiment) -> tuple[OwnPlan, BenchTool]:
    """Check the experiment, whose first candidate is the new file, and find both programs.

    Raises:
        FidelabError: If a program, a file or the text cannot be used.
    """
    plan = plan_own(experiment)
    if len(plan.sizes) > 1:
        raise UsageError("one context makes one table: name one --n-ctx")
    return plan, BenchTool.beside(plan.tool.path)


def pull_request(
    experiment: Experiment,
    *,
    command: str,
    url: str = "",
    listener: Listener | None = None,
    watch: Callable[[str], None] = lambda text: None,
) -> tuple[NewQuantization, RunFolder]:
    """Measure the new file, its neighbours and the base; write ``llama.cpp-pr.md`` and ``.json`` into the run folder.

    Args:
        experiment: the base as model, the new file as first candidate, the neighbours as further ones; ``engine.bin``.
        url: where others find the new file.

    Raises:
        FidelabError: If nothing can be measured. A failure of one file leaves the others, and is in their ``fault``.
    """
    plan, timer = plan_pull_request(experiment)
    report, folder = execute(experiment, command=command, listener=listener)
    paths = {role: Path(job.arm.path) for job in plan.jobs for role in [job.role]}
    rates, faults = _rates(timer, paths, plan.experiment.threads, folder, watch)
    arms = {"reference": report.reference, **{f"candidate:{arm.name}": arm for arm in report.candidates}}
    new = plan.jobs[1].role
    files = [
        _figures(
            "base" if job.role == "reference" else "new" if job.role == new else "neighbour",
            arms[job.role],
            job.arm.path,
            job.arm.weights,
            rates.get(job.role, ()),
            faults.get(job.role, ""),
        )
        for job in plan.jobs
    ]
    one = next((found[0] for found in rates.values() if found), None)
    [(n_ctx, windows)] = plan.sizes.items()  # plan_pull_request
    commands = [shell_line(*map(_public, words)) for _, words in plan.commands()]
    commands.append(shell_line(*map(_public, _words(timer, "FILE", plan.experiment.threads))))
    found = NewQuantization(
        files=tuple(sorted(files, key=lambda file: (file.bytes, file.file))),
        tool=plan.tool.version,
        cpu="" if one is None else one.cpu,
        threads=0 if one is None else one.threads,
        text=_public(plan.text.name),
        windows=windows,
        n_ctx=n_ctx,
        commands=tuple(commands),
        url=url,
    )
    write_atomically(folder.path / "llama.cpp-pr.json", found.to_json())
    write_atomically(folder.path / "llama.cpp-pr.md", as_markdown(found))
    return found, folder


def _public(word: str) -> str:
    """Return a word of a command without the folders of this machine."""
    return Path(word).name if Path(word).is_absolute() else word


def _words(timer: BenchTool, model: str | Path, threads: int | None) -> list[str]:
    return timer.command(model, n_prompt=PROMPT, n_gen=GENERATED, repeats=_REPEATS, threads=threads, cpu=True)


def _rates(
    timer: BenchTool,
    paths: Mapping[str, Path],
    threads: int | None,
    folder: RunFolder,
    watch: Callable[[str], None],
) -> tuple[dict[str, list[BenchRates]], dict[str, str]]:
    """Rates of each role's file on the processor, over two starts; and why a file has none."""
    rates: dict[str, list[BenchRates]] = {role: [] for role in paths}
    faults: dict[str, str] = {}
    out = folder.path / "speed"
    out.mkdir(exist_ok=True)
    for number in range(_ROUNDS):
        for role in [*paths][:: 1 if number % 2 == 0 else -1]:
            if role in faults:
                continue
            log = folder.log(f"{role}-cpu-{number}")
            watch(f"llama-bench of {paths[role].name}, start {number + 1} of {_ROUNDS}")
            try:
                rates[role] += timed(_words(timer, paths[role], threads), log, out / f"{log.stem}.json")
            except FidelabError as error:
                faults[role], rates[role] = str(error), []
    return rates, faults


def _figures(
    role: str, arm: ArmRecord, path: str, weights: str, rates: Sequence[BenchRates], fault: str
) -> FileFigures:
    kld = arm.axes.get(DECIDING)
    metrics: dict[str, Metric] = {} if kld is None else {m.key: m for m in kld.metrics if not m.cell}
    ran = arm.ran
    extra: Mapping[str, Any] = {} if ran is None else (ran.__pydantic_extra__ or {})
    estimate = extra.get("perplexity")
    by_test: dict[str, list[float]] = {}
    for one in rates:
        by_test.setdefault(f"tg{one.n_gen}" if one.n_gen else f"pp{one.n_prompt}", []).extend(one.rates)
    keys = ("mean", "median", "p99", "max", "rms_dp", "top1")
    return FileFigures(
        role=role,
        file=Path(path).name,
        bytes=Path(path).stat().st_size if ran is None or not ran.weight_bytes else ran.weight_bytes,
        bits_per_weight=None if ran is None else ran.bits_per_weight,
        sha256=weights,
        perplexity=(float(estimate[0]), float(estimate[1])) if estimate else None,
        kld={} if role == "base" else {key: metrics[key].value for key in keys if key in metrics},
        kld_interval=metrics["mean"].ci if role != "base" and "mean" in metrics else None,
        rates={test: tuple(values) for test, values in by_test.items()},
        fault="; ".join(filter(None, (arm.reason or "", fault))),
    )


# ------------------------------------------------------------------------------------------------------ Markdown


def as_markdown(found: NewQuantization) -> str:
    """Return the four parts as Markdown, which ends in a newline."""
    parts = [
        "### Model in the new format",
        _file_line(found),
        "### Perplexity",
        _perplexities(found),
        "### KL divergence from the base",
        _divergences(found),
        "### Speed on the processor",
        _speeds(found),
        "### How it was measured",
        _method(found),
        "Commands:",
        code_block("\n".join(found.commands)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _name(one: FileFigures) -> str:
    name = code_span(one.file)
    return f"**{name}**" if one.role == "new" else f"{name} (base)" if one.role == "base" else name


def _base(found: NewQuantization) -> FileFigures:
    return next(one for one in found.files if one.role == "base")


def _size(one: FileFigures) -> tuple[str, str]:
    bits = ABSENT if one.bits_per_weight is None else f"{one.bits_per_weight:.2f}"
    return f"{one.bytes / 2**30:.3g}", bits


def _file_line(found: NewQuantization) -> str:
    new = next(one for one in found.files if one.role == "new")
    [size], (_, bits) = format_bytes(new.bytes), _size(new)
    at = f"Download: <{found.url}>" if found.url else "Download: (the address, --url)"
    return f"{code_span(new.file)}: {size}, {bits} bits per weight, sha256 {code_span(new.sha256)}. {at}"


def _perplexities(found: NewQuantization) -> str:
    base = _base(found).perplexity

    def row(one: FileFigures) -> tuple[str, ...]:
        own = one.perplexity
        value = ABSENT if own is None else f"{own[0]:.4f} ± {own[1]:.4f}"
        change = ABSENT if own is None or base is None else f"{100 * (own[0] / base[0] - 1):+.2f}%".replace("-", "−")
        return _name(one), *_size(one), value, "" if one.role == "base" else change

    return pipe_table(("file", "GiB", "bpw", "PPL", "over the base"), 1, map(row, found.files))


def _divergences(found: NewQuantization) -> str:
    def row(one: FileFigures) -> tuple[str, ...]:
        kld = one.kld
        share = kld.get("rms_dp")
        return (
            _name(one),
            *_size(one),
            format_kld(kld.get("mean")),
            format_interval(one.kld_interval, "nats"),
            *(format_kld(kld.get(key)) for key in ("median", "p99", "max")),
            format_percent(share),
            format_percent(kld.get("top1")),
        )

    columns = ("file", "GiB", "bpw", "mean KLD", "95% interval", "median", "P99", "max", "RMS Δp", "same top token")
    table = pipe_table(columns, 1, (row(one) for one in found.files if one.role != "base"))
    return "\n\n".join((table, *_standing(found)))


def _standing(found: NewQuantization) -> Iterator[str]:
    """How the new file stands among those that are no larger, and those that are no smaller."""
    new = next(one for one in found.files if one.role == "new")
    mean = new.kld.get("mean")
    if mean is None:
        return
    for one in found.files:
        other = one.kld.get("mean")
        if one.role != "neighbour" or other is None:
            continue
        apart = _apart(new.kld_interval, one.kld_interval)
        if one.bytes <= new.bytes and other <= mean:
            said = "is no larger, and closer to the base" + ("" if apart else " (the intervals overlap)")
            yield f"{code_span(one.file)} {said}."
        elif one.bytes >= new.bytes and other >= mean:
            said = "is no smaller, and further from the base" + ("" if apart else " (the intervals overlap)")
            yield f"{code_span(one.file)} {said}."


def _apart(own: tuple[float, float | None] | None, other: tuple[float, float | None] | None) -> bool:
    if own is None or other is None:
        return False
    return (own[1] is not None and own[1] < other[0]) or (other[1] is not None and other[1] < own[0])


def _speeds(found: NewQuantization) -> str:
    tests = (f"pp{PROMPT}", f"tg{GENERATED}")

    def cell(rates: Sequence[float]) -> str:
        if not rates:
            return ABSENT
        spread = statistics.stdev(rates) if len(rates) > 1 else math.nan
        return f"{statistics.mean(rates):.2f} ± {spread:.2f}"

    def row(one: FileFigures) -> tuple[str, ...]:
        return _name(one), *_size(one), *(cell(one.rates.get(test, ())) for test in tests)

    head = ("file", "GiB", "bpw", *(f"{test}, tok/s" for test in tests))
    where = f"{escaped(found.cpu)}, {found.threads} threads, no GPU" if found.cpu else ""
    how = f"{_ROUNDS} starts of {_REPEATS} repetitions per file, in turn and back; ± is the standard deviation of all."
    return "\n\n".join(filter(None, (pipe_table(head, 1, map(row, found.files)), f"{where}: {how}" if where else how)))


def _method(found: NewQuantization) -> str:
    lines = [
        f"llama.cpp {escaped(found.tool)}; text {code_span(found.text)}, {found.windows} windows of {found.n_ctx:,} "
        "tokens, the second half of each is scored.",
        "PPL: llama-perplexity's own estimate and standard error. KLD: over the full vocabulary, from the 16-bit rows "
        "of `--kl-divergence-base`; intervals resample documents of the text.",
        *(f"{code_span(one.file)}: {escaped(one.fault)}" for one in found.files if one.fault),
    ]
    return "\n".join(f"- {line}" for line in lines)
