"""Run a profile: its stages one after another, each as a command of fidelab in a separate process.

The folder of a profile's run is ``<output_dir>/profiles/<id>``. It contains ``config.resolved.yaml`` from the first
moment, a folder per stage (``stages/<name>``: the command, its JSON, its log, its runs), the captures of all stages,
``skips.json``, and ``study.json``, which compares the source's figures with the measured ones.  A stage that this
machine cannot run is skipped; the record says what it needs and what was found. A failed stage fails the profile, and
the others still run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from fidelab.config.profiles import Figure, Resolved, Stage
from fidelab.config.trust import check_trusted, trust_content
from fidelab.core import Status, read_file, strict_json, usable_cores
from fidelab.core.errors import FidelabError, InputError, OutputError, UnknownNameError
from fidelab.results.measurement import Definition
from fidelab.results.numbers import counted, one_line
from fidelab.results.record import write_atomically
from fidelab.results.store import CONFIG, RunFolder
from fidelab.results.study import PART, Study, StudyRow
from fidelab.results.values import Record
from fidelab.run.pipeline import Interrupted
from fidelab.run.signals import terminate_as_interrupt
from fidelab.studies.study import new_study, write_study

SKIPS = "skips.json"
KIND: Final = "profile"
_GB, _MB = 1e9, 1e6
_MAX_STAGE_BYTES = 256 << 20  # of a stage's JSON
_GRACE_SECONDS = 60.0  # seconds in which a stopped stage leaves what it has
_STEP = re.compile(r"[^.\[]+|\[[^\]]*\]")

_SECONDS = Definition("seconds", "s", None, "Wall time.", name="time")
_DISK = Definition("disk", "bytes", None, "Saved outputs and converted weights.")
_EXPECTED = Definition("expected", "", None, "The source's figure.")
_MEASURED = Definition("measured", "", None, "The same figure measured here.")
_COLUMNS = ("name", "stage", "unit", "expected", "measured", "why", "seconds")


class Skip(Record):
    """Reason why a stage was not run here."""

    stage: str
    """Name of the stage."""
    need: str
    """Requirement of the stage."""
    found: str
    """Resource of this machine."""


# ------------------------------------------------------------------------------------------------- needs and machine


@dataclass(frozen=True)
class Machine:
    """This machine, as far as stages need to know it. Each property is determined only when a need is judged."""

    folder: Path

    @cached_property
    def gpus(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        """``cuda``, ``rocm`` or ``none``, and the name and bytes of each GPU that torch can use."""
        from fidelab.engines.installed import gpu_files

        if not gpu_files():
            return "none", ()
        try:
            import torch

            found = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
            kind = "rocm" if getattr(torch.version, "hip", None) else "cuda"
            rows = [torch.cuda.get_device_properties(index) for index in found]
            return (kind if rows else "none"), tuple((str(row.name), int(row.total_memory)) for row in rows)
        except Exception as error:  # a driver that does not fit; doctor says more
            return f"none ({one_line(str(error))[:80]})", ()

    @cached_property
    def memory(self) -> int:
        """Bytes of the host that this process may use."""
        import psutil

        from fidelab.environments.host import cgroup_memory

        total = int(psutil.virtual_memory().total)
        group = cgroup_memory()
        return total if group is None else min(total, group[0])

    @property
    def disk(self) -> int:
        """Bytes free where runs are written."""
        place = self.folder.absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def record(self) -> dict[str, Any]:
        """Return all of it, for the record."""
        kind, cards = self.gpus
        return {
            "device": "cpu" if not cards else kind,
            "gpus": [{"name": name, "gb": round(size / _GB, 1)} for name, size in cards],
            "cores": usable_cores(),
            "memory_gb": round(self.memory / _GB, 1),
            "disk_gb": round(self.disk / _GB, 1),
        }


def judge(stage: Stage, machine: Machine, ended: Mapping[str, Status]) -> list[Skip]:
    """Return the requirements of a stage that this machine lacks; empty if it can run.

    ``ended``: status of the stages before it.
    """
    needs, skips = stage.needs, list[tuple[str, str]]()
    if needs.never is not None:
        return [Skip(stage=stage.name, need=needs.never, found=f"this variant of {stage.name}")]
    if needs.device not in (None, "cpu") or needs.gpus or needs.gpu_memory:
        kind, cards = machine.gpus
        wanted = needs.device if needs.device not in (None, "cpu") else "gpu"
        found = ", ".join(f"{name} ({size / _GB:.0f} GB)" for name, size in cards) or f"GPUs that torch can use: {kind}"
        if not cards or wanted not in ("gpu", kind):
            skips.append((f"device {wanted}", found))
        elif len(cards) < (needs.gpus or 1):
            skips.append((f"{needs.gpus} GPUs", found))
        elif min(size for _, size in cards) < (needs.gpu_memory or 0) * _GB:
            skips.append((f"{needs.gpu_memory:g} GB of GPU memory", found))
    amounts = (
        (needs.memory, "GB of memory", lambda: machine.memory / _GB),
        (needs.disk, "GB of free disk", lambda: machine.disk / _GB),
        (needs.cores, "cores", usable_cores),
    )
    for least, unit, have in amounts:
        if least is not None and have() < least:
            skips.append((f"{least:g} {unit}", f"{have():.1f} {unit}" if unit != "cores" else f"{have()} {unit}"))
    skips += [(f"package {name}", "not installed") for name in needs.packages if util.find_spec(name) is None]
    skips += [(f"engine {name}", why) for name in needs.engines if (why := _lacks_engine(name))]
    skips += [(f"data {name}", why) for name in needs.data if (why := _lacks_data(name))]
    lost = {name: ended.get(name) for name in needs.stages if ended.get(name) is not Status.OK}
    skips += [(f"stage {name}", "not run" if status is None else word_of(status)) for name, status in lost.items()]
    return [Skip(stage=stage.name, need=need, found=one_line(found)) for need, found in skips]


def word_of(status: Status) -> str:
    """Return ``ok``, ``failed``, or ``skipped`` for a stage that this machine cannot run."""
    return "skipped" if status is Status.NOT_SUPPORTED else status.value


def _lacks_engine(name: str) -> str:
    from fidelab.environments.environment import locate

    try:
        locate(name)
    except FidelabError as error:
        return str(error)
    return ""


def _lacks_data(name: str) -> str:
    """Reason why a data set is unavailable; one on the hub is fetched."""
    from fidelab.inputs.gsm8k import load_problems
    from fidelab.inputs.texts import load_text

    try:
        if name == "gsm8k" or name.endswith(".jsonl"):
            load_problems(name, 1)
        else:
            load_text(name)
    except FidelabError as error:
        return str(error)
    return ""


# --------------------------------------------------------------------------------------------------------- running


def run_profile(
    resolved: Resolved,
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
    label = resolved.name.replace("/", "-").removesuffix(".yaml") + (f"-{resolved.variant}" if resolved.variant else "")
    written = {"kind": KIND, "only": list(only), "command": command, "resolved": resolved.model_dump(mode="json")}
    text = yaml.safe_dump(written, sort_keys=False, allow_unicode=True)
    label = re.sub(r"[^A-Za-z0-9.-]+", "-", label.rpartition("-.")[2])
    folder = RunFolder.create(output_dir.absolute() / "profiles", label, text)
    trust_content(folder.config, text.encode())
    return _run_jobs(resolved, folder.path, only, command, watch), folder.path


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
        resolved = Resolved.model_validate(written["resolved"])
        only, command = [str(name) for name in written["only"]], str(written["command"])
    except FileNotFoundError:
        raise InputError(f"{folder} is not a run of a profile: it has no {CONFIG}") from None
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, ValidationError) as error:
        raise InputError(f"{file} cannot be read: {one_line(str(error))[:200]}") from None
    return _run_jobs(resolved, folder, only, command, watch)


def stage_command(stage: Stage, folder: Path) -> list[str]:
    """Return the command of a stage, ``fidelab`` or ``k16v8`` first. Experiments are files in the profile's folder.

    Raises:
        OutputError: If the file cannot be written.
    """
    own = folder / "stages" / stage.name

    def placed(value: Any) -> Any:
        match value:
            case str():
                return value.replace("{folder}", str(own)).replace("{stages}", str(folder / "stages"))
            case list() | tuple():
                return [placed(inner) for inner in value]
            case dict():
                return {key: placed(inner) for key, inner in value.items()}
        return value

    if stage.experiment is None:
        return _with_program([str(placed(word)) for word in stage.command or ()])
    places = {"output_dir": str(own / "runs"), "captures_dir": str(folder / "captures")}
    if stage.experiment.get("kind") is not None:  # a cross-engine experiment keeps its captures itself
        del places["captures_dir"]
    file = own / "experiment.yaml"
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{own} cannot be made: {error.strerror or error}") from None
    # JSON is YAML, and says what is a text and what a number
    write_atomically(file, json.dumps({**places, **placed(stage.experiment)}, indent=2, ensure_ascii=False) + "\n")
    return [
        "fidelab",
        "compare",
        "-f",
        str(file),
        "--json",
        "--trust",
        str(file),
    ]  # whoever runs the profile has trusted it


def plan_profile(resolved: Resolved, output_dir: Path, *, only: Sequence[str] = (), command: str = "") -> Study:
    """Return the stages, whether each can run here, and its cost in seconds and bytes, without running any.

    The cost of an experiment is that of its dry run. For other commands, the profile specifies it.

    Raises:
        UnknownNameError: If ``only`` names a stage that the profile does not have.
    """
    machine, rows, commands = Machine(output_dir), dict[str, StudyRow](), dict[str, str]()
    for stage in _chosen(resolved, only):
        skips = judge(stage, machine, {name: row.status for name, row in rows.items()})
        words = ["compare", "-f", "EXPERIMENT", "--json"] if stage.experiment is not None else stage.command or ()
        commands[stage.name] = shlex.join(_with_program([*map(str, words)]))
        seconds, disk = (None, None) if skips or stage.experiment is None else _dry_run(stage)
        if seconds is None and stage.needs.hours is not None:
            seconds = 3600 * stage.needs.hours
        rows[stage.name] = _stage(
            stage,
            Status.NOT_SUPPORTED if skips else Status.OK,
            _lacking(skips) or None,
            seconds,
            disk,
            about=stage.about,
            experiment=stage.experiment,
            skips=[skip.model_dump() for skip in skips],
            needs=stage.needs.model_dump(mode="json", exclude_defaults=True),
        )
    running = [row for row in rows.values() if row.measured]
    times = [row.value("seconds") for row in running]
    seconds, disk = sum(filter(None, times)), sum(row.value("disk") or 0.0 for row in running)
    unknown = f", and {counted(n, 'stage')} of unknown time" if (n := times.count(None)) else ""
    return new_study(
        command=command,
        settings=resolved.model_dump(mode="json"),
        kind=KIND,
        title=_title(resolved),
        columns=("name", "about", "seconds", "disk"),
        rows=tuple(rows.values()),
        sentences=(f"in all about {seconds:,.0f} s and {disk / _MB:,.1f} MB of saved outputs{unknown}",),
        commands=commands,
    )


def _dry_run(stage: Stage) -> tuple[float | None, float | None]:
    """Return the seconds and the bytes that an experiment's dry run gives; ``None`` where it gives none."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [sys.executable, "-m", *stage_command(stage, Path(scratch)), "--dry-run"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    try:
        plan = strict_json(done.stdout)
        whole = sum(float(plan.get(key, 0)) for key in ("disk_bytes", "conversion_bytes"))
        return float(plan["seconds"]), whole
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None


def _chosen(resolved: Resolved, only: Sequence[str]) -> list[Stage]:
    known = [stage.name for stage in resolved.stages]
    for name in only:
        if name not in known:
            raise UnknownNameError(f"stage of profile {resolved.name}", name, known)
    return [stage for stage in resolved.stages if not only or stage.name in only]


def _title(resolved: Resolved) -> str:
    return f"{resolved.name}{f' ({resolved.variant})' if resolved.variant else ''}: {resolved.purpose}"


def _lacking(skips: Sequence[Skip]) -> str:
    return "; ".join(f"needs {skip.need}, found {skip.found}" for skip in skips)


def _with_program(words: list[str]) -> list[str]:
    return words if words[:1] == ["k16v8"] else ["fidelab", *words]


def _run_jobs(
    resolved: Resolved, folder: Path, only: Sequence[str], command: str, watch: Callable[[str], None]
) -> Study:
    machine = Machine(folder)
    ended: dict[str, StudyRow] = {}
    skips: list[Skip] = []
    chosen = _chosen(resolved, only)
    for number, stage in enumerate(chosen, 1):
        place = f"{stage.name} ({number} of {len(chosen)})"
        kept = _finished_row(folder, stage)
        lacking = [] if kept else judge(stage, machine, {name: row.status for name, row in ended.items()})
        if kept is not None:
            watch(f"{place}: done before")
            ended[stage.name] = kept
        elif lacking:
            skips += lacking
            reason = _lacking(lacking)
            watch(f"{place}: skipped, {reason}")
            ended[stage.name] = _stage(stage, Status.NOT_SUPPORTED, reason)
        else:
            watch(f"{place}: {stage.about or 'runs'}; log: {folder / 'stages' / stage.name / 'log.txt'}")
            ended[stage.name] = row = _run_stage(stage, folder)
            why = f", {row.reason}" if row.reason else ""
            watch(f"{place}: {row.status.value}{why}, {row.value('seconds'):.0f} s")
        study = _study(resolved, folder, ended, skips, machine, command)
        write_study(study, RunFolder(folder))
        write_atomically(folder / SKIPS, json.dumps([skip.model_dump() for skip in skips], indent=2) + "\n")
    return study


def _stage(
    stage: Stage,
    status: Status,
    reason: str | None,
    seconds: float | None = None,
    disk: float | None = None,
    **facts: Any,
) -> StudyRow:
    """Outcome of a stage; ``hours``: the profile's estimate for the required machine."""
    metrics = [made(value) for made, value in ((_SECONDS, seconds), (_DISK, disk)) if value is not None]
    facts = {"hours": stage.needs.hours, **facts}
    at = {PART: "stage", "name": stage.name}
    return StudyRow(status=status, reason=reason, at={**at}, metrics=tuple(metrics), facts=facts)


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
            [sys.executable, "-m", *words], stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            _stop(process)
            raise Interrupted(folder, "fidelab reproduce") from None
    reason = None if code == 0 else _reason(own / "log.txt", code)
    seconds = round(time.monotonic() - began, 3)
    row = _stage(stage, Status.FAILED if code else Status.OK, reason, seconds, command=words, exit_code=code)
    write_atomically(own / "stage.json", row.model_dump_json(indent=2, exclude_defaults=True) + "\n")
    return row


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(log: Path, code: int) -> str:
    """The last line that the stage wrote for people."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = [one_line(line) for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    said = next((line for line in reversed(lines) if line.startswith("fidelab: ")), lines[-1] if lines else "")
    return ": ".join(filter(None, (f"exit code {code}", said.removeprefix("fidelab: ")[:400])))


# ------------------------------------------------------------------------------------------ expected against measured


def find_figure(data: Any, at: str) -> tuple[float | None, tuple[float, float] | None, str | None]:
    """Return the value at a path in a stage's JSON, its interval, and the reason if there is none.

    Steps are keys, places in lists, and ``[key=value,key.key=value]``: the only matching item of a list. A metric,
    which is an object with ``value`` and perhaps ``ci``, counts as its value; the interval of ``name`` may also be its
    neighbour ``name_ci``.
    """
    node, why, interval = data, "", None
    for step in _STEP.findall(at):
        if isinstance(node, Mapping):
            why = str(node.get("reason") or why)
        name = step.strip("[]")
        if step.startswith("["):
            conditions = [condition.partition("=")[::2] for condition in name.split(",")]
            items = node if isinstance(node, list) else []
            fitting = [item for item in items if all(_leaf(item, key) == wanted for key, wanted in conditions)]
            if len(fitting) != 1:
                return None, None, why or f"{'several items' if fitting else 'no item'} with {name}"
            node = fitting[0]
        elif isinstance(node, Mapping) and name in node:
            node, interval = node[name], node.get(f"{name}_ci")
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None, None, why or f"no {name!r} in what the stage printed"
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


def _study(
    resolved: Resolved,
    folder: Path,
    ended: Mapping[str, StudyRow],
    skips: Sequence[Skip],
    machine: Machine,
    command: str,
) -> Study:
    outputs = {name: _output(folder, name) for name, row in ended.items() if row.status is not Status.NOT_SUPPORTED}
    source, differences = resolved.source, (*resolved.differences, *_versions(resolved))
    said = (
        source.url and f"Expected: {source.title}, {source.url}",
        source.setup and f"Measured there on: {source.setup}",
        differences and "Differences of the protocol:",
        *(f"- {difference}" for difference in differences),
    )
    return new_study(
        run_id=folder.name,
        command=command,
        settings=resolved.model_dump(mode="json"),
        kind=KIND,
        title=_title(resolved),
        columns=_COLUMNS,
        rows=(*ended.values(), *(_figure(figure, ended, outputs) for figure in resolved.expected)),
        sentences=tuple(filter(None, said)),
        facts={
            "machine": machine.record(),
            "skips": [skip.model_dump() for skip in skips],
            "differences": list(differences),
            "outputs": outputs if resolved.collect else {},
        },
    )


def _output(folder: Path, stage: str) -> Any:
    try:
        return strict_json(read_file(folder / "stages" / stage / "out.json", _MAX_STAGE_BYTES))
    except (OSError, ValueError):
        return None


def _figure(figure: Figure, ended: Mapping[str, StudyRow], outputs: Mapping[str, Any]) -> StudyRow:
    """A figure of the source and the measured one, or the reason why it is missing."""
    stage, value, interval = ended.get(figure.stage), None, None
    if stage is None or stage.status is Status.NOT_SUPPORTED:
        reason: str | None = "stage skipped" if stage else "stage not run"
    else:
        value, interval, reason = find_figure(outputs.get(figure.stage), figure.at)
        if value is None and stage.status is Status.FAILED:
            reason = "stage failed"
    metrics = [_EXPECTED(figure.value)] if figure.value is not None else []
    facts = {"unit": figure.unit} if figure.unit else {}
    return StudyRow(
        status=Status.OK if value is not None else Status.NOT_MEASURABLE,
        reason=reason,
        at={PART: "figure", "name": figure.name, "stage": figure.stage},
        metrics=(*metrics, _MEASURED(value, interval)) if value is not None else tuple(metrics),
        facts=facts if value is not None else {**facts, "why": reason},
    )


def _versions(resolved: Resolved) -> list[str]:
    """Pinned values that differ here."""
    lines = []
    for name, pinned in resolved.pins.packages.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "none"
        if found.partition("+")[0] != pinned:
            lines.append(f"{name}: {found} here, {pinned} pinned")
    return lines
