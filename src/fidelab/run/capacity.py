"""Measure the capacity of the servers of several arms. Each server is started in turn, measured, and stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import fidelab
from fidelab.bench.serving import Requests, ServingSettings, ServingWatch, measure_capacity, reach
from fidelab.config.schema import Preset
from fidelab.core import Arm, Status, slug
from fidelab.core.errors import FidelabError, NotSupportedError
from fidelab.environments.environment import Environment
from fidelab.environments.servers import end
from fidelab.report.html import write_html
from fidelab.results.measurement import Measurement
from fidelab.results.record import ArmRecord, Report, RuntimeRecord
from fidelab.results.store import RunFolder
from fidelab.run.arms import serve_command
from fidelab.run.launch import arm_of, check, check_servable, launch, plan

_HOST = "127.0.0.1"


def capacity_of_arms(
    presets: Sequence[Preset],
    load: Mapping[str, Any],
    contexts: Sequence[int],
    most: int,
    *,
    device: str,
    threads: int | None,
    patience: float,
    output_dir: Path,
    command: str,
    watch: ServingWatch,
    say: Callable[[str], None],
) -> tuple[Report, RunFolder]:
    """Measure the capacity of each arm's own server. An arm whose server cannot run does not affect the others.

    Args:
        presets: the arms; the others are compared with the first.
        load: settings of :class:`ServingSettings` but for the server.
        contexts, most: as in :func:`measure_capacity`.
        patience: seconds within which a server must answer.

    Raises:
        FidelabError: If an arm is invalid. Raised before any server is started.
        KeyboardInterrupt, SystemExit: If stopped. The server is ended, and the report in the folder has the arms so
            far.
    """
    arms = [arm_of(preset, device=device, threads=threads) for preset in presets]
    for preset, arm in zip(presets, arms, strict=True):
        check_servable(preset, arm)
    environments = [_environment(preset, arm) for preset, arm in zip(presets, arms, strict=True)]
    settings = {"arms": [preset.arm_fields() for preset in presets], "load": dict(load)}
    folder = RunFolder.create(output_dir, f"capacity-{slug(presets[0].model)}", yaml.safe_dump(settings))
    created, records = datetime.now(UTC).replace(microsecond=0), list[ArmRecord]()
    report: Report | None = None
    try:
        for preset, arm, environment in zip(presets, arms, environments, strict=True):
            records.append(_measure(preset, arm, environment, load, contexts, most, patience, folder, watch, say))
            report = Report(
                run_id=folder.run_id,
                created=created,
                fidelab_version=fidelab.__version__,
                command=command,
                settings=settings,
                comparability_key={"benches.capacity": {**load, "most": most}},
                reference=records[0],
                candidates=tuple(records[1:]),
            )
            report.write(folder.report)
    finally:
        if report is not None:
            write_html(report, folder.html)
            if len(records) < len(arms):
                say(f"fidelab: the configurations so far are in {folder.path}")
    assert report is not None
    return report, folder


def _environment(preset: Preset, arm: Arm) -> Environment | NotSupportedError:
    """Return the environment of an arm's server, or the reason why it cannot run here."""
    try:
        return check(preset, arm)
    except NotSupportedError as error:
        return error


def _measure(
    preset: Preset,
    arm: Arm,
    environment: Environment | NotSupportedError,
    load: Mapping[str, Any],
    contexts: Sequence[int],
    most: int,
    patience: float,
    folder: RunFolder,
    watch: ServingWatch,
    say: Callable[[str], None],
) -> ArmRecord:
    """Measure one arm's server, from its start to its end."""
    ran: RuntimeRecord | None = None
    try:
        if isinstance(environment, NotSupportedError):
            raise environment
        planned = plan(preset, arm, _HOST, None, environment)
        with launch(planned, patience, say) as launched:
            try:
                contact = reach(ServingSettings.of(**load, base_url=planned.url), None)
                watch.reached(contact)
                kept = Requests(folder.path, arm.name, watch)
                found = measure_capacity(contact, contexts, most, watch=kept)
                k, v = contact.server.kv or (None, None)
                facts = {"k_dtype": k, "v_dtype": v, "server": contact.server.kind, **contact.server.facts}
                ran = RuntimeRecord.model_validate(facts)
            finally:
                end(launched.server)
    except NotSupportedError as error:
        found = Measurement(status=Status.NOT_SUPPORTED, reason=str(error))
    except FidelabError as error:
        found = Measurement(status=Status.FAILED, reason=str(error))
    return ArmRecord(
        status=found.status,
        reason=found.reason,
        name=arm.name,
        engine=arm.engine,
        model=arm.model,
        kv=arm.kv,
        serve_command=serve_command(None, arm),
        ran=ran,
        benches={"capacity": found},
    )
