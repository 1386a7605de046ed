"""``--dry-run``: jobs, tokens, expected disk space and time, and the source of the rates."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from fidelab.cli.output import duration, note, say, say_command, say_fact
from fidelab.core import format_bytes
from fidelab.core.lines import columns
from fidelab.results.numbers import counted

if TYPE_CHECKING:
    from fidelab.config.cross import CrossEngine
    from fidelab.config.schema import Experiment, ServeConfig
    from fidelab.plan.estimate import Estimate
    from fidelab.plan.prepare import PreparedRun
    from fidelab.plan.resolve import Settings


def show_plan(experiment: Experiment, as_json: bool) -> None:
    """Print the plan, without running or writing anything."""
    if experiment.engine.bin is not None:
        _show_own(experiment, as_json)
        return
    plan = _planned(experiment)
    if as_json:
        print(json.dumps(plan))
        return
    _print_jobs(plan)
    print()
    _print_time(plan)


def _show_own(experiment: Experiment, as_json: bool) -> None:
    """Print the commands of the user's own programs, and the disk space that their files need."""
    from fidelab.core import shell_line
    from fidelab.run.own_llamacpp import plan_own

    plan = plan_own(experiment)
    commands = [{"role": role, "command": shell_line(*words)} for role, words in plan.commands()]
    expected = plan.seconds()
    if as_json:
        seconds = None if expected is None else round(expected[0], 1)
        own = {"commands": commands, "seconds": seconds, "disk_bytes": plan.disk_bytes()}
        print(json.dumps({**own, "remarks": list(plan.remarks)}))
        return
    for one in commands:
        say(one["role"])
        say_command(one["command"], indent=2)
    print()
    for remark in plan.remarks:
        say(remark)
    [size] = format_bytes(plan.disk_bytes())
    say(f"{counted(len(commands), 'start')} of llama-perplexity; files of rows take {size} for a while")
    if expected is None:
        say("how long is not known: this program has not run here; a run shows the time left after its first windows")
    else:
        say(f"about {duration(expected[0])}, {expected[1]}")


def show_pasted(serve: ServeConfig) -> None:
    """Print what became of each part of a pasted command: taken, translated, or ignored with the reason."""
    if serve.taken:
        note(f"fidelab: taken from --serve: {', '.join(serve.taken)}")
    for written, read in serve.translated.items():
        note(f"fidelab: translated from --serve: {written} → {read}")
    for words, reason in serve.ignored.items():
        note(f"fidelab: ignored from --serve: {words} ({reason})")


def show_cross_plan(cross: CrossEngine, as_json: bool) -> None:
    """Print the plan of every engine of a cross-engine experiment, and the total time."""
    from fidelab.core.errors import FidelabError
    from fidelab.studies.cross_engine import experiments_of, line_failure

    plans: dict[str, dict[str, Any]] = {}
    lines = {line.label: line for line in cross.engines}
    for label, experiment in experiments_of(cross).items():
        try:
            plans[label] = _planned(experiment)
        except FidelabError as error:
            plans[label] = {"reason": line_failure(cross, lines[label], error)}
    whole = {name: sum(plan.get(name, 0) for plan in plans.values()) for name in ("tokens", "disk_bytes", "seconds")}
    if as_json:
        print(json.dumps({"engines": plans, **whole}))
        return
    for label, plan in plans.items():
        say(f"{label}:")
        if "reason" in plan:
            say(f"cannot run: {plan['reason']}", indent=2, hang=4)
        else:
            _print_jobs(plan, 2)
            _print_time(plan, 2)
        print()
    say(f"about {duration(whole['seconds'])} in all")


def _planned(experiment: Experiment) -> dict[str, Any]:
    from fidelab.core.serial import to_json
    from fidelab.models.reading import plan_alone
    from fidelab.plan.looks import n_looks, planned, windows_of
    from fidelab.plan.memory import memory_needs

    began = time.monotonic()
    with plan_alone() as reads:
        prepared = planned(experiment, convert=False)
        needs = memory_needs(prepared.settings)
    planning = time.monotonic() - began
    expected = prepared.estimate()
    plan = {
        **_plan(prepared, expected),
        **{
            "seconds": round(expected.seconds + planning, 1),
            "parts": {name: round(seconds, 1) for name, seconds in {"planning": planning, **expected.parts()}.items()},
            "axes": {name: round(seconds, 1) for name, seconds in expected.axes().items()},
            "benches": {name or "loads": round(seconds, 1) for name, seconds in expected.benches.items()},
            "sources": expected.sources,
            "unread_bytes": sum(reads.unread.values()),
            "memory": [to_json(need) for need in needs],
            "budget_seconds": experiment.budget,
        },
    }
    if n_looks(prepared.settings) > 1:
        most = round(prepared.estimate(whole=True).seconds + planning, 1)
        plan |= {"windows": windows_of(prepared.plan), "seconds_at_most": most}
    return plan


def _plan(prepared: PreparedRun, expected: Estimate) -> dict[str, Any]:
    """Return the rows of the planned work."""
    from fidelab.axes.base import Axis
    from fidelab.plan.estimate import conversion_bytes, needed_bytes
    from fidelab.plan.starts import starts_and_loads

    settings = prepared.settings
    leading = [name for name, axis in settings.axes.items() if axis.follows]
    # The engines that are not installed here, each with the remedy
    starts, loads = starts_and_loads(settings, prepared.plan.jobs)
    problems = {str(arm.about.get("not_installed", "")) for arm in prepared.settings.resolved.values()} - {""}
    return {
        "jobs": [
            {
                "role": job.role,
                "kv": job.label,
                "captures_missing": len(job.captures),
                "tokens": job.tokens,
                "seconds": round(job.seconds, 1),
            }
            for job in expected.jobs
        ],
        "not_supported": dict(settings.unsupported),
        "unavailable": dict(prepared.plan.unavailable),
        "remarks": [
            *prepared.plan.remarks,
            *[f"{problem}; planned without asking it" for problem in sorted(problems)],
            *_unreachable(settings),
        ],
        "follows": leading,
        "not_counted": [name for name in leading if type(settings.axes[name]).foreseen is Axis.foreseen],
        "tokens": sum(job.tokens for job in expected.jobs),
        "starts": starts,
        "loads": loads,
        "disk_bytes": needed_bytes(prepared.plan),
        "conversion_bytes": conversion_bytes(prepared.plan),
        "captures_dir": str(settings.captures_dir),
    }


def _unreachable(settings: Settings) -> list[str]:
    """Lines about servers that do not answer, each asked once."""
    servers = {name: one for name, one in settings.resolved.items() if one.engine_class.is_server and not one.borrowed}
    with ThreadPoolExecutor(max(1, len(servers))) as pool:  # each may take its seconds
        found = pool.map(lambda one: one.engine_class.unreachable(one.arm), servers.values())
        return [f"{name}: {why}" for name, why in zip(servers, found, strict=True) if why]


def _print_jobs(plan: Mapping[str, Any], indent: int = 0) -> None:
    told = partial(say, indent=indent, hang=indent + 2)
    jobs = plan["jobs"]
    kv_wide = max((len(job["kv"]) for job in jobs), default=0)
    role_wide = max((len(job["role"]) for job in jobs), default=0)
    room = columns() - indent
    for job in jobs:
        state = f"{job['tokens']:>9,} tokens {duration(job['seconds']):>9}"
        state = state if job["captures_missing"] else "saved already"
        if role_wide + kv_wide + len(f" {'':>9} tokens {'':>9} ") <= room:
            told(f"{job['role']:<{role_wide}} {job['kv']:<{kv_wide}} {state}")
        elif role_wide + len(f"{'':>9} tokens {'':>9} ") <= room:  # the role of a candidate holds its format
            told(f"{job['role']:<{role_wide}} {state}")
        else:
            told(job["role"])
            told(f"  {state.strip()}")
    wide = min(max([role_wide, 23, *map(len, plan["not_supported"])]), room // 2) + 1
    for name, seconds in plan["benches"].items():
        say_fact(f"bench {name}" if name != "loads" else "loads for benches", duration(seconds), wide, indent=indent)
    for name, reason in plan["not_supported"].items():
        say_fact(name, f"not supported: {reason}", wide, indent=indent)
    for name, reason in plan["unavailable"].items():
        say_fact(f"test {name}", f"not measurable: {reason}", wide, indent=indent)
    for remark in plan["remarks"]:
        told(f"{remark}")
    if plan["not_counted"]:
        leading = ", ".join(plan["not_counted"])
        told(f"not counted: questions that follow from the reference's answers ({leading})")
    for need in plan["memory"]:
        told(f"{memory_line(need)}")
    if plan["unread_bytes"]:
        [size] = format_bytes(plan["unread_bytes"])
        told(f"{size} of weights are read for their hash when the run starts, and were not for this plan")
    mib = plan["disk_bytes"] / 2**20
    if plan["starts"]:
        loaded = counted(plan["loads"], "load")
        told(f"{counted(plan['starts'], 'start')} of an engine, {loaded} of a model")
    told(f"total {plan['tokens']:,} tokens, {mib:.1f} MiB of saved outputs in {plan['captures_dir']}")
    if plan["conversion_bytes"]:
        mib = plan["conversion_bytes"] / 2**20
        told(f"and {mib:,.1f} MiB in the cache: a GGUF file's weights, converted once")


def memory_line(need: Mapping[str, Any]) -> str:
    """Return the memory that a configuration needs next to what was found, and whether it fits."""
    needed, found = (f"{need[key] / 2**30:.3g} GiB" for key in ("needed_bytes", "found_bytes"))
    fits = "" if need["needed_bytes"] <= need["found_bytes"] else ": will not fit"
    return f"{need['model']} in {need['dtype']} needs {needed} for its weights, {need['of']} has {found}{fits}"


def _print_time(plan: Mapping[str, Any], indent: int = 0) -> None:
    told = partial(say, indent=indent, hang=indent + 2)
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in plan["parts"].items() if seconds >= 0.5)
    told(f"about {duration(plan['seconds'])}" + (f": {parts}" if parts else ""))
    if "windows" in plan:
        first, most = plan["windows"]
        told(
            f"{first} to {counted(most, 'window')}: a decided candidate reads no more; "
            f"about {duration(plan['seconds_at_most'])} if none is decided early"
        )
    if len(plan["axes"]) > 1:
        told("tests: " + ", ".join(f"{name} {duration(seconds)}" for name, seconds in plan["axes"].items()))
    if plan["budget_seconds"] is not None:
        over = plan["budget_seconds"] < plan["seconds"]
        said = "too short for the first look" if over else "it ends before windows that exceed it"
        told(f"budget {duration(plan['budget_seconds'])}: {said}")
    for rates, arms in plan["sources"].items():
        told(f"rates from {rates}: {', '.join(arms)}")
    if any(source.startswith("defaults") for source in plan["sources"]):
        note("the time is a guess by a factor of several: the first run here makes the next estimate a measured one")
