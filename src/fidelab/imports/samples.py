"""Right and wrong answers of other tools, item by item: paired with a reference's, and written as a run.

Each tool's reader fills :class:`Samples`; the statistics are one.  See docs/metrics/between-runs.md#imported-results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core import Status
from fidelab.core.errors import InputError, MismatchError
from fidelab.imports.write_run import ImportedArm, Source, labels_of, write_run
from fidelab.metrics.equivalence import MARGIN, Loss, certify, flip_counts
from fidelab.metrics.intervals import RatioItems, event_interval, paired_difference
from fidelab.results.decision_record import Certificate, FlipRecord
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.record import ArmRecord, Verdict

_ACCURACY = Definition("accuracy", "share", "higher", "Share of the items that the configuration answers correctly.")
_REFERENCE = Definition("reference_accuracy", "share", None, "Share of the items that the reference gets right.")
_DIFFERENCE = Definition("difference", "points", "higher", "Accuracy minus the reference's, paired over the items.")
_P = Definition("mcnemar_p", "p", None, "McNemar's exact test of items lost against gained.", name="McNemar p")
_UNPAIRED = Definition("unpaired_p", "p", None, "The z-test that the harness's own comparison makes of two means.")
_LOST = Definition("lost", "count", None, "Items that only the reference answers correctly.")
_GAINED = Definition("gained", "count", None, "Items that only this configuration answers correctly.")

Key = tuple[str, str, str]  # task, filter, metric


@dataclass
class Samples:
    """The items of one folder: key → item → 0 or 1.

    Attributes:
        tool: name of the tool, as its results are called in reports.
        documents, prompts: (task, item) → hash of its content, and of the text that the model read.
        left: keys with other values than 0 and 1, which are left out.
        earlier: task → how many runs the folder has besides the one that is read, and the name of that one.
        repeats: items of one question have the same number after a division by this.
    """

    tool: str
    path: Path
    values: dict[Key, dict[int, float]] = field(default_factory=dict)
    documents: dict[tuple[str, int], str] = field(default_factory=dict)
    prompts: dict[tuple[str, int], str] = field(default_factory=dict)
    left: set[Key] = field(default_factory=set)
    earlier: dict[str, tuple[int, str]] = field(default_factory=dict)
    repeats: int = 1


def compare_samples(
    read: Callable[[Path], Samples],
    ref: Path,
    tests: Sequence[Path],
    output_dir: Path,
    *,
    names: Sequence[str] | None = None,
    margin: float = MARGIN,
    seed: int = 42,
    command: str = "",
) -> ImportedArm:
    """Compare folders of samples, as ``read`` reads them, with a reference folder, and write a run folder.

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
        return _alone(read(ref), output_dir, command)
    labels = labels_of(ref, tests, names)
    reference, arms = read(ref), [read(test) for test in tests]
    tool = reference.tool
    pairs = [_paired(reference, arm) for arm in arms]
    bare: dict[str, Any] = {"engine": tool, "model": "unstated model"}
    records = []
    for label, arm, pair in zip(labels, arms, pairs, strict=True):
        prompts = partial(_other_prompts, reference, arm)
        axes = {_axis_name(tool, key): _axis(key, *sides, seed) for key, sides in pair.items()}
        certificates = {
            _axis_name(tool, key): Certificate.of(
                certify([Loss.of_accuracy(*sides, margin)], seed), flips=[FlipRecord.of(*sides)]
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
                            *(f"{task}: {said}" for task in _tasks(pair) if (said := prompts(task))),
                        ]
                    )
                ),
                **bare,
            )
        )
    facts = {"reference": str(ref.name), "margin": margin, "tasks": _tasks(reference.values)}
    source = Source(tool, facts, facts, {tool: facts["tasks"]})
    report, folder = write_run(
        source, ArmRecord(status=Status.OK, name=ref.resolve().name, **bare), records, output_dir, command
    )
    return ImportedArm(report, folder, tuple(_notes(reference, arms, pairs)))


def _alone(samples: Samples, output_dir: Path, command: str) -> ImportedArm:
    """Write a run of one folder: its accuracies with their intervals, compared with nothing."""
    path, tool = samples.path, samples.tool
    axes = {_axis_name(tool, key): _accuracy(samples, key) for key in sorted(samples.values)}
    if not axes:
        raise InputError(f"{path} has no task with right and wrong answers")
    facts = {"reference": path.name, "tasks": _tasks(samples.values)}
    source = Source(tool, facts, facts, {tool: facts["tasks"]})
    arm = ArmRecord(
        status=Status.OK,
        name=path.resolve().name,
        engine=tool,
        model="unstated model",
        axes=axes,
    )
    report, folder = write_run(source, arm, [], output_dir, command)
    notes = (*_notes(samples, [], []), "nothing was compared: name another folder to compare with this one")
    return ImportedArm(report, folder, notes)


def _accuracy(samples: Samples, key: Key) -> Measurement:
    values = samples.values[key]
    events = RatioItems.of([*values.values()], 1.0, [item // samples.repeats for item in values])
    right, n, questions = int(events.num.sum()), len(values), len(np.unique(events.clusters))
    return Measurement(
        status=Status.OK,
        title=_title(key),
        n_items=n,
        n_clusters=questions,
        cluster="item" if questions == n else "question",
        metrics=(_ACCURACY(right / n, event_interval(events), headline=True),),
        summary=f"{right} of {n} right",
    )


def _title(key: Key) -> str:
    return f"{key[0]}, {key[2]}" + (f" ({key[1]})" if key[1] != "none" else "")


Sides = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]  # right answers of both, and questions


def _paired(ref: Samples, test: Samples) -> dict[Key, Sides]:
    """Return the correct answers of both sides, item by item, and the number of each item's question."""
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
        questions = np.array(order, dtype=np.int64) // ref.repeats
        pairs[key] = np.array([ours[n] for n in order]), np.array([theirs[n] for n in order]), questions
    return pairs


def _axis_name(tool: str, key: Key) -> str:
    task, filter_, metric = key
    return ":".join([tool, task, metric, *([] if filter_ == "none" else [filter_])])


def _axis(
    key: Key, ref: NDArray[np.float64], test: NDArray[np.float64], questions: NDArray[np.int64], seed: int
) -> Measurement:
    n, n_questions = len(ref), len(np.unique(questions))
    right, left = (RatioItems.of(side, 1.0, questions) for side in (test, ref))
    difference = paired_difference(right, left, seed, scale=100.0, bounds=(0.0, 1.0), proportion=True)
    flips = flip_counts(ref, test, questions)
    errors = [side.std(ddof=1) / math.sqrt(n) for side in (ref, test)] if n > 1 else [0.0]
    error = math.hypot(*errors)
    return Measurement(
        status=Status.IDENTICAL if (ref == test).all() else Status.OK,
        title=_title(key),
        n_items=n,
        n_clusters=n_questions,
        cluster="item" if n_questions == n else "question",
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
    return f"{name.partition(':')[2]}: {counts}; {words[claim.state]}"


def _tasks(keys: Iterable[Key]) -> list[str]:
    return sorted({task for task, *_ in keys})


def _other_prompts(ref: Samples, arm: Samples, task: str) -> str:
    """Say in how many items of a task two models read other prompts; empty: in none, or the files do not say."""
    common = [key for key in ref.prompts.keys() & arm.prompts.keys() if key[0] == task]
    differ = sum(ref.prompts[key] != arm.prompts[key] for key in common)
    if not differ:
        return ""
    where = f"{differ} of {len(common)} items"
    return f"prompt_hash differs in {where} (chat template, few-shots): more than the model differs"


def _notes(ref: Samples, arms: Sequence[Samples], pairs: Sequence[Mapping[Key, Any]]) -> Iterator[str]:
    for side in (ref, *arms):
        for task, (count, name) in sorted(side.earlier.items()):
            others = "an earlier run" if count == 1 else f"{count} earlier runs"
            yield f"{side.path} has {others} of {task}; {name} was read"
    for key in sorted(set[Key]().union(ref.left, *(arm.left for arm in arms))):
        yield f"{_axis_name(ref.tool, key)} has values other than 0 and 1 and was left out"
    for arm, pair in zip(arms, pairs, strict=True):
        alone = sorted({key[0] for key in ref.values.keys() ^ arm.values.keys()} - {key[0] for key in pair})
        if alone:
            yield f"{arm.path} and {ref.path} do not both have {', '.join(alone)}"
        for task in _tasks(pair):
            if differ := _other_prompts(ref, arm, task):
                yield f"{task}: {differ}"
