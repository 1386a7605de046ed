"""Measure the loss of keys and values at each width: separately and together, in all layers, one layer or one head.

See docs/metrics/causes.md#sensitivity-of-keys-and-values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fidelab
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill, RoundedCache, Tokens
from fidelab.config.schema import Experiment
from fidelab.core import FormatSpec, KVSpec, shell_line
from fidelab.core.errors import EngineError, InputError, NotSupportedError, UsageError
from fidelab.engines import DEFAULT
from fidelab.engines.base import engine_class, engine_titles
from fidelab.engines.hf.weights import NATIVE
from fidelab.engines.storage import ANY_FORMAT, LayerFormats
from fidelab.environments.checkpoints import checkpoints
from fidelab.formats import create
from fidelab.formats.base import Format
from fidelab.metrics.cliff import asymmetry, cliff
from fidelab.plan.prepare import prepare
from fidelab.results.measurement import Definition, Metric
from fidelab.results.numbers import counted, public_name
from fidelab.results.plots import Heatmap
from fidelab.results.store import RunFolder
from fidelab.results.study import Study, StudyRow
from fidelab.run.runner import Listener
from fidelab.studies.recipes import WIDE, Recipe, pair_name
from fidelab.studies.roundings import Cell, Choices, Found, Question, Rows, Say, ask, heatmap, measure, windows_of
from fidelab.studies.study import OpenStudy

Place = Literal["cache", "layer", "head"]
Side = Literal["keys", "values", "both"]

CLIFF = Definition("cliff", "count", None, "widest bits at which one bit less costs 0.1 nats per token or more")
ASYMMETRY = Definition("asymmetry", "ratio", None, "ΔPPL with rounded keys over ΔPPL with rounded values")

_WIDTHS = range(2, 9)
_SIDES: tuple[Side, ...] = ("keys", "values", "both")
_ONE_SIDE = _SIDES[:2]
_CALIBRATED = (1, 4, 16)  # windows
_FP8, _TOP = "fp8_e4m3", 448.0
_RIVALS = 6  # pairs of formats that a plan has to beat: those that take the most of the budget


@dataclass(frozen=True)
class _Statistics:
    """Statistics of keys and values in one window: arrays by layer."""

    windows: list[dict[str, Any]]

    @property
    def layers(self) -> list[int]:
        """Layers with keys and values in the cache."""
        return [int(layer) for layer in self.windows[0]["layers"]]

    def heads(self, place: int) -> int:
        """Return the number of KV heads of the layer at this index of :attr:`layers`."""
        return len(self.windows[0]["k_amax"][place])

    def amax(self, side: Side, place: int, windows: int) -> float:
        """Return the largest magnitude over the first windows."""
        return float(max(max(window[f"{side[0]}_amax"][place]) for window in self.windows[:windows]))


@dataclass(frozen=True)
class _Cache(Question):
    """The question: keys, values and both at every width, and in FP8; by ``by`` single layers or heads."""

    kind = "kv-sensitivity"
    request = RoundedCache
    columns = ("side", "place", "format", "delta_nll", "kld", "top1")
    statistics: _Statistics
    widths: Sequence[int]
    group: int
    dtype: str
    formats: Sequence[str] = ()
    storage: LayerFormats = ANY_FORMAT

    @property
    def names(self) -> list[str]:
        """Formats of the grid: those of the widths, then the named ones."""
        return [*(_int(width, self.group) for width in self.widths), *self.formats]

    @property
    def sides(self) -> tuple[Side, ...]:
        """Sides of a layer that have formats of their own: vLLM stores keys and values alike."""
        return _ONE_SIDE if self.storage.any_format else ("both",)

    @property
    def cells(self) -> list[Cell]:
        """All layers at each width, then in FP8; then one layer, or one head, at a time."""
        sides = _SIDES if self.storage.any_format else self.sides
        grid = (self._cell("all", side, name) for name in self.names for side in sides)
        return [*grid, *(self._fp8() if self.widths else ()), *self._single()]

    def _cell(self, place: str, side: Side, name: str) -> Cell:
        rule = f"{'*' if place == 'all' else place}:{self._rounding(side, name)}"
        at: dict[str, int | float | str] = {"side": side, "place": place, "format": name}
        widths = {_int(width, self.group): width for width in self.widths}
        return Cell(rule, at | ({"bits": widths[name]} if name in widths else {}))

    def _rounding(self, side: Side, name: str) -> str:
        """The rule that rounds as the engine stores: vLLM's integers have a scale for each token and head."""
        if self.storage.any_format or name == NATIVE:
            return _pair(side, name)
        dims = self.statistics.windows[0]["head_dim"][0]
        return "/".join(self._stored(one, dim) for one, dim in zip(_both(name), dims, strict=True))

    def _fp8(self) -> list[Cell]:
        """Without scales, with one per token and head, with calibrated ones per tensor."""
        cells, known = [], self.statistics
        for side in _ONE_SIDE:
            for fmt in (_FP8, f"{_FP8}[scale=per-token-head]"):
                cells.append(Cell(f"*:{_pair(side, fmt)}", {"side": side, "place": "all", "format": fmt}))
            for windows in sorted({min(windows, len(known.windows)) for windows in _CALIBRATED}):
                rules = []
                for place, layer in enumerate(known.layers):
                    scale = known.amax(side, place, windows) / _TOP
                    rules.append(f"{layer}:{_pair(side, f'{_FP8}[scale={scale:.9g}]' if scale > 0 else _FP8)}")
                name = f"{_FP8}, calibrated on {counted(windows, 'window')}"
                cells.append(Cell(";".join(rules), {"side": side, "place": "all", "format": name}))
        return cells

    def _single(self) -> list[Cell]:
        if self.by == "cache":
            return []
        places = [
            place
            for number, layer in enumerate(self.statistics.layers)
            for place in (
                [f"{layer}"] if self.by == "layer" else [f"{layer}.{n}" for n in range(self.statistics.heads(number))]
            )
        ]
        return [self._cell(place, side, name) for name in self.names for side in self.sides for place in places]

    def arranged(self, rows: Sequence[StudyRow]) -> tuple[Sequence[StudyRow], int]:
        """Return the rows as asked. Rows of single layers and heads are only in the files."""
        return rows, sum(row.at["place"] == "all" for row in rows)

    def facts(self, found: Found) -> dict[str, Any]:
        native = next((rows.rows.nll_ref for rows in found.values() if isinstance(rows, Rows)), np.empty(0))
        known = native[np.isfinite(native)]
        return {"native_nll": float(known.mean()) if len(known) else None}

    def findings(self, found: Found) -> tuple[Metric, ...]:
        """Return cliffs and asymmetries."""
        metrics = [self._cliff(side, found) for side in _SIDES if self.widths]
        for width in self.widths:
            k, v = (self._whole(side, found).get(width) for side in _ONE_SIDE)
            if k is not None and v is not None:
                ratio = asymmetry(k.rows.nll_ref, k.rows.nll_test, v.rows.nll_test, k.clusters)
                metrics.append(ASYMMETRY(ratio and ratio[0], ratio and ratio[1], cell={"bits": width}))
        return tuple(metrics)

    def _whole(self, side: Side, found: Found) -> dict[int, Rows]:
        """Width → rows, of the whole cache."""
        cells = {width: self._cell("all", side, _int(width, self.group)) for width in self.widths}
        return {width: rows for width, cell in cells.items() if isinstance(rows := found[cell.text], Rows)}

    def _cliff(self, side: Side, found: Found) -> Metric:
        whole = self._whole(side, found)
        if not whole:
            return CLIFF(None, cell={"side": side})
        losses = np.stack([rows.rows.nll_test - rows.rows.nll_ref for rows in whole.values()])
        clusters = next(iter(whole.values())).clusters
        result = cliff([*whole], losses, clusters, native=32 if self.dtype == "float32" else 16)
        return CLIFF(result.bits, result.interval, cell={"side": side})

    def sentences(self, _rows: Sequence[StudyRow], findings: Sequence[Metric]) -> Iterator[str]:
        cliffs = [f"{one.cell['side']} {_bits(one)}" for one in findings if one.key == CLIFF.key]
        if cliffs:
            yield f"Cliff, where one more bit costs 0.1 nats per token or more: {'; '.join(cliffs)}."
        parts = []
        for one in findings:
            if one.key == ASYMMETRY.key:
                span = "" if one.interval is None else f" ({one.interval[0]:.3g}–{one.interval[1]:.3g})"
                said = "the values' loss is within noise" if one.value is None else f"{one.value:.3g}{span}"
                parts.append(f"{one.cell['bits']} bits: {said}")
        if parts:
            yield f"ΔPPL of keys over that of values at {'; '.join(parts)}."

    def heatmap(self, rows: Sequence[StudyRow]) -> Heatmap:
        """Draw layer or head × width, a grid for keys and one for values; or side × width of the whole cache."""
        label = "format" if self.formats else "bits"
        wide = [row for row in rows if row.at["format"] in self.names]
        single = [row for row in wide if row.at["place"] != "all"]
        title = "mean KL, nats: " + ("each layer or head by itself" if single else "all layers")
        values = {
            (str(row.at["side"]), str(row.at["place"]), str(row.at[label])): row.value("kld") for row in single or wide
        }
        return heatmap(title, label, "layer" if single else "layers", values)

    def choices(self, budget: float) -> Choices:
        """Return formats for keys and values of each layer within a budget of bits per value.

        On vLLM a layer has either the format of all quantized layers, or the compute type.

        Raises:
            InputError: If nothing fits the budget.
        """
        known, names = self.statistics, [NATIVE, *self.names]
        dims = known.windows[0]["head_dim"]
        shapes = [(known.heads(number), tuple(dims[number])) for number, _ in enumerate(known.layers)]
        values = sum(heads * sum(dims) for heads, dims in shapes)
        sized = {name: np.array([self._sizes(name, *shape) for shape in shapes]) for name in names}  # [layers, 2]
        sizes = np.stack([sized[name] for name in names], axis=-1)  # [layers, 2, names]
        if self.storage.any_format:
            groups = {f"{layer}.{side}": (layer, side) for layer in known.layers for side in self.sides}
            pairs = {pair_name(k, v, self._wide): (k, v) for k in names for v in names if {k, v} != {NATIVE}}
            everywhere = {name: f"*:{k}/{v}" for name, (k, v) in pairs.items()}
            sizes = sizes.reshape(len(groups), len(names))
        else:
            groups = {f"{layer}": (layer, side) for layer in known.layers for side in self.sides}
            pairs = {name: (name, name) for name in self.names}
            everywhere = {name: f"*:{self._rounding('both', name)}" for name in pairs}
            sizes = sizes.sum(axis=1)
        least = sizes.min(axis=1).sum() / values
        if budget < least:
            raise InputError(f"--budget {budget:g}: bits per value; the smallest of these formats takes {least:.3g}")
        whole = {name: float(sized[k][:, 0].sum() + sized[v][:, 1].sum()) / values for name, (k, v) in pairs.items()}
        fitting = sorted((name for name in whole if whole[name] <= budget), key=lambda name: -whole[name])[:_RIVALS]
        return Choices(
            unit="bits per value",
            budget=budget,
            groups=[*groups],
            formats=names,
            texts={
                (group, name): self._cell(str(layer), side, name).text
                for group, (layer, side) in groups.items()
                for name in self.names
            },
            sizes=sizes,
            per=values,
            values=values,
            option=self._option,
            rivals={name: (everywhere[name], whole[name]) for name in fitting},
            together=[] if self.storage.any_format else [[NATIVE, name] for name in self.names],
            refined=bool(self.formats),
            kv=lambda formats: Recipe.of(formats).kv(self._wide),
        )

    def _sizes(self, name: str, heads: int, dims: tuple[int, int]) -> list[float]:
        """Bits of one token of a layer, of keys and of values."""
        sides = (name, name) if self.storage.any_format else _both(name)
        native = 32.0 if self.dtype == "float32" else 16.0
        return [
            heads * (dim * native if side == NATIVE else 8.0 * _format(self._stored(side, dim)).packed_token_bytes(dim))
            for side, dim in zip(sides, dims, strict=True)
        ]

    def _stored(self, side: str, dim: int) -> str:
        """A side of the engine's formats as Transformers rounds it."""
        return f"{side}[group={dim}]" if side in self.storage.per_token_head else side

    def _option(self, chosen: Mapping[str, str]) -> str:
        """Rules of all layers."""
        if not self.storage.any_format:
            return ";".join(f"{layer}:{self._rounding('both', name)}" for layer, name in chosen.items())
        layers = self.statistics.layers
        return ";".join(f"{layer}:{chosen[f'{layer}.keys']}/{chosen[f'{layer}.values']}" for layer in layers)

    @property
    def _wide(self) -> str:
        return {"float32": "f32", "float16": "f16"}.get(self.dtype, "bf16")


def _format(text: str) -> Format:
    return create(FormatSpec.parse(text))


def _both(name: str) -> tuple[str, str]:
    """Keys and values as an engine's format stores them."""
    spec = KVSpec.parse(name)
    k, v = (NATIVE if side.name in WIDE else str(side) for side in (spec.k, spec.v))
    return k, v


def _bits(found: Metric) -> str:
    """A cliff in words, with its interval."""
    said = [f"{value:.0f} bits" if value else "none" for value in (found.value, *(found.interval or ()))]
    return f"{said[0]} (95%: {said[1]} to {said[2]})" if found.interval else said[0]


def _pair(side: Side, fmt: str) -> str:
    return {"keys": f"{fmt}/{NATIVE}", "values": f"{NATIVE}/{fmt}", "both": f"{fmt}/{fmt}"}[side]


def _int(width: int, group: int) -> str:
    return f"int{width}" if group == 32 else f"int{width}[group={group}]"


def kv_sensitivity(
    experiment: Experiment,
    bits: Sequence[int] = (),
    *,
    formats: Sequence[str] = (),
    engine: str = DEFAULT,
    by: Place = "cache",
    group: int = 32,
    budget: float | None = None,
    command: str = "",
    listener: Listener | None = None,
    say: Say = lambda text: None,
) -> tuple[Study, RunFolder]:
    """Measure the grid, and with a budget also the plan. The new run folder gets ``study.json``.

    Args:
        experiment: experiment on engine hf with the axis ``kld``, whose windows and scored rows are used.
        bits: widths of symmetric integers, 2 to 8.
        formats: further formats: ``q8_0``, ``fp8_e4m3``; with engine vllm also pairs, ``bf16/int8``.
        engine: the engine that the plan is for.  ``hf``: any format in any layer.  ``vllm``: one format, and layers
            that keep the compute type.
        by: single layers or single heads, in addition to the whole cache.
        group: values that share a scale.
        budget: bits per stored value, scales included: a plan layer by layer is made and measured on every second
            window, which the rows do not use.

    Raises:
        FidelabError: If the run cannot start.
        EngineError: If the model gave no answer.
        KeyboardInterrupt: If stopped. Finished captures are kept, and the next call reuses them.
    """
    if RoundedCache.kind not in engine_class(experiment.engine.name).kinds:
        raise NotSupportedError(f"engine {experiment.engine.name} cannot round single layers; leave out --engine")
    widths = _checked(bits) if bits or not formats else []
    if budget is not None and by != "layer":
        raise UsageError("--budget with --bits or --kv is a plan of layers: add --by layer")
    if widths:
        create(FormatSpec.parse(_int(widths[0], group)))  # refuses a group that no format has
    storage = engine_class(engine).layer_formats
    if storage is None:
        raise NotSupportedError(
            f"engine {engine} has one cache format for all layers. Nearest that works: compare single formats, "
            + shell_line(
                "fidelab", "compare", "MODEL", "--engine", engine, *chain(*(("--kv", name) for name in formats))
            )
        )
    named = _check_formats(formats, engine, storage)
    if not storage.any_format and (widths or by != "layer"):
        raise UsageError(f"a plan for engine {engine} is made of its formats, layer by layer: --kv fp8_e4m3 --by layer")
    prepared = prepare(experiment, only="reference")
    chosen, held_out = windows_of(prepared, halves=budget is not None)
    study = OpenStudy.begin("kv-sensitivity", prepared, command, listener)
    statistics = _statistics(study, len(chosen.windows[0]))
    title = f"Sensitivity of keys and values of {public_name(experiment.model)}"
    question = _Cache(title, by, statistics, widths, group, prepared.settings.reference.dtype, named, storage)
    choices = None if budget is None else question.choices(budget)
    if choices is not None and not storage.any_format:
        choices = replace(choices, commands=lambda kv, uniform: _proof(experiment, engine, kv, uniform))
    return measure(study, question, chosen, held_out, choices, say), study.folder


def calibrate(
    experiment: Experiment, target: Path, *, windows: int = 16, n_ctx: int = 512, listener: Listener | None = None
) -> list[dict[str, float]]:
    """Write a copy of a model with static scales of an FP8 KV cache: ``amax / 448`` over windows of the prompts.

    Returns:
        A row per layer: ``layer``, ``k_amax``, ``v_amax``, ``k_scale``, ``v_scale``.

    Raises:
        FidelabError: If the run cannot start.
        EngineError: If the model gave no answer.
        InputError: If the prompts are too short, a layer's keys or values are all 0 or not finite.
    """
    refuse_unscalable = checkpoints.refuse_unscalable  # where the package is absent, before a model is fetched
    prepared = prepare(experiment, only="reference")
    path = str(prepared.settings.reference.path)
    refuse_unscalable(path)
    if target.exists():
        raise UsageError(f"{target} exists; name a folder that does not, nothing is overwritten")
    found = _statistics(OpenStudy.begin("calibrate", prepared, "", listener), n_ctx, windows)
    if len(found.windows) < windows:
        raise InputError(
            f"the prompts make {len(found.windows)} windows of {n_ctx} tokens: ask for fewer --windows, or give more "
            "--prompts"
        )
    rows = []
    for place, layer in enumerate(found.layers):
        k, v = (found.amax(side, place, windows) for side in _ONE_SIDE)
        for side, amax in (("keys", k), ("values", v)):
            if not 0 < amax < float("inf"):
                raise InputError(f"layer {layer}: the largest of its {side} is {amax:g}, which gives no scale")
        rows.append({"layer": layer, "k_amax": k, "v_amax": v, "k_scale": k / _TOP, "v_scale": v / _TOP})
    notes = {
        "method": "static, per tensor: amax / 448",
        "windows": windows,
        "n_ctx": n_ctx,
        "prompts": prepared.settings.experiment.prompts,
        "weights": prepared.settings.reference.weights,
        "fidelab": fidelab.__version__,
        "layers": rows,
    }
    scales = {int(row["layer"]): (row["k_scale"], row["v_scale"]) for row in rows}
    checkpoints.write_kv_scales(path, target, scales, notes)
    return rows


def _checked(bits: Sequence[int]) -> list[int]:
    """The widths, widest first.

    Raises:
        UsageError: If there is no width, one occurs twice, or one has no format.
    """
    for width in bits:
        if width not in _WIDTHS:
            raise UsageError(f"--bits: {width} is not one of {', '.join(map(str, reversed(_WIDTHS)))}")
    if not bits or len({*bits}) != len(bits):
        raise UsageError("--bits: name each width once: 8,7,6,5,4,3,2")
    return sorted(bits, reverse=True)


def _proof(experiment: Experiment, engine: str, kv: str, uniform: str) -> dict[str, str]:
    """The command that compares a plan with a single format on its engine; empty where both are the same."""
    kld = experiment.axes["kld"]
    words = ["fidelab", "compare", experiment.model, "--engine", engine, "--reference", "auto", "--control", "none"]
    words += ["--dtype", experiment.dtype, "--axes", "kld", "--windows", kld["windows"], "--n-ctx", kld["n_ctx"]]
    return {} if kv == uniform else {"Prove": shell_line(*words, "--kv", uniform, "--kv", kv)}


def _check_formats(formats: Sequence[str], engine: str, storage: LayerFormats) -> list[str]:
    """The formats, checked.

    Raises:
        UsageError: If a format does not exist, occurs twice, or cannot be in the plan.
    """
    for name in formats:
        spec = KVSpec.parse(name)
        if spec.skipped:
            raise UsageError(f"--kv {name}: the plan chooses the layers: leave out skip-layers")
        if storage.any_format and "/" in name:
            raise UsageError(f"--kv {name}: the plan chooses keys and values apart: name single formats")
        for side in (spec.k, spec.v):
            if side.name not in WIDE:
                create(side)
            if storage.formats and side.name not in WIDE and str(side) not in storage.formats:
                title = engine_titles()[engine]
                raise UsageError(
                    f"--kv {name}: a plan for {title} is made of {', '.join(storage.formats)}, and pairs of them"
                )
        if {spec.k.name, spec.v.name} <= {*WIDE}:
            raise UsageError(f"--kv {name}: 16 and 32 bits are the compute type, which every plan may keep")
    if len({*formats}) != len(formats):
        raise UsageError("--kv: name each format once")
    return [*formats]


def _statistics(study: OpenStudy, n_ctx: int, most: int = max(_CALIBRATED)) -> _Statistics:
    """Magnitudes of keys and values over windows of the prompts, which are another text than the one that is scored.

    Raises:
        EngineError: If the model gave no answer, or keeps no keys and values.
    """
    inputs, ids = study.prepared.inputs, list[int]()
    for prompt in inputs.prompts:
        ids += inputs.tokenizer.chat(prompt.messages, "chat", prompt.tools)
        if len(ids) >= n_ctx * most:
            break
    starts = range(0, max(len(ids) - n_ctx, 0) + 1, n_ctx)
    windows: tuple[Tokens, ...] = tuple(tuple(ids[at : at + n_ctx]) for at in starts)[:most]
    last = len(windows[0]) - 1
    request = Prefill("kv-statistics", windows, last, last, tuple((i,) for i in range(len(windows))))
    [path] = ask(study, request, request.axis, [], "statistics", RoundedCache).result.captures.values()
    found = Capture(path).manifest["facts"].get("statistics")
    if not found or not found[0]["layers"]:
        raise EngineError("the model wrote no keys and values into its cache")
    return _Statistics(found)
