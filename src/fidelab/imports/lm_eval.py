"""``fidelab import lm-eval``: samples of lm-evaluation-harness (``--log_samples``), compared item by item.

Each folder holds ``samples_TASK_TIME.jsonl`` (in a folder of the model's name, or next to it), a line per item and
filter with ``doc_id``, ``doc_hash``, ``target_hash`` and the values of its metrics.  The harness compares two models by
an unpaired z-test of their means, which ignores that both answered the same items; here items are paired. Metrics that
are 0 or 1 are read, others are listed and omitted.  See docs/metrics.md#imported-results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core import Status, plain_json
from fidelab.core.errors import InputError, MismatchError
from fidelab.imports.write_run import ImportedArm, Source, labels_of, write_run
from fidelab.metrics.equivalence import MARGIN, Loss, certify, flip_counts
from fidelab.metrics.intervals import RatioItems, binomial_interval, paired_difference
from fidelab.results.decision_record import Certificate, FlipRecord
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.record import ArmRecord, Verdict

_SAMPLES_NAME = re.compile(r"samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.:-]+\.jsonl")
_MAX_FILE_BYTES = 1 << 30  # bytes of a file
_LISTED = 6  # models that one line names
_SAMPLE_KEYS = {"doc_id", "doc_hash", "prompt_hash", "target_hash", "filter"}

_ACCURACY = Definition("accuracy", "share", "higher", "Share of the items that the configuration answers correctly.")
_REFERENCE = Definition("reference_accuracy", "share", None, "Share of the items that the reference gets right.")
_DIFFERENCE = Definition("difference", "points", "higher", "Accuracy minus the reference's, paired over the items.")
_P = Definition("mcnemar_p", "p", None, "McNemar's exact test of items lost against gained.", name="McNemar p")
_UNPAIRED = Definition("unpaired_p", "p", None, "The z-test that the harness's own comparison makes of two means.")
_LOST = Definition("lost", "count", None, "Items that only the reference answers correctly.")
_GAINED = Definition("gained", "count", None, "Items that only this configuration answers correctly.")

Key = tuple[str, str, str]  # task, filter, metric


@dataclass
class _Samples:
    """The items of one folder: key → document → 0 or 1.

    ``documents``, ``prompts``: (task, document) → hash of its content, and of the text that the model read.
    ``earlier``: task → how many runs the folder has besides the one that is read, and the name of that one.
    """

    path: Path
    values: dict[Key, dict[int, float]] = field(default_factory=dict)
    documents: dict[tuple[str, int], str] = field(default_factory=dict)
    prompts: dict[tuple[str, int], str] = field(default_factory=dict)
    left: set[Key] = field(default_factory=set)
    earlier: dict[str, tuple[int, str]] = field(default_factory=dict)


def import_samples(
    ref: Path,
    tests: Sequence[Path],
    output_dir: Path,
    *,
    names: Sequence[str] | None = None,
    margin: float = MARGIN,
    seed: int = 42,
    command: str = "",
) -> ImportedArm:
    """Compare folders of samples with a reference folder, and write a run folder.

    Without ``tests``, the run has the accuracies of ``ref`` with their intervals, and compares nothing.

    Args:
        names: of the candidates, one per folder; the folders' names by default.
        margin: loss of accuracy that the certificate rules out, 0 … 1.
        seed: of the bootstrap.

    Raises:
        InputError: If a folder has no samples, or a line is damaged.  The message names file and line.
        MismatchError: If folders have no task in common, or different items in a task.
        UsageError: If names do not fit, or the reference is also a test.
    """
    if not tests and names is None:
        return _alone(ref, output_dir, command)
    labels = labels_of(ref, tests, names)
    reference, arms = _read(ref), [_read(test) for test in tests]
    pairs = [_paired(reference, arm) for arm in arms]
    bare: dict[str, Any] = {"engine": "lm-eval", "model": "unstated model"}
    records = []
    for label, arm, pair in zip(labels, arms, pairs, strict=True):
        prompts = partial(_other_prompts, reference, arm)
        axes = {_axis_name(key): _axis(key, *sides, seed) for key, sides in pair.items()}
        certificates = {
            _axis_name(key): Certificate.of(
                certify([Loss.of_accuracy(*sides, np.arange(len(sides[0])), margin)], seed),
                flips=[FlipRecord.of(*sides, np.arange(len(sides[0])))],
            )
            for key, sides in pair.items()
        }
        records.append(
            ArmRecord(
                status=Status.OK,
                name=label,
                axes=axes,
                certificates=certificates,
                verdict=Verdict(
                    sentence="; ".join(
                        [
                            *(_summarize(name, axes[name], certificates[name]) for name in axes),
                            *(
                                f"{task}: {said}"
                                for task in sorted({key[0] for key in pair})
                                if (said := prompts(task))
                            ),
                        ]
                    )
                ),
                **bare,
            )
        )
    facts = {"reference": str(ref.name), "margin": margin, "tasks": sorted({key[0] for key in reference.values})}
    source = Source("lm-eval", facts, facts, {"lm-eval": facts["tasks"]})
    report, folder = write_run(
        source, ArmRecord(status=Status.OK, name=ref.resolve().name, **bare), records, output_dir, command
    )
    return ImportedArm(report, folder, tuple(_notes(reference, arms, pairs)))


def _alone(path: Path, output_dir: Path, command: str) -> ImportedArm:
    """Write a run of one folder: its accuracies with their intervals, compared with nothing."""
    samples = _read(path)
    axes = {_axis_name(key): _accuracy(key, values) for key, values in sorted(samples.values.items())}
    if not axes:
        raise InputError(f"{path} has no task with right and wrong answers")
    facts = {"reference": path.name, "tasks": _tasks(samples.values)}
    source = Source("lm-eval", facts, facts, {"lm-eval": facts["tasks"]})
    arm = ArmRecord(
        status=Status.OK,
        name=path.resolve().name,
        engine="lm-eval",
        model="unstated model",
        axes=axes,
    )
    report, folder = write_run(source, arm, [], output_dir, command)
    notes = (*_notes(samples, [], []), "nothing was compared: name another folder to compare with this one")
    return ImportedArm(report, folder, notes)


def _accuracy(key: Key, values: Mapping[int, float]) -> Measurement:
    right, n = int(sum(values.values())), len(values)
    share = binomial_interval(right, n)
    return Measurement(
        status=Status.OK,
        title=f"{key[0]}, {key[2]}" + (f" ({key[1]})" if key[1] != "none" else ""),
        n_items=n,
        n_clusters=n,
        cluster="item",
        metrics=(_ACCURACY(right / n, share, headline=True),),
        summary=f"{right} of {n} right",
    )


def _read(path: Path) -> _Samples:
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: name what lm_eval --output_path PATH --log_samples wrote")
    files: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("samples_*.jsonl"), key=lambda file: file.name):  # by task, then by time
        if match := _SAMPLES_NAME.fullmatch(file.name):
            files.setdefault(match["task"], []).append(file)
    if not files:
        raise InputError(f"{path} holds no samples_TASK_TIME.jsonl: run lm_eval with --log_samples")
    folders = sorted({file.parent for runs in files.values() for file in runs})
    if len(folders) > 1:
        listed = ", ".join(str(folder.relative_to(path)) for folder in folders[:_LISTED])
        more = f" and {len(folders) - _LISTED} more" if len(folders) > _LISTED else ""
        raise InputError(f"{path} holds samples of {len(folders)} models: name one of {listed}{more}")
    samples = _Samples(path)
    for task, runs in files.items():
        file = runs[-1]
        if len(runs) > 1:
            samples.earlier[task] = (len(runs) - 1, file.name)
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"{file} has more than {_MAX_FILE_BYTES >> 30} GiB: that is not a file of samples")
        with file.open("r", encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    _add(samples, task, line, f"{file}, line {number}")
    return samples


def _add(samples: _Samples, task: str, line: str, where: str) -> None:
    try:
        item = plain_json(line)
        document = item["doc_id"]
        if not isinstance(document, int) or isinstance(document, bool):
            raise TypeError("doc_id is not a whole number")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{where} is not a sample of lm-eval ({error.__class__.__name__}: {error})") from None
    content = f"{item.get('doc_hash')} {item.get('target_hash')}"
    if samples.documents.setdefault((task, document), content) != content:
        raise InputError(f"{where}: item {document} is there twice with different contents")
    if isinstance(item.get("prompt_hash"), str):
        samples.prompts[task, document] = item["prompt_hash"]
    listed = item.get("metrics")
    metrics = listed if isinstance(listed, list) else [name for name in item if name not in _SAMPLE_KEYS]
    for name in filter(lambda name: isinstance(name, str), metrics):
        value = item.get(name)
        if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
            key = task, str(item.get("filter", "none")), name
            samples.values.setdefault(key, {})[document] = float(value)
        elif isinstance(value, int | float | list):
            samples.left.add((task, str(item.get("filter", "none")), name))


def _paired(ref: _Samples, test: _Samples) -> dict[Key, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the correct answers of both sides, item by item."""
    common = [key for key in ref.values if key in test.values and key not in ref.left | test.left]
    if not common:
        have, there = (sorted({key[0] for key in side.values}) or ["nothing"] for side in (ref, test))
        raise MismatchError(
            f"{ref.path} and {test.path} have no task with right and wrong answers in common: {', '.join(have[:5])} "
            f"against {', '.join(there[:5])}"
        )
    pairs = {}
    for key in common:
        ours, theirs = ref.values[key], test.values[key]
        if odd := sorted(ours.keys() ^ theirs.keys()):
            raise MismatchError(
                f"task {key[0]}: item {odd[0]} is in only one of {ref.path} and {test.path}, with {len(odd) - 1} "
                "more: run both with the same items (--limit, --samples)"
            )
        other = next((n for n in ours if ref.documents[key[0], n] != test.documents[key[0], n]), None)
        if other is not None:
            raise MismatchError(
                f"task {key[0]}: item {other} has other content in {test.path} than in {ref.path}: another version of "
                "the task, or another order"
            )
        order = sorted(ours)
        pairs[key] = np.array([ours[n] for n in order]), np.array([theirs[n] for n in order])
    return pairs


def _axis_name(key: Key) -> str:
    task, filter_, metric = key
    return ":".join(["lm-eval", task, metric, *([] if filter_ == "none" else [filter_])])


def _axis(key: Key, ref: NDArray[np.float64], test: NDArray[np.float64], seed: int) -> Measurement:
    n = len(ref)
    items = np.arange(n)
    right, left = (RatioItems.of(side, 1.0, items) for side in (test, ref))
    difference = paired_difference(right, left, seed, scale=100.0, bounds=(0.0, 1.0), proportion=True)
    flips = flip_counts(ref, test, items)
    errors = [side.std(ddof=1) / math.sqrt(n) for side in (ref, test)] if n > 1 else [0.0]
    error = math.hypot(*errors)
    return Measurement(
        status=Status.IDENTICAL if (ref == test).all() else Status.OK,
        title=f"{key[0]}, {key[2]}" + (f" ({key[1]})" if key[1] != "none" else ""),
        n_items=n,
        n_clusters=n,
        cluster="item",
        metrics=(
            _DIFFERENCE(difference.estimate, difference.interval, headline=True),
            _ACCURACY(float(test.mean())),
            _REFERENCE(float(ref.mean())),
            _P(flips.p),
            _UNPAIRED(None if error == 0.0 else math.erfc(abs(test.mean() - ref.mean()) / error / math.sqrt(2))),
            _LOST(flips.harmful),
            _GAINED(flips.beneficial),
        ),
    )


def _summarize(name: str, axis: Measurement, certificate: Certificate) -> str:
    [claim] = certificate.claims
    words = {
        "holds": f"a loss of {100 * claim.margin:g} points is ruled out",
        "exceeded": f"a loss of {100 * claim.margin:g} points or more is shown",
        "underpowered": f"too few items to see {100 * claim.margin:g} points",
        "undecided": f"a loss of {100 * claim.margin:g} points is neither shown nor ruled out",
    }
    lost, gained = (int(axis.value(key) or 0) for key in ("lost", "gained"))
    p = axis.value("mcnemar_p")
    counts = f"lost {lost} of {axis.n_items}, gained {gained} (p = {p:.2g})"
    return f"{name.removeprefix('lm-eval:')}: {counts}; {words[claim.state]}"


def _tasks(keys: Iterable[Key]) -> list[str]:
    return sorted({task for task, *_ in keys})


def _other_prompts(ref: _Samples, arm: _Samples, task: str) -> str:
    """Say in how many items of a task two models read other prompts; empty: in none, or the files do not say."""
    common = [key for key in ref.prompts.keys() & arm.prompts.keys() if key[0] == task]
    differ = sum(ref.prompts[key] != arm.prompts[key] for key in common)
    if not differ:
        return ""
    where = f"{differ} of {len(common)} items"
    return f"prompt_hash differs in {where} (chat template, few-shots): more than the model differs"


def _notes(ref: _Samples, arms: Sequence[_Samples], pairs: Sequence[Mapping[Key, Any]]) -> Iterator[str]:
    for side in (ref, *arms):
        for task, (count, name) in sorted(side.earlier.items()):
            others = "an earlier run" if count == 1 else f"{count} earlier runs"
            yield f"{side.path} has {others} of {task}; {name} was read"
    for key in sorted(set[Key]().union(ref.left, *(arm.left for arm in arms))):
        yield f"{_axis_name(key)} has values other than 0 and 1 and was left out"
    for arm, pair in zip(arms, pairs, strict=True):
        alone = sorted({key[0] for key in ref.values.keys() ^ arm.values.keys()} - {key[0] for key in pair})
        if alone:
            yield f"{arm.path} and {ref.path} do not both have {', '.join(alone)}"
        for task in _tasks(pair):
            if differ := _other_prompts(ref, arm, task):
                yield f"{task}: {differ}"
