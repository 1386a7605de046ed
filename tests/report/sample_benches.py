"""Reports with benches, some of their cells invalid or failed, of many arms and of one; the figures are made up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fidelab.core import Status
from fidelab.results.measurement import Cell, Coordinates, Definition, Flag, Measurement, Metric, key_of
from fidelab.results.plots import Bars, Curve
from fidelab.results.record import ArmRecord, Report, Timing
from tests.report.sample import HOSTILE, arm, sample_report

MIB = 2**20
LENGTHS = (128, 512, 2048, 8192)
DEPTHS = (0, 1024, 4096, 16384)
RATE = Definition("rate", "tok/s", "higher", about="prompt tokens over the time to the first token")
ISOLATED = Definition("isolated", "tok/s", "higher", about="time between the first and the last token")
OUTPUT = Definition("output_rate", "tok/s", "higher", about="generated tokens per second")


def spread(median: float, half: float = 0.02) -> tuple[float, float, float]:
    """Three repeats around a median: steady up to a half of 2.5%."""
    return median * (1 - half), median, median * (1 + half)


def curves(key: str, title: str, x_label: str, y_label: str, metrics: Sequence[Metric], x: str) -> Iterator[Curve]:
    """Values against one coordinate, a curve per batch."""
    for batch in dict.fromkeys(metric.cell["batch"] for metric in metrics):
        mine = [metric for metric in metrics if metric.cell["batch"] == batch]
        yield Curve(
            key=key,
            title=title,
            x_label=x_label,
            y_label=y_label,
            x=tuple(float(metric.cell[x]) for metric in mine),
            y=tuple(metric.value for metric in mine),
            series=f"batch {batch}",
            caption="Median of the repeats; shaded from the slowest to the fastest.",
            low=tuple(min(metric.repeats, default=None) for metric in mine),
            high=tuple(max(metric.repeats, default=None) for metric in mine),
        )


def prefill(speed: float = 1.0, batches: tuple[int, ...] = (1,)) -> Measurement:
    """Rates that fall with the length."""
    shapes: list[Coordinates] = [{"tokens": n, "batch": batch} for batch in batches for n in LENGTHS]
    metrics = [
        RATE.repeated(
            spread(speed * int(at["batch"]) * 3000 / (1 + int(at["tokens"]) / 6000)),
            cell=at,
            headline=at == {"tokens": 8192, "batch": 1},
        )
        for at in shapes
    ]
    return Measurement(
        status=Status.OK,
        title="Prefill: prompt tokens per second",
        metrics=tuple(metrics),
        cells=tuple(Cell(status=Status.OK, at=at, facts={"warmups": 2}) for at in shapes),
        plots=tuple(curves("prefill", "Prefill against prompt length", "prompt, tokens", "tok/s", metrics, "tokens")),
    )


def decode(speed: float = 1.0, batches: tuple[int, ...] = (1,)) -> Measurement:
    """Rates that fall with the depth; the second cell is not steady, and the last one failed."""
    metrics, cells = [], []
    for batch in batches:
        for number, depth in enumerate(DEPTHS):
            at: Coordinates = {"depth": depth, "batch": batch}
            rate = speed * batch * 42 / (1 + depth / 9000)
            shaky = number == 1
            headline = depth == DEPTHS[-1] and batch == 1
            metrics.append(ISOLATED.repeated(spread(rate, 0.04 if shaky else 0.02), cell=at, headline=headline))
            metrics.append(
                Definition("by_subtraction", "tok/s", "higher", optional=True).repeated(
                    spread(rate * 0.97, 0.02), cell=at
                )
            )
            flags = (Flag(kind="unsteady", text="the last three repeats differ by 8%"),) if shaky else ()
            cells.append(Cell(status=Status.OK, at=at, flags=flags, facts={"n": 64, "warmups": 2}))
    cells.append(Cell(status=Status.FAILED, reason="out of memory", at={"depth": 65536, "batch": 1}))
    isolated = [metric for metric in metrics if metric.name == "isolated"]
    return Measurement(
        status=Status.OK,
        title="Decode: tokens per second behind the first one",
        metrics=tuple(metrics),
        cells=tuple(cells),
        plots=tuple(curves("decode", "Decode against depth", "tokens in the cache", "tok/s", isolated, "depth")),
    )


def startup(seconds: float) -> Measurement:
    """Cold takes twice as long to read the weights."""
    metrics, parts = [], dict[str, tuple[float, ...]]()
    for start, weights in (("cold", 2 * seconds), ("warm", seconds)):
        split = {"interpreter": 0.2, "import": 2.1, "weights": weights, "warm-up": 0.6, "first token": 0.3}
        for name, value in {"total": sum(split.values()), **split}.items():
            headline = (name, start) == ("total", "warm")
            metrics.append(
                Definition(key_of(name), "s", "lower", name=name).repeated(
                    spread(value), cell={"start": start}, headline=headline
                )
            )
        parts = {name: (*parts.get(name, ()), value) for name, value in split.items()}
    bars = Bars(
        key="startup", title="Where the start-up time goes", y_label="seconds", labels=("cold", "warm"), parts=parts
    )
    return Measurement(
        status=Status.OK,
        title="Start-up: seconds from the process' start to the first token",
        metrics=tuple(metrics),
        plots=(bars,),
    )


def memory(per_token: float, device: bool = False) -> Measurement:
    """Bytes of the cache, and peaks that grow with it."""

    def size(name: str, value: float, *, exact: bool = False, headline: bool = False, **cell: int) -> Metric:
        return Definition(key_of(name), "bytes", "lower", exact=exact, name=name)(
            value, cell=dict(cell), headline=headline
        )

    points = []
    for n in LENGTHS:
        points += [
            size("KV", per_token * n, exact=True, tokens=n, batch=1),
            size("peak host", 620 * MIB + 1.5 * per_token * n, tokens=n, batch=1),
        ]
        points += [size("peak device", 300 * MIB + 2 * per_token * n, tokens=n, batch=1)] if device else []
    metrics = [
        size("KV bytes per token", per_token, exact=True, headline=True),
        size("expected KV bytes per token", per_token, exact=True),
        size("weights", 269e6, exact=True),
        size("host, model loaded", 540 * MIB),
        size("peak host", 620 * MIB + 1.5 * per_token * LENGTHS[-1], headline=not device),
    ]
    metrics += [size("peak device", 300 * MIB + 2 * per_token * LENGTHS[-1], headline=True)] if device else []
    return Measurement(
        status=Status.OK,
        title="Memory",
        metrics=(*metrics, *points),
        plots=tuple(
            curves(
                "cache",
                "KV cache against context",
                "tokens in the cache, per sequence",
                "bytes",
                [point for point in points if point.name == "KV"],
                "tokens",
            )
        ),
    )


def load_shape(context: int, concurrency: int) -> Coordinates:
    """A closed loop."""
    return {"context": context, "output": 128, "arrival": "closed", "concurrency": concurrency}


def load_cell(context: int, concurrency: int, speed: float = 1.0, *, headline: bool = False) -> list[Metric]:
    """Throughput that saturates, latencies that grow."""
    at = load_shape(context, concurrency)
    rate = speed * 900 * concurrency / (concurrency + 14) / (1 + context / 30000)
    tpot = 1000 * concurrency / rate
    tails = {
        "TTFT": (40 + context / 20 + 9 * concurrency, 3.0),
        "TPOT": (tpot, 1.6),
        "ITL": (tpot * 0.98, 2.2),
        "E2E": (tpot * 130, 3.0),
    }
    latencies = [
        Definition(key_of(f"{name} {part}"), "ms", "lower", name=f"{name} {part}")(p50 * factor, cell=at)
        for name, (p50, tail) in tails.items()
        for part, factor in {"mean": 1.1, "p50": 1.0, "p95": 2.0, "p99": tail}.items()
    ]
    return [
        OUTPUT(rate, cell=at, headline=headline),
        *latencies,
        Definition("total_rate", "tok/s", "higher")(rate * 9, cell=at),
        Definition("completed_rate", "req/s", "higher")(rate / 128, cell=at),
        Definition("goodput", "req/s", "higher")(rate / 140, cell=at),
        Definition("good_requests", "share", "higher")(0.9, cell=at),
        Definition("failed_requests", "share", "lower")(0.0, cell=at),
        Definition("effective_concurrency", "count")(concurrency * 0.98, cell=at),
        Definition("server_output_rate", "tok/s", "higher", name="server's output rate")(rate * 1.01, cell=at),
    ]


def serving(speed: float = 1.0, contexts: tuple[int, ...] = (128, 4096, 32768), most: int = 64) -> Measurement:
    """A sweep; the highest load at the longest context is invalid."""
    metrics, cells = [], []
    loads = [2**n for n in range(most.bit_length())]
    for context in contexts:
        for concurrency in loads:
            metrics += load_cell(context, concurrency, speed, headline=(context, concurrency) == (contexts[0], most))
            bad: dict[str, Any] = {}
            if (context, concurrency) == (contexts[-1], most):
                text = f"{most} requests at once were asked, 11.2 were in flight"
                bad = {"valid": False, "flags": (Flag(kind="underfilled", text=text),)}
            facts = {"requests": 8 * concurrency, "client": {"lag_p99": 0.4}, "server": {"kind": "vllm"}}
            cells.append(Cell(status=Status.OK, at=load_shape(context, concurrency), facts=facts, **bad))
    saturation = Definition("saturation", "count")
    for context, found, gain in ((contexts[0], 32, 0.009), (contexts[-1], None, 0.096)):
        metrics.append(saturation(found, cell={"context": context}))
        cells.append(Cell(status=Status.OK, at={"context": context}, facts={"gain": gain, "threshold": 0.05}))
    rates = [metric for metric in metrics if metric.name == "output rate"]
    return Measurement(
        status=Status.OK,
        title="Serving: load on a server",
        metrics=tuple(metrics),
        cells=tuple(cells),
        plots=tuple(
            Curve(
                key="throughput",
                title="Throughput against concurrency",
                x_label="requests at once",
                y_label="output tok/s",
                x=tuple(map(float, loads)),
                y=tuple(metric.value for metric in rates if metric.cell["context"] == context),
                series=f"{context} in",
                doubts=tuple("not valid" if (context, load) == (contexts[-1], most) else "" for load in loads),
            )
            for context in dict.fromkeys(contexts)
        ),
        facts={
            "target": "http://127.0.0.1:8000",
            "model": "smollm2",
            "endpoint": "/v1/completions",
            "settings": {"seed": 0},
        },
    )


def benched(
    record: ArmRecord, speed: float, per_token: float, *, served: bool = True, device: bool = False
) -> ArmRecord:
    """The arm with every bench."""
    found = {
        "startup": startup(1.1 / speed),
        "prefill": prefill(speed, (1, 4)),
        "decode": decode(speed, (1, 4)),
        "memory": memory(per_token, device),
        **({"serving": serving(speed)} if served else {}),
    }
    return record.model_copy(update={"benches": found, "timing": Timing(load_seconds=2.4, seconds=61.2)})


def rich_report() -> Report:
    """Fidelity and every bench: three candidates, control and reference, and arms that did not run."""
    plain = sample_report()
    assert plain.control is not None
    factors = (1.02, 1.31, 1.44)
    candidates = (
        *(benched(c, f, 46080 / f**2) for c, f in zip(plain.candidates[:3], factors, strict=True)),
        *plain.candidates[3:],
    )
    return plain.model_copy(
        update={
            "reference": benched(plain.reference, 1.0, 46080),
            "control": benched(plain.control, 0.98, 46080, served=False),
            "candidates": candidates,
        }
    )


def bench_report(*names: str, **benches: Measurement) -> Report:
    """Benches and no axes; the first name is the reference's, each further arm is a tenth faster."""
    arms = [
        arm(name, benches=benches) if benches else benched(arm(name), 1 + n / 10, 46080 / (1 + n / 10))
        for n, name in enumerate(names or ("bf16",))
    ]
    return sample_report(reference=arms[0], control=None, candidates=tuple(arms[1:]), floor={})


def hostile_benches() -> Report:
    """Hostile text wherever a bench has text, in an arm of a hostile name."""
    flags = (Flag(kind=HOSTILE, text=HOSTILE),)
    first: Coordinates = {HOSTILE: HOSTILE, "n": 1}
    second: Coordinates = {HOSTILE: HOSTILE, "n": 2}
    hostile = Definition("hostile", "tok/s", "higher", about=HOSTILE, name=HOSTILE)
    metrics = (
        hostile.repeated(spread(10), cell=first, flags=flags, headline=True),
        Definition("hostile_p50", "ms", "lower", name=f"{HOSTILE} p50")(10, cell=first, caveat=HOSTILE),
        Definition("hostile_p99", "ms", "lower", name=f"{HOSTILE} p99")(12, cell=first, flags=flags),
    )
    found = {
        HOSTILE: Measurement(
            status=Status.OK,
            title=HOSTILE,
            metrics=metrics,
            cells=(
                Cell(status=Status.OK, at=first, flags=flags, facts={HOSTILE: HOSTILE}),
                Cell(status=Status.FAILED, reason=HOSTILE, at=second, valid=False),
            ),
            plots=(
                Curve(
                    key=HOSTILE,
                    title=HOSTILE,
                    x_label=HOSTILE,
                    y_label=HOSTILE,
                    x=(1, 2, 3),
                    y=(1, 2, 3),
                    series=HOSTILE,
                    caption=HOSTILE,
                    doubts=("", "", HOSTILE),
                ),
                Bars(
                    key=HOSTILE,
                    title=HOSTILE,
                    y_label=HOSTILE,
                    labels=(HOSTILE,),
                    parts={HOSTILE: (2.0,)},
                    caption=HOSTILE,
                ),
            ),
            flags=flags,
            facts={HOSTILE: HOSTILE},
        ),
        "decode": Measurement(status=Status.FAILED, reason=HOSTILE),
    }
    return sample_report(
        reference=arm("f32", name=HOSTILE, benches=found),
        control=None,
        candidates=(arm("f16", name=f"{HOSTILE}2", benches=found),),
        floor={},
    )
