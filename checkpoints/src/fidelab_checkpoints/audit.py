"""Defects of a checkpoint, found without running it: one pass over its tensors, then rules over the results.

The table of rules is :mod:`fidelab_checkpoints.rules`.  The modules that are imported here add their rules to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fidelab.core.errors import InputError, UsageError
from fidelab.models import embedded
from fidelab.models.resolve import path
from fidelab_checkpoints import fusing, geometry, original, templates, tensors  # noqa: F401 (their rules enter the table)
from fidelab_checkpoints.files import Checkpoint, open_checkpoint
from fidelab_checkpoints.modules import SCALES, modules_of
from fidelab_checkpoints.rules import RULES, Finding, Subject, counted
from fidelab_checkpoints.scan import Statistics, fused, readable, scan, slices
from fidelab_checkpoints.schemes import scheme_of

SCHEMA = "fidelab.audit/1"
Verdict = Literal["ok", "suspicious", "broken"]
_ORDER: dict[str, int] = {"broken": 0, "suspicious": 1, "information": 2}


@dataclass(frozen=True)
class Audit:
    """The outcome.

    Attributes:
        checkpoint: its name.
        method: of its quantization; ``gguf``; or ``None`` for plain weights.
        findings: the most severe first.
        rules: names of those that were applied.
        unchecked: what was not checked → why.
        tensors, files, nbytes: number of tensors read, of files they are in, and their bytes.
        quantized: modules that are quantized.
        modules: those that have a weight matrix, quantized or not.
    """

    checkpoint: str
    method: str | None
    findings: tuple[Finding, ...]
    rules: tuple[str, ...]
    unchecked: dict[str, str]
    tensors: int
    files: int
    nbytes: int
    quantized: int
    modules: int

    @property
    def verdict(self) -> Verdict:
        """``broken`` if any finding is broken, else ``suspicious`` if any is suspicious, else ``ok``."""
        severities = {finding.severity for finding in self.findings}
        return "broken" if "broken" in severities else "suspicious" if "suspicious" in severities else "ok"

    def as_json(self) -> dict[str, Any]:
        """Return the audit as plain data, schema ``fidelab.audit/1``."""
        return {
            "schema": SCHEMA,
            "checkpoint": self.checkpoint,
            "verdict": self.verdict,
            "method": self.method,
            "tensors": self.tensors,
            "files": self.files,
            "bytes": self.nbytes,
            "modules": self.modules,
            "quantized_modules": self.quantized,
            "rules": list(self.rules),
            "unchecked": self.unchecked,
            "findings": [finding.as_json() for finding in self.findings],
        }


def audit(
    name: str | Path,
    base: str | Path | None = None,
    tp: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Read a checkpoint once and apply all rules.

    Args:
        name, base: The checkpoint and the original that it was made from, as
            :func:`fidelab_checkpoints.files.open_checkpoint` takes them.
        tp: number of devices that its layers will be split over.
        progress: called with the bytes read and the bytes of all tensors.

    Raises:
        InputError: If it is not a checkpoint, or is damaged, pickled or of an unknown method.
        UsageError: If ``tp`` is below 1.
    """
    if tp < 1:
        raise UsageError(f"--tp {tp}: the number of devices is at least 1")
    with open_checkpoint(name, complete=False) as checkpoint:
        if base is None:
            return _audited(survey(checkpoint, tp=tp, progress=progress))
        if checkpoint.format != "gguf" and str(base) in embedded.NAMES:
            base = path(str(base))  # as dense weights, from which ``fidelab checkpoint quantize`` made the result
        with open_checkpoint(base) as original:
            if original.format != checkpoint.format:
                raise InputError(
                    f"--base {base} is {original.format} and {name} is {checkpoint.format}, whose tensors have other "
                    "names: pass the original in the same format"
                )
            return _audited(survey(checkpoint, base=original, tp=tp, progress=progress))


def _audited(subject: Subject) -> Audit:
    findings = [finding for known in RULES.values() for finding in known.findings(subject)]
    checkpoint = subject.checkpoint
    unchecked = _unchecked(subject)
    return Audit(
        checkpoint=checkpoint.name,
        method="gguf" if checkpoint.format == "gguf" else subject.scheme.method,
        findings=tuple(sorted(findings, key=lambda finding: _ORDER[str(finding.severity)])),
        rules=tuple(name for name in RULES if name not in unchecked),
        unchecked=unchecked,
        tensors=len(checkpoint.tensors),
        files=len({info.file for info in checkpoint.tensors.values()}),
        nbytes=checkpoint.nbytes,
        quantized=sum(module.quantized for module in subject.modules.values()),
        modules=sum(module.matrix for module in subject.modules.values()),
    )


def _unchecked(subject: Subject) -> dict[str, str]:
    """Return the rules that could not check anything, and the tensors whose values were not read, with the reasons."""
    checkpoint, why = subject.checkpoint, dict[str, str]()
    if subject.base is None:
        why |= {name: "needs --base ORIGINAL" for name in RULES if name.startswith("base-")}
    elif checkpoint.missing_files:
        why["base-missing"] = "files are missing"
    if checkpoint.format == "gguf":
        why["tp-split"] = "not for GGUF files"
    elif subject.tp == 1:
        why["tp-split"] = "needs --tp N"
    blind = [info for info in checkpoint.tensors.values() if not readable(info)]
    if blind:
        why[f"values of {counted(blind, 'tensor')}"] = f"type {', '.join(sorted({info.dtype for info in blind}))}"
    return why


def survey(
    checkpoint: Checkpoint,
    base: Checkpoint | None = None,
    tp: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Subject:
    """Read every tensor of the checkpoint once, and return the input of the rules.

    Raises:
        InputError: If the method is not known, or a file changed in the meantime.
    """
    scheme = scheme_of(checkpoint)
    modules = modules_of(checkpoint)
    scales = {info.name for module in modules.values() for part, info in module.parts.items() if part in SCALES}
    statistics: dict[str, Statistics] = {}
    done, total = 0, checkpoint.nbytes
    for name, info in checkpoint.tensors.items():
        whole = Statistics()
        for part in slices(info) if fused(info) else (info,):
            statistics[part.name] = scan(checkpoint, part, scale=name in scales)
            whole = whole.joined(statistics[part.name])
        statistics[name] = whole
        done += info.nbytes
        if progress is not None:
            progress(done, total)
    return Subject(checkpoint, base, tp, scheme, modules, statistics)
