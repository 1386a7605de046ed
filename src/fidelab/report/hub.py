"""One configuration of a report for the hub: a model card, its metadata, and entries of ``.eval_results``.

Metadata are those of ``huggingface_hub.ModelCardData``, and entries are in the form of
``huggingface_hub.EvalResultEntry``.  See docs/sharing.md#exports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml

from fidelab.core.errors import UsageError
from fidelab.report.exports import slug
from fidelab.report.markdown import code_span, escaped
from fidelab.report.standalone import badge_svg, frontier_svg
from fidelab.results.measurement import DECIDING, Measurement, Metric, label
from fidelab.results.numbers import counted, format_interval, heading, one_line, public_name
from fidelab.results.record import ArmRecord, Report
from fidelab.results.values import NEEDS_REASON

BADGE, FRONTIER = "fidelab-badge.svg", "fidelab-frontier.svg"
EVAL_RESULTS = ".eval_results/fidelab.yaml"
"""Files next to a card: paths within a repository on the hub."""

_PIXELS = 800
_PACKED = re.compile(r"hf://(?P<repo>[^@]+)(?:@(?P<revision>.+))?")
_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@\S+)?")
_TEXTS: Mapping[str, str] = {"wikitext-2": "Salesforce/wikitext"}  # text of a run → data set on the hub


class DataSet(NamedTuple):
    """A data set on the hub, ``owner/name``, and its commit."""

    repo: str
    revision: str | None = None


class Published(NamedTuple):
    """Facts that a report does not hold. Those that are ``None`` are left out, or follow from the report."""

    base_model: str | None = None
    """Hub id of the model that the configuration was quantized from."""
    quantized_by: str | None = None
    """Account of whoever made the files."""
    data: DataSet | None = None
    """What the figures are of."""


def has_other_weights(report: Report, arm: ArmRecord) -> bool:
    """Return whether a configuration has other files than the reference, not only another cache."""
    hashes = arm.weights_sha256, report.reference.weights_sha256
    return arm.model != report.reference.model if None in hashes else hashes[0] != hashes[1]


def base_model_of(report: Report, arm: ArmRecord, published: Published) -> str | None:
    """Return the hub id of the model that was quantized; ``None`` for an unknown one, and for equal weights."""
    if published.base_model is not None:
        return published.base_model
    name = report.reference.model
    match = _HUB_ID.fullmatch(name)
    if match is None or not has_other_weights(report, arm) or name.endswith(".gguf") or Path(name).exists():
        return None  # a path wins over a hub id of the same spelling, as in a run
    return match["repo"]


def metadata(report: Report, arm: ArmRecord, published: Published) -> dict[str, Any]:
    """Return the metadata of a card: keys of the hub in the order in which they are written."""
    gguf, other = PurePath(arm.model).suffix == ".gguf", has_other_weights(report, arm)
    base = base_model_of(report, arm, published)
    library = "gguf" if gguf else "transformers" if arm.weights_sha256 is not None else None
    found = {
        "base_model": base,
        "base_model_relation": "quantized" if base is not None else None,
        "quantized_by": published.quantized_by,
        "library_name": library,
        "tags": ["fidelab", *(["gguf"] if gguf else []), *(["quantized"] if other or base else [])],
    }
    return {key: value for key, value in found.items() if value is not None}


def model_card(report: Report, arm: ArmRecord, published: Published | None = None, *, images: bool = False) -> str:
    """Return a model card: metadata, and the section for people.

    ``images``: the card shows :data:`BADGE` and :data:`FRONTIER`, as far as the report has them.

    Raises:
        UsageError: If no test has a figure.
    """
    if next(_headlines(arm), None) is None:
        raise UsageError(f"{report.run_id} has no figure of fidelity for {arm.name}: there is nothing for a model card")
    head = yaml.safe_dump(metadata(report, arm, published or Published()), sort_keys=False, allow_unicode=True)
    drawn = drawings(report, arm) if images else {}
    name = escaped(one_line(arm.name))
    shown = {BADGE: f"![KLD of {name}]({BADGE})\n\n", FRONTIER: f"\n![KLD against size]({FRONTIER})\n"}
    badge, frontier = (shown[file] if file in drawn else "" for file in (BADGE, FRONTIER))
    return f"---\n{head}---\n\n# Fidelity of {code_span(arm.name)}\n\n{badge}{report.to_markdown()}{frontier}"


def drawings(report: Report, arm: ArmRecord) -> dict[str, str]:
    """Return the SVG files next to a card by name; without those for which the report lacks figures."""
    found = {}
    if arm.deciding is not None and arm.deciding.value("mean") is not None:
        found[BADGE] = f"{badge_svg(report, arm)}\n"
    if (frontier := frontier_svg(report, _PIXELS)) is not None:
        found[FRONTIER] = f"{frontier}\n"
    return found


def eval_results(report: Report, arm: ArmRecord, data: DataSet | None = None) -> str | None:
    """Return the content of :data:`EVAL_RESULTS`: an entry per first figure of each test whose data set is on the hub.

    That is ``data``, else the borrowed reference's pack, else the text that comes from the hub.  ``None``: there is
    none.
    """
    found = [
        _entry(report, arm, name, measured, metric, dataset)
        for name, measured, metric in _headlines(arm)
        for dataset in [data or _data_of(report, name)]
        if dataset is not None
    ]
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=120) if found else None


def _data_of(report: Report, axis: str) -> DataSet | None:
    packed = _PACKED.fullmatch(report.borrowed.place) if report.borrowed else None
    if packed is not None:
        return DataSet(packed["repo"], packed["revision"])
    text = _TEXTS.get(str(report.settings.get("text")))
    return DataSet(text) if text is not None and axis == DECIDING else None


def _entry(
    report: Report, arm: ArmRecord, axis: str, measured: Measurement, metric: Metric, data: DataSet
) -> dict[str, Any]:
    place = label(metric.cell)
    notes = [
        f"{one_line(arm.name)}: {one_line(axis)} {heading(metric.name, metric.unit)}{f' at {place}' if place else ''}",
        f"95% {format_interval(metric.ci, metric.unit)}" if metric.ci else "",
        "lower bound" if metric.bound else "",
        f"reference {one_line(report.reference.name)} of {one_line(public_name(report.reference.model))}",
        counted(measured.n_items, "item") if measured.n_items else "",
        f"{arm.engine}, fidelab {report.fidelab_version}",
    ]
    dataset = {"id": data.repo, "task_id": "_".join(filter(None, (slug(axis), slug(metric.key), slug(place))))}
    if data.revision is not None:
        dataset["revision"] = data.revision
    return {
        "dataset": dataset,
        "value": metric.value,
        "date": report.created.date().isoformat(),
        "notes": "; ".join(filter(None, notes)),
    }


def _headlines(arm: ArmRecord) -> Iterator[tuple[str, Measurement, Metric]]:
    """Test, its measurement, and each of its first figures that has a value."""
    for name, measured in arm.axes.items():
        if measured.status not in NEEDS_REASON:
            yield from ((name, measured, metric) for metric in measured.headlines if metric.value is not None)
