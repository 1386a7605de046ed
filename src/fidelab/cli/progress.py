"""Progress of a run or an installation on standard error: moving lines on a terminal, plain ones elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from fidelab.cli.output import duration, open_console
from fidelab.core.lines import wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from fidelab.environments.install import Stage
    from fidelab.results.outcomes import ArmResult
    from fidelab.results.store import RunFolder
    from fidelab.run.runner import Announced, Listener, Watched

_LINE_EVERY = 30.0  # seconds between plain progress lines of one job
_PLAN_SECONDS = 10.0  # seconds after which the run's own pace counts more than the plan


def watcher() -> Listener:
    """Return the listener that fits standard error: bars on a terminal, else plain lines."""
    console = open_console(stderr=True)
    return _Bars(console) if console.is_terminal else _Lines(console)


class _Name(ProgressColumn):
    """The only column that shrinks on a narrow terminal.  It is cut, not folded."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        rate = task.fields.get("rate")
        return Text(f"{rate:,.0f} tok/s" if rate else "– tok/s")


class _Left(ProgressColumn):
    def render(self, task: Task) -> Text:
        left = _remaining_seconds(task.elapsed or 0.0, task.completed, task.total or 0.0)
        return Text(str(timedelta(seconds=round(left))) if task.total else "-:--:--", style="progress.remaining")


def _remaining_seconds(elapsed: float, done: float, total: float) -> float:
    """Return the expected remaining seconds, if ``done`` of ``total`` expected seconds took ``elapsed``."""
    return max(0.0, total - done) * (elapsed + _PLAN_SECONDS) / (done + _PLAN_SECONDS)


def _print_wrapped(console: Console, text: str) -> None:
    """Print a paragraph, wrapped at the console's width; words wider than that stay whole."""
    console.print("\n".join(wrapped(text, console.width)), highlight=False, markup=False, soft_wrap=True)


def _title(job: Watched) -> str:
    return job.role if job.role.partition(":")[0] in ("reference", "floor", "twin") else job.arm.name


class _Lines:
    """Prints a line at the start and end of each job, and one every half minute in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._done = self._tokens = 0
        self._began = self._said = 0.0
        self._started, self._pace = 0.0, (0.0, 0.0)

    def start(self, plan: Announced, folder: RunFolder | None) -> None:
        if folder is not None:
            self._console.print(f"run {folder.path}", highlight=False, markup=False, soft_wrap=True)  # to be copied
        self._started = time.monotonic()
        for remark in plan.remarks:
            self._print(remark)

    def stage(self, text: str) -> None:
        self._print(text)

    def job_started(self, job: Watched, tokens: int, reused: bool) -> None:
        self._done, self._tokens = 0, tokens
        self._began = self._said = time.monotonic()
        self._print(f"{_title(job)}: found in an earlier run" if reused else f"{_title(job)}: {tokens:,} tokens to do")

    def extended(self, job: Watched, tokens: int) -> None:
        self._tokens += tokens

    def job_lost(self, job: Watched, reason: str) -> None:
        self._print(f"{_title(job)}: lost on the cluster, {reason}")

    def opened(self, job: Watched, seconds: float) -> None:
        self._began = self._said = time.monotonic()
        self._print(f"{_title(job)}: model loaded in {seconds:.1f} s")

    def progress(self, job: Watched, tokens: int) -> None:
        self._done += tokens
        now = time.monotonic()
        if now - self._said >= _LINE_EVERY:
            self._said = now
            rate = self._done / (now - self._began)
            self._print(
                f"{_title(job)}: {self._done:,} of {self._tokens:,} tokens, {rate:,.0f} tok/s, {self._remaining_text()}"
            )

    def advanced(self, done: float, total: float) -> None:
        self._pace = done, total

    def _remaining_text(self) -> str:
        """Return the expected duration of the whole run as text."""
        return f"{duration(_remaining_seconds(time.monotonic() - self._started, *self._pace))} left of the run"

    def job_ended(self, job: Watched, result: ArmResult) -> None:
        seconds = result.timing.get("seconds")
        took = f" in {seconds:.0f} s" if seconds else ""
        self._print(f"{_title(job)}: {result.status}{took}" + (f" ({result.reason})" if result.reason else ""))

    def bench(self, text: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said >= _LINE_EVERY or not self._said:
            self._said = now
            self._print(f"benches, {done} of {total}: {text}; {self._remaining_text()}")

    def scoring(self) -> None:
        self._print("scoring")

    def close(self) -> None: ...

    def _print(self, text: str) -> None:
        _print_wrapped(self._console, text)


class _Bars(_Lines):
    """One bar for the whole run, measured in expected time; the current job is named."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (_Name(), BarColumn(20), TextColumn("{task.percentage:>3.0f}%"))
        rates = (_Rate(table_column=Column(no_wrap=True)), _Left(table_column=Column(no_wrap=True)))
        self._bar = Progress(
            *columns, *rates, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task: TaskID | None = None

    def start(self, plan: Announced, folder: RunFolder | None) -> None:
        super().start(plan, folder)
        self._task = self._bar.add_task("starting", total=None)
        self._bar.start()

    def job_started(self, job: Watched, tokens: int, reused: bool) -> None:
        self._update(description=f"{_title(job)}: {'found' if reused else 'loading'}", refresh=True)

    def opened(self, job: Watched, seconds: float) -> None:
        self._done, self._began = 0, time.monotonic()
        self._update(description=_title(job), refresh=True)

    def progress(self, job: Watched, tokens: int) -> None:
        self._done += tokens
        self._update(rate=self._done / max(1e-3, time.monotonic() - self._began))

    def advanced(self, done: float, total: float) -> None:
        self._update(completed=done, total=total)

    def job_ended(self, job: Watched, result: ArmResult) -> None:
        if result.reason:
            super().job_ended(job, result)

    def bench(self, text: str, done: int, total: int) -> None:
        self._update(description=f"benches, {done} of {total}: {text}", rate=None, refresh=True)

    def scoring(self) -> None:
        self._update(description="scoring", refresh=True)

    def close(self) -> None:
        self._bar.stop()

    def _update(self, **fields: Any) -> None:
        """Change the bar; ``refresh`` shows the change even if the job is short."""
        if self._task is not None:
            self._bar.update(self._task, **fields)


class Installation:
    """Shows the steps of an installation: one line each, or on a terminal one line that is rewritten."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage: Stage | None = None
        self._began = self._stage_began = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line that is not rewritten."""
        _print_wrapped(self._console, text)

    def begin(self, stage: Stage) -> None:
        """Show the next step."""
        self._stage, self._stage_began = stage, time.monotonic()
        if not self._console.is_terminal:
            self.say(f"{self._place()}: {stage.text} ({self._times()})")

    def __rich__(self) -> Text:
        """Return the rewritten line, most important part first, since a narrow terminal cuts it."""
        if self._stage is None:
            return Text("starting")
        line = f"{self._place()}: {self._times()} ({self._stage.text})"
        return Text(line, no_wrap=True, overflow="ellipsis")

    def _place(self) -> str:
        assert self._stage is not None
        return f"{self._stage.recipe}, step {self._stage.number} of {self._stage.total}, {self._stage.kind}"

    def _times(self) -> str:
        assert self._stage is not None
        now = time.monotonic()
        left = self._stage.remaining_seconds(now - self._stage_began)
        return f"{duration(now - self._began)} elapsed, about {duration(left)} left"


@contextmanager
def watch_installation() -> Iterator[Installation]:
    """Show an installation on standard error."""
    console = open_console(stderr=True)
    shown = Installation(console)
    if console.is_terminal:
        with console.status(shown):
            yield shown
    else:
        yield shown
