"""A finished run in an experiment tracker: Weights & Biases, or trackio.  See docs/sharing.md#mirrors.

One run of fidelab becomes one run there.  What goes: where the figures come from (configuration), every figure with the
ends of its interval (history and summary), verdicts, two tables, and the page as it lies in the run's folder.  As in
receipts, absolute paths are their last parts.  The trackers' own collecting of machine, code, console and packages is
switched off.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Final

from fidelab.core import slug
from fidelab.core.errors import FidelabError, InputError, OutputError, UsageError
from fidelab.ledger.receipt import public
from fidelab.results.record import Report
from fidelab.results.store import RunFolder
from fidelab.results.table import Key, arms, tabulate

Table = tuple[tuple[str, ...], list[tuple[str | float | None, ...]]]
"""Columns and rows."""


@dataclass(frozen=True)
class Mirrored:
    """What a tracker gets.  ``page``: HTML, empty where the run has none."""

    name: str
    config: dict[str, Any]
    figures: dict[str, float]
    verdicts: dict[str, str]
    tables: dict[str, Table]
    page: str


def mirrored(report: Report, page: str = "") -> Mirrored:
    """The content of a mirror.

    A figure is named ``<arm>/<axis or bench>/<shape of work>/<metric>``, without the part that it has not; the ends of
    its 95% interval (of repeats the smallest and the largest) follow as ``…_low`` and ``…_high``.
    """
    figures: dict[str, float] = {}
    rows: list[tuple[str | float | None, ...]] = []
    for key, metric in tabulate(report).metrics.items():
        if metric.value is None:
            continue
        low, high = metric.ci or metric.span or (None, None)
        name = "/".join(filter(None, (_arm(key), key.group, key.cell, key.metric)))
        ends = {name: metric.value, f"{name}_low": low, f"{name}_high": high}
        figures |= {place: value for place, value in ends.items() if value is not None}
        bound = "≥" if metric.bound else ""
        rows.append((*key, metric.unit, metric.better or "", bound, metric.value, low, high, metric.caveat))
    plain = report.model_dump(mode="json", by_alias=True)
    config = {
        name: plain[name]
        for name in ("schema", "run_id", "created", "fidelab_version", "command", "environment", "settings")
    }
    told = ("status", "reason", "engine", "model", "kv", "weights_sha256", "ran")
    config["arms"] = {f"{role} {arm.name}": arm.model_dump(mode="json", include={*told}) for role, arm in arms(report)}
    config["comparability_key"] = plain["comparability_key"]
    config["recommendation"] = plain["recommendation"]
    verdicts: list[tuple[str | float | None, ...]] = [
        (role, arm.name, arm.engine, arm.kv_text, arm.status.value, arm.reason or "")
        + ((arm.verdict.band or "no verdict", arm.verdict.sentence) if arm.verdict else ("", ""))
        for role, arm in arms(report)
    ]
    return Mirrored(
        name=report.run_id,
        config=public(config),
        figures=figures,
        verdicts={arm.name: arm.verdict.band or "no verdict" for arm in report.candidates if arm.verdict},
        tables={
            "arms": (("role", "arm", "engine", "kv", "status", "reason", "verdict", "sentence"), public(verdicts)),
            "figures": ((*Key._fields, "unit", "better", "bound", "value", "low", "high", "caveat"), rows),
        },
        page=page,
    )


def _arm(key: Key) -> str:
    """Names are unique among candidates alone."""
    return key.arm if key.role == "candidate" else f"{key.role} {key.arm}"


def mirror(run: RunFolder, target: str, project: str) -> str:
    """Write a finished run to a tracker and return where it is found.

    Args:
        target: a name in :data:`TARGETS`.

    Raises:
        UsageError: the target's package is not installed; trackio has this run already.
        InputError: the run has no report yet, or a damaged one.
        OutputError: the tracker refused.
    """
    try:
        page = run.html.read_text("utf-8") if run.html.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{run.html}: cannot read the page: {error}") from None
    content = mirrored(run.read_report(), page)
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else its own crash reports go out, offline or not
    try:
        with redirect_stdout(StringIO()):
            try:
                tracker = import_module(target)
            except ImportError as error:
                needs = f"--to {target} needs its package ({error}): pip install 'fidelab[{target}]'"
                raise UsageError(needs) from None
            return TARGETS[target](tracker, content, project)
    except FidelabError:
        raise
    except Exception as error:  # whatever another's package raises
        why = " ".join(str(error).split()) or type(error).__name__
        raise OutputError(f"{target} did not take {content.name}: {why}") from error


def _to_wandb(wandb: Any, content: Mirrored, project: str) -> str:
    """One run whose id is the run's name: mirrored again, it replaces what is there."""
    quiet = wandb.Settings(
        **dict.fromkeys(("x_disable_stats", "x_disable_meta", "x_disable_machine_info", "silent"), True),
        **dict.fromkeys(("disable_git", "disable_code", "disable_job_creation"), True),
        **dict.fromkeys(("host", "username", "email"), ""),
        console="off",
        save_code=False,
        x_save_requirements=False,
    )
    tables = {name: wandb.Table(columns=[*columns], data=rows) for name, (columns, rows) in content.tables.items()}
    page = {"report": wandb.Html(content.page, inject=False)} if content.page else {}
    run_id = slug(content.name)
    with wandb.init(
        project=project, id=run_id, name=content.name, config=content.config, tags=["fidelab"], settings=quiet
    ) as run:
        run.log({**content.figures, **tables, **page})
        run.summary.update({f"{arm}/verdict": verdict for arm, verdict in content.verdicts.items()})
        place = str(run.url) if run.settings.mode == "online" else f"{run.settings.sync_dir} (send it with: wandb sync)"
    if run.disabled:
        raise UsageError("WANDB_MODE=disabled: wandb writes nothing; set it to online or offline")
    return place


def _to_trackio(trackio: Any, content: Mirrored, project: str) -> str:
    """One run with everything at step 0, in ``TRACKIO_DIR`` unless the environment names a Space or a server."""
    where = trackio.utils.resolve_space_id_and_server_url(None, None)
    remote = next(filter(None, where), None)
    with _without_network(remote is None), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        if remote is None and content.name in _known(trackio, project):
            raise UsageError(
                f"trackio's project {project} has {content.name} already: delete it there, or name another --project"
            )
        trackio.init(
            project=project,
            name=content.name,
            config={**content.config, "verdicts": content.verdicts},
            auto_log_gpu=False,
            auto_log_cpu=False,
            embed=False,
        )
        try:
            tables = {
                name: trackio.Table(columns=[*columns], data=rows) for name, (columns, rows) in content.tables.items()
            }
            page = {"report": trackio.Html(content.page, inject=False)} if content.page else {}
            trackio.log({**content.figures, **tables, **page}, step=0)
        finally:
            trackio.finish()
        # it only warns of what it cannot write
        lost = [str(one.message) for one in told if "trackio" in Path(one.filename).parts]
        if not lost and remote is None and content.name not in _known(trackio, project):
            lost = [f"nothing was written to {trackio.utils.TRACKIO_DIR}"]
        if lost:
            raise OutputError(" ".join(lost[0].split()))
    return str(remote or trackio.utils.TRACKIO_DIR).partition("?")[0]  # behind it a server's address has its token


def _known(trackio: Any, project: str) -> set[str]:
    """The runs of a project here; none where there is no such project yet."""
    try:
        return {run.name for run in trackio.Api().runs(project)}
    except ValueError:
        return set()


@contextmanager
def _without_network(local: bool) -> Iterator[None]:
    """trackio asks the hub for the user's name, even where nothing is sent there."""
    if not local:
        yield
        return
    from huggingface_hub import constants

    former, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = former


TARGETS: Final[dict[str, Callable[[Any, Mirrored, str], str]]] = {"wandb": _to_wandb, "trackio": _to_trackio}
