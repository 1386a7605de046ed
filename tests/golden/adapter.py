"""What the golden tests know of fidelab: the only file here to edit when modules, records or captures change.

``run`` makes a golden run with the real engine.  ``score`` computes the report of a stored one without any engine.
``rows`` flattens a report.  ``pack`` and ``unpack`` are the present reader and writer of captures.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from fidelab.axes import AXES
from fidelab.bench import BENCHES
from fidelab.bench.base import Answers, Bench, BenchInputs, Facts
from fidelab.captures.container import Array, BFloat16, TensorFile
from fidelab.captures.manifest import capture_key
from fidelab.captures.reader import Capture
from fidelab.captures.requests import request_from_record, request_record
from fidelab.captures.writer import CaptureWriter, store_head, store_vocabulary
from fidelab.config.schema import Experiment
from fidelab.core import Arm, Status, Vocabulary, digest, slug
from fidelab.core.serial import from_json, to_json
from fidelab.inputs.traffic import random_prompts
from fidelab.results.measurement import Measurement, label
from fidelab.results.outcomes import ArmResult, RunFacts, read_outcomes
from fidelab.results.plots import Curve
from fidelab.results.record import ArmRecord, Report
from fidelab.run.pipeline import execute
from fidelab.scoring.score import score_run
from tests.golden.bundle import Bundle
from tests.golden.rows import Kind, Row, number
from tests.golden.runs import BY_ORDER, UNTIED, GoldenRun

_VOLATILE = {"loaded_host_bytes", "peak_device_bytes", "peak_host_bytes"}
_VOLATILE |= {"provenance", "pythonpath", "variables", "versions"}
"""Of what ran: sizes of processes, folders, versions."""


def axes_and_benches() -> list[str]:
    """Names of everything that measures and comes with the package."""
    return [*AXES.built_in, *BENCHES.built_in]


def run(golden: GoldenRun, room: Path) -> Bundle:
    """Run the experiment in an empty folder with the real engine."""
    write_files(golden.files, room)
    if golden.answers:
        (room / "answers.json").write_text(json.dumps(_answers(golden.answers)))
    data = dict(golden.experiment)
    if golden.answers:
        data["engine_args"] = {**data.get("engine_args", {}), "answers": "answers.json"}
    if golden.model:
        data["model"] = f"./{_model(golden.model, room / golden.model).name}"
    data["axes"] = {
        name: dict(AXES.load(name).quick) if settings == "quick" else settings
        for name, settings in data["axes"].items()
    }
    timed: list[tuple[str, Mapping[str, Answers], Facts]] = []
    with contextlib.chdir(room), contextlib.ExitStack() as stack:
        for name in data.get("benches", {}):
            stack.enter_context(mock.patch.object(BENCHES.load(name), "record", _noting(name, timed)))
        _, folder = execute(
            Experiment.model_validate({**data, "keep_rows": True}), command="golden"
        )  # the oracle reads them
        results, facts, _ = read_outcomes(folder)
    benched = [result.role for result in results if result.benches]
    per_arm = len(timed) // len(benched) if benched else 0
    notes = {role: timed[n * per_arm : (n + 1) * per_arm] for n, role in enumerate(benched)}
    stored = {**data, "axes": json.loads(json.dumps(data["axes"]))}
    if golden.model:
        stored["model"] = golden.model
    stored["engine"] = "fake" if not golden.model else "hf"
    return pack(stored, facts.unavailable, results, golden.files, notes)


def write_files(files: Mapping[str, str], room: Path) -> None:
    """Write the files that an experiment reads."""
    for name, content in files.items():
        (room / name).parent.mkdir(parents=True, exist_ok=True)
        (room / name).write_text(content, encoding="utf-8")


def _noting(name: str, notes: list[tuple[str, Mapping[str, Answers], Facts]]) -> Any:
    record = BENCHES.load(name).record

    def noted(self: Bench, answers: Mapping[str, Answers], facts: Facts) -> Measurement:
        notes.append((name, answers, facts))
        return record(self, answers, facts)  # type: ignore[no-any-return]

    return noted


def _answers(table: str) -> list[tuple[str, str]]:
    """What the reference answers: text of a prompt and the answer behind it."""
    match table:
        case "needles":
            from fidelab.inputs.needles import draw_needles, sentence

            drawn = [needles for draw in (0, 2) for needles in draw_needles(3, 1, draw, 0)]
            told = [(sentence("cloze", "rare paint", n.codes[0]), f" {n.codes[0]}.") for n in drawn]
            castle = ("Csatle", "zebra" * 4)  # the reference minds this perturbation
            return [*told, castle, *((f"10{i}", letter * 20) for i, letter in enumerate("xabc"))]
        case "questions":
            from fidelab.inputs.needles import draw_needles, sentence

            drawn = list(draw_needles(4, 1, 2, 0))
            # The last one is answered with a wrong code, too.
            told = [(sentence("question", "rare paint", n.codes[0]), f" {n.codes[0]}") for n in drawn[:3]]
            return [*told, (sentence("question", "rare paint", drawn[3].codes[0]), f" {drawn[3].wrong[0]}")]
        case "problems":
            return [(f"Problem {i:02}:", f" It is {17 * i}.\n#### {17 * i}") for i in range(24)]
        case "eval":
            from fidelab.inputs.questions.load import load_questions

            asked = [one for one in load_questions() if one.kind in ("arithmetic", "word-problems")]
            told = [(one.messages[-1]["content"], f" {one.answer.splitlines()[-1][-20:]}") for one in asked]
            return [*told[:-1], (told[-1][0], " 0")]
        case "toolcalls":
            from fidelab.inputs.tokens import Tokenizer
            from fidelab.inputs.toolcalls.load import load_dialogues
            from fidelab.inputs.toolcalls.prompts import ask
            from fidelab.models import resolve

            bytewise = Tokenizer.load(resolve("fake"))
            calls = [
                ask(bytewise, one, step, "plain JSON") for one in load_dialogues()[:3] for step in range(len(one.steps))
            ]
            longest = sorted(calls, key=lambda one: -len(one.prompt))  # a prompt holds those of earlier turns
            return [(bytes(one.prompt).decode(), bytes(one.right).decode()) for one in longest]
        case "prose":
            from fidelab.inputs.texts import load_text

            prose = load_text("default").content.encode("ascii", "ignore").decode()
            return [(f"prompt {i}", prose[3000 * i : 3000 * i + 180]) for i in range(8)]
    raise ValueError(table)


def _model(kind: str, folder: Path) -> Path:
    """A model of random weights."""
    from tests.engines.tiny import save
    from tests.tiny_models import model

    return save(model(kind), folder)


def pack(
    experiment: Mapping[str, Any],
    unavailable: Mapping[str, str],
    results: Sequence[ArmResult],
    files: Mapping[str, str],
    timed: Mapping[str, Sequence[tuple[str, Mapping[str, Answers], Facts]]] | None = None,
) -> Bundle:
    """A golden run from an experiment and what its arms left, read by the present reader of captures."""
    given = {key: value for key, value in experiment.items() if key not in ("text", "prompts", "traffic")}
    if "traffic" in experiment:
        given["traffic"] = experiment["traffic"]
    needed = {name: text for name, text in files.items() if name.startswith("tasks/")}
    bundle = Bundle({"experiment": given, "unavailable": dict(unavailable), "files": needed})
    requests: list[Any] = []
    vocabularies: list[Any] = []
    heads: list[Any] = []
    arms = []
    for result in results:
        captures = {}
        for axis, folder in sorted(result.captures.items()):
            capture = Capture(folder)
            arrays, bfloat16 = _joined(capture, bundle)
            captures[axis] = {
                "request": _index(requests, request_record(capture.request)),
                "vocabulary": _index(vocabularies, capture.pieces()),
                "head": None if capture.head is None else _index(heads, _head(capture, bundle)),
                "estimator": str(capture.estimator),
                "ran": _steady(capture.manifest["ran"]),
                "facts": {key: value for key, value in capture.manifest["facts"].items() if key != "seconds"},
                "failed": {str(i): item["failed"] for i, item in enumerate(capture.items) if item["failed"]},
                "arrays": arrays,
                "bfloat16": bfloat16,
            }
        arms.append(
            {
                "role": result.role,
                "arm": {**to_json(result.arm), "path": "", "model": Path(result.arm.model).name},
                "status": str(result.status),
                "reason": result.reason,
                "ran": None if result.ran is None else _steady(result.ran),
                "failures": dict(result.failures),
                "captures": captures,
                "benches": [_timed(note, bundle) for note in (timed or {}).get(result.role, ())],
            }
        )
    bundle.text |= {"requests": requests, "vocabularies": vocabularies, "heads": heads, "arms": arms}
    bundle.text = json.loads(json.dumps(bundle.text, default=list))
    return bundle


def _index(known: list[Any], value: Any) -> int:
    if value not in known:
        known.append(value)
    return known.index(value)


def _steady(ran: Mapping[str, Any]) -> dict[str, Any]:
    """What ran, without what differs from machine to machine."""
    return {key: value for key, value in ran.items() if key not in _VOLATILE and value is not None}


def _joined(capture: Capture, bundle: Bundle) -> tuple[dict[str, Any], list[str]]:
    """All items' arrays of each name as one, and which of them are bfloat16."""
    arrays: dict[str, Any] = {}
    wide: list[str] = []
    for name in sorted({name for item in range(len(capture.items)) for name in capture.names(item)}):
        parts: list[NDArray[Any] | None] = []
        for item in range(len(capture.items)):
            array: Array | None = capture.array(item, name) if name in capture.names(item) else None
            if isinstance(array, BFloat16):
                wide = [*dict.fromkeys([*wide, name])]
                array = array.bits
            parts.append(array)
        whole = np.concatenate([part for part in parts if part is not None])
        lengths = [None if part is None else len(part) for part in parts]
        arrays[name] = {"array": bundle.keep(whole), "lengths": lengths}
    return arrays, wide


def _head(capture: Capture, bundle: Bundle) -> dict[str, Any]:
    assert capture.head is not None
    file = TensorFile(capture.head.path)
    tensors = {}
    for name in sorted(file.names()):
        tensor = file.get(name)
        kept = bundle.keep(tensor.bits if isinstance(tensor, BFloat16) else tensor)
        tensors[name] = {"array": kept, "bfloat16": isinstance(tensor, BFloat16)}
    return {"tensors": tensors, "softcap": capture.head.softcap, "scale": capture.head.scale}


def _timed(note: tuple[str, Mapping[str, Answers], Facts], bundle: Bundle) -> dict[str, Any]:
    name, answers, facts = note
    kept = {}
    for part, one in answers.items():
        times = {"seconds": None if one.seconds is None else bundle.keep(one.seconds), "warmups": one.warmups}
        ended = {"status": str(one.status), "reason": one.reason, "facts": list(one.facts)}
        kept[part] = {**times, "ran": _steady(one.ran), **ended}
    ran = {"ran": _steady(facts.ran), "weights_bytes": facts.weights_bytes, "loads": facts.loads}
    return {"bench": name, **ran, "answers": kept}


def recoded(bundle: Bundle, room: Path) -> Bundle:
    """A stored run as the present reader reads what the present writer wrote of it."""
    results = unpack(bundle, room)
    text = bundle.text
    packed = pack(text["experiment"], text["unavailable"], results, text["files"])
    for old, new in zip(text["arms"], packed.text["arms"], strict=True):
        new["benches"] = old["benches"]
        new["arm"] = old["arm"]
    timed = [one["seconds"] for arm in text["arms"] for note in arm["benches"] for one in note["answers"].values()]
    packed.arrays |= {name: bundle.arrays[name] for name in timed if name is not None}
    return packed


def unpack(bundle: Bundle, room: Path) -> list[ArmResult]:
    """What every arm left, with captures written by the present writer into a folder."""
    text = bundle.text
    store = room / "captures"
    vocabularies = []
    for pieces in text["vocabularies"]:
        vocabulary = Vocabulary(len(pieces), digest(*pieces))
        store_vocabulary(store, vocabulary, pieces)
        vocabularies.append(vocabulary)
    heads = []
    for head in text["heads"]:
        tensors = {
            name: _typed(bundle.arrays[entry["array"]], entry["bfloat16"]) for name, entry in head["tensors"].items()
        }
        heads.append(store_head(store, tensors, head["softcap"], head["scale"]))
    requests = [request_from_record(record) for record in text["requests"]]
    experiment = _experiment(bundle)
    results = []
    for place, record in enumerate(text["arms"]):
        arm = from_json(Arm, record["arm"])
        captures = {}
        for axis, one in record["captures"].items():
            request, vocabulary = requests[one["request"]], vocabularies[one["vocabulary"]]
            target = store / f"{place}-{slug(record['role'])[:40]}" / axis
            writer = CaptureWriter(target, request, capture_key(arm, request, {}, 0), to_json(arm), vocabulary)
            for item, arrays in enumerate(_split(bundle, one, len(request.items()))):
                if arrays:
                    writer.add(item, arrays)
                if (why := one["failed"].get(str(item))) is not None:
                    writer.fail(item, why)
            if one["head"] is not None:
                writer.head(heads[one["head"]])
            captures[axis] = writer.finish(one["estimator"], one["ran"], one["facts"])
        left = {name: record[name] for name in ("role", "reason", "ran", "failures")}
        benches = _benches(experiment, record["benches"], bundle)
        results.append(ArmResult(arm=arm, status=Status(record["status"]), captures=captures, benches=benches, **left))
    return results


def _typed(array: NDArray[Any], wide: bool) -> Array:
    return BFloat16(array) if wide else array


def _split(bundle: Bundle, capture: Mapping[str, Any], n_items: int) -> list[dict[str, Array]]:
    """The arrays of each item."""
    items: list[dict[str, Array]] = [{} for _ in range(n_items)]
    for name, entry in capture["arrays"].items():
        whole, start = bundle.arrays[entry["array"]], 0
        for item, length in enumerate(entry["lengths"]):
            if length is not None:
                items[item][name] = _typed(whole[start : start + length], name in capture["bfloat16"])
                start += length
    return items


def _benches(experiment: Experiment, records: Sequence[Mapping[str, Any]], bundle: Bundle) -> dict[str, Any]:
    """What each bench makes of the stored times."""
    found = {}
    make = partial(random_prompts, 256, frozenset({0}))
    inputs = BenchInputs(lambda length, count, seed: make(length, count, seed), None)
    for record in records:
        cls = BENCHES.load(record["bench"])
        bench = cls(cls.Settings.model_validate(experiment.benches[record["bench"]]))
        questions = {question.part: question for question in bench.questions(inputs)}
        answers = {}
        for part, one in record["answers"].items():
            seconds, status = one["seconds"] and bundle.arrays[one["seconds"]], Status(one["status"])
            rest = one["warmups"], one["ran"], status, one["reason"], one["facts"]
            answers[part] = Answers(questions[part], seconds, *rest)
        facts = Facts(record["ran"], record["weights_bytes"], record["loads"])
        found[record["bench"]] = bench.record(answers, facts).model_dump(mode="json")
    return found


def _experiment(bundle: Bundle) -> Experiment:
    return Experiment.model_validate(bundle.text["experiment"])


def score(bundle: Bundle, results: Sequence[ArmResult], room: Path) -> Report:
    """The report of a stored run, by the function that scores a run when it ends and when it is scored again."""
    write_files(bundle.text["files"], room)
    facts = RunFacts("golden", "2026-01-01T00:00:00Z", "golden", {}, bundle.text["unavailable"])
    with contextlib.chdir(room):
        return score_run(_experiment(bundle), facts, results).report


_MEANS = ("mean", "reverse KL", "Jensen–Shannon", "KL from cold")  # of divergences that are never negative
NAMES: Mapping[str, str] = {}
"""Name of a metric in the record → its name in the golden rows, where they differ."""


def rows(report: Report, name: str) -> list[Row]:
    """All figures, counts and decisions of a report."""
    found: list[Row] = []

    def add(
        arm: str,
        source: str,
        figure: str,
        value: Any,
        ends: tuple[float | None, float | None] | None = None,
        *,
        kind: Kind = "text",
        cell: str = "",
    ) -> None:
        if figure in BY_ORDER and name not in UNTIED:
            return
        text = str(value) if kind == "text" else number(value)
        low, high = map(number, ends or (None, None))
        found.append(Row(name, arm, source, figure, cell, kind, text, low, high))

    add("", "run", "candidates", len(report.candidates), kind="count")
    arms = [("reference", report.reference), *([("control", report.control)] if report.control else [])]
    arms += [(f"control {arm.name}", arm) for arm in report.controls]
    arms += [(arm.name, arm) for arm in report.candidates]
    for arm, record in arms:
        _arm(add, arm, record)
    for axis, measurement in report.floor.items():
        _measurement(add, "floor", axis, measurement)
    for n, one in enumerate(report.comparisons):
        pair = f"{n}: {one.better} < {one.worse}"
        add("", f"comparison {one.axis}", "difference", one.difference, one.ci, kind="float", cell=pair)
        add("", f"comparison {one.axis}", "outcome", f"differs {one.differs}, alike {one.equivalent}", cell=pair)
    if report.recommendation is not None:
        add("", "recommendation", "arm", report.recommendation.arm)
        add("", "recommendation", "confidence", report.recommendation.confidence)
        add("", "recommendation", "alternative", report.recommendation.alternative)
        add("", "recommendation", "stability", report.recommendation.stability, kind="float")
        add("", "recommendation", "saving", report.recommendation.saving, kind="float")
        for limit, value in report.recommendation.limits.items():
            add("", "recommendation", "limit", value, kind="float", cell=limit)
        for beaten in report.recommendation.dominated:
            add(beaten.arm, "dominated", beaten.by, beaten.difference, beaten.ci, kind="float")
    return found


def _arm(add: Any, arm: str, record: ArmRecord) -> None:
    add(arm, "arm", "status", record.status.value)
    for axis, measurement in {**record.axes, **record.benches}.items():
        _measurement(add, arm, axis, measurement)
    if record.verdict is not None:
        verdict = record.verdict
        for figure in ("band", "at_best", "at_worst", "preliminary"):
            add(arm, "verdict", figure, getattr(verdict, figure))
        add(arm, "verdict", "reasons", len(verdict.because), kind="count")
    if record.composite is not None:
        whole = record.composite
        add(arm, "composite", "value", whole.value, whole.ci, kind="float", cell=" ".join(whole.axes))
        add(arm, "composite", "band", f"{whole.band}, close {whole.too_close_to_call}")
    if record.floor is not None:
        add(arm, "rounding noise", "mean", record.floor.mean, record.floor.ci, kind="nats", cell=record.floor.of)
        add(arm, "rounding noise", "positions", record.floor.n_positions, kind="count")
    for sums in record.documents:
        cell = f"context {sums.context}"
        add(arm, "documents", "documents", len(sums.documents), kind="count", cell=cell)
        add(arm, "documents", "positions", sum(sums.positions), kind="count", cell=cell)
        add(arm, "documents", "kl", sum(sums.kl), kind="float", cell=cell)
        add(arm, "documents", "probability loss", sum(sums.probability_loss), kind="float", cell=cell)
    for axis, certificate in record.certificates.items():
        source = f"certificate {axis}"
        add(arm, source, "state", certificate.state)
        for n, claim in enumerate(certificate.claims):
            mean = claim.unit == "nats" and claim.key != "log_perplexity"  # a difference has lost its first digits
            kind: Kind = "nats" if mean else "float"
            cell = f"{n}: context {claim.context}"
            add(arm, source, claim.name, claim.estimate, claim.ci, kind=kind, cell=cell)
            add(arm, source, f"{claim.name}: state", claim.state, cell=cell)
            add(arm, source, f"{claim.name}: margin", claim.margin, kind="float", cell=cell)
            add(arm, source, f"{claim.name}: detectable", claim.detectable, kind="float", cell=cell)
            add(arm, source, f"{claim.name}: clusters", claim.clusters, kind="count", cell=cell)
            add(arm, source, f"{claim.name}: clusters needed", claim.clusters_needed, kind="count", cell=cell)
            add(arm, source, f"{claim.name}: equivalent", claim.equivalent, cell=cell)
        for n, flips in enumerate(certificate.flips):
            for figure in ("n", "harmful", "beneficial"):
                add(arm, source, f"flips: {figure}", getattr(flips, figure), kind="count", cell=str(n))
            net = (flips.harmful - flips.beneficial) / (flips.n or 1)
            add(arm, source, "flips: net", net, flips.ci, kind="float", cell=str(n))
            for figure in ("p", "mid_p", "p_clusters"):
                add(arm, source, f"flips: {figure}", getattr(flips, figure), kind="float", cell=str(n))


def _measurement(add: Any, arm: str, source: str, found: Measurement) -> None:
    add(arm, source, "status", found.status.value)
    for figure in ("n_items", "n_failed", "n_clusters"):
        if getattr(found, figure) is not None:
            add(arm, source, figure, getattr(found, figure), kind="count")
    if found.cluster:
        add(arm, source, "cluster", found.cluster)
    for metric in found.metrics:
        cell = label(metric.cell)
        figure = NAMES.get(metric.name, metric.name)
        mean = metric.unit == "nats" and figure.startswith(_MEANS)
        kind: Kind = "count" if metric.unit == "count" else "nats" if mean else "float"
        add(arm, source, figure, metric.value, metric.ci, kind=kind, cell=cell)
        if metric.noise:
            add(arm, source, f"{figure}: rounding noise", metric.noise, kind="nats", cell=cell)
        if metric.bound:
            add(arm, source, f"{figure}: lower bound", True, cell=cell)
        for flag in metric.flags:
            add(arm, source, f"{figure}: flag {flag.kind}", True, cell=cell)
    for part in found.cells:
        add(arm, source, "cell", f"{part.status.value}, valid {part.valid}", cell=label(part.at))
    for kind_of in sorted({flag.kind for flag in found.flags}):
        count = sum(flag.kind == kind_of for flag in found.flags)
        add(arm, source, f"flag {kind_of}", count, kind="count")
    curves = [plot for plot in found.plots if isinstance(plot, Curve)]
    for curve in curves:
        known = [y for y in curve.y if y is not None]
        cell = f"{curve.key} {curve.series}".strip()
        add(arm, source, "curve: points", len(known), kind="count", cell=cell)
        add(arm, source, "curve: weighted sum", sum(n * y for n, y in enumerate(known, 1)), kind="float", cell=cell)


def exact_head(patch: Any) -> None:
    """Let logits come from a product in float64."""
    from fidelab.axes import rows as axis_rows
    from fidelab.metrics import divergence

    def logits(states: NDArray[Any], head: divergence.Head, **_: Any) -> NDArray[Any]:
        return divergence.head_logits(states, head, product=_float64)

    patch.setattr(axis_rows, "head_logits", logits)


def _float64(states: NDArray[Any], weight: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(states.astype(np.float64) @ weight.astype(np.float64)).astype(np.float32)


def audit_faults() -> list[str]:
    """One planted fault for each rule, and a checkpoint without any."""
    from checkpoints.tests.test_audit import FAULTS

    first = {fault.rule: name for name, fault in reversed(FAULTS.items())}
    return ["nothing", *sorted(first.values())]


def audit_json(name: str, room: Path) -> dict[str, Any]:
    """What ``fidelab checkpoint audit --json`` prints of a checkpoint with a planted fault; the rules as a number."""
    from checkpoints.tests.synthetic import quantized
    from checkpoints.tests.test_audit import FAULTS
    from fidelab_checkpoints.audit import audit

    base, tp = None, 1
    if name == "nothing":
        content = quantized("gptq")
    else:
        fault = FAULTS[name]
        content, tp = fault.whole(), fault.tp
        fault.change(content)
        base = None if fault.base is None else str(fault.base().write(room / "base"))
    found = audit(str(content.write(room / "checkpoint")), base, tp).as_json()
    return {**found, "rules": len(found["rules"])}


def physics_json(words: Sequence[str], room: Path) -> dict[str, Any]:
    """What ``fidelab estimate --json`` prints."""
    from tests.run.harness import cli

    done = cli("estimate", *words, "--json", cwd=room)
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def physics_of_model(kind: str, room: Path) -> dict[str, Any]:
    """The same of a configuration file: one of the tiny models."""
    from tests.tiny_models import KINDS

    (room / "config.json").write_text(json.dumps(KINDS[kind].config().to_dict(), default=str))
    return physics_json(["config.json", "--context", "64", "--batch", "2"], room)


def sensitivity_json(settings: Mapping[str, Any], room: Path) -> dict[str, Any]:
    """What ``fidelab diagnose sensitivity --json`` prints, if these answers came from the engine.

    The answers are drawn from seeds by the text of the rounding; fewer bits move them further.
    """
    from fidelab.models.tiny import make_tiny
    from fidelab.studies import roundings
    from fidelab.studies.weights import sensitivity

    make_tiny(room / "tiny", layers=2)
    (room / "text.txt").write_text("".join(f"# Title {i}\nline {i} of a text\n" for i in range(40)))
    data: dict[str, Any] = {"model": "./tiny", "engine": "hf", "reference": "f32", "control": "none"}
    data |= {"candidates": ["int8"], "dtype": "float32", "threads": 1, "text": "text.txt", "floor": 0.0, "twins": 0.0}
    data |= {"axes": {"kld": {"windows": 6, "n_ctx": 24}}}

    class Drawn:
        def __init__(self, request: Any) -> None:
            self.request = request

        def rows(self, texts: Sequence[str], say: Any = None) -> dict[str, Any]:
            clusters = np.concatenate([np.asarray(units, dtype=np.int64) for units in self.request.units])
            return {text: roundings.Rows(self._compared(text, len(clusters)), clusters) for text in texts}

        def _compared(self, text: str, n: int) -> Any:
            from fidelab.metrics.divergence import compare_rows

            draw = np.random.default_rng([int(digest(text)[:8], 16), n])
            native = draw.normal(size=(n, 16)).astype(np.float32)
            far = 0.02 if "int8" in text or "q8" in text else 0.3
            moved = native + far * draw.normal(size=(n, 16)).astype(np.float32)
            return compare_rows(native, moved, draw.integers(0, 16, n))

    def ask(_prepared: Any, request: Any, *_rest: Any, **_more: Any) -> Drawn:
        return Drawn(request)

    with contextlib.chdir(room), mock.patch.object(roundings, "ask", ask):
        experiment, formats = Experiment.model_validate(data), settings["formats"]
        study, _ = sensitivity(experiment, formats, by=settings["by"], budget=settings["budget"])
    return dict(json.loads(study.to_json()))


def plants() -> Mapping[str, tuple[str, Any, str, Any]]:
    """Breaks of fidelab by name: the stored run that shows it, and whose attribute is replaced by what."""
    from fidelab.axes import kld, perplexity, plad, rniah, trajectory
    from fidelab.axes import rows as axis_rows
    from fidelab.metrics import agreement, composite, divergence, equivalence, intervals, retrieval
    from fidelab.metrics.perplexity import row_nll
    from fidelab.scoring import pairing
    from fidelab.scoring import score as scoring

    compare, logits, of = divergence.compare_rows, axis_rows.logits, intervals.RatioItems.of
    targets, certify, first = kld._targets, equivalence.certify, agreement.first_divergence

    def exchanged(p: Any, q: Any, after: Any, *rest: Any, **more: Any) -> Any:
        return compare(q, p, after, *rest, **more)

    def highest_id(p: Any, q: Any, after: Any, *rest: Any, **more: Any) -> Any:
        v = min(p.shape[1], q.shape[1])
        flipped = np.where(after < 0, after, v - 1 - after)
        return compare(p[:, :v][:, ::-1].copy(), q[:, :v][:, ::-1].copy(), flipped, *rest, **more)

    def never_failed(*values: Any, **more: Any) -> Any:
        found = compare(*values, **more)
        return replace(found, kl=np.where(found.failed, 0.0, found.kl), failed=np.zeros_like(found.failed))

    def unclipped(*values: Any, **more: Any) -> Any:
        found = compare(*values, **more)
        return replace(found, kl=found.kl - 1e-7)

    def later(capture: Any, item: int, start: int, stop: int) -> Any:
        found = logits(capture, item, start, stop)
        return found if capture.manifest["asked"]["kv"]["k"] == "exact" else np.roll(found, 1, axis=0)

    def halves(_cls: Any, num: Any, den: Any, clusters: Any) -> Any:
        return of(num, den, np.asarray(clusters) // 2)

    def lenient(losses: Any, seed: int = 0) -> Any:
        return certify([replace(loss, margin=2 * loss.margin) for loss in losses], seed)

    def one_more(ref: Any, test: Any) -> Any:
        found = first(ref, test)
        return replace(found, prefix=min(found.prefix + 1, found.longest))

    def signed(ref: Any, test: Any) -> Any:
        return 100 * np.exp(-5 * (np.asarray(test) - np.asarray(ref)))

    def uncapped(states: Any, weights: Any, **more: Any) -> Any:
        return head(states, replace(weights, softcap=None), **more)

    def all_cells(cells: Any, compat: Any = None) -> Any:
        return retrieval.retrieval_score(cells, "refract")

    summarise, head = divergence.summarise_kl, divergence.head_logits
    return {
        "KL in the other direction": ("documents", axis_rows, "compare_rows", exchanged),
        "a row too late": ("documents", axis_rows, "logits", later),
        "targets one token early": ("documents", kld, "_targets", lambda *asked: np.roll(targets(*asked), 1)),
        "no clamp at 0": ("bands", axis_rows, "compare_rows", unclipped),
        "failed rows counted as 0": ("failures", axis_rows, "compare_rows", never_failed),
        "wrong clusters": ("documents", intervals.RatioItems, "of", classmethod(halves)),
        "another limit of flips": ("hf-llama", divergence, "CONFIDENT_FLIP", 0.02),
        "ties to the highest id": ("documents", axis_rows, "compare_rows", highest_id),
        "another percentile": ("documents", kld, "summarise_kl", lambda *a: replace(s := summarise(*a), p99=s.p95)),
        "soft-cap left out": ("hf-gemma2", axis_rows, "head_logits", uncapped),
        "edges of bands": ("bands", composite, "KL_EDGES", (0.01, 0.051, 0.1)),
        "mean in the place of the harmonic mean": ("composite", composite, "_harmonic", partial(np.mean, axis=-1)),
        "certificates of twice the margin": ("documents", scoring, "certify", lenient),
        "prefix one token too long": ("bands", trajectory, "first_divergence", one_more),
        "drift that may be won back": ("composite", plad, "cell_scores", signed),
        "cells without information": ("cells", rniah, "retrieval_score", all_cells),
        "log-likelihood in bits": ("geometric", perplexity, "row_nll", lambda *a: row_nll(*a) / np.log(2)),
        "engagement not checked": ("failures", pairing, "engaged", lambda result: (result.status, result.reason)),
    }


def study_plants() -> Mapping[str, tuple[str, str, Any, str, Any]]:
    """Breaks of the other commands by name: which, the fixture that shows it, and whose attribute is replaced."""
    from fidelab.metrics.allocation import allocate
    from fidelab.physics import traffic
    from fidelab.studies import roundings
    from fidelab_checkpoints import audit
    from fidelab_checkpoints.rules import RULES

    token_bytes = traffic.Model.token_bytes
    first = audit_faults()[1]
    fewer = {name: rule for name, rule in RULES.items() if name != _rule_of(first)}  # the table keeps its order

    def one_more(model: Any, kv: Any) -> Any:
        return token_bytes(model, kv) + 1

    def thrifty(costs: Any, sizes: Any, limit: Any) -> Any:
        return allocate(costs, sizes, 0.9 * limit)

    return {
        "a byte too many per token": ("physics", "dense", traffic.Model, "token_bytes", one_more),
        "a rule left out": ("audit", first, audit, "RULES", fewer),
        "a tenth of the budget unused": ("sensitivity", "kinds", roundings, "allocate", thrifty),
    }


def _rule_of(fault: str) -> str:
    from checkpoints.tests.test_audit import FAULTS

    return FAULTS[fault].rule
