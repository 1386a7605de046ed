"""The cross-engine experiment: one text on several engines, one after another, and what they say together.

For each engine: its candidate against its own reference, an ordinary run.  Then the references against one another.
What an engine cannot do stays in its rows; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from typing import Any

from fidelab.axes import AXES
from fidelab.axes.base import load_axis, parts_of
from fidelab.axes.perplexity import Perplexity
from fidelab.bench.base import load_bench
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.config.cross import KIND, CrossEngine, EngineLine
from fidelab.config.load import dump
from fidelab.config.schema import EngineConfig, Experiment
from fidelab.config.trust import remember
from fidelab.core import Status, usable_cores
from fidelab.core.errors import FidelabError
from fidelab.core.paths import expand
from fidelab.engines.base import engine_class
from fidelab.inputs.prompts import load_prompts
from fidelab.inputs.texts import load_text
from fidelab.models import resolve
from fidelab.results.measurement import DECIDING, Coordinates, Definition, Flag, Measurement, Metric, key_of
from fidelab.results.numbers import counted
from fidelab.results.outcomes import ArmResult, read_outcomes
from fidelab.results.record import Report
from fidelab.results.store import RunFolder
from fidelab.results.study import PART, Study, StudyRow
from fidelab.run.pipeline import execute
from fidelab.run.runner import Listener
from fidelab.scoring.pairing import Scorer
from fidelab.studies.study import arm_of, new_study, write_study

CrossWatch = Callable[[str], Listener | None]

_AXES = ("trajectory", DECIDING, "rniah", "plad", "perplexity")  # where none is named, in their quick sizes
_COLUMNS = (
    *("engine", "model", "version", "KV", "rows from", "load", "bytes_per_token", "floor"),  # the reference
    *("context", "perplexity"),
    *("arm", "tokens", "depth", "batch", "prefill_rate", "decode_isolated", "decode_by_subtraction"),
    *("from", "kld", "top1"),  # of candidates and of references from one another
)
_TIMED = ("prefill", "decode")  # benches with columns of their own, in one table; others have a table each
_NOTE = (
    "16-bit references, each engine's 8-bit cache against its own reference, references from one another; "
    "timing: medians of the repeats"
)
_PPL = Definition("perplexity", "", "lower", "Perplexity of the reference over the same windows.")
_BYTES = Definition("bytes_per_token", "bytes", "lower", "Bytes of cache per token, as stored.", exact=True)
_LOAD = Definition("load", "s", "lower", "From the job's arrival in the worker to the loaded model, imports included.")
_COMPOSITE = Definition("composite", "points", "higher", "Harmonic mean of the four tests.")


def run_cross(cross: CrossEngine, *, command: str, watch: CrossWatch = lambda _what: None) -> tuple[Study, RunFolder]:
    """Run the experiment in a new folder. Its ``study.json`` grows with every engine.

    ``watch``: called with the name of each step; returns its listener.

    Raises:
        FidelabError: If the run cannot start. Failures of an engine are in its rows.
        KeyboardInterrupt: If stopped. Finished captures are kept.
    """
    cross = _filled(cross)
    load_text(cross.text)
    load_prompts(None if cross.prompts == "default" else Path(cross.prompts))
    resolve(cross.model)
    created = datetime.now(UTC).replace(microsecond=0)
    config = dump(cross, {"command": command, "created": created.isoformat()})
    folder = RunFolder.create(Path(cross.output_dir), KIND, config)
    remember(cross, config, folder.config)
    axes = tuple(dict.fromkeys(_score_key(name) for name in cross.axes or {}))
    study = new_study(
        run_id=folder.run_id,
        created=created,
        command=command,
        settings=cross.model_dump(mode="json"),
        kind=KIND,
        title=f"{Path(cross.model).name}, {counted(len(cross.engines), 'engine')}",
        columns=tuple(dict.fromkeys((*_COLUMNS, *axes, "composite", "band", "verdict"))),
        note=_NOTE,
    )
    references: dict[str, ArmResult] = {}
    try:
        for line in cross.engines:
            rows, reference = _Line(cross, line, folder.path, command, watch).measure()
            arms = dict(study.arms)
            if reference is not None:
                references[line.label] = reference
                arms[f"reference of {line.label}"] = arm_of(reference)
            kept = (*study.columns, *_bench_columns(cross, rows))
            study = study.model_copy(
                update={"rows": (*study.rows, *rows), "arms": arms, "columns": tuple(dict.fromkeys(kept))}
            )
            write_study(study, folder)
        if DECIDING in (cross.axes or {}):
            pairs = agreement(_experiment(cross, cross.engines[0], folder.path), references)
            study = study.model_copy(update={"rows": (*study.rows, *pairs)})
            write_study(study, folder)
    except KeyboardInterrupt:  # the folder of a single engine's run cannot be resumed
        raise KeyboardInterrupt from None
    return study, folder


def _bench_columns(cross: CrossEngine, rows: Sequence[StudyRow]) -> list[str]:
    """Return the metrics of benches that have a table of their own."""
    return [metric.key for row in rows if row.at[PART] in cross.benches for metric in row.metrics]


def experiments_of(cross: CrossEngine) -> dict[str, Experiment]:
    """Return the experiment of each engine by the name of its line, without running anything.

    Raises as :func:`run_cross`.
    """
    cross = _filled(cross)
    resolve(cross.model)
    nowhere = Path(cross.output_dir) / "dry-run"
    return {line.label: _experiment(cross, line, nowhere) for line in cross.engines}


def line_failure(cross: CrossEngine, line: EngineLine, error: FidelabError) -> str:
    """Return why a line cannot run, with what to do where its files are missing."""
    text, gguf = str(error), engine_class(line.engine.name).checkpoint_format == "gguf"
    if line.model is not None and line.model.endswith(".gguf") and not expand(line.model).exists():
        source = cross.model if not cross.model.endswith(".gguf") else "the model"
        return f"{text}; make it from {source} with llama.cpp's convert_hf_to_gguf.py, or name another file"
    if line.model is None and gguf and "none: pass" in text:
        return f"{text} as 'model' of this engine's line"
    return text


def agreement(experiment: Experiment, arms: Mapping[str, ArmResult]) -> tuple[StudyRow, ...]:
    """Return the mean KL of every arm from every other, over captures of axis ``kld``. Arms without one are left out.

    ``experiment``: its KLD settings and seed are used.  ``arms``: name → result.
    """
    alone = experiment.model_copy(update={"axes": {DECIDING: experiment.axes[DECIDING]}})
    results = {name: replace(arm, role=f"arm:{name}") for name, arm in arms.items() if parts_of(DECIDING, arm.captures)}
    scorers = {name: Scorer(alone, list(results.values()), {}, reference=arm.role) for name, arm in results.items()}
    return tuple(_agree(scorers[one], one, results[other], other) for one, other in permutations(results, 2))


# ------------------------------------------------------------------------------------------- one engine


@dataclass(frozen=True)
class _Line:
    """One engine of the experiment."""

    cross: CrossEngine
    line: EngineLine
    folder: Path
    command: str
    watch: CrossWatch

    def measure(self) -> tuple[list[StudyRow], ArmResult | None]:
        """Rows about this engine, what it cannot do included; and its reference, where that was asked."""
        experiment = _experiment(self.cross, self.line, self.folder)
        try:
            report, run = execute(experiment, command=self.command, listener=self.watch(self.line.label))
            reference = next(result for result in read_outcomes(run)[0] if result.role == "reference")
            return list(self._rows(report, run, reference)), reference
        except FidelabError as error:
            return [self._row("reference", Status.FAILED, line_failure(self.cross, self.line, error))], None

    def _rows(self, report: Report, run: RunFolder, reference: ArmResult) -> Iterator[StudyRow]:
        line, cross, ran = self.line, self.cross, report.reference.ran
        capture = next(iter(parts_of(DECIDING, reference.captures).values()), None)
        well, floor = report.reference.status is Status.OK, report.floor.get(DECIDING)
        facts = {
            "model": Path(line.model).name if line.model else None,
            "version": _version(line.engine, ran.versions if ran else {}),
            "KV": str(reference.arm.kv.label),
            "dtype": reference.arm.dtype,
            "rows from": None if capture is None else str(Capture(capture, verify=False).estimator),
            "run": str(run.path.relative_to(self.folder)),
        }
        metrics = [_BYTES(ran.cache_bytes_per_token)] if ran and ran.cache_bytes_per_token is not None else []
        if (load := reference.timing.get("load_seconds")) is not None:
            metrics.append(_LOAD(load))
        if floor is not None and (own := floor.metric("mean")) is not None:
            metrics.append(own.model_copy(update={"key": "floor", "name": "floor"}))
        outcome = report.reference.status, report.reference.reason
        yield self._row("reference", *outcome, metrics, {key: value for key, value in facts.items() if value})
        for context, perplexity in (_perplexity(cross, reference) if well else {}).items():
            yield self._row("perplexity", Status.OK, None, [_PPL(perplexity)], context=context)
        for role, arm in (("reference", report.reference), ("candidate", report.candidates[0])):
            yield from (row for name, bench in arm.benches.items() for row in self._speed(role, name, bench))
        yield self._candidate(report)

    def _row(
        self,
        part: str,
        status: Status,
        reason: str | None = None,
        metrics: Iterable[Metric] = (),
        facts: Mapping[str, Any] | None = None,
        flags: Iterable[Flag] = (),
        **at: int | str,
    ) -> StudyRow:
        return StudyRow(
            status=status,
            reason=reason,
            at={"engine": self.line.label, PART: part, **at},
            metrics=tuple(metrics),
            facts=dict(facts or {}),
            flags=tuple(flags),
        )

    def _candidate(self, report: Report) -> StudyRow:
        """The engine's 8-bit cache against its own 16-bit reference."""
        [arm] = report.candidates
        metrics = []
        for name in report.settings["axes"]:
            axis = arm.axes.get(name)
            if axis is not None and name == DECIDING:
                metrics += _divergences(axis)
            if axis is not None and (score := axis.metric("score")) is not None:
                metrics.append(score.model_copy(update={"key": _score_key(name), "name": f"{name} score"}))
        facts = {"KV": self.line.candidate.label}
        if (composite := arm.composite) is not None:
            metrics.append(_COMPOSITE(composite.value, composite.ci))
            if composite.band is not None:
                facts["band"] = composite.band + (", too close" if composite.too_close_to_call else "")
        if (verdict := arm.verdict) is not None:
            open_ = f"cannot tell, at best {verdict.at_best}" if verdict.at_worst else f"at best {verdict.at_best}"
            if word := verdict.band or (open_ if verdict.at_best else ""):
                facts["verdict"] = f"{word}, modified" if verdict.modified else word
        return self._row("candidate", arm.status, arm.reason, metrics, facts)

    def _speed(self, role: str, name: str, bench: Measurement) -> Iterator[StudyRow]:
        """A row for each shape of work of a bench, and one where there is none."""
        for at in bench.shapes() or [{}]:
            cell, metrics = bench.cell(at), [metric for metric in bench.metrics if metric.cell == at]
            flags = dict.fromkeys(
                (*(cell.flags if cell else ()), *(flag for metric in metrics for flag in metric.flags))
            )
            named = [
                metric.model_copy(update={"key": f"{name}_{metric.key}", "name": f"{name} {metric.name}", "cell": {}})
                for metric in metrics
            ]
            yield StudyRow(
                status=cell.status if cell else bench.status,
                reason=cell.reason if cell else bench.reason,
                at={"engine": self.line.label, PART: "timing" if name in _TIMED else name, "arm": role, **at},
                metrics=tuple(named),
                flags=tuple(flags),
            )


def _experiment(cross: CrossEngine, line: EngineLine, folder: Path) -> Experiment:
    found = cross.experiment(line, cross.axes or {}, str(folder / "runs"))
    return found.model_copy(update={"keep_rows": True})  # other engines' arms are compared with them afterwards


def _version(engine: EngineConfig, versions: Mapping[str, str]) -> str | None:
    """The package that brings the engine."""
    cls = engine_class(engine.name)
    packages = cls.packages or (cls.library or cls.name,)
    return next((f"{name} {versions[name]}" for name in packages if name in versions), None)


def _perplexity(cross: CrossEngine, reference: ArmResult) -> dict[int, float | None]:
    """Context → perplexity of the reference alone, over all its rows."""
    parts = parts_of("perplexity", reference.captures)
    if not parts:
        return {}
    axis = Perplexity(Perplexity.Settings.model_validate((cross.axes or {})["perplexity"]))
    captures = {part: Capture(path) for part, path in parts.items()}
    score = axis.score_parts({part: Pair.match(own, own) for part, own in captures.items()}, cross.seed)
    perplexities = (metric for metric in score.found.metrics if metric.key == "reference_ppl")
    return {int(metric.cell["context"]): metric.value for metric in perplexities}


def _score_key(axis: str) -> str:
    return f"{key_of(axis)}_score"


def _divergences(kld: Measurement) -> list[Metric]:
    """Mean KL and share of equal top tokens, by the names of the study's columns."""
    names = {"mean": ("kld", "mean KL"), "top1": ("top1", "same top token")}
    found = ((kld.metric(own), key, title) for own, (key, title) in names.items())
    return [metric.model_copy(update={"key": key, "name": title}) for metric, key, title in found if metric is not None]


def _agree(scorer: Scorer, reference: str, other: ArmResult, name: str) -> StudyRow:
    measured = scorer.measure(other)
    score = measured.deciding
    at: Coordinates = {"engine": name, PART: "agreement", "from": reference}
    if score is None:
        return StudyRow(status=Status.FAILED, reason=measured.reason or "no full-vocabulary KLD", at=at)
    return StudyRow(
        status=measured.status,
        reason=measured.reason,
        at=at,
        metrics=tuple(_divergences(score.found)),
        n_items=len(score.usable),
        n_failed=int((~score.usable).sum()),
    )


# --------------------------------------------------------------------------------------------- settings


def _filled(cross: CrossEngine) -> CrossEngine:
    """Every default spelled out.

    Raises:
        FidelabError: If an engine or axis does not exist, or an axis does not have a setting.
    """
    for line in cross.engines:
        engine_class(line.engine.name)
    axes = cross.axes or {name: dict(AXES.load(name).quick) for name in _AXES}
    return cross.model_copy(
        update={
            "axes": {name: load_axis(name, values).settings.model_dump(mode="json") for name, values in axes.items()},
            "benches": {
                name: load_bench(name, values).settings.model_dump(mode="json")
                for name, values in cross.benches.items()
            },
            "threads": cross.threads or usable_cores(),
        }
    )
