"""A report as a section of a model card, in GitHub-flavoured Markdown, without headings.

Names are code spans, and all other text is escaped: nothing from models, logs and configs becomes markup, a link or
another cell. Addresses are code spans too, since renderers make links of them, some after escapes are undone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fidelab.report.cells import engines_of, fact_of
from fidelab.report.sections import Section, table_of
from fidelab.report.summary import Performance
from fidelab.report.tables import NAME, TextTable
from fidelab.report.view import Answer, View, build_view
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import ABSENT, one_line, printable, public_command, public_name
from fidelab.results.record import Report

_LEGEND = (
    "KLD: mean KL divergence from the reference in nats, whose upper end sets the verdict. Same top: positions with "
    "the same most likely token. Flips: positions whose top token changes although the reference clearly preferred "
    "its own."
)
_MAX_FIGURES = 8  # columns of figures; wider tables with fewer rows have a row per figure
_MARKUP = re.compile(r"[\\`*\[\]<~$&|]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is none
_BLOCK = re.compile(r"^(\d{1,9}(?=[.)])|(?=[>#+-]))(.)")  # begins a quote, a heading or a list
_ENTITIES = {"<": "&lt;", "&": "&amp;"}
_ADDRESS = re.compile(r"://|www\.|@|\b(mailto|xmpp):", re.IGNORECASE)


def render_markdown(report: Report) -> str:
    """Render the section, which ends in a newline."""
    view = build_view(report)
    rows = ((row, code_cell(row.name), (row.mark, *(row.cells[n] for n in view.kept))) for row in view.candidates)
    cells = ((f"**{name}**" if row.chosen else name, *map(escaped, figures)) for row, name, figures in rows)
    beside = [line for table in view.beside for line in _table(table)]
    verdicts = (
        pipe_table((view.subject, "verdict", *(view.headings[n] for n in view.kept)), 2, cells),
        _bullets(f"{', '.join(map(code_span, names))}: {escaped(why)}" for why, names in view.reasons),
        *(escaped(line) for line in (*view.headlines, *view.partings)),
        *beside,
        _bullets(map(escaped, view.remarks)),
        _LEGEND,
        _bullets(
            escaped(line) for line in (view.floor, view.control, *view.memory_notes, view.weights, view.ranking) if line
        ),
    )
    warnings = (
        *(f"failed: {escaped(line)}" for line in view.failures),
        *map(escaped, (*view.modified, *view.engine_remarks)),
    )
    engines = escaped(engines_of((report.reference, *report.candidates)))
    n = len(view.candidates) if view.fidelity else len(view.rows)
    subject = f"{n} configuration{'' if n == 1 else 's'} of {code_span(public_name(view.rows[0].model))} on {engines}"
    if view.performance is not None and not view.fidelity:
        what = view.performance.measured
        compared = f", compared with the reference {code_span(view.rows[0].name)}" if n > 1 else ""
        opening = f"{what[:1].upper()}{what[1:]} of {subject}{compared}."
    else:
        base = code_span(view.rows[0].name)
        opening = f"{subject}, compared with the reference {base}{_protocol(report, view.text)}."
    parts = [
        *(_answer(view.answer) if view.answer else ()),
        opening,
        _bullets(warnings),
        *(verdicts if view.fidelity else map(escaped, view.headlines)),
        *(_speed(view, view.performance) if view.performance else ()),
        *(part for axis in view.axes for part in _section(axis, alone=False)),
        "To repeat:",
        code_block(view.command),
        f"Made with fidelab {escaped(view.version)} on {report.created.date().isoformat()}.",
    ]
    return printable("\n\n".join(part for part in parts if part) + "\n")


def _answer(answer: Answer) -> Iterator[str]:
    """The recommendation, what it rests on, and the command that turns it on."""
    yield f"**{escaped(answer.head)}**"
    yield _bullets(map(escaped, (*answer.facts, *((answer.note,) if answer.note else ()))))
    yield code_block(public_command(answer.command)) if answer.command else ""


def _protocol(report: Report, text: str) -> str:
    """Text and windows, and the facts of the other axes, as far as the settings name them."""
    settings = report.settings
    axes = _mapping(settings.get("axes"))
    parts = [f"text {_setting(settings['text'])}"] if "text" in settings else []
    if "windows" in (kld := _mapping(axes.get(DECIDING))):
        size = ""
        if "n_ctx" in kld:
            n_ctx = kld["n_ctx"]
            shortest, *longer = n_ctx if isinstance(n_ctx, list | tuple) else [n_ctx]
            others = f" and fewer of {' and '.join(map(_setting, longer))}" if longer else ""
            size = " of the shortest context" if shortest is None else f" of {_setting(shortest)} tokens{others}"
            if kld.get("protocol") == "depth":
                size = (
                    " per depth" if shortest is None else f" per depth to {_setting((longer or [shortest])[-1])} tokens"
                )
        protocol = f" (protocol {_setting(kld['protocol'])})" if "protocol" in kld else ""
        scored = f", {text}" if text else ""
        parts.append(f"KLD over {_setting(kld['windows'])} windows{size}{protocol}{scored}")
    for name in axes:
        measured = (arm.axes[name] for arm in report.candidates if name != DECIDING and name in arm.axes)
        if axis := next((axis for axis in measured if axis.measured), None):
            words = [f"{axis.n_items:,} item{'' if axis.n_items == 1 else 's'}"] if axis.n_items else []
            plain = (fact for fact, value in axis.facts.items() if fact_of(value) != ABSENT)
            words += [f"{escaped(one_line(fact))} {_setting(axis.facts[fact])}" for fact in plain]
            parts.append(": ".join(filter(None, (code_span(name), ", ".join(words)))))
    return f": {'; '.join(parts)}" if parts else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _setting(value: Any) -> str:
    return fact_of(value) if isinstance(value, int | float) else code_span(public_name(str(value)))


def pipe_table(columns: Sequence[str], words: int | Collection[int], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are Markdown already.

    ``words``: the columns that hold words, or how many first ones do.
    """
    left = range(words) if isinstance(words, int) else words
    ruler = [":--" if n in left else "--:" for n in range(len(columns))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ruler, *rows))


def _speed(view: View, speed: Performance) -> list[str]:
    """Speed and memory of all arms: the headline metrics, flags, then all tables of the benches."""
    arms = zip(speed.names, speed.rows, strict=True)
    cells = ((code_cell(name), *(escaped(str(figure)) for figure in figures)) for name, figures in arms)
    shown = speed.columns and not view.summarized
    table = pipe_table((NAME, *speed.columns), 1, cells) if shown else ""
    lines = _bullets(escaped(f"{bench.name}: {line}") for bench in view.benches for line in bench.lines)
    whole = (part for bench in view.benches for part in _section(bench, alone=len(view.rows) == 1))
    return [table, escaped(speed.note) if table else "", lines, *whole]


def _section(section: Section, *, alone: bool) -> Iterator[str]:
    """All tables of an axis or a bench; ``alone``: the report has one arm, which need not be named."""
    for table in (*section.matrices, *section.tables):
        shown = table.without_name() if alone else table
        wide = len(shown.columns) - shown.named > max(_MAX_FIGURES, len(shown.rows))
        whole = shown.turned() if wide else shown
        yield from _table(whole, code=1 if whole.columns[0] == NAME else 0)
    yield _bullets(map(escaped, section.footnotes))
    if section.kind == "bench":
        for part in section.shown:
            for plot in part.tables:
                title = plot.title if alone else f"{part.arm.name}: {plot.title}"
                yield from _table(replace(table_of(plot), title=one_line(title), named=len(plot.columns)), code=1)


def _table(table: TextTable, code: int | None = None) -> tuple[str, str]:
    """Title and rows of a table; the first ``code`` columns are code spans, by default those that identify a row."""
    spans = table.named if code is None else code
    lines = ((*map(code_cell, line[:spans]), *map(_figure, line[spans:])) for line in table.rows)
    colon = "" if table.title.endswith("?") else ":"
    return f"{_paragraph(table.title)}{colon}", pipe_table(tuple(map(_figure, table.columns)), table.named, lines)


def _paragraph(text: str) -> str:
    """Text that begins a paragraph, whatever it begins with."""
    return _BLOCK.sub(r"\1\\\2", escaped(text))


def _figure(text: str) -> str:
    """Text in a cell of a table."""
    return escaped(text.replace("\\|", "\\ |"))  # as in code spans


def code_cell(text: str) -> str:
    """Return a code span in a cell of a table."""
    return code_span(text).replace("|", "\\|")


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def escaped(text: str) -> str:
    """Return text that is shown as it is."""
    # As an entity where not all renderers take a backslash: python-markdown makes a tag of ``\<b>``
    return " ".join(
        code_span(word)
        if _ADDRESS.search(word)
        else _MARKUP.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), word)
        for word in text.split(" ")
    )


def code_span(text: str) -> str:
    """Return a code span, delimited by more backticks than the text has in a row."""
    text = one_line(text).replace("\\|", "\\ |")  # renderers disagree on which sign the backslash belongs to
    if not text:
        return ABSENT
    ticks = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if "`" in (text[0], text[-1]) else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def code_block(text: str) -> str:
    """Return an indented code block: renderers without fences take what stands between them for text and HTML."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join("    " + "".join(char if char.isprintable() else "\ufffd" for char in line) for line in lines)
