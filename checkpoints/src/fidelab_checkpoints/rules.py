"""The table of possible defects of a checkpoint: each rule with its symptom, cause, check and remedy.

The audit runs every rule, and the failure catalogue in docs/ is made from this table, so the two always agree.  A rule
is a function of a :class:`Subject` that yields its findings:

    @broken(title=…, symptom=…, cause=…, check=…, command=…)
    def _scale_zero(subject: Subject) -> Iterator[Finding]:
        yield Finding("the scales of 3 modules are all zero", tensors)

Its decorator is its severity; its function's name, with hyphens, is the name of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from fidelab_checkpoints.files import Checkpoint
from fidelab_checkpoints.modules import Module
from fidelab_checkpoints.scan import Statistics
from fidelab_checkpoints.schemes import Scheme

Severity = Literal["broken", "suspicious", "information"]


@dataclass(frozen=True)
class Finding:
    """Finding of a rule.

    Attributes:
        text: a sentence without its full stop, with numbers and places.
        tensors: names of all tensors (or modules) that it is about.
        severity: where it differs from the rule's.
        rule: filled in by the audit.
    """

    text: str
    tensors: Sequence[str] = ()
    severity: Severity | None = None
    rule: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain data, with the names of all tensors."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "text": self.text,
            "at_run_time": RULES[self.rule].symptom,
            "count": len(self.tensors),
            "tensors": list(self.tensors),
        }


@dataclass(frozen=True)
class Subject:
    """Input of the rules.

    Attributes:
        checkpoint: the audited checkpoint.
        base: the original that it was made from, if the user names it.
        tp: number of devices that tensor parallelism would split it over.
        scheme: its quantization, according to its configuration.
        modules: name → the tensors that make up one linear layer (or any other layer with a weight).
        statistics: statistics of each tensor's values by name; empty if values were not read.
        kept: results of one rule that others use as well.
    """

    checkpoint: Checkpoint
    base: Checkpoint | None = None
    tp: int = 1
    scheme: Scheme = field(default_factory=Scheme)
    modules: Mapping[str, Module] = field(default_factory=dict)
    statistics: Mapping[str, Statistics] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Rule:
    """One kind of fault.

    Attributes:
        id: its name in reports and documents, as ``scale-zero``.
        title: a heading.
        severity: what its findings make of the verdict, where a finding itself does not say.
        symptom: what it looks like at run time; a sentence without its full stop.
        cause: how checkpoints come to have it.
        check: what is looked at.
        command: what to run, or to do about it.
        find: the check itself.
    """

    id: str
    title: str
    severity: Severity
    symptom: str
    cause: str
    check: str
    command: str
    find: Callable[[Subject], Iterable[Finding]]

    def findings(self, subject: Subject) -> list[Finding]:
        """Return the findings of the check, with the rule's name and severity."""
        return [replace(found, rule=self.id, severity=found.severity or self.severity) for found in self.find(subject)]


RULES: dict[str, Rule] = {}
"""All rules, in the order in which their modules were imported (:mod:`fidelab_checkpoints.audit` imports them)."""

_Check = Callable[[Subject], Iterable[Finding]]


def _entering(
    severity: Severity, *, title: str, symptom: str, cause: str, check: str, command: str
) -> Callable[[_Check], _Check]:
    """Return a decorator that adds a function to :data:`RULES`; the arguments are those of :class:`Rule`."""

    def enter(find: _Check) -> _Check:
        id = find.__name__.strip("_").replace("_", "-")
        assert id not in RULES, f"two rules are called {id}"
        RULES[id] = Rule(id, title, severity, symptom, cause, check, command, find)
        return find

    return enter


broken = partial(_entering, "broken")
suspicious = partial(_entering, "suspicious")
information = partial(_entering, "information")


# Texts of findings about many names.


def and_more(names: Sequence[str]) -> str:
    """Return a list in words, such as ``a``, ``a and b`` or ``a, b and 7 more``."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def counted(names: Sequence[Any], noun: str) -> str:
    """Return a number with its noun, such as ``1 tensor`` or ``1,000 tensors``."""
    return f"{len(names):,} {noun}{'' if len(names) == 1 else 's'}"


def are(names: Sequence[Any]) -> str:
    """Return ``is`` for one, else ``are``."""
    return "is" if len(names) == 1 else "are"


def listed(text: str, names: Sequence[str], severity: Severity | None = None) -> list[Finding]:
    """Return a finding whose text ends with the names, such as ``… in a, b and 1 more``, or nothing without names."""
    return [Finding(f"{text} {and_more(names)}", names, severity)] if names else []


def counted_findings(names: Sequence[str], noun: str, says: str, severity: Severity | None = None) -> list[Finding]:
    """Return a finding such as ``3 tensors are …: a, b and 1 more``, or nothing without names."""
    return listed(f"{counted(names, noun)} {are(names)} {says}:", names, severity)


def verb(names: Sequence[Any], root: str) -> str:
    """Return a verb as it follows :func:`counted`, such as ``lacks`` for one, else ``lack``."""
    return f"{root}s" if len(names) == 1 else root
