"""Rules about flags that go together, in one table: what a flag needs, and what it leaves without effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import typer

from fidelab.core.errors import UsageError

PRESET, BORROWED = "=preset", "=borrowed"
"""What a command line gives without a flag of its own: a configuration in one line begins from a preset; the reference
is a packed one."""


class Rule(NamedTuple):
    """One rule, by the names of a command's parameters.

    It holds where ``flag`` is given, and always without one.  ``needs``: one of these has to be given, too.
    ``excludes``: these must not be given.  ``only``: nothing else may be given.  In ``message`` stands ``{flag}`` for
    the flag as typed, and ``{others}`` for those to leave out.
    """

    message: str
    flag: str = ""
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None


_SHOWN = ("as_json", "details", "markdown")
_LIMITS = ("max_kld", "max_flips", "max_accuracy_loss", "min_saving", "min_tokens_per_s")
_OTHER_SETTINGS = "{flag} takes the settings of the %s: leave out {others}"
_SECTION = Rule(
    "--markdown prints a separate section: leave out --json and --details", "markdown", excludes=("as_json", "details")
)
_FORMATS = "name formats of weights, --weights int4, or of keys and values, --kv q8_0 or --bits 8,7,6,5,4,3,2"
_EXPORT = "--export needs a plan: add --kv FORMAT --by layer --budget 8bits"
_PERMITTED = ("trusted", "python", "image", "programs", "pythonpath", "engine_arg", "text", "prompts", "traffic")
"""Flags that repeat what a resumed run asks permission for."""

RULES: Mapping[str, tuple[Rule, ...]] = {
    "compare": (
        _SECTION,
        Rule(_OTHER_SETTINGS % "run", "resume_dir", only=(*_SHOWN, *_PERMITTED, "fail_on")),
        Rule(_OTHER_SETTINGS % "file", "file", only=("overrides", *_SHOWN, "trusted", "dry_run", "fail_on")),
        Rule(
            "--trust needs a file: from -f, a preset or --serve, or --resume RUN_DIR",
            "trusted",
            needs=("file", "preset", PRESET, "serve", "resume_dir"),
        ),
        Rule("--change is a change of a server's command line: give that with --serve COMMAND", "change", ("serve",)),
        Rule(
            "the command of --serve defines the reference: leave out {others}",
            "serve",
            excludes=("model", "engine", "reference", "preset"),
        ),
        Rule(
            "name a model: fidelab compare MODEL --kv FORMAT (or -f FILE, --serve COMMAND, --preset NAME, or --resume "
            "RUN_DIR)",
            needs=("model", "file", "serve", "preset", "resume_dir"),
        ),
    ),
    "compare, references known": (
        Rule(
            "a borrowed reference fixes windows and settings: leave out {others}",
            BORROWED,
            excludes=(
                *("text", "prompts", "traffic", "quick", "windows", "n_ctx", "protocol", "stride", "limit", "control"),
            ),
        ),
        Rule(
            "name at least one candidate: --kv FORMAT, --candidate KEY=VALUE,…, --vary KEY=A,B,…, or --change FLAGS "
            "with --serve",
            needs=("kv", "candidate", "vary", "change", BORROWED),
        ),
    ),
    "bench offline": (
        Rule("name a model: fidelab bench MODEL --kv FORMAT (or --preset NAME)", needs=("model", "preset")),
    ),
    "reproduce run": (
        Rule("--markdown prints a separate section: leave out --json", "markdown", excludes=("as_json",)),
        Rule(_OTHER_SETTINGS % "profile", "resume_dir", only=("as_json", "markdown", "trusted")),
        Rule(
            "name a profile: fidelab reproduce NAME (fidelab reproduce list shows them)", needs=("name", "resume_dir")
        ),
    ),
    "report": (
        _SECTION,
        Rule(
            "--format writes its own files: leave out {others}",
            "form",
            excludes=(*_SHOWN, "rescore", "margin", *_LIMITS),
        ),
        Rule("-o goes with --format: lm-eval, hub, badge, frontier", "out", needs=("form",)),
        Rule("--configuration goes with --format: lm-eval, hub, badge", "configuration", needs=("form",)),
        *(
            Rule("{flag} goes with --format hub", name, needs=("form",))
            for name in ("base_model", "quantized_by", "dataset")
        ),
        Rule(
            "--rescore writes the run's report with the run's own limits: leave out {others}",
            "rescore",
            excludes=_LIMITS,
        ),
        Rule("--margin needs the scores again: add --rescore", "margin", needs=("rescore",)),
    ),
    "check": (
        Rule("--all and --configuration: name one", "every", excludes=("configuration",)),
        Rule("--github writes the job summary in Markdown: leave out {others}", "github", excludes=("markdown",)),
    ),
    "doctor": (
        Rule("--system looks at the machine, --trial at engines: give one of them", "system", excludes=("trial",)),
    ),
    "diagnose sensitivity": (
        Rule(_FORMATS, needs=("weights", "kv", "bits")),
        Rule(_FORMATS, "weights", excludes=("kv", "bits")),
        *(
            Rule(_EXPORT, flag, needs=(lacking,))
            for flag in ("export", "export_format")
            for lacking in ("kv", "budget")
        ),
    ),
    "setup install": (
        Rule("{flag} and {others} exclude each other", "cuda", excludes=("rocm", "cpu")),
        Rule("{flag} and {others} exclude each other", "rocm", excludes=("cpu",)),
    ),
    "serve stop": (Rule("--all is for every server: leave the name out", "everything", excludes=("name",)),),
}
"""Command → its rules, in the order in which they are told."""


def given_flags(context: typer.Context) -> dict[str, str]:
    """Return the parameters that the command line names, each with its flag as typed."""
    found = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            flag = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()
            found[str(parameter.name)] = flag
    return found


def check_flags(context: typer.Context, rules: str | None = None, also: Collection[str] = ()) -> None:
    """Check a command line against the rules of its command. Every command does so before it runs.

    ``rules``: key of other rules in :data:`RULES`.  ``also``: what is given without a flag of its own.

    Raises:
        UsageError: If one is broken.
    """
    given = given_flags(context) | dict.fromkeys(also, "")
    if any("preset=" in str(context.params.get(name)) for name in given):  # of a list, too
        given[PRESET] = ""
    if text := broken(RULES.get(rules or context.command_path.partition(" ")[2], ()), given):
        raise UsageError(text)


def broken(rules: tuple[Rule, ...], given: Mapping[str, str]) -> str | None:
    """Return the message of the first broken rule, or ``None``.  ``given``: parameter → its flag as typed."""
    for rule in rules:
        if rule.flag and rule.flag not in given:
            continue
        others = [flag for name, flag in given.items() if name in rule.excludes]
        if rule.only is not None:
            others = [flag for name, flag in given.items() if name not in (rule.flag, *rule.only) and name[0] != "="][
                :1
            ]
        if others or (rule.needs and not given.keys() & set(rule.needs)):
            return rule.message.format(flag=given.get(rule.flag, ""), others=", ".join(others))
    return None
