"""``fidelab checkpoint quantize``: a recipe's plan, quantization in its tool's environment, audit and comparison.

Everything is made in ``OUT.work`` next to the output. A resumed run does not repeat finished steps, and the output gets
its name when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelab.config.experiment import validate
from fidelab.core import canonical_json, digest, plain_json, write_atomically
from fidelab.core.errors import EngineError, InputError, OutputError, UsageError
from fidelab.core.paths import expand
from fidelab.engines import DEFAULT
from fidelab.environments.checkpoints import checkpoints
from fidelab.environments.environment import Environment, engines_dir, interpreter, link_folder, read_marker
from fidelab.environments.recipes import install_command, variants
from fidelab.models.resolve import path as model_path
from fidelab.report.html import write_html
from fidelab.results.capacity import asked_again
from fidelab.results.recommend import recommended
from fidelab.results.record import Report
from fidelab.run.pipeline import execute
from fidelab.run.runner import Listener
from fidelab.run.signals import end_with_parent, terminate_as_interrupt

SCHEMA, RECORD = "fidelab.quantize/1", "fidelab-quantize.json"
_TOOL = "llm-compressor"
_GRACE_SECONDS = 10.0  # seconds between asking the worker to end and killing it


@dataclass(frozen=True)
class Quantized:
    """Outcome of a quantization: its place, what was quantized, the audit, and the comparison with the original."""

    output: Path
    plan: checkpoints.Plan
    verdict: str
    experts: Mapping[str, Any]
    report: Report | None


def plan_quantization(model: str, recipe_file: Path) -> checkpoints.Plan:
    """Return what a recipe quantizes of a model, and what it keeps.

    Raises:
        ConfigError, InputError: If the recipe is wrong or does not fit the model.
    """
    recipe = checkpoints.read_recipe(recipe_file)
    with checkpoints.open_checkpoint(model_path(model)) as checkpoint:
        return checkpoints.plan(recipe, checkpoint)


def quantize(
    model: str,
    recipe_file: Path,
    output: Path,
    *,
    resume: bool = False,
    python: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    listener: Listener | None = None,
) -> Quantized:
    """Quantize a model by a recipe, audit the result and compare it with the original.

    Args:
        model: a folder, a hub id or an embedded model.
        recipe_file: see :func:`fidelab_checkpoints.recipe.read_recipe`.
        output: folder to create.
        resume: continue an earlier call; its recipe and model must be the same.
        python: interpreter of an environment with llm-compressor; found automatically by default.
        say: called with a line for each step.
        listener: listener of the comparison.

    Raises:
        ConfigError, InputError: If the recipe is wrong or does not fit the model. Raised before anything is loaded.
        UsageError: If the output exists, or there is nothing to resume, or only something else.
        EngineError: If the tool is not installed, or failed.
    """
    recipe = checkpoints.read_recipe(recipe_file)
    output = expand(output)
    work = output.with_name(f"{output.name}.work")
    if output.exists():
        raise UsageError(f"{output} exists; name another folder with --output")
    source = model_path(model)
    with checkpoints.open_checkpoint(source) as checkpoint:
        planned = checkpoints.plan(recipe, checkpoint)
        # Changes with the recipe, the texts it names and the model's files; large files by size and time
        files = [(file, file.stat()) for file in (*checkpoint.files, checkpoint.folder / "config.json")]
        stats = [(file.name, found.st_size, found.st_mtime_ns) for file, found in files]
        texts = [source.text for source in recipe.calibration.sources] if recipe.calibration else []
        contents = [digest(Path(text).read_bytes()) for text in texts]
        identity = digest(canonical_json([recipe.model_dump(mode="json"), contents, stats]))
    environment = _environment(python)
    _prepare(work, identity, resume)
    about = _quantized(recipe, planned, source, work, environment, say)
    made = work / "model"
    _check_plan(planned, made)
    say("auditing")
    audited = checkpoints.audit(made, tp=recipe.tp)
    _write(made / "fidelab-audit.json", {**audited.as_json(), "checkpoint": output.name})
    bits = _bits(planned, made)
    # What lies beside the weights is published with them, so paths of this machine are names there
    names = {str(output): output.name, str(work / "dense"): output.name, str(work / "runs"): "runs"}
    read = [*texts, model, *([recipe.fidelity.text] if recipe.fidelity else [])]
    names |= {path: Path(path).resolve().name for path in read if Path(path).exists()}
    report = _compared(model, recipe.fidelity, made, output, work, say, listener) if recipe.fidelity else None
    record = {
        "schema": SCHEMA,
        "model": names.get(model, model),
        "recipe": _renamed(recipe.model_dump(mode="json"), names),
        "quantized": list(planned.quantized),
        "kept": dict(planned.kept),
        "kept_layers": list(planned.layers),
        "bits_per_weight": bits,
        "tool": about,
        "verdict": audited.verdict,
        "fidelity": None if report is None else "fidelab-report.json",
    }
    if report is not None:
        remark = describe_recipe(recipe, planned, bits)  # at the candidate: people read it without the other files
        candidates = tuple(
            arm.model_copy(
                update={"ran": arm.ran and arm.ran.model_copy(update={"remarks": (*arm.ran.remarks, remark)})}
            )
            for arm in report.candidates
        )
        report = report.model_copy(update={"candidates": candidates})
        published = Report.model_validate(_renamed(json.loads(report.to_json()), names))
        write_atomically(made / "fidelab-report.json", published.to_json())
        write_html(published, made / "fidelab-report.html")
    _write(made / RECORD, record)
    made.rename(output)
    shutil.rmtree(work, ignore_errors=True)
    return Quantized(output, planned, audited.verdict, about.get("experts", {}), report)


def _renamed(content: Any, names: Mapping[str, str]) -> Any:
    """Return JSON content with other values in the place of texts, such as names in that of this machine's paths."""
    match content:
        case str():
            return names.get(content, content)
        case list():
            return [_renamed(value, names) for value in content]
        case dict():
            return {key: _renamed(value, names) for key, value in content.items()}
        case _:
            return content


def _environment(python: str | None) -> Environment:
    if python is not None:
        return Environment(_TOOL, interpreter(python))
    for name in variants(_TOOL):
        folder = engines_dir() / name
        if read_marker(folder) is not None:
            return Environment(_TOOL, str(folder / "bin" / "python"))
    raise EngineError(f"{_TOOL} is not installed: {install_command(_TOOL)} (or name its Python with --python)")


def _prepare(work: Path, identity: str, resume: bool) -> None:
    state = work / "state.json"
    if work.exists() and not resume:
        raise UsageError(f"{work} is left from an interrupted run: resume it with --resume, or remove it")
    if resume:
        if not state.is_file():
            raise UsageError(f"{work}: there is nothing to resume")
        if plain_json(state.read_text("utf-8")).get("identity") != identity:
            raise UsageError(f"{work} was begun with another recipe, text or model: remove it to start again")
        return
    try:
        work.mkdir(parents=True)
        _write(state, {"identity": identity})
    except OSError as error:
        raise OutputError(f"cannot write {work} ({error.strerror or error})") from error


def _quantized(
    recipe: checkpoints.Recipe,
    planned: checkpoints.Plan,
    source: Path,
    work: Path,
    environment: Environment,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Worker's report of its work; the checkpoint is ``work / "model"``."""
    answer = work / "tool.json"
    if answer.is_file() and (work / "model").is_dir():
        say("already quantized")
        kept: dict[str, Any] = plain_json(answer.read_text("utf-8"))
        return kept
    for name in ("model", "model.part"):
        shutil.rmtree(work / name, ignore_errors=True)
    content = recipe.model_dump(mode="json")
    job = {
        **{key: content[key] for key in ("method", "scheme", "calibration", "keep_kinds")},
        "seed": recipe.calibration.seed if recipe.calibration else 0,
        "model": str(source),
        "kept": list(planned.kept),
        "samples": str(work / "samples.json"),
        "output": str(work / "model"),
    }
    _write(work / "job.json", job)
    about = _worker(environment, work, say)
    _write(answer, about)
    return about


def _worker(environment: Environment, work: Path, say: Callable[[str], None]) -> dict[str, Any]:
    log = work / "log.txt"
    variables = {
        **os.environ,
        "PYTHONPATH": str(link_folder(checkpoints.WORKER.partition(".")[0])),
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [*environment.command(checkpoints.WORKER), str(work / "job.json")]
    last: dict[str, Any] = {}
    with log.open("ab") as errors, terminate_as_interrupt():
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=variables, cwd=work,
            start_new_session=True, preexec_fn=end_with_parent(),
        )  # fmt: skip
        try:
            for line in process.stdout or ():
                last = plain_json(line)
                if stage := last.get("stage"):
                    say(f"{stage} {last['done']}/{last['of']}" if "of" in last else str(stage))
            process.wait()
        finally:
            # End the worker with all that it started, also where a second Ctrl-C interrupts
            try:
                if process.poll() is None:
                    process.terminate()
                    process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if "done" in last and process.returncode == 0:
        done: dict[str, Any] = last["done"]
        return done
    reason = last.get("failed") or f"it ended with {process.returncode} while {last.get('stage', 'starting')}"
    if process.returncode == 2 and "failed" in last:
        raise InputError(str(reason))
    raise EngineError(f"{_TOOL}: {reason}; resume with --resume; log: {log}")


def _check_plan(planned: checkpoints.Plan, made: Path) -> None:
    """Whether the tool quantized what the plan says.  It may call what wraps the language model otherwise.

    Raises:
        EngineError: If it did not. The message names the first module.
    """
    with checkpoints.open_checkpoint(made) as checkpoint:
        found = {
            checkpoints.tail(name)
            for name in checkpoints.quantized_modules(checkpoint.tensors, checkpoint.quantization)
        }
    wanted = {checkpoints.tail(name) for name in planned.quantized}
    if missing := sorted(wanted - found):
        raise EngineError(
            f"{_TOOL} left {missing[0]} in 16 bits, and {len(missing) - 1} more that the recipe quantizes"
        )
    if extra := sorted(found - wanted):
        raise EngineError(f"{_TOOL} quantized {extra[0]}, and {len(extra) - 1} more that the recipe keeps")


def _bits(planned: checkpoints.Plan, made: Path) -> float:
    """Stored bits per quantized weight, scales and zero points included."""
    wanted = {checkpoints.tail(name) for name in planned.quantized}
    with checkpoints.open_checkpoint(made) as checkpoint:
        modules = [
            module.parts
            for name, module in checkpoints.modules_of(checkpoint).items()
            if checkpoints.tail(name) in wanted
        ]
        sizes = (part.nbytes for parts in modules for name, part in parts.items() if name != "weight_shape")
        return 8 * sum(sizes) / planned.weights


def describe_recipe(recipe: checkpoints.Recipe, planned: checkpoints.Plan, bits: float) -> str:
    """Describe the recipe in a sentence: method, scheme, bits per quantized weight, and modules kept in 16 bits."""
    scheme, kept = recipe.scheme, Counter(planned.kept.values())
    groups = "" if scheme.group is None else f" in groups of {scheme.group}"
    left = ", ".join(f"{why} ({count})" for why, count in kept.items()) or "no module"
    return (
        f"quantized by {recipe.method} to {scheme.format}{groups}: {len(planned.quantized)} modules at {bits:.2f} bits "
        f"per weight, scales included; kept in 16 bits: {left}"
    )


def _compared(
    model: str,
    fidelity: checkpoints.Fidelity,
    made: Path,
    output: Path,
    work: Path,
    say: Callable[[str], None],
    listener: Listener | None,
) -> Report:
    """The result against the original, both in float32 on engine hf: its weights are read as dense ones, exactly.

    The report states the bytes that the result's own files have.
    """
    finished = work / "report.json"
    if finished.is_file():
        say("already compared")
        return Report.from_json(finished)
    dense = work / "dense"
    if not dense.is_dir():
        say("dequantizing for the comparison")
        checkpoints.convert(made, dense, "safetensors", dtype="float32", lossy=True)
    say("comparing with the original")
    experiment = validate(
        {
            "model": model,
            "engine": DEFAULT,
            "dtype": "float32",
            "reference": {},
            "control": "none",
            "candidates": [{"name": "quantized", "model": str(dense)}],
            "axes": {"kld": {"windows": fidelity.windows, "n_ctx": fidelity.n_ctx}},
            "text": fidelity.text,
            "output_dir": str(work / "runs"),
        },
        "the comparison of fidelab checkpoint quantize",
    )
    report = execute(experiment, command="fidelab checkpoint quantize", listener=listener)[0]
    with checkpoints.open_checkpoint(made) as checkpoint:
        size = checkpoint.nbytes
    # The dense copy is removed, so the record names the output.
    runs = [arm.ran and arm.ran.model_copy(update={"weight_bytes": size}) for arm in report.candidates]
    arms = [
        arm.model_copy(update={"model": str(output), "ran": ran})
        for arm, ran in zip(report.candidates, runs, strict=True)
    ]
    report = report.model_copy(update={"candidates": tuple(arms)})
    if report.capacity is not None:
        report = asked_again(report, None, None)
    report = recommended(report)
    write_atomically(finished, report.to_json())
    return report


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_atomically(file, json.dumps(content, indent=1) + "\n")
