"""Public surface of fidelab for authors of an axis, a bench, an engine or a number format.

A package of your own adds one file and one entry point (groups ``fidelab.axes``, ``fidelab.benches``,
``fidelab.engines``, ``fidelab.formats``); fidelab itself stays as it is.  CONTRIBUTING.md has a recipe for each.  Names
are imported at first use, so that an engine's module can be loaded in an environment that has numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fidelab.axes.base import OVER_CONTROL, Axis, AxisInputs, AxisScore, AxisSettings
    from fidelab.bench.base import (
        Answers,
        Bench,
        BenchInputs,
        BenchSettings,
        CellResult,
        Facts,
        LiveSettings,
        Question,
        joined,
        outcome_of,
    )
    from fidelab.captures.pair import Pair
    from fidelab.captures.reader import Capture
    from fidelab.captures.requests import (
        Forced,
        Generate,
        Layerwise,
        Prefill,
        RoundedCache,
        RoundedWeights,
        Served,
        Timed,
    )
    from fidelab.core import Arm, Estimator, FormatSpec, KVSpec, Status
    from fidelab.core.errors import EngineError, FidelabError, InputError, NotSupportedError, UsageError
    from fidelab.core.runtime import RuntimeInfo
    from fidelab.engines.base import Answer, Engine, Sink, Support
    from fidelab.engines.dialect import Dialect
    from fidelab.engines.server_metrics import MetricNames
    from fidelab.formats.base import Format, Parts
    from fidelab.results.measurement import Cell, Definition, Flag, Measurement, Metric
    from fidelab.results.plots import Bars, Curve, Grid, Heatmap, TablePlot, TextPair, Texts

__all__ = [
    "OVER_CONTROL",
    "Answer",
    "Answers",
    "Arm",
    "Axis",
    "AxisInputs",
    "AxisScore",
    "AxisSettings",
    "Bars",
    "Bench",
    "BenchInputs",
    "BenchSettings",
    "Capture",
    "Cell",
    "CellResult",
    "Curve",
    "Definition",
    "Dialect",
    "Engine",
    "EngineError",
    "Estimator",
    "Facts",
    "FidelabError",
    "Flag",
    "Forced",
    "Format",
    "FormatSpec",
    "Generate",
    "Grid",
    "Heatmap",
    "InputError",
    "KVSpec",
    "Layerwise",
    "LiveSettings",
    "Measurement",
    "Metric",
    "MetricNames",
    "NotSupportedError",
    "Pair",
    "Parts",
    "Prefill",
    "Question",
    "RoundedCache",
    "RoundedWeights",
    "RuntimeInfo",
    "Served",
    "Sink",
    "Status",
    "Support",
    "TablePlot",
    "TextPair",
    "Texts",
    "Timed",
    "UsageError",
    "joined",
    "outcome_of",
]

_MODULES = {
    "Dialect": "engines.dialect",
    "MetricNames": "engines.server_metrics",
    "RuntimeInfo": "core.runtime",
    **dict.fromkeys(
        (
            "OVER_CONTROL",
            "Axis",
            "AxisInputs",
            "AxisScore",
            "AxisSettings",
        ),
        "axes.base",
    ),
    **dict.fromkeys(
        (
            "Answers",
            "Bench",
            "BenchInputs",
            "BenchSettings",
            "CellResult",
            "Facts",
            "LiveSettings",
            "Question",
            "joined",
            "outcome_of",
        ),
        "bench.base",
    ),
    **dict.fromkeys(("Pair",), "captures.pair"),
    **dict.fromkeys(("Capture",), "captures.reader"),
    **dict.fromkeys(
        (
            "Forced",
            "Generate",
            "Layerwise",
            "Prefill",
            "RoundedCache",
            "RoundedWeights",
            "Served",
            "Timed",
        ),
        "captures.requests",
    ),
    **dict.fromkeys(
        (
            "Arm",
            "Estimator",
            "FormatSpec",
            "KVSpec",
            "Status",
        ),
        "core",
    ),
    **dict.fromkeys(
        (
            "Answer",
            "Engine",
            "Sink",
            "Support",
        ),
        "engines.base",
    ),
    **dict.fromkeys(
        (
            "EngineError",
            "FidelabError",
            "InputError",
            "NotSupportedError",
            "UsageError",
        ),
        "core.errors",
    ),
    **dict.fromkeys(
        (
            "Format",
            "Parts",
        ),
        "formats.base",
    ),
    **dict.fromkeys(
        (
            "Cell",
            "Definition",
            "Flag",
            "Measurement",
            "Metric",
        ),
        "results.measurement",
    ),
    **dict.fromkeys(
        (
            "Bars",
            "Curve",
            "Grid",
            "Heatmap",
            "TablePlot",
            "TextPair",
            "Texts",
        ),
        "results.plots",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"fidelab.{_MODULES[name]}"), name)
