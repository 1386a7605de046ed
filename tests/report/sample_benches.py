"""Reports with benches, some of their cells invalid or failed, of many arms and of one; the figures are made up."""

from __future__ import annotations

from typing import Any

from fidelab.core import Status
from fidelab.results.axis_record import Axes
from fidelab.results.bench_record import (
    Benches,
    Decode,
    Memory,
    MemoryPoint,
    Prefill,
    SpeedCell,
    Startup,
    StartupSplit,
    Timing,
)
from fidelab.results.bench_values import Flag, Spread
from fidelab.results.record import ArmRecord, Report
from fidelab.results.serving_record import Client, Distribution, Goodput, LoadCell, Saturation, Server, Serving
from tests.report.sample import HOSTILE, arm, sample_report

MIB = 2**20
LENGTHS = (128, 512, 2048, 8192)
DEPTHS = (0, 1024, 4096, 16384)


def spread(median: float, half: float = 0.04, *, steady: bool = True) -> Spread:
    """Three repeats around a median."""
    repeats = (median * (1 - half), median, median * (1 + half))
    return Spread(median=median, low=repeats[0], high=repeats[2], steady=steady, repeats=repeats)


def times(p50: float, tail: float = 3.0) -> Distribution:
    """Milliseconds whose 99th percentile is so many times their median."""
    return Distribution(n=100, mean=p50 * 1.1, percentiles={"p50": p50, "p95": p50 * 2, "p99": p50 * tail})


def prefill(speed: float = 1.0, batches: tuple[int, ...] = (1,)) -> Prefill:
    """Rates that fall with the length."""
    cells = [
        SpeedCell(
            status=Status.OK, tokens=n, batch=batch, rate=spread(speed * batch * 3000 / (1 + n / 6000)), warmups=2
        )
        for batch in batches
        for n in LENGTHS
    ]
    return Prefill(status=Status.OK, cells=tuple(cells))


def decode(speed: float = 1.0, batches: tuple[int, ...] = (1,)) -> Decode:
    """Rates that fall with the depth; the second cell is not steady, and the last one failed."""
    cells = []
    for batch in batches:
        for at, depth in enumerate(DEPTHS):
            rate = speed * batch * 42 / (1 + depth / 9000)
            cells.append(
                SpeedCell(
                    status=Status.OK,
                    tokens=depth,
                    batch=batch,
                    n=64,
                    rate=spread(rate, steady=False) if at == 1 else spread(rate),
                    by_subtraction=spread(rate * 0.97, 0.1),
                    flags=(Flag(kind="unsteady", text="the last three repeats differ by 8%"),) if at == 1 else (),
                )
            )
    cells.append(SpeedCell(status=Status.FAILED, reason="out of memory", tokens=65536, batch=1))
    return Decode(status=Status.OK, cells=tuple(cells))


def startup(seconds: float) -> Startup:
    """Cold takes twice as long to read the weights."""

    def split(weights: float) -> StartupSplit:
        parts = {"interpreter": 0.2, "import": 2.1, "weights": weights, "warm-up": 0.6, "first token": 0.3}
        return StartupSplit(
            total=spread(sum(parts.values())), parts={name: spread(value) for name, value in parts.items()}
        )

    return Startup(status=Status.OK, cold=split(2 * seconds), warm=split(seconds))


def memory(per_token: float, device: bool = False) -> Memory:
    """Bytes of the cache, and peaks that grow with it."""
    points = tuple(
        MemoryPoint(
            tokens=n,
            kv_bytes=per_token * n,
            peak_host_bytes=620 * MIB + 1.5 * per_token * n,
            peak_device_bytes=300 * MIB + 2 * per_token * n if device else None,
        )
        for n in LENGTHS
    )
    return Memory(
        status=Status.OK,
        kv_bytes_per_token=per_token,
        expected_bytes_per_token=per_token,
        weights_bytes=269e6,
        loaded_host_bytes=540 * MIB,
        peak_host_bytes=points[-1].peak_host_bytes,
        peak_device_bytes=points[-1].peak_device_bytes,
        points=points,
    )


def load_cell(context: int, concurrency: int, speed: float = 1.0, **changes: Any) -> LoadCell:
    """A valid cell: throughput that saturates, latencies that grow."""
    rate = speed * 900 * concurrency / (concurrency + 14) / (1 + context / 30000)
    tpot = 1000 * concurrency / rate
    fields: dict[str, Any] = {
        "status": Status.OK,
        "arrival": "closed",
        "context": context,
        "output": 128,
        "concurrency": concurrency,
        "seconds": 30.0,
        "n_requests": 8 * concurrency,
        "n_completed": 8 * concurrency,
        "input_tokens": 8 * concurrency * context,
        "output_tokens": 8 * concurrency * 128,
        "context_measured": context + 3.0,
        "effective_concurrency": concurrency * 0.98,
        "completed_rate": rate / 128,
        "output_rate": rate,
        "total_rate": rate * 9,
        "ttft": times(40 + context / 20 + 9 * concurrency),
        "tpot": times(tpot, 1.6),
        "itl": times(tpot * 0.98, 2.2),
        "e2el": times(tpot * 130),
        "goodput": Goodput(targets={"ttft": 500}, share=0.9, rate=rate / 140),
        "client": Client(lag_p50=0.05, lag_p99=0.4, cpu_seconds=1.5),
        "server": Server(kind="vllm", output_rate=rate * 1.01, ratio=0.99, samples=30),
    }
    return LoadCell(**{**fields, **changes})


def serving(speed: float = 1.0, contexts: tuple[int, ...] = (128, 4096, 32768), most: int = 64) -> Serving:
    """A sweep; the highest load at the longest context is invalid."""
    cells = []
    for context in contexts:
        concurrency = 1
        while concurrency <= most:
            bad: dict[str, Any] = {}
            if concurrency == most and context == contexts[-1]:
                text = f"{most} requests at once were asked, 11.2 were in flight"
                bad = {"valid": False, "flags": (Flag(kind="underfilled", text=text),), "errors": {"timeout": 5}}
            cells.append(load_cell(context, concurrency, speed, **bad))
            concurrency *= 2
    return Serving(
        status=Status.OK,
        target="http://127.0.0.1:8000",
        model="smollm2",
        endpoint="/v1/completions",
        cells=tuple(cells),
        saturation=(
            Saturation(context=contexts[0], concurrency=32, gain=0.009),
            Saturation(context=contexts[-1], concurrency=None, gain=0.096),
        ),
        settings={"seed": 0},
    )


def benched(
    record: ArmRecord, speed: float, per_token: float, *, served: bool = True, device: bool = False
) -> ArmRecord:
    """The arm with every bench."""
    found = Benches(
        timing=Timing(load_seconds=2.4, seconds=61.2),
        startup=startup(1.1 / speed),
        prefill=prefill(speed, (1, 4)),
        decode=decode(speed, (1, 4)),
        memory=memory(per_token, device),
        serving=serving(speed) if served else None,
    )
    return record.model_copy(update={"benches": found})


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


def bench_report(*names: str, **benches: Any) -> Report:
    """Benches and no axes; the first name is the reference's, each further arm is a tenth faster."""
    arms = [
        arm(name, benches=Benches(**benches)) if benches else benched(arm(name), 1 + n / 10, 46080 / (1 + n / 10))
        for n, name in enumerate(names or ("bf16",))
    ]
    return sample_report(reference=arms[0], control=None, candidates=tuple(arms[1:]), floor=Axes())


def hostile_benches() -> Report:
    """Hostile text wherever a bench has text, in an arm of a hostile name."""
    flags = (Flag(kind="noise", text=HOSTILE),)
    cells = (
        SpeedCell(status=Status.OK, tokens=128, rate=spread(10), flags=flags),
        SpeedCell(status=Status.FAILED, reason=HOSTILE, tokens=256),
    )
    load = load_cell(128, 1, errors={HOSTILE: 2}, flags=flags)
    server = Server(kind=HOSTILE)
    found = Benches(
        startup=Startup(status=Status.OK, warm=StartupSplit(total=spread(2), parts={HOSTILE: spread(2)}), flags=flags),
        prefill=Prefill(status=Status.OK, cells=cells),
        decode=Decode(status=Status.FAILED, reason=HOSTILE),
        serving=Serving(
            status=Status.OK,
            target=HOSTILE,
            model=HOSTILE,
            endpoint=HOSTILE,
            cells=(load, load_cell(128, 2, valid=False, flags=flags, server=server)),
            settings={HOSTILE: HOSTILE},
            flags=flags,
        ),
    )
    return sample_report(
        reference=arm("f32", name=HOSTILE, benches=found),
        control=None,
        candidates=(arm("f16", name=f"{HOSTILE}2", benches=found),),
        floor=Axes(),
    )
