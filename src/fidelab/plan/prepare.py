"""Turn an experiment into a plan with its inputs. Nothing runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fidelab.axes.base import AxisInputs
from fidelab.config.schema import Experiment
from fidelab.core import Status
from fidelab.core.errors import UsageError
from fidelab.core.registry import require_all
from fidelab.engines import ENGINES
from fidelab.engines.checkpoint import shape_of
from fidelab.inputs.conversations import load_traffic, traffic_prompts, traffic_remarks, traffic_text
from fidelab.inputs.prompts import load_prompts
from fidelab.inputs.texts import load_text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import reading
from fidelab.models.key_sizes import fragile_keys, key_sizes, narrow
from fidelab.models.local import parts_of
from fidelab.models.weights import weight_files
from fidelab.plan.benches import BenchPlan
from fidelab.plan.build import Plan, build_plan
from fidelab.plan.capacity import capacity_question
from fidelab.plan.deploy import ResolvedArm
from fidelab.plan.estimate import Estimate, check_disk, estimate
from fidelab.plan.memory import rank_remarks
from fidelab.plan.resolve import Settings, convert_weights, refuse_same_server, resolve_experiment
from fidelab.plan.speed import speed_work
from fidelab.references.borrow import borrow, check_model
from fidelab.results.capacity_record import CapacityQuestion
from fidelab.results.measurement import DECIDING
from fidelab.results.outcomes import ArmResult

_SAMPLE_CHARACTERS = 2000  # of the evaluation text, on which engine and parent compare tokenizers


@dataclass(frozen=True)
class PreparedRun:
    """A plan with its inputs."""

    plan: Plan
    inputs: AxisInputs
    sample: str
    capacity: CapacityQuestion | None = None

    @property
    def settings(self) -> Settings:
        """The resolved experiment."""
        return self.plan.settings

    def estimate(self, *, whole: bool = False) -> Estimate:
        """Estimate the cost of the plan without running it.  ``whole``: with all looks, not only the first."""
        if whole:
            return replace(self, plan=self.plan.whole()).estimate()
        benches = BenchPlan(self.settings, self.inputs.tokenizer)
        timed = list(speed_work(self.settings, self.plan.jobs, benches.inputs))
        if not self.settings.benches:
            return estimate(self.plan, self.inputs, timed)
        results = [ArmResult(job.role, job.arm, Status.OK) for job in self.plan.jobs]
        return estimate(self.plan, self.inputs, [*benches.expected(results), *timed])


def prepare(
    experiment: Experiment,
    only: str | None = None,
    *,
    replicate: int = 0,
    created: str | None = None,
    convert: bool = True,
    meanwhile: Callable[[ResolvedArm], None] | None = None,
) -> PreparedRun:
    """Resolve and plan. Nothing runs or is written, but models may be fetched and converted, and packs unpacked.

    ``only``: keep only the job of this role (the first of several candidates). ``replicate``: first number of this
    run's captures.  ``created``: when the run was first started, by default now.  ``convert``: convert the weights of
    GGUF files where an arm needs that; without it, captures of such an arm count as missing, and the engine of a pasted
    command need not be installed.  ``meanwhile``: called with the reference's arm as soon as it is
    known, to start what takes time.

    Raises:
        FidelabError: For anything that the user can fix. The message is one line.
    """
    require_packages(experiment)
    experiment, pack = borrow(experiment)
    if pack is not None and replicate:
        raise UsageError("a borrowed reference cannot be repeated: leave out runs")
    assume = not convert and experiment.serve is not None
    settings = resolve_experiment(experiment, created or now(), pack, assume=assume)
    if meanwhile is not None and pack is None and settings.axes and experiment.executor.name == "local":
        meanwhile(settings.resolved[settings.reference.name])
    capacity = capacity_question(settings)
    tokenizer = Tokenizer.load(settings.model)
    if pack is not None:
        check_model(pack, settings.model, tokenizer)
        pack.install(settings.captures_dir)
    converted = convert_weights(settings, convert)
    experiment, limit = settings.experiment, settings.model.max_positions
    if experiment.traffic is None:
        prompts = None if experiment.prompts == "default" else Path(experiment.prompts)
        text = load_text(experiment.text, tokenizer)
        inputs = AxisInputs(tokenizer, text, load_prompts(prompts), limit)
    else:
        traffic = load_traffic(Path(experiment.traffic), tokenizer, skip_bad=experiment.skip_bad)
        asked = traffic_prompts(traffic) or load_prompts()
        private = not experiment.keep_text
        inputs = AxisInputs(tokenizer, traffic_text(traffic), asked, limit, traffic, private=private)
    plan = build_plan(converted, inputs, replicate)
    if inputs.traffic is not None:
        plan = replace(plan, remarks=(*traffic_remarks(tokenizer, inputs.traffic), *plan.remarks))
    plan = replace(
        plan, remarks=(*plan.remarks, *rank_remarks(settings), *_fragile_keys(settings), *_windows(settings))
    )
    if only is None:
        refuse_same_server(settings)
    else:
        plan = replace(plan, jobs=tuple(job for job in plan.jobs if job.role.partition(":")[0] == only)[:1])
    check_disk(plan.whole())
    return PreparedRun(plan, inputs, inputs.text.content[:_SAMPLE_CHARACTERS], capacity)


def _windows(settings: Settings) -> Iterator[str]:
    """Say which layers of the model read no token beyond a window, where several depths are asked for."""
    axis, model = settings.axes.get(DECIDING), settings.model
    if axis is None or model.kind == "fake" or getattr(axis.settings, "protocol", "") != "depth":
        return
    shape = shape_of(str(model.path))
    if shape.window and shape.layers:
        rest = "no layer reads" if shape.full == 0 else "the others read"
        which = f"{shape.layers - shape.full} of {shape.layers}" if shape.full is not None else "some"
        yield f"kld: {which} layers read the last {shape.window:,} tokens alone, {rest} all of a deeper context"


def _fragile_keys(settings: Settings) -> Iterator[str]:
    """Say where a candidate's 8-bit keys will fail, by the weights of its model, a line per model."""
    said: set[Path] = set()
    for arm in settings.candidates:
        resolved = settings.resolved.get(arm.name)
        if resolved is None or not narrow(arm.kv.k.name) or arm.name in settings.unsupported:
            continue
        model = resolved.model
        weights = model.gguf if model.gguf is not None else model.path
        if model.kind != "fake" and not resolved.engine_class.is_server and weights not in said:
            said.add(weights)
            reads, files = reading.current(), parts_of(weights) if weights.suffix == ".gguf" else weight_files(weights)
            if reads is not None and not reads.may_read_all(files):
                remedy = f"fidelab estimate {model.name} examines them"
                yield f"{arm.name}: its keys are not examined, since a plan reads no weights; {remedy}"
                continue
            if text := fragile_keys(key_sizes(weights)):
                yield text if model is settings.model else f"{arm.name}: {text}"


def require_packages(experiment: Experiment) -> None:
    """Check that all optional packages that a run needs in this process are installed.

    Raises:
        MissingPackageError: If one is not. The message names all of them.
    """
    engines = [experiment.engine, *(arm.engine for arm in experiment.arms if arm.engine is not None)]
    here = any(
        engine.name in ENGINES.names()  # an unknown engine is refused later
        and getattr(ENGINES.load(engine.name), "needs", ())
        and engine.python is None
        and engine.image is None
        for engine in engines
    )
    needed: set[str] = set()
    if experiment.axes or here:
        needed |= {"torch"} if experiment.model == "fake" else {"torch", "transformers"}
    if experiment.executor.name == "ray":
        needed |= {"ray"}
    require_all(needed, "this run")


def now() -> str:
    """Return the time in UTC, in the form of the records."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
