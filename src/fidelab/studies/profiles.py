"""Run a profile: its stages one after another, each as a command of fidelab in a separate process.

A stage of computations runs :mod:`fidelab.studies.arithmetic`, and its figures are computed, not measured.

The folder of a profile's run is ``<output_dir>/profiles/<id>``. It contains ``config.resolved.yaml`` from the first
moment, a folder per stage (``stages/<name>``: the command, its JSON, its log, its runs), the captures of all stages,
``skips.json``, and ``study.json``, which compares the source's figures with the measured ones.  A stage that this
machine cannot run is skipped; the record says what it needs and what was found. A failed stage fails the profile, and
the others still run.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from fidelab.config.profiles import Figure, ResolvedProfile, Stage, fill
from fidelab.config.trust import check_trusted, trust_content
from fidelab.core import Status, read_file, slug, strict_json, usable_cores, write_atomically
from fidelab.core.errors import FidelabError, InputError, OutputError, UnknownNameError
from fidelab.core.scratch import scratch
from fidelab.core.waiting import wait_for
from fidelab.results.measurement import Definition
from fidelab.results.numbers import counted, one_line
from fidelab.results.record import SCHEMA as REPORT_SCHEMA
from fidelab.results.record import Report
from fidelab.results.store import CONFIG, RunFolder
from fidelab.results.study import PART, Study, StudyRow
from fidelab.results.study import SCHEMA as STUDY_SCHEMA
from fidelab.results.values import Record
from fidelab.run.pipeline import Interrupted
from fidelab.run.signals import end_with_parent, terminate_as_interrupt
from fidelab.studies.study import new_study, write_study

SKIPS = "skips.json"
_RECORDS: Mapping[str, type[Report | Study]] = {REPORT_SCHEMA: Report, STUDY_SCHEMA: Study}
KIND: Final = "profile"
_GB, _MB = 1e9, 1e6
_MAX_STAGE_BYTES = 256 << 20  # of a stage's JSON
_GRACE_SECONDS = 60.0  # seconds in which a stopped stage leaves what it has
_STEP = re.compile(r"[^.\[]+|\[[^\]]*\]")

_SECONDS = Definition("seconds", "s", None, "Wall time.", name="time")
_DISK = Definition("disk", "bytes", None, "Saved outputs and converted weights.")
_EXPECTED = Definition("expected", "", None, "The source's figure.")
_MEASURED = Definition("measured", "", None, "The same figure measured here.")
_PUBLISHED = Definition("expected", "", None, "The source's figure.", name="published")
_COMPUTED = Definition("measured", "", None, "The same figure computed from others of the source.", name="computed")
_DIFFERENCE = Definition("difference", "", None, "The figure here minus the source's.")
_COLUMNS = ("name", "stage", "unit", "expected", "measured", "difference", "agrees", "why", "seconds")
_RANGES = (
    "The range of a computed figure comes from the rounding of the figures that it follows from. Figures agree if the "
    "published one, within half a unit of its last digit, lies in that range."
)


class Skip(Record):
    """Reason why a stage was not run here."""

    stage: str
    """Name of the stage."""
    need: str
    """Requirement of the stage."""
    found: str
    """Resource of this machine."""


# ------------------------------------------------------------------------------------------------- needs and machine


def machine_record(folder: Path) -> dict[str, Any]:
    """Return what stages need to know of this machine: GPUs that torch can use, cores, GB of memory and of free disk.

    ``folder``: where runs are written; it need not exist.
    """
    from fidelab.engines.installed import gpu_files
    from fidelab.environments.host import host_memory

    device, gpus = "cpu", list[dict[str, Any]]()
    if gpu_files():
        try:
            import torch

            rows = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
            gpus = [{"name": str(row.name), "gb": round(row.total_memory / _GB, 1)} for row in rows]
            device = ("rocm" if getattr(torch.version, "hip", None) else "cuda") if gpus else "cpu"
        except Exception as error:  # a driver that does not fit; doctor says more
            device = f"cpu ({one_line(str(error))[:80]})"
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return {
        "device": device,
        "gpus": gpus,
        "cores": usable_cores(),
        "memory_gb": round(host_memory() / _GB, 1),
        "disk_gb": round(shutil.disk_usage(place).free / _GB, 1),
    }


def judge(stage: Stage, machine: Mapping[str, Any], ended: Mapping[str, Status]) -> list[Skip]:
    """Return the requirements of a stage that this machine lacks; empty if it can run.

    ``machine``: as of :func:`machine_record`.  ``ended``: status of the stages before it.
    """
    needs, gpus = stage.needs, machine["gpus"]
    lacks = list[tuple[str, str]]()
    if needs.never is not None:
        return [Skip(stage=stage.name, need=needs.never, found=f"this variant of {stage.name}")]
    if needs.device not in (None, "cpu") or needs.gpus or needs.gpu_memory:
        found = ", ".join(f"{gpu['name']} ({gpu['gb']:.0f} GB)" for gpu in gpus) or f"device {machine['device']}"
        if not gpus or needs.device == "cuda" != machine["device"]:
            lacks.append((f"device {needs.device or 'gpu'}", found))
        elif len(gpus) < (needs.gpus or 1):
            lacks.append((f"{needs.gpus} GPUs", found))
        elif min(gpu["gb"] for gpu in gpus) < (needs.gpu_memory or 0):
            lacks.append((f"{needs.gpu_memory:g} GB of GPU memory", found))
    for least, unit, have in (
        (needs.memory, "GB of memory", machine["memory_gb"]),
        (needs.disk, "GB of free disk", machine["disk_gb"]),
    ):
        if least is not None and have < least:
            lacks.append((f"{least:g} {unit}", f"{have:.1f} {unit}"))
    lacks += [(f"package {name}", "not installed") for name in needs.packages if util.find_spec(name) is None]
    lacks += [(f"engine {name}", why) for name in needs.engines if (why := _refusal("engine", name))]
    lacks += [(f"data {name}", why) for name in needs.data if (why := _refusal("data", name))]
    lost = {name: ended.get(name) for name in needs.stages}
    words = {None: "not run", Status.NOT_SUPPORTED: "skipped", Status.FAILED: "failed"}
    lacks += [(f"stage {name}", words[status]) for name, status in lost.items() if status in words]
    return [Skip(stage=stage.name, need=need, found=one_line(found)) for need, found in lacks]


def _refusal(kind: str, name: str) -> str:
    """Reason why an engine or a data set is not available; a data set on the hub is fetched."""
    from fidelab.environments.environment import locate
    from fidelab.inputs.gsm8k import load_problems
    from fidelab.inputs.texts import load_text

    try:
        if kind == "engine":
            locate(name)
        elif name == "gsm8k" or name.endswith(".jsonl"):
            load_problems(name, 1)
        else:
            load_text(name)
    except FidelabError as error:
        return str(error)
    return ""


# --------------------------------------------------------------------------------------------------------- running


def run_profile(
    resolved: ResolvedProfile,
    output_dir: Path,
    *,
    only: Sequence[str] = (),
    command: str = "",
    watch: Callable[[str], None] = lambda text: None,
) -> tuple[Study, Path]:
    """Run the stages that this machine can run, and write the record; ``only``: run just these stages.

    Raises:
        UnknownNameError: If ``only`` names a stage that the profile does not have.
        OutputError: If the folder cannot be written.
        Interrupted: If stopped by Ctrl-C or SIGTERM. :func:`resume_profile` continues.
    """
    _chosen(resolved, only)
    label = slug("-".join(filter(None, (Path(resolved.name).stem, resolved.variant))))
    written = {"kind": KIND, "only": list(only), "command": command, "resolved": resolved.model_dump(mode="json")}
    text = yaml.safe_dump(written, sort_keys=False, allow_unicode=True)
    folder = RunFolder.create(output_dir.absolute() / "profiles", label, text)
    trust_content(folder.config, text.encode())
    return _run_stages(resolved, folder.path, only, command, watch), folder.path


def resume_profile(
    folder: Path, *, trusted: Sequence[Path] = (), watch: Callable[[str], None] = lambda text: None
) -> Study:
    """Resume a profile: successful stages are kept, all others run again and find their own captures.

    ``trusted``: files or folders that the user trusts although another user began the profile.

    Raises:
        InputError: If the folder is not a run of a profile.
        ConfigError: If another user began it, and it is not trusted.
        Interrupted: As :func:`run_profile`.
    """
    folder = folder.absolute()
    file = folder / CONFIG
    try:
        content = read_file(file, _MAX_STAGE_BYTES)
        check_trusted(file, content, "may run any command of fidelab", trusted)
        written = yaml.safe_load(content)
        resolved = ResolvedProfile.model_validate(written["resolved"])
        only, command = [str(name) for name in written["only"]], str(written["command"])
    except FileNotFoundError:
        raise InputError(f"{folder} is not a run of a profile: it has no {CONFIG}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError, ValidationError) as error:
        raise InputError(f"{file} cannot be read: {one_line(str(error))[:200]}") from None
    return _run_stages(resolved, folder, only, command, watch)


def stage_command(stage: Stage, folder: Path) -> list[str]:
    """Return the command of a stage, ``fidelab`` or ``k16v8`` first. Experiments are files in the profile's folder.

    Raises:
        OutputError: If the file cannot be written.
    """
    own = folder / "stages" / stage.name
    known = {"folder": str(own), "stages": str(folder / "stages")}
    if stage.compute is not None:
        entries = {name: entry.model_dump(mode="json") for name, entry in stage.compute.items()}
        return ["fidelab.studies.arithmetic", str(_written(own / "compute.json", entries))]
    if stage.experiment is None:
        return _with_program([str(fill(word, known, stage.name)) for word in stage.command or ()])
    places = {"output_dir": str(own / "runs"), "captures_dir": str(folder / "captures")}
    if stage.experiment.get("kind") is not None:  # a cross-engine experiment keeps its captures itself
        del places["captures_dir"]
    # JSON is YAML, and says what is a text and what a number
    file = _written(own / "experiment.yaml", {**places, **fill(stage.experiment, known, stage.name)})
    # whoever runs the profile has trusted it
    return ["fidelab", "compare", "-f", str(file), "--json", "--trust", str(file)]


def _written(file: Path, content: Any) -> Path:
    """Write a stage's input as JSON into its folder.

    Raises:
        OutputError: If the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{file.parent} cannot be made: {error.strerror or error}") from None
    write_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return file


def plan_profile(resolved: ResolvedProfile, output_dir: Path, *, only: Sequence[str] = (), command: str = "") -> Study:
    """Return the stages, whether each can run here, and its cost in seconds and bytes, without running any.

    The cost of an experiment is that of its dry run. For other commands, the profile specifies it.

    Raises:
        UnknownNameError: If ``only`` names a stage that the profile does not have.
    """
    machine, rows, commands = machine_record(output_dir), dict[str, StudyRow](), dict[str, str]()
    for stage in _chosen(resolved, only):
        skips = judge(stage, machine, {name: row.status for name, row in rows.items()})
        if stage.compute is not None:
            commands[stage.name] = (
                f"python -m fidelab.studies.arithmetic FILE  # {counted(len(stage.compute), 'figure')}"
            )
        else:
            words = ["compare", "-f", "EXPERIMENT", "--json"] if stage.experiment is not None else stage.command or ()
            commands[stage.name] = shlex.join(_with_program([*map(str, words)]))
        seconds, disk = (None, None) if skips or stage.experiment is None else _dry_run(stage)
        if seconds is None and stage.needs.hours is not None:
            seconds = 3600 * stage.needs.hours
        found = [skip.model_dump() for skip in skips]
        rows[stage.name] = _row(stage, skips, seconds, disk, about=stage.about, skips=found)
    running = [row for row in rows.values() if row.measured]
    times = [row.value("seconds") for row in running]
    seconds, disk = sum(filter(None, times)), sum(row.value("disk") or 0.0 for row in running)
    unknown = f", and {counted(n, 'stage')} of unknown time" if (n := times.count(None)) else ""
    return _study(
        resolved,
        command,
        columns=("name", "about", "seconds", "disk"),
        rows=tuple(rows.values()),
        sentences=(f"in all about {seconds:,.0f} s and {disk / _MB:,.1f} MB of saved outputs{unknown}",),
        commands=commands,
    )


def _dry_run(stage: Stage) -> tuple[float | None, float | None]:
    """Return the seconds and the bytes that an experiment's dry run gives; ``None`` where it gives none."""
    with scratch("dry-run") as room:
        words = [sys.executable, "-m", *stage_command(stage, room), "--dry-run"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    try:
        plan = strict_json(done.stdout)
        return float(plan["seconds"]), sum(float(plan.get(key, 0)) for key in ("disk_bytes", "conversion_bytes"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None


def _chosen(resolved: ResolvedProfile, only: Sequence[str]) -> list[Stage]:
    known = [stage.name for stage in resolved.stages]
    if unknown := next((name for name in only if name not in known), None):
        raise UnknownNameError(f"stage of profile {resolved.name}", unknown, known)
    return [stage for stage in resolved.stages if not only or stage.name in only]


def _with_program(words: list[str]) -> list[str]:
    return words if words[:1] == ["k16v8"] else ["fidelab", *words]


def _run_stages(
    resolved: ResolvedProfile, folder: Path, only: Sequence[str], command: str, watch: Callable[[str], None]
) -> Study:
    machine, chosen = machine_record(folder), _chosen(resolved, only)
    ended, skips = dict[str, StudyRow](), list[Skip]()
    for number, stage in enumerate(chosen, 1):
        place = f"{stage.name} ({number} of {len(chosen)})"
        if (row := _finished_row(folder, stage)) is not None:
            watch(f"{place}: done before")
        elif lacks := judge(stage, machine, {name: row.status for name, row in ended.items()}):
            skips += lacks
            row = _row(stage, lacks)
            watch(f"{place}: skipped, {row.reason}")
        else:
            watch(f"{place}: {stage.about or 'runs'}; log: {folder / 'stages' / stage.name / 'log.txt'}")
            row = _run_stage(stage, folder)
            watch(f"{place}: {', '.join(filter(None, (row.status.value, row.reason)))}, {row.value('seconds'):.0f} s")
        ended[stage.name] = row
        skips += (
            _nested_skips(stage.name, _output(folder, stage.name)) if row.status is not Status.NOT_SUPPORTED else []
        )
        found = [skip.model_dump() for skip in skips]
        study = _measured_study(resolved, folder, ended, {"machine": machine, "skips": found}, command)
        write_study(study, RunFolder(folder), stage_records(study, folder))
        write_atomically(folder / SKIPS, json.dumps(found, indent=2) + "\n")
    return study


def _row(
    stage: Stage, outcome: str | Sequence[Skip], seconds: float | None = None, disk: float | None = None, **facts: Any
) -> StudyRow:
    """Row of a stage; ``outcome``: why it failed, or why it cannot run here; empty if neither."""
    if isinstance(outcome, str):
        reason, status = outcome, Status.FAILED
    else:
        reason = "; ".join(f"needs {skip.need}, found {skip.found}" for skip in outcome)
        status = Status.NOT_SUPPORTED
    return StudyRow(
        status=status if reason else Status.OK,
        reason=reason or None,
        at={PART: "stage", "name": stage.name},
        metrics=tuple(made(value) for made, value in ((_SECONDS, seconds), (_DISK, disk)) if value is not None),
        facts={"hours": stage.needs.hours, **facts},  # the profile's estimate for the machine that it needs
    )


def _finished_row(folder: Path, stage: Stage) -> StudyRow | None:
    """The row of a stage that ended well in this folder before."""
    try:
        row = StudyRow.model_validate(strict_json(read_file(folder / "stages" / stage.name / "stage.json", 1 << 20)))
    except (OSError, ValueError):
        return None
    return row if row.status is Status.OK else None


def _run_stage(stage: Stage, folder: Path) -> StudyRow:
    """One stage in a separate process, which is stopped with this one."""
    own = folder / "stages" / stage.name
    own.mkdir(parents=True, exist_ok=True)
    words = stage_command(stage, folder)
    began = time.monotonic()
    with (own / "out.json").open("wb") as out, (own / "log.txt").open("ab") as log, terminate_as_interrupt():
        process = subprocess.Popen(  # a separate session: Ctrl-C reaches it once, from here
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        try:
            code = wait_for(process)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_GRACE_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise Interrupted(folder, "fidelab reproduce") from None
    seconds = round(time.monotonic() - began, 3)
    row = _row(stage, _reason(own / "log.txt", code) if code else "", seconds, command=words, exit_code=code)
    write_atomically(own / "stage.json", row.model_dump_json(indent=2, exclude_defaults=True) + "\n")
    return row


def _reason(log: Path, code: int) -> str:
    """The last line that the stage wrote for people."""
    lines = [one_line(line) for line in log.read_text("utf-8", "replace")[-8192:].splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("fidelab: ")), lines[-1] if lines else "")
    return ": ".join(filter(None, (f"exit code {code}", said.removeprefix("fidelab: ")[:400])))


# ------------------------------------------------------------------------------------------ expected against measured


Found = tuple[float | None, tuple[float, float] | None, str | None]


def find_figure(data: Any, at: str) -> Found:
    """Return the value at a path in a stage's JSON, its interval, and the reason if there is none.

    Steps are keys, places in lists, and ``[key=value,key.key=value]``: the only matching item of a list, or of several
    the only one that has the rest of the path. A metric, which is an object with ``value`` and perhaps ``ci``, counts
    as its value.
    """
    return _follow(data, _STEP.findall(at), "")


def _follow(node: Any, steps: Sequence[str], why: str) -> Found:
    """The same from a place on; ``why``: the last reason that the path went by."""
    interval = None
    for place, step in enumerate(steps):
        if isinstance(node, Mapping):
            why = str(node.get("reason") or why)
        if step.startswith("["):
            conditions = [condition.partition("=")[::2] for condition in step[1:-1].split(",")]
            items = node if isinstance(node, list) else []
            fitting = [item for item in items if all(_leaf(item, key) == wanted for key, wanted in conditions)]
            if len(fitting) > 1:
                ends = [_follow(item, steps[place + 1 :], why) for item in fitting]
                known = [end for end in ends if end[0] is not None]
                return known[0] if len(known) == 1 else (None, None, why or f"several items with {step[1:-1]}")
            if not fitting:
                return None, None, why or f"no item with {step[1:-1]}"
            node = fitting[0]
        else:
            try:
                node = node[int(step) if isinstance(node, list) else step]
            except (LookupError, TypeError, ValueError):
                return None, None, why or f"no {step!r} in what the stage printed"
    if isinstance(node, Mapping) and "value" in node:
        interval, node = node.get("ci"), node["value"]
    if isinstance(node, bool) or not isinstance(node, int | float):
        return None, None, why or ("not measurable" if node is None else "no number there")
    bounds = (float(interval[0]), float(interval[1])) if isinstance(interval, list) and len(interval) == 2 else None
    return float(node), bounds, None


def _leaf(item: Any, path: str) -> str | None:
    for key in path.split("."):
        item = item.get(key) if isinstance(item, Mapping) else None
    return None if item is None else str(item)


def _study(resolved: ResolvedProfile, command: str, **fields: Any) -> Study:
    variant = f" ({resolved.variant})" if resolved.variant else ""
    title, settings = f"{resolved.name}{variant}: {resolved.purpose}", resolved.model_dump(mode="json")
    return new_study(command=command, settings=settings, kind=KIND, title=title, **fields)


def _measured_study(
    resolved: ResolvedProfile, folder: Path, ended: Mapping[str, StudyRow], facts: Mapping[str, Any], command: str
) -> Study:
    outputs: dict[str, Any] = {}
    for name, row in ended.items():
        if row.status is not Status.NOT_SUPPORTED:
            outputs[name] = _output(folder, name)
    lines = []
    for name, pinned in resolved.pins.packages.items():
        found = metadata.version(name) if util.find_spec(name) else "none"
        if found.partition("+")[0] != pinned:
            lines.append(f"{name}: {found} here, {pinned} pinned")
    source, differences = resolved.source, (*resolved.differences, *lines)
    said = (
        source.url and f"Expected: {source.title}, {source.url}",
        source.setup and f"Measured there on: {source.setup}",
        differences and "Differences of the protocol:",
        *(f"- {difference}" for difference in differences),
    )
    computing = {stage.name for stage in resolved.stages if stage.compute is not None}
    figures = [_figure(figure, ended, outputs, computed=figure.stage in computing) for figure in resolved.expected]
    return _study(
        resolved,
        command,
        run_id=folder.name,
        columns=_COLUMNS,
        rows=(*ended.values(), *figures, *_nested_figures(outputs)),
        sentences=(*_agreement(figures), *filter(None, said)),
        note=_RANGES if any(figure.ci("measured") for figure in figures if figure.at["stage"] in computing) else "",
        facts={**facts, "differences": list(differences), "outputs": outputs if resolved.collect else {}},
    )


def stage_records(study: Study, folder: Path) -> dict[str, Report | Study]:
    """Return stage → what it printed, of the stages that printed the record of a run or a study.

    ``folder`` is the profile's.
    """
    found: dict[str, Report | Study] = {}
    for row in study.rows if study.kind == KIND else ():
        name = str(row.at.get("name"))
        output = _output(folder, name) if row.at[PART] == "stage" else None
        if isinstance(output, Mapping):
            with suppress(KeyError, TypeError, ValidationError):
                found[name] = _RECORDS[output["schema"]].model_validate(output)
    return found


def _output(folder: Path, stage: str) -> Any:
    """The JSON that a stage printed; ``None`` if it cannot be read."""
    with suppress(OSError, ValueError):
        return strict_json(read_file(folder / "stages" / stage / "out.json", _MAX_STAGE_BYTES))
    return None


def _nested_skips(stage: str, output: Any) -> list[Skip]:
    """Skipped stages of a stage that is a profile itself."""
    if not isinstance(output, Mapping) or output.get("kind") != KIND:
        return []
    return [Skip.model_validate({**skip, "stage": f"{stage}/{skip['stage']}"}) for skip in output["facts"]["skips"]]


def _nested_figures(outputs: Mapping[str, Any]) -> Iterator[StudyRow]:
    """Figures of stages that are profiles themselves."""
    for stage, output in outputs.items():
        if isinstance(output, Mapping) and output.get("kind") == KIND:
            for row in (StudyRow.model_validate(row) for row in output["rows"]):
                if row.at[PART] == "figure":
                    yield row.model_copy(update={"at": {**row.at, "stage": f"{stage}/{row.at['stage']}"}})


def _agreement(figures: Sequence[StudyRow]) -> list[str]:
    """How many of the judged figures agree, and a line for each reason why others do not; empty without one."""
    judged = [row for row in figures if "agrees" in row.facts]
    unlike = dict[str, list[str]]()
    for row in judged:
        if row.facts["agrees"] == "no":
            measured = str(row.facts["measured"]).partition(" ")[0]  # without the range
            both = f"{row.at['name']} ({row.facts['expected']}, here {measured})"
            unlike.setdefault(str(row.facts.get("remark", "no reason known")), []).append(both)
    if not judged:
        return []
    n = sum(map(len, unlike.values()))
    ending = f", {n} {'does' if n == 1 else 'do'} not:" if n else ""
    lines = (f"- {', '.join(names)}: {reason}" for reason, names in unlike.items())
    return [f"{len(judged) - n} of {counted(len(judged), 'published figure')} agree{ending}", *lines]


def _figure(
    figure: Figure, ended: Mapping[str, StudyRow], outputs: Mapping[str, Any], *, computed: bool = False
) -> StudyRow:
    """A figure of the source and the measured or computed one, or the reason why it is missing."""
    stage, value, interval = ended.get(figure.stage), None, None
    if stage is None or stage.status is Status.NOT_SUPPORTED:
        reason: str | None = "stage skipped" if stage else "stage not run"
    else:
        value, interval, reason = find_figure(outputs.get(figure.stage), figure.at)
        if value is None and stage.status is Status.FAILED and outputs.get(figure.stage) is None:
            reason = "stage failed"
        if value is not None:
            value /= figure.divisor
            interval = interval and (interval[0] / figure.divisor, interval[1] / figure.divisor)
    theirs, ours = (_PUBLISHED, _COMPUTED) if computed else (_EXPECTED, _MEASURED)
    metrics = [theirs(figure.value)] if figure.value is not None else []
    metrics += [ours(value, interval)] if value is not None else []
    facts = {"unit": figure.unit} if figure.unit else {}
    if figure.value is not None:
        facts["expected"] = f"{figure.value:,}".removesuffix(".0")
    agrees = True
    if value is not None and figure.value is not None and figure.tolerance is not None:
        metrics.append(_DIFFERENCE(value - figure.value))
        low, high = interval or (value, value)
        slack = figure.tolerance * (1 + 1e-9)  # a half that is rounded up or down
        agrees = low - slack <= figure.value <= high + slack
        facts |= {"agrees": "yes" if agrees else "no", **_shown(figure.value, value, interval, figure.tolerance)}
    if figure.remark:
        facts["remark"] = figure.remark
    if why := reason or (figure.remark if agrees else ""):
        facts["why"] = why
    return StudyRow(
        status=Status.NOT_MEASURABLE if reason else Status.OK,
        reason=reason,
        at={PART: "figure", "name": figure.name, "stage": figure.stage},
        metrics=tuple(metrics),
        facts=facts,
    )


def _shown(value: float, found: float, interval: tuple[float, float] | None, tolerance: float) -> dict[str, str]:
    """Texts of a judged figure: the source's with its own digits, the one here with one more."""
    digits = max(0, -math.floor(math.log10(2 * tolerance))) if tolerance else 0
    more = digits + bool(tolerance)
    span = "" if interval is None else f" ({interval[0]:,.{more}f}–{interval[1]:,.{more}f})"
    gap = f"{found - value:+,.{more}f}"
    return {
        "expected": f"{value:,.{digits}f}",
        "measured": f"{found:,.{more}f}{span}",
        "difference": gap.replace("-", "−") if float(gap.replace(",", "")) else f"{0:.{more}f}",
    }
