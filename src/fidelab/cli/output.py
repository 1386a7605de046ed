"""Output of commands: the table or one JSON object on standard output, everything else on standard error.

Text from servers, models, logs or files can hold sequences that control a terminal.  After :func:`guard_streams`, none
of them reaches the terminal, neither by ``print`` nor by a console of :func:`open_console`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer

from fidelab.core.lines import columns, encodable, folded_command, wrapped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    from fidelab.results.record import Report
    from fidelab.results.study import Study

_BLANK_ENDS = re.compile(r"(?<![ \t])[ \t](?:[ \t]|\x1b\[[0-9;]*m)*(?=\n)")  # with changes of style between blanks
_OPEN_END = re.compile(r"(?<![ \t])[ \t](?:[ \t]|\x1b\[[0-9;]*m)*\Z")
_BLANKS = re.compile(r"[ \t]+")
_TQDM_PREFIX = re.compile(r"(?:[\r\n]|\x1b\[A)*")  # tqdm begins its lines so


def _without_blanks(end: re.Match[str]) -> str:
    return _BLANKS.sub("", end[0])


class _Plain:
    """A standard stream without blanks at the ends of lines, whose encoding can hold every text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._held = ""  # blanks that may stand at the end of a line

    def write(self, text: str) -> int:
        whole = self._held + text
        end = _OPEN_END.search(whole)
        self._held = end[0] if end else ""
        whole = whole[: end.start()] if end else whole
        if whole:
            self._stream.write(
                encodable(_BLANK_ENDS.sub(_without_blanks, whole), self._stream.encoding, same_width=True)
            )
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        held, self._held = self._held, ""
        if held:
            self._stream.write(held)
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Guarded:
    """A standard stream that escapes unprintable characters as in JSON.

    Rich unwraps the stream and writes its control sequences there. Consoles of :func:`open_console` clean the texts
    between them; typer's show only fidelab's texts.
    """

    def __init__(self, stream: TextIO, *, dispensable: bool = False) -> None:
        """``dispensable``: a command goes on if the stream cannot be written, as on a full disk."""
        self.rich_proxied_file = cast(TextIO, _Plain(stream))
        self._dispensable = dispensable

    def write(self, text: str) -> int:
        from fidelab.results.numbers import printable

        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        begin = ""
        if sys._getframe(1).f_globals.get("__name__", "").startswith("tqdm."):  # it moves the cursor back
            match = _TQDM_PREFIX.match(text)
            begin = match[0] if match else ""
        try:
            self.rich_proxied_file.write(begin + printable(text[len(begin) :], escaped=True))
        except OSError as error:
            if not self._dispensable:
                error.filename = error.filename or "standard output"
                raise
            _discard(self.rich_proxied_file)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def guard_streams() -> None:
    """Prevent printed text from controlling the terminal from now on."""
    if not isinstance(sys.stdout, _Guarded):
        sys.stdout = cast(TextIO, _Guarded(sys.stdout or _null()))
    if not isinstance(sys.stderr, _Guarded):
        sys.stderr = cast(TextIO, _Guarded(sys.stderr or _null(), dispensable=True))


def _null() -> TextIO:
    """In place of a stream that the caller closed, if nothing opened it before."""
    return Path(os.devnull).open("w", encoding="utf-8")


def _discard(stream: TextIO) -> None:
    """Send what a stream still holds, and all that follows, to the null device: Python flushes it when it ends."""
    with Path(os.devnull).open("wb") as null:
        os.dup2(null.fileno(), stream.fileno())
    stream.flush()


def flush_output() -> None:
    """Write what standard output still holds; a reader that has gone, such as ``head``, wants none of it.

    Raises:
        OSError: If it cannot be written, as on a full disk.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise


def note(text: str) -> None:
    """Print a paragraph for the user on standard error, wrapped at its width."""
    print("\n".join(wrapped(text, columns(sys.stderr))), file=sys.stderr)


def say(text: str = "", *, indent: int = 0, hang: int = 2) -> None:
    """Print a paragraph on standard output, wrapped at its width.

    ``indent``, ``hang``: blanks before the first line, and before all further ones.
    """
    print("\n".join(wrapped(text, columns(), indent=" " * indent, hang=" " * hang)))


def say_command(command: str, *, indent: int = 0) -> None:
    """Print a command on standard output, folded so that it can be pasted."""
    print("\n".join(folded_command(command, columns(), indent=" " * indent)))


def say_fact(name: str, value: str, column: int, *, indent: int = 0, command: bool = False) -> None:
    """Print ``name  value`` with the value at a column, where its further lines begin, too.

    A value with a word that does not fit there, such as a hash, stands below the name.  A ``command`` is folded so that
    it can be pasted.
    """
    width = columns()
    column = min(column, max(12, width // 3))
    head = f"{'':{indent}}{name:<{column - indent}}"
    head = head if head.endswith(" ") else f"{head}  "
    hang = " " * column
    if max(len(head), column) + max(map(len, value.split(" "))) > width:
        print(head.rstrip())
        head = hang = " " * (indent + 2)
    if command:
        first, *rest = folded_command(value, width, indent=hang)
        lines = [f"{head}{first.strip()}", *rest]
    else:
        lines = wrapped(value, width, indent=head, hang=hang)
    print("\n".join(lines))


def duration(seconds: float) -> str:
    """Format seconds as ``40 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def command_line() -> str:
    """Return the command line that the user typed, with the user's own defaults, for the record."""
    from fidelab.cli.defaults import words_of_defaults
    from fidelab.core import shell_line

    return shell_line("fidelab", *sys.argv[1:], *words_of_defaults())


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Show a moving line on standard error during a slow step, on a terminal only.

    Yields a function that changes the text.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        from rich.text import Text

        console = open_console(stderr=True)
    except Exception:  # fidelab doctor says so
        yield lambda text: None
        return
    with console.status(Text(text)) as line:
        yield lambda text: line.update(Text(text))


def open_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or error, as wide as :func:`fidelab.core.lines.columns`."""
    stream = sys.stderr if stderr else sys.stdout
    stream = getattr(stream, "rich_proxied_file", stream)
    # without a height, rich takes 80 columns for a terminal of kind "dumb", whatever its width
    height = 50 if os.environ.get("TERM") in ("dumb", "unknown") else None
    return _console_class()(file=stream, width=columns(stream), height=height)


@cache
def _console_class() -> type[Console]:
    """Create the class when it is first needed, because importing rich takes time."""
    from rich.console import Console
    from rich.segment import Segment

    from fidelab.results.numbers import printable

    class Guarded(Console):
        """Console that writes its own control sequences and no others."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control or segment.text.isprintable():
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    return Guarded


UNDECIDED = 3
"""Exit code for undecided results: none is shown to be bad, and not all are shown to be good."""


def exit_on(faults: Collection[str], undecided: Collection[str] = ()) -> None:
    """Print each line on standard error; exit with 1 for a fault, with 3 if all are undecided."""
    for line in (*faults, *undecided):
        note(f"fidelab: {line}")
    if faults or undecided:
        raise typer.Exit(1 if faults else UNDECIDED)


def print_json(value: Any) -> None:
    """Print plain data as one JSON object; NaN and infinities become null."""
    from fidelab.core import finite

    print(json.dumps(finite(value), indent=2, ensure_ascii=False))


def show_study(study: Study, folder: Path | None, as_json: bool, markdown: bool = False) -> None:
    """Print a study as tables, as Markdown, or as its JSON; ``folder`` contains its files."""
    if as_json:
        sys.stdout.write(study.to_json())
        return
    from fidelab.report.study import render_study, study_markdown
    from fidelab.studies.profiles import stage_records

    stages = {} if folder is None else stage_records(study, folder)
    if markdown:
        sys.stdout.write(study_markdown(study, stages))
    else:
        render_study(study, open_console(), folder=folder, stages=stages)


def show_report(
    report: Report, *, as_json: bool, folder: Path | None = None, details: bool = False, markdown: bool = False
) -> None:
    """Print the report on standard output."""
    if as_json:
        sys.stdout.write(report.to_json())
    elif markdown:
        print(report.to_markdown(), end="")
    else:
        from fidelab.report.text import render_text

        render_text(report, open_console(), folder=folder, details=details)


def failures(report: Report) -> list[str]:
    """Return the failures of a run, a line each: arms, their benches, and lost items."""
    from fidelab.report.cells import shared

    arms = [report.reference, *([report.control] if report.control else []), *report.candidates]
    lost = [arm for arm in arms if arm.status in ("failed", "not_engaged")]
    faults = shared(((arm.name, str(arm.reason)) for arm in lost), " failed: ")
    for arm in arms:
        failed = ((name, bench.reason) for name, bench in arm.benches.items() if bench.status == "failed")
        faults += [f"{arm.name}: {name} failed: {why}" for name, why in failed if why != arm.reason]
        flags = (flag for axis in arm.axes.values() for flag in axis.flags)
        faults += [f"{arm.name}: {flag.text}" for flag in flags if flag.kind == "lost" and arm.measured]
    return faults
