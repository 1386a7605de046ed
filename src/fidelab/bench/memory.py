"""Memory of an arm: cache bytes per token, the reserved pool, and the peak against the length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from fidelab.bench.base import (
    Answers,
    Bench,
    BenchInputs,
    Facts,
    LiveSettings,
    Question,
    Sizes,
    against,
    complete,
    outcome_of,
)
from fidelab.core import Status
from fidelab.results.measurement import Cell, Coordinates, Definition, Measurement, Metric

_KV = Definition("kv", "bytes", "lower", "Measured bytes per token × tokens × sequences.", exact=True, name="KV")
_PER_TOKEN = Definition(
    "kv_bytes_per_token",
    "bytes",
    "lower",
    "Measured from the storage; scales included.",
    exact=True,
    name="KV bytes per token",
)
_HOST = Definition("peak_host", "bytes", "lower", "Most host memory of the worker's processes up to here.")
_DEVICE = Definition("peak_device", "bytes", "lower", "Most device memory allocated during one answer.")

_TOTALS: Mapping[str, Definition] = {
    "cache_bytes_per_token": _PER_TOKEN,
    "expected_bytes_per_token": Definition(
        "expected_kv_bytes_per_token",
        "bytes",
        "lower",
        "What the asked format takes.",
        exact=True,
        name="expected KV bytes per token",
    ),
    "state_bytes_per_sequence": Definition(
        "state_bytes_per_sequence",
        "bytes",
        "lower",
        "State of recurrent layers, which does not grow with the length.",
        exact=True,
    ),
    "weights_bytes": Definition("weights", "bytes", "lower", "Bytes of the checkpoint.", exact=True),
    "loaded_host_bytes": Definition(
        "host_model_loaded",
        "bytes",
        "lower",
        "Host memory of the worker's processes with the model loaded and nothing asked.",
        name="host, model loaded",
    ),
    "peak_host_bytes": _HOST,
    "peak_device_bytes": _DEVICE,
    # the pool takes the rest of the memory, so a smaller one is not a gain
    "cache_bytes": Definition("pool", "bytes", None, "The pool that the engine set aside for the cache."),
    "cache_tokens": Definition("pool_tokens", "tokens", "higher", "Tokens that fit into the pool.", limit="memory"),
}
"""Key of the engine's own report → metric of the whole arm."""
_AT_LENGTH: Mapping[str, Definition] = {"kv_bytes": _KV, "peak_host_bytes": _HOST, "peak_device_bytes": _DEVICE}
"""The same → the metric at one length."""


class MemorySettings(LiveSettings):
    """Settings of bench ``memory``: the questions are put once, in ascending length."""

    repeats: int = Field(default=1, ge=1, le=1, description="one: a peak never falls")
    max_warmup: int = Field(default=0, ge=0, le=0, description="none")
    lengths: Sizes = Field(default=(128, 512, 1024), description="tokens of the prompts")


class Memory(Bench):
    """Measured bytes.

    Host peaks are those of the worker's processes up to the end of each answer; device peaks are those of the answer
    itself. See docs/metrics/speed.md#memory.
    """

    name: ClassVar[str] = "memory"
    title: ClassVar[str] = "How much memory does it take?"
    Settings = MemorySettings
    first: ClassVar[bool] = True  # this bench runs first, since a peak raised by another bench never falls
    not_on_servers: ClassVar[str] = "a server's memory is not to be seen from outside"

    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        shapes = sorted((batch * n, batch, n) for batch in self.settings.batch for n in self.settings.lengths)
        return tuple(
            Question.make(inputs, self.settings, self.name, part=f"{n}.b{batch}", tokens=n, batch=batch, n=0)
            for _, batch, n in shapes
        )

    def record(self, answers: Mapping[str, Answers], facts: Facts) -> Measurement:
        cells = [answer.cell(answer.at()) for answer in answers.values()]
        good = [answer for answer in answers.values() if answer.status is Status.OK]
        ran = good[-1].ran if good else facts.ran
        peaks = [peak for answer in good if (peak := answer.ran.get("peak_device_bytes")) is not None]
        metrics = _sizes(
            _TOTALS,
            {
                **ran,
                "weights_bytes": facts.weights_bytes or None,
                "peak_device_bytes": max(peaks, default=ran.get("peak_device_bytes")),
            },
            {},
        )
        for answer in good:
            asked, per_token = answer.question, answer.ran.get("cache_bytes_per_token")
            kv = None if per_token is None else per_token * asked.tokens * asked.batch
            metrics += _sizes(_AT_LENGTH, {**answer.ran, "kv_bytes": kv}, answer.at())
        ended: list[Cell] = [cell for cell in cells if cell.status is not Status.OK]
        return _complete(Measurement(**outcome_of(cells), title=self.title, metrics=tuple(metrics), cells=tuple(ended)))


def _sizes(definitions: Mapping[str, Definition], told: Mapping[str, Any], at: Coordinates) -> list[Metric]:
    """Return the metrics of the reported sizes."""
    return [make(told[name], cell=at) for name, make in definitions.items() if told.get(name) is not None]


def _complete(found: Measurement) -> Measurement:
    """Add curves of the cache and of the peak, with bytes per token and the peak as headline."""
    device = found.value(_DEVICE.key) is not None
    peak, where = (_DEVICE, "device memory") if device else (_HOST, "memory of the worker's processes")
    shown = (
        (_KV, "cache", "KV cache against context", "Measured bytes per token, times tokens."),
        (
            peak,
            "device-memory" if device else "memory",
            f"Peak {'device ' if device else ''}memory against context",
            "Most device memory at each length." if device else f"Most {where} up to each length.",
        ),
    )
    x_label, y_label, mib = "tokens in the cache, per sequence", "MiB", 2.0**-20
    plots = [
        curve
        for make, key, title, caption in shown
        for curve in against(
            found, make.key, scale=mib, key=key, title=title, x_label=x_label, y_label=y_label, caption=caption
        )
    ]
    return complete(found, [found.metric(_PER_TOKEN.key), found.metric(peak.key, {})], plots)
