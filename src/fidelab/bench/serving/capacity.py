"""Capacity of a server: the longest context and the number of requests at once, against the size of its cache.

Loads are tried in turn.  A load is beyond the capacity if it is rejected, if its requests do not all run at once, if it
is preempted, or if it misses the targets of the goodput.  The border is found by doubling and bisecting.  All requests
of a load are sent at once and have prompts of their own, so that no prefix is shared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fidelab.bench.base import CellResult
from fidelab.bench.load.client import drive
from fidelab.bench.load.exchange import Exchange, Load, ServerRefusedError
from fidelab.bench.load_cell import Drive
from fidelab.bench.serving.contact import Contact, cache_room
from fidelab.bench.serving.measure import ServingWatch
from fidelab.core import Status
from fidelab.core.errors import InputError
from fidelab.metrics.serving import count_good
from fidelab.results.measurement import Cell, Coordinates, Definition, Flag, Measurement, Metric
from fidelab.results.plots import TablePlot

TITLE = "How much does its server take?"
MAX_CONCURRENCY = 256  # largest number of concurrent requests to try by default
_FIRST_PROMPT_TOKENS = 256  # tokens of the first prompt if the server does not report its limit
_MAX_PROMPT_TOKENS = 1 << 20
_FINE = 16  # tokens: the longest context is found to within a block of this size, or 2%
_INTERVAL = 0.1  # seconds between readings of the server's metrics: loads are short
_ATTAINED = 0.9  # share of the requests that must meet every target
_MEMORY = re.compile(r"out of memory|\bOOM\b|cudaMalloc|hipMalloc|alloc", re.IGNORECASE)

CAPACITY = Definition(
    "requests_at_once", "count", "higher", "Most requests that are at work at once, none rejected, preempted or late."
)
PREDICTED = Definition(
    "by_cache_size",
    "count",
    None,
    "Tokens of the cache over those of a request.",
    exact=True,
    name="by the cache's size",
)
LARGEST = Definition("longest_context", "tokens", "higher", "Longest prompt that is answered, with one request.")


@dataclass(frozen=True)
class _Border:
    """Reason why a load is beyond the capacity.  ``kind``: rejected, memory, failed, preempted, queued, target."""

    kind: str
    why: str


def measure_capacity(
    contact: Contact, contexts: Sequence[int] = (), most: int = MAX_CONCURRENCY, *, watch: ServingWatch | None = None
) -> Measurement:
    """Find the longest context, and for each of some contexts how many requests the server takes at once.

    See docs/metrics.md#capacity.

    Args:
        contact: the server, with the settings of the requests: ``output``, ``goodput``, ``seed``, ``timeout``.
        contexts: prompt lengths in tokens; by default the longest possible one and a quarter of it.
        most: largest number of concurrent requests to try.

    Raises:
        InputError: If the tokenizer cannot make such prompts.
        KeyboardInterrupt: If the bench is stopped.  ``watch`` has the finished cells.
    """
    return _Search(contact, most, watch or ServingWatch()).run(contexts)


class _Search:
    def __init__(self, contact: Contact, most: int, watch: ServingWatch) -> None:
        self._contact = contact
        self._settings = contact.settings
        self._most = most
        self._watch = watch
        self._tried: list[tuple[int, int, _Border | None]] = []
        self._cells: list[CellResult] = []
        self._longest: int | None = None
        self._flags: list[Flag] = []
        self._failure = ""

    def run(self, contexts: Sequence[int]) -> Measurement:
        border = self._find_longest(contexts)
        if self._longest is None:
            return self._measurement(border.why if border else "no prompt was answered")
        if border is not None:
            self._flags.append(Flag(kind=border.kind, text=f"longest context {self._longest:,}: {border.why}"))
        for context in contexts or sorted({max(1, self._longest // 4), self._longest}):
            if self._failure:
                break
            self._cell(context)
        return self._measurement(self._failure)

    # --------------------------------------------------------------------------------------------- the search

    def _find_longest(self, contexts: Sequence[int]) -> _Border | None:
        """Find the longest prompt that a single request may have, and what limits it."""
        output, limit = self._settings.output, self._contact.limit
        most = (limit or _MAX_PROMPT_TOKENS) - output
        good, bad, border = 0, most + 1, None
        if limit is not None:
            border = _Border("limit", f"the server's limit is {limit:,} tokens, of which {output:,} are the answer's")
        tokens = most if limit is not None else min([_FIRST_PROMPT_TOKENS, *contexts])
        while tokens > 0 and bad - good > max(_FINE, good // 50):
            found = self._try(tokens, 1)
            if self._failure:
                return found
            if found is None:
                good = self._longest = tokens
                tokens = min(most, 2 * good) if bad > most else (good + bad) // 2
                if good == most:
                    break
            else:
                bad, border = tokens, found
                tokens = (good + bad) // 2
        return border

    def _cell(self, context: int) -> None:
        """Find how many requests of this context the server takes at once."""
        room = cache_room(self._contact, context + self._settings.output)
        assert self._longest is not None
        if context > self._longest:
            self._end(context, None, room, _Border("limit", f"prompts of {self._longest:,} tokens are the longest"))
            return
        good, bad = 0, self._most + 1
        border = _Border("most", f"{self._most} at once are answered; more were not tried")
        n = 1
        while bad - good > 1 and not self._failure:
            found = self._try(context, n)
            if found is None:
                good = n
                n = (good + bad) // 2 if bad <= self._most else self._next(n, room)
            else:
                bad, border = n, found
                n = (good + bad) // 2
        self._end(context, good, room, border)

    def _next(self, n: int, room: int | None) -> int:
        """Return the next larger load: first the prediction from the cache's size, then one more, then twice as
        many.
        """
        if room is not None and n < room:
            return min(room, self._most)
        return min(n + 1 if n == room else 2 * n, self._most)

    def _try(self, context: int, n: int) -> _Border | None:
        """Return what goes wrong with ``n`` concurrent requests.

        A queue is checked twice, since readings can miss a peak.
        """
        title = f"context {context:,}, {n} at once"
        found = self._load(context, n, title)
        if found is not None and found.kind == "queued":
            found = self._load(context, n, f"{title} (again)")
        self._tried.append((context, n, found))
        return found

    def _load(self, context: int, n: int, title: str) -> _Border | None:
        settings, contact = self._settings, self._contact
        self._watch.begin(title)
        number = len(self._tried)
        requests = contact.requests([context] * n, [settings.output] * n, None, settings.seed + number)
        try:
            with contact.scraper(_INTERVAL) as scraper:
                load = Load(requests, concurrency=n)
                result = drive(contact.target, load)
                driven = Drive(requests, result, scraper.reading(result.started, result.ended))
        except ServerRefusedError as error:
            return _refusal(error.status, error.said or str(error))
        except InputError as error:
            return self._failed_border(str(error))
        self._watch.driven(number, 0, driven)
        return self._judge(driven, n)

    # ------------------------------------------------------------------------------------------------ verdicts

    def _judge(self, driven: Drive, n: int) -> _Border | None:
        failed = [exchange for exchange in driven.measured if exchange.error is not None]
        if failed:
            first = failed[0]
            said = first.detail or str(first.error)
            words = self._contact.explain(driven.requests[0]) if n == 1 else None
            status = "400" if words else str(first.error).removeprefix("http-")  # streams may end without a status
            border = _refusal(int(status) if status.isdecimal() else 0, words or said, f"{len(failed)} of {n}: ")
            return self._failed_border(border.why) if self._contact.unreachable() else border
        reading = driven.server
        if reading is not None and reading.preemptions:
            return _Border("preempted", f"at {n} at once, {reading.preemptions:,.0f} preempted")
        together = _peak_concurrency(driven.measured)
        working = reading.running_max if reading is not None else None
        if n > 1 and (together < n if working is None else max(working, together) < n):
            at_work = together if working is None else max(int(working), together)
            full = reading is not None and (reading.kv_usage_max or 0) > 0.9
            why = "the cache was full" if full else "the others waited"
            return _Border("queued", f"{at_work} of {n} were at work at once, {why}")
        targets = {str(name): limit for name, limit in self._settings.goodput.items()}
        if targets and (good := count_good(driven.measured, targets)) < _ATTAINED * n:
            wanted = ", ".join(f"{name} {limit:g} ms" for name, limit in targets.items())
            return _Border("target", f"{good} of {n} met {wanted}")
        return None

    def _failed_border(self, why: str) -> _Border:
        self._failure = f"the server is gone: {why}" if self._contact.unreachable() else why
        kind = "memory" if _MEMORY.search(why) else "failed"
        return _Border(kind, self._failure)

    # ------------------------------------------------------------------------------------------------- records

    def _end(self, context: int, good: int | None, room: int | None, border: _Border) -> None:
        at: Coordinates = {"context": context, "output": self._settings.output}
        self._flags.append(Flag(kind=border.kind, text=f"context {context:,}: {border.why}"))
        status = Status.OK if good else Status.NOT_SUPPORTED
        facts = {"stopped by": border.kind, "why": border.why}
        cell = Cell(status=status, reason=None if good else border.why, at=at, facts=facts)
        metrics = [CAPACITY(good, cell=at, headline=not self._cells)] if good else []
        if room is not None:
            metrics.append(PREDICTED(room, cell=at))
        self._cells.append(CellResult(cell, tuple(metrics)))
        self._watch.begin(f"context {context:,}")
        self._watch.measured(self._cells[-1], self._measurement(self._failure))

    def _measurement(self, reason: str) -> Measurement:
        metrics: list[Metric] = [metric for cell in self._cells for metric in cell.metrics]
        if self._longest is not None:
            metrics.append(LARGEST(self._longest, cell={"output": self._settings.output}))
        rows = tuple((c, n, "yes" if border is None else border.why) for c, n, border in self._tried)
        return Measurement(
            status=Status.FAILED if reason else Status.OK,
            reason=reason or None,
            title=TITLE,
            metrics=tuple(metrics),
            cells=tuple(cell.cell for cell in self._cells),
            flags=tuple(self._flags),
            plots=(TablePlot(title="Loads that were tried", columns=("context", "at once", "answered"), rows=rows),),
            facts=self._contact.facts(),
        )


def _refusal(status: int, said: str, count: str = "") -> _Border:
    if _MEMORY.search(said):
        return _Border("memory", f"{count}{said}")
    return _Border("rejected" if 400 <= status < 500 else "failed", f"{count}{said}")


def _peak_concurrency(exchanges: Sequence[Exchange]) -> int:
    """Return the largest number of requests that were between their first token and their end at one time."""
    spans = [(float(one.events[0]), one.ended) for one in exchanges if len(one.events)]
    return max((sum(begin <= at < end or begin == at for begin, end in spans) for at, _ in spans), default=0)
