"""Resolve an experiment to settings with nothing optional left, and find missing features of engines early."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fidelab.axes import AXES
from fidelab.axes.base import Axis, load_axis
from fidelab.bench.base import Bench, load_bench
from fidelab.config.schema import ArmConfig, EngineConfig, Experiment
from fidelab.core import Arm, KVSpec, canonical_json, digest, usable_cores
from fidelab.core.errors import EngineError, InputError, OutputError, UnavailableError, UsageError
from fidelab.core.names import AUTO_TEXT
from fidelab.core.paths import expand
from fidelab.core.roles import CONTROL, EXACT, QUERIES, TRUTH
from fidelab.engines import DEFAULT
from fidelab.engines.base import Engine, Support, engine_class
from fidelab.engines.hf.cache_formats import packages_of
from fidelab.engines.hf.kernels import ATTENTION, AUTO
from fidelab.engines.installed import gpu_files, versions_of
from fidelab.engines.k16v8 import versions_for
from fidelab.environments.asked import Engines, check_kv_name, installation_record, native_kv, versions_there
from fidelab.environments.container import existing_paths
from fidelab.environments.queries import EngineAnswers
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, cache_dir, check_conversion, resolve, with_weights
from fidelab.models.gguf import head_sizes, read_header
from fidelab.models.local import bits_per_weight, parts_of
from fidelab.models.resolve import check_path
from fidelab.models.weights import content_sha256
from fidelab.plan.arms import DTYPES, inherited_kv, other_attention, resolve_arm, same_attention, served_name, with_kv
from fidelab.plan.deploy import ResolvedArm, loads_safetensors
from fidelab.references.pack import Pack
from fidelab.results.measurement import DECIDING

NODE_THREADS = 4  # of an arm on a cluster, unless specified: few enough that arms do not keep each other from GPUs

_BITS32 = KVSpec.parse("f32")
_EXACT_ENGINE = EngineConfig(name=DEFAULT)


@dataclass(frozen=True)
class Settings:
    """A resolved experiment.

    ``roles``: all arms under their roles, in the order in which they run: reference, control, controls of other kernel
    paths, candidates, and with ``control: full`` diagnostic arms, which separate format loss from kernel loss.
    ``resolved`` and ``unsupported`` go by the arm's name: where it runs, and why it cannot.  ``pack``: what the
    reference is borrowed from.
    """

    experiment: Experiment
    model: Model
    roles: Mapping[str, Arm]
    axes: Mapping[str, Axis]
    benches: Mapping[str, Bench]
    unsupported: Mapping[str, str]
    resolved: Mapping[str, ResolvedArm]
    output_dir: Path
    captures_dir: Path
    pack: Pack | None = None

    @property
    def reference(self) -> Arm:
        """The arm that all others are compared with."""
        return self.roles["reference"]

    @property
    def candidates(self) -> list[Arm]:
        """The candidates, cells of a grid included."""
        return [arm for role, arm in self.roles.items() if role.startswith("candidate:")]


def resolve_experiment(
    experiment: Experiment, created: str = "", pack: Pack | None = None, *, assume: bool = False
) -> Settings:
    """Resolve names, formats, models and environments. ``created`` marks captures that only this run may use.

    ``pack``: pack that the reference is borrowed from.  ``assume``: see :class:`fidelab.environments.asked.Engines`.

    Raises:
        FidelabError: For anything that the user can fix. The message names the fault and the remedy.
    """
    for config in (experiment.engine, *(arm.engine for arm in experiment.arms if arm.engine)):
        engine_class(config.name)
    for name, values in experiment.axes.items():
        load_axis(name, values)  # refused before a model is fetched
    benches = {name: load_bench(name, values) for name, values in experiment.benches.items()}
    check_path(experiment.model)  # before somebody installs an engine for a file that holds none
    with Engines(lambda: _files(experiment), assume) as engines:
        _check_kv_names(experiment, engines)
        return _Resolver(experiment, benches, engines, created, pack).settings()


def _files(experiment: Experiment) -> list[str]:
    """Files that engines may be asked about: local models, those in the caches, and files of options."""
    names = {experiment.model, *(config.model for config in experiment.arms if config.model)}
    tables = (experiment.engine_args, *(config.engine_args for config in experiment.arms))
    options = {value for table in tables for value in table.values()}
    local = [str(expand(name)) for name in sorted(names) if expand(name).exists()]
    from huggingface_hub.constants import HF_HUB_CACHE

    return [*local, *existing_paths(sorted(options)), str(cache_dir() / "models"), str(Path(HF_HUB_CACHE).absolute())]


def _only_prompts(experiment: Experiment, axes: Mapping[str, Axis]) -> bool:
    """Whether configurations may start without compilation: it was asked for, and nothing is generated.

    Raises:
        UsageError: If it was asked for, not left open, and something is generated.
    """
    others = [f"test {name} generates text" for name, axis in axes.items() if not axis.reads_prompts]
    others += ["speed is that of a compiled model"] if experiment.speed else []
    others += [] if axes else ["no test reads prompts"]
    if experiment.quick_start is True and others:
        raise UsageError(f"quick_start: {others[0]}; leave out one of the two")
    return bool(experiment.quick_start) and not others


class _Resolver:
    """Resolves the arms, and where each of them runs."""

    def __init__(
        self,
        experiment: Experiment,
        benches: Mapping[str, Bench],
        engines: Engines,
        created: str,
        pack: Pack | None,
    ) -> None:
        self._pack = pack
        self._engines = engines
        self._created = created
        self._asked_dtype = experiment.dtype
        self._models: dict[str, Model] = {}
        self._model = self._find_model(experiment.model)
        self._benches = benches
        reference = with_kv(experiment.reference, native_kv(experiment.reference.engine or experiment.engine))
        here = experiment.executor.name == "local"
        device = _device(experiment.device, self._model) if here else _check_cluster_device(experiment.device)
        text, chosen = _text_of(experiment, device)
        axes = {name: load_axis(name, values) for name, values in chosen.items()}
        self._axes: Mapping[str, Axis] = axes
        self._experiment = experiment.model_copy(
            update={
                "reference": reference,
                "candidates": [with_kv(arm, inherited_kv(arm, reference, experiment)) for arm in experiment.candidates],
                "dtype": DTYPES[self._model.native] if experiment.dtype == "auto" else experiment.dtype,
                "threads": experiment.threads or (usable_cores() if here else NODE_THREADS),
                "device": device,
                "text": text,
                "axes": {name: axis.settings.model_dump(mode="json") for name, axis in axes.items()},
                "benches": {name: bench.settings.model_dump(mode="json") for name, bench in benches.items()},
            }
        )
        self._resolved: dict[str, ResolvedArm] = {}
        self._unsupported: dict[str, str] = {}
        self._quick_starts = 0  # configurations that start without compilation
        self._only_prompts = _only_prompts(experiment, axes)
        self._strangers: dict[str, str] = {}  # arms with another tokenizer than the reference's, and the reason

    def settings(self) -> Settings:
        experiment = self._experiment
        if self._pack is None:
            reference = self._arm(experiment.reference)
        else:
            # The arm of a packed reference, which nothing here runs
            reference = self._pack.arm
            environment = self._engines.ask(self._experiment.engine).environment
            self._resolved[reference.name] = ResolvedArm(
                reference, engine_class(reference.engine), self._model, environment, self._pack.versions, borrowed=True
            )
        candidates = (*(self._candidate(config) for config in experiment.candidates), *self._cells())
        if candidates and all(arm.name in self._strangers for arm in candidates):
            raise UsageError(f"{candidates[0].name} has {self._strangers[candidates[0].name]}")
        # Refuse what would be captured twice: the same arm, in environments of the same versions
        names: set[str] = set()
        twins: dict[str, str] = {}
        for arm in candidates:
            versions = self._resolved[arm.name].versions if arm.name in self._resolved else {}
            fingerprint = digest(arm.fingerprint(), canonical_json(dict(versions)))
            twin = twins.get(fingerprint)
            if twin is not None or arm.name in names:
                same = f" (it means the same as {twin!r})" if twin not in (None, arm.name) else ""
                raise UsageError(f"candidate {arm.name!r} is given twice{same}; name each once")
            names.add(arm.name)
            twins[fingerprint] = arm.name
        control = self._control(reference)
        controls = self._path_controls(reference, control, candidates[: len(experiment.candidates)])
        diagnostics = self._diagnostics(reference, candidates) if experiment.control == "full" else {}
        # Refuse two different arms of one name: reports refer to arms by name
        arms = [reference, *([control] if control else []), *controls.values(), *candidates]
        prints: dict[str, str] = {}
        for arm in arms:
            if prints.setdefault(arm.name, arm.fingerprint()) != arm.fingerprint():
                raise UsageError(
                    f"two different configurations are named {arm.name!r}; give one of them another 'name'"
                )
        if reference.name in self._unsupported:
            why = self._unsupported[reference.name]
            raise UsageError(f"the reference cannot run on engine {reference.engine}: {why}")
        output = _folder(Path(experiment.output_dir), "--output-dir")
        roles = {
            "reference": reference,
            **({CONTROL: control} if control else {}),
            **controls,
            **{f"candidate:{arm.name}": arm for arm in candidates},
            **diagnostics,
        }
        here = {role: arm for role, arm in roles.items() if not (role == "reference" and self._pack)}
        self._unify_attention([arm for role, arm in here.items() if not role.startswith(EXACT)])
        self._unify_attention([arm for role, arm in here.items() if role.startswith(EXACT)])  # a group of their own
        if experiment.quick_start is True and not self._quick_starts:
            raise UsageError(f"quick_start: engine {experiment.engine.name} compiles nothing here; leave it out")
        settings = Settings(
            experiment=experiment,
            model=self._model,
            roles=roles,
            axes=self._axes,
            benches=self._benches,
            unsupported=self._unsupported,
            resolved=self._resolved,
            output_dir=output,
            captures_dir=_folder(Path(experiment.captures_dir or output / "captures"), "captures_dir"),
            pack=self._pack,
        )
        return _with_resolved(settings, self._resolved)

    def _find_model(self, name: str) -> Model:
        if name not in self._models:
            self._models[name] = resolve(name)
        return self._models[name]

    def _candidate(self, config: ArmConfig) -> Arm:
        """A candidate; one whose own engine or model is unavailable is unsupported and does not affect the others."""
        try:
            return self._arm(config)
        except (EngineError, UnavailableError) as error:
            if config.engine is None and config.model is None:
                raise
            arm = replace(self._resolve_arm(config, self._model), weights=config.model or self._model.weights)
            self._unsupported[arm.name] = str(error)
            return arm

    def _cells(self) -> list[Arm]:
        """The arms of the grid.  A level that one engine lacks is a cell that is not supported; one that no cell can
        have is a mistake."""
        experiment = self._experiment
        arms: list[Arm] = []
        refused: list[UsageError | None] = []
        grid = experiment.levels
        for config in experiment.cells:
            config = with_kv(config, inherited_kv(config, experiment.reference, experiment))
            try:
                arms.append(self._candidate(config))
                refused.append(None)
            except UsageError as error:
                arms.append(self._resolve_arm(config, self._model))
                self._unsupported[arms[-1].name] = str(error)
                refused.append(error)
        for key, values in experiment.vary.items():
            for value in values:
                errors = [error for levels, error in zip(grid, refused, strict=True) if levels[key] == value]
                if errors[0] is not None and all(errors):
                    raise errors[0]
        return arms

    def _arm(self, config: ArmConfig) -> Arm:
        """One arm with nothing optional left, and where it runs."""
        engine = config.engine or self._experiment.engine
        cls = engine_class(engine.name)
        config = served_name(config, engine)
        model = self._find_model(config.model or self._experiment.model)
        answers = self._engines.ask(engine)
        if (model.kind == "fake") != (engine.name == "fake"):
            raise UsageError("model 'fake' and engine 'fake' go together: give both or neither")
        check_kv_name(config, engine, answers)
        arm, draft, drafting = self._drafting(self._resolve_arm(config, model), cls)
        answers.check_kv(arm.kv)
        if model.text_only and not model.convertible and loads_safetensors(cls):
            reason = f"Transformers reads no GGUF files of architecture {model.architecture!r}"
            verdict = Support(False, f"{reason}: use engine llamacpp, or the model's safetensors")
        elif draft and draft.vocab_size != model.vocab_size:  # its drafts are not tokens of the verifying model
            sizes = ", ".join(f"{Path(each.name).name} has {each.vocab_size:,} tokens" for each in (draft, model))
            reason = f"the draft model has another vocabulary: {sizes}"
            verdict = Support(False, f"{reason}; draft with a smaller model of the same family")
        elif self._axes and (other := _other_tokens(self._model, model)):
            self._strangers[arm.name] = other
            verdict = Support(False, other)
        elif (
            cls.checkpoint_format == "gguf"
            and model.gguf is not None
            and (odd := cls.refuses_heads(arm.kv, *head_sizes(read_header(model.gguf))))
        ):
            verdict = Support(False, odd)
        else:
            # For an arm of a cluster's GPUs an engine is asked on the node; here, where it may find no GPU, only for
            # options that it does not have
            if not self._runs_on_cluster(arm):
                verdict = answers.verdict(arm)
            else:
                with contextlib.suppress(EngineError):
                    answers.supports(arm)
                verdict = Support(True)
            if not verdict.ok and self._experiment.force:
                arm, verdict = self._forced(arm, answers)
        if not verdict.ok:
            self._unsupported[arm.name] = verdict.reason
        self._resolved[arm.name] = ResolvedArm(
            arm=arm,
            engine_class=cls,
            model=model,
            environment=answers.environment,
            versions={
                **versions_there(answers, arm),
                **versions_for(arm),
                **versions_of(*packages_of(arm.kv)),
                **({"draft": drafting} if drafting else {}),
                # the same URL may lead to another server tomorrow: its captures are this run's alone
                **({"asked": self._created} if cls.is_server else {}),
            },
            about={**installation_record(answers), **_weight_bytes(cls, model)},
            draft=draft,
            unasked=self._runs_on_cluster(arm),
        )
        return arm

    def _runs_on_cluster(self, arm: Arm) -> bool:
        """Whether an arm runs on a device that this machine does not have."""
        return self._experiment.executor.name != "local" and arm.device.startswith("cuda") and not gpu_files()

    def _drafting(self, arm: Arm, engine: type[Engine]) -> tuple[Arm, Model | None, str]:
        """The arm with the place of what drafts, its model where it drafts by itself, and the hash of the weights.

        Heads that draft may not be a model by themselves; of such a folder or file all bytes count.
        """
        speculation = engine.speculation(dict(arm.options))
        if speculation is None or not speculation.draft:
            return arm, None, ""
        try:
            draft = self._find_model(speculation.draft)
        except InputError:
            if speculation.method == "draft_model":
                raise
            return arm, None, content_sha256(expand(speculation.draft))
        alone = speculation.method == "draft_model"
        return replace(arm, draft=str(draft.path)), draft if alone else None, draft.weights

    def _forced(self, arm: Arm, answers: EngineAnswers) -> tuple[Arm, Support]:
        """The arm with option ``force``, if its engine then accepts what it otherwise refuses.

        What was refused because it did not run in its trial needs no option.
        """
        verdict = answers.supports(arm)
        if verdict.ok:
            return arm, verdict
        forced = replace(arm, options=tuple(sorted({**dict(arm.options), "force": "yes"}.items())))
        try:
            again = answers.supports(forced)
        except UsageError:  # this engine knows no force
            return arm, verdict
        return (forced, again) if again.ok else (arm, verdict)

    def _resolve_arm(self, config: ArmConfig, model: Model) -> Arm:
        arm = resolve_arm(self._experiment, config, model, self._asked_dtype)
        if not self._only_prompts or (quick := engine_class(arm.engine).quick_start(arm)) is None:
            return arm
        self._quick_starts += 1
        return quick

    # ------------------------------------------------------------------------ control and diagnostic arms

    def _control(self, reference: Arm) -> Arm | None:
        experiment = self._experiment
        if experiment.control == "none":
            return None
        if isinstance(experiment.control, ArmConfig):
            return self._arm(experiment.control)
        answers = self._engines.ask(experiment.reference.engine or experiment.engine)
        name = answers.control_for(reference.kv, self._model.native)
        return None if name is None else self._arm(_with_cache(experiment.reference, KVSpec.parse(name), name))

    def _path_controls(self, reference: Arm, control: Arm | None, candidates: Sequence[Arm]) -> dict[str, Arm]:
        """A control for each attention that a candidate asks for and the reference does not.

        None for the cells of a grid, which measures the effects of its factors itself.
        """
        experiment, controls = self._experiment, dict[str, Arm]()
        if experiment.control not in ("auto", "full"):
            return controls
        kv = (control or reference).kv
        for arm in candidates:
            attention = other_attention(reference, arm)
            if attention is None or f"{CONTROL}:{attention}" in controls or arm.name in self._unsupported:
                continue
            options = {key: text for key, text in experiment.reference.engine_args.items() if key != ATTENTION}
            config = _with_cache(experiment.reference, kv, f"{kv.label} {ATTENTION}={attention}")
            named = options if attention == AUTO else {**options, ATTENTION: attention}
            nearest = self._arm(config.model_copy(update={"engine_args": named}))
            if nearest.fingerprint() != arm.fingerprint():
                controls[f"{CONTROL}:{attention}"] = nearest
        return controls

    def _unify_attention(self, arms: Sequence[Arm]) -> None:
        """Resolve the attention of arms that are compared; records say why they lack k16v8's kernels."""
        chosen, refused = same_attention([arm for arm in arms if arm.name not in self._unsupported])
        for arm in chosen:
            if (resolved := self._resolved[arm.name]).arm != arm:
                about = {**resolved.about, "kernels_refused": f"one attention for all configurations; {refused}"}
                self._resolved[arm.name] = replace(resolved, arm=arm, about=about)

    def _diagnostics(self, reference: Arm, candidates: Sequence[Arm]) -> dict[str, Arm]:
        """The arms that show where a loss comes from.

        They are the reference's 32-bit twin, candidates on a kernel that quantizes no queries, and every candidate's
        format under exact attention, on the same weights.
        """
        # Candidates whose engine may quantize queries, on a kernel that does not; cells of a grid have none
        experiment, diagnostics = self._experiment, dict[str, Arm]()
        for config, arm in zip(experiment.candidates, candidates, strict=False):
            options = engine_class(arm.engine).native_query_options(arm)
            if options and arm.name not in self._unsupported:
                changed = {"name": f"{arm.name} (16-bit queries)", "engine_args": {**config.engine_args, **options}}
                diagnostics[f"{QUERIES}:{arm.name}"] = self._arm(config.model_copy(update=changed))
        answers = self._engines.ask(self._experiment.reference.engine or self._experiment.engine)
        if _BITS32.label in answers.kv_names() and reference.kv.k != _BITS32.k:
            diagnostics[TRUTH] = self._arm(_with_cache(self._experiment.reference, _BITS32, f"{_BITS32.label} (truth)"))
        if reference.engine in (_EXACT_ENGINE.name, "fake"):  # computes attention exactly itself
            return diagnostics
        known = set(self._engines.ask(_EXACT_ENGINE).kv_names())
        for arm in candidates:
            if {arm.kv.k.name, arm.kv.v.name} <= known and arm.model == reference.model:
                diagnostics[f"{EXACT}:{arm.name}"] = self._exact(arm.kv, f"{arm.name} (exact attention)")
        if any(role.startswith(EXACT) for role in diagnostics):
            diagnostics = {EXACT: self._exact(_BITS32, f"{_BITS32.label} (exact attention)"), **diagnostics}
        return diagnostics

    def _exact(self, kv: KVSpec, name: str) -> Arm:
        return self._arm(ArmConfig(kv=kv, name=name, engine=_EXACT_ENGINE, dtype="float32"))


def convert_weights(settings: Settings, make: bool = True) -> Settings:
    """Return the settings with the weights of GGUF files converted for arms whose engines cannot load these files.

    An arm whose weights cannot be converted is not supported; the others are not affected.  ``make``: whether to
    convert what is not in the cache yet.

    Raises:
        InputError: If that arm is the reference.
        OutputError: If the disk has no room for the weights.
    """
    resolved, unsupported = dict(settings.resolved), dict(settings.unsupported)
    for arm in settings.roles.values():
        if arm.name in unsupported or not resolved[arm.name].lacks_weights:
            continue
        before = resolved[arm.name]
        whole, draft = before.model, before.draft
        if not make and any(check_conversion(each) for each in (whole, draft) if each):
            continue
        try:
            model, draft = with_weights(whole), draft and with_weights(draft)
        except InputError as error:
            if arm == settings.reference:
                raise
            unsupported[arm.name] = str(error)
        else:
            drafting = str(draft.path) if draft else arm.draft
            arm = replace(arm, path=str(model.path), weights=model.weights, draft=drafting)
            about = {**before.about, **_weight_bytes(before.engine_class, model)}
            resolved[arm.name] = replace(before, arm=arm, model=model, about=about, draft=draft)
    return _with_resolved(replace(settings, unsupported=unsupported), resolved)


def _with_resolved(settings: Settings, resolved: Mapping[str, ResolvedArm]) -> Settings:
    """The settings with arms as they were resolved last; an arm whose engine is not there was not."""
    roles = {role: resolved[arm.name].arm if arm.name in resolved else arm for role, arm in settings.roles.items()}
    return replace(settings, roles=roles, resolved=resolved)


# Words, numbers, white space, accents and another script: what tokenizers cut differently.
_SAMPLE = "The 1,234 naïve foxes' code:\n\tif x != 0:  return 'été' # 漢字かな\n"


def _other_tokens(reference: Model, model: Model) -> str:
    """Return why a model's distributions cannot be compared with the reference's; empty: they are over one vocabulary.

    A model without a tokenizer of its own that can be loaded is left to its engine.
    """
    if model.path == reference.path or "fake" in (model.kind, reference.kind):
        return ""
    try:
        ours, theirs = Tokenizer.load(reference), Tokenizer.load(model)
        if ours.encode(_SAMPLE) == theirs.encode(_SAMPLE):
            return ""
        sizes = f"{len(ours.pieces()):,} and {len(theirs.pieces()):,} ids"
    except InputError:
        return ""
    return (
        f"another tokenizer than the reference's ({sizes}): no KL between their distributions; compare their answers, "
        "by lm_eval --log_samples and fidelab import lm-eval"
    )


def refuse_same_server(settings: Settings) -> None:
    """Refuse a candidate that is the reference's own server, since the two would only measure repeatability.

    Raises:
        UsageError: If a candidate asks the reference's server and model with the same settings.
    """
    reference = settings.reference
    if not settings.resolved[reference.name].engine_class.is_server:
        return
    for arm in settings.candidates:
        if arm.engine == reference.engine and arm.options == reference.options:
            raise UsageError(
                f"candidate {arm.name!r} asks the same server and model in the same way as the reference: that "
                "measures repeatability, which the floor does; give the candidate a base-url or model of its own"
            )


def _weight_bytes(engine: type[Engine], model: Model) -> dict[str, float]:
    """Size of the weights that an engine loads, for the record; empty where a server has them, or where unknown.

    Bits per weight are those of GGUF files.
    """
    if engine.is_server or model.kind == "fake":
        return {}
    gguf = model.gguf if engine.checkpoint_format == "gguf" else None
    if gguf is None:
        return {"weight_bytes": model.weight_bytes}
    return {
        "weight_bytes": sum(part.stat().st_size for part in parts_of(gguf)),
        "bits_per_weight": bits_per_weight(gguf),
    }


def _with_cache(config: ArmConfig, kv: KVSpec, name: str) -> ArmConfig:
    """The same arm with another cache."""
    return config.model_copy(update={"kv": kv, "name": name})


def _listed(value: Any) -> Any:
    """A tuple as files write it."""
    return [*value] if isinstance(value, tuple) else value


_SERVED_DEPTH = 2048  # tokens: a server sends its top tokens for each token that it reads


def _text_of(experiment: Experiment, device: str) -> tuple[str, Mapping[str, Mapping[str, Any]]]:
    """Return the evaluation text in the place of ``auto``, and the axes with their settings.

    The axes ``core`` read long documents of many kinds on a GPU and on servers, at several depths, where no size is
    given.  A CPU would take much longer over them.
    """
    if experiment.text != AUTO_TEXT:
        return experiment.text, experiment.axes
    kld, usual = experiment.axes.get(DECIDING), AXES.load(DECIDING).until_decided
    served = engine_class(experiment.engine.name).is_server
    sized = kld is not None and {
        name: value for name, value in kld.items() if value not in (usual.get(name), _listed(usual.get(name)))
    }
    core = {*experiment.axes} <= {DECIDING, "trajectory"} and experiment.traffic is None
    if kld is None or sized or not core or not (served or device != "cpu") or experiment.reference_from is not None:
        return "default", experiment.axes
    deep = {"protocol": "depth", **({"n_ctx": _SERVED_DEPTH} if served else {})}
    return "agents", {**experiment.axes, DECIDING: deep}


def _device(asked: str, model: Model) -> str:
    if model.kind == "fake" or asked == "cpu" or (asked == "auto" and not gpu_files()):
        return "cpu"  # without torch, whose import takes a second
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(asked).type
    except RuntimeError:
        raise UsageError(f"--device {asked!r} is not a device; write cpu, cuda or cuda:0") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {asked}: no usable GPU here; pass --device cpu")
    return asked


def _check_cluster_device(asked: str) -> str:
    """A device of a cluster's nodes, which are not looked at."""
    if asked == "auto":
        raise UsageError("--device auto: which devices the cluster has is asked when the run starts; say cuda or cpu")
    if re.fullmatch(r"cuda:\d+", asked):
        raise UsageError(f"--device {asked}: the cluster chooses the GPU; pass --device cuda")
    if asked not in ("cpu", "cuda"):
        raise UsageError(f"--device {asked!r} is not a device of a cluster; write cpu or cuda")
    return asked


def _check_kv_names(experiment: Experiment, engines: Engines) -> None:
    """Refuse unknown format names before a model is fetched."""
    configs = [experiment.reference] if experiment.reference_from is None else []
    configs += experiment.candidates
    if "engine" not in experiment.vary:  # else a name that one engine lacks is a cell that is not supported
        configs += experiment.cells
    if isinstance(experiment.control, ArmConfig):
        configs.append(experiment.control)
    for config in configs:
        engine = config.engine or experiment.engine
        try:
            check_kv_name(config, engine, engines.ask(engine))
        except EngineError:
            if config.engine is None:
                raise
            continue  # this arm cannot run; the resolver says so


def _folder(path: Path, what: str) -> Path:
    """An existing or creatable folder, absolute."""
    path = expand(path)
    for part in (path, *path.parents):
        if part.exists():
            if not part.is_dir():
                raise OutputError(f"{what} {path}: {part} is a file; name a folder")
            if not os.access(part, os.W_OK):
                raise OutputError(f"{what} {path}: {part} is not writable; name another folder")
            break
    return path
