"""Measures all cells of a load in order; repeats are whole passes over them, so that drift affects all cells equally.

Each cell's record holds its outcome.  A context beyond the server's limit is ``not_supported``, with the server's
message, and the other cells continue.  If the server is gone, the load ends and finished cells are kept.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fidelab.bench.base import CellResult
from fidelab.bench.load.client import drive
from fidelab.bench.load.exchange import Load, LoadRequest, ServerRefusedError
from fidelab.bench.load_cell import Drive, LoadCell, compare_counts, count_by_finish, load_cell
from fidelab.bench.load_figures import serving_measurement
from fidelab.bench.serving.contact import Contact, cache_room, reach
from fidelab.bench.serving.settings import ServingSettings
from fidelab.core import Status
from fidelab.core.errors import InputError
from fidelab.inputs.traffic import arrivals
from fidelab.results.measurement import Cell, Flag, Measurement

_TOO_LONG = re.compile(
    r"context|max_model_len|maximum.{0,20}(length|token)|too (long|many tokens)|exceed|longer than", re.IGNORECASE
)
_ABOUT_REQUEST = (400, 413, 422)  # statuses that may mean a request beyond the server's length
_EMPTY_STREAM_CAUSES = {"no-stream", "aborted", "server"}  # kinds of errors of a stream without content


class ServingWatch:
    """Callbacks that follow a load; the base class ignores everything."""

    def reached(self, contact: Contact) -> None:
        """The server has answered."""

    def begin(self, title: str) -> None:
        """A cell begins."""

    def driven(self, number: int, repeat: int, drive: Drive) -> None:
        """A cell was driven, with this outcome of each request."""

    def measured(self, cell: CellResult, serving: Measurement) -> None:
        """A cell is done; receives all cells so far."""


def measure_serving(
    settings: ServingSettings, key: str | None = None, *, watch: ServingWatch | None = None
) -> Measurement:
    """Run the load of every cell on the server.

    ``key``: the API key, which is never shown.

    Raises:
        EngineError: If no request was possible (see :func:`fidelab.bench.serving.contact.reach`).
        InputError: If the tokenizer cannot be used.
        KeyboardInterrupt: If the bench is stopped.  ``watch`` has the finished cells.
    """
    watch = watch or ServingWatch()
    contact = reach(settings, key)
    watch.reached(contact)
    return _Sweep(contact, watch).run()


class _Sweep:
    def __init__(self, contact: Contact, watch: ServingWatch) -> None:
        self._contact = contact
        self._settings = contact.settings
        self._watch = watch
        self._asked = list[LoadCell]()
        cells, settings = contact.settings.cells(), contact.settings
        shortest = 0  # one length for all cells, so that they stand in one row
        if any(not cell.context for cell in cells):
            seeds = [self._seed(number, n) for number in range(len(cells)) for n in range(settings.repeats)]
            shortest = contact.shortest(max(map(settings.count, cells)) + settings.warmup, seeds)
        for cell in cells:
            asked = replace(cell, context=cell.context or shortest, by_finish=contact.by_finish)
            if asked not in self._asked:  # the shortest prompt may have a length that is named, too
                self._asked.append(asked)
        self._drives: dict[int, list[Drive]] = {number: [] for number in range(len(self._asked))}
        self._ended: dict[int, CellResult] = {}  # cells that are not asked again

    def run(self) -> Measurement:
        total = len(self._asked) * self._settings.repeats
        for repeat in range(self._settings.repeats):
            for number, asked in enumerate(self._asked):
                if number in self._ended:
                    continue
                step = repeat * len(self._asked) + number + 1
                gone = self._measure(number, repeat, asked, f"{_title(asked)} ({step}/{total})")
                if gone is not None:
                    return self._serving(gone)
        return self._serving()

    def _measure(self, number: int, repeat: int, asked: LoadCell, title: str) -> str | None:
        """Drive one cell once; return why the server is gone, if it is."""
        self._watch.begin(title)
        if reason := self._limit_reason(asked):
            self._end(number, asked, Status.NOT_SUPPORTED, reason)
            return None
        try:
            # The requests, those of the warm-up first; every cell and repeat has its own prompts
            settings = self._settings
            seed = self._seed(number, repeat)
            count = settings.count(asked) + settings.warmup
            due = None
            if asked.request_rate is not None:
                due = arrivals(settings.arrival, asked.request_rate, count, seed).tolist()
            requests = self._contact.requests([asked.context] * count, [asked.output] * count, due, seed)
        except InputError as error:
            self._end(number, asked, Status.NOT_SUPPORTED, str(error))
            return None
        try:
            driven = self._drive(asked, requests)
        except ServerRefusedError as error:
            beyond = error.status in _ABOUT_REQUEST and _TOO_LONG.search(error.said)
            self._end(number, asked, Status.NOT_SUPPORTED if beyond else Status.FAILED, error.said or str(error))
            return None
        except InputError as error:
            self._end(number, asked, Status.FAILED, str(error))
            return self._unreachable_reason()
        self._watch.driven(number, repeat, driven)
        self._drives[number].append(driven)
        cell = self._cell(number)
        failed = cell.cell.status is Status.FAILED
        if failed and (words := self._refused_for_length(driven)):
            self._end(number, asked, Status.NOT_SUPPORTED, words)
            return None
        self._watch.measured(cell, self._serving())
        return self._unreachable_reason() if failed else None

    def _drive(self, asked: LoadCell, requests: Sequence[LoadRequest]) -> Drive:
        settings, contact = self._settings, self._contact
        load = Load(
            requests,
            concurrency=asked.concurrency,
            open_loop=asked.arrival != "closed",
            warmup=settings.warmup,
            duration=settings.duration,
        )
        with contact.scraper() as scraper:
            begun = time.monotonic()
            result = drive(contact.target, load)
            driven = Drive(requests, result, scraper.reading(result.started, result.ended))
            driven = count_by_finish(driven) if asked.by_finish else driven
            whole = scraper.reading(begun, ended := time.monotonic())
        return compare_counts(driven, whole, ended - begun)

    def _seed(self, number: int, repeat: int) -> int:
        """Return the seed of a cell's prompts in one repeat."""
        return int(np.random.SeedSequence([self._settings.seed, number, repeat]).generate_state(1)[0])

    def _limit_reason(self, asked: LoadCell) -> str | None:
        limit, tokens = self._contact.limit, asked.context + asked.output
        if limit is not None and tokens > limit:
            return (
                f"{tokens:,} tokens ({asked.context:,} + {asked.output:,}) are beyond the server's "
                f"max_model_len {limit:,}"
            )
        room, wanted = cache_room(self._contact, tokens), asked.concurrency
        if not self._settings.fit or asked.arrival != "closed" or room is None or wanted is None:
            return None
        if wanted <= max(1, room):
            return None
        return (
            f"{wanted} requests of {tokens:,} tokens do not fit the server's cache of "
            f"{self._contact.server.facts['cache_tokens']:,} tokens, which holds {room}: the others would wait"
        )

    # ------------------------------------------------------------------------------------------ records

    def _end(self, number: int, asked: LoadCell, status: Status, reason: str) -> None:
        """Mark a cell that is not asked again; the measurements of earlier passes stay."""
        ended = self._cell(number) if self._drives[number] else None
        if ended is not None and ended.cell.status is Status.OK:
            flag = Flag(kind="errors", text=f"repeat {len(self._drives[number]) + 1} failed: {reason}")
            cell = ended.cell.model_copy(update={"valid": False, "flags": (*ended.cell.flags, flag)})
            self._ended[number] = CellResult(cell, ended.metrics)
        else:
            self._ended[number] = CellResult(Cell(status=status, reason=reason, at=asked.at, valid=False))
        self._watch.measured(self._ended[number], self._serving())

    def _cell(self, number: int) -> CellResult:
        return load_cell(self._asked[number], self._drives[number])

    def _serving(self, gone: str | None = None) -> Measurement:
        numbers = range(len(self._asked))
        loads = [self._ended.get(n) or self._cell(n) for n in numbers if n in self._ended or self._drives[n]]
        ends = [load.cell.status for load in loads]
        reason = gone
        if reason is None and loads and Status.OK not in ends:
            reason = loads[0].cell.reason
        status = Status.FAILED if reason else Status.OK
        if reason and set(ends) <= {Status.NOT_SUPPORTED}:
            status = Status.NOT_SUPPORTED
        return serving_measurement(loads, self._contact.facts(), status=status, reason=reason)

    def _refused_for_length(self, driven: Drive) -> str | None:
        """Return the server's message if every request was refused for its length.

        A server that ends such streams without a message (llama_cpp.server does) is asked once more without streaming.
        """
        kinds, first = {exchange.error for exchange in driven.measured}, driven.measured[:1]
        if kinds and kinds <= {f"http-{status}" for status in _ABOUT_REQUEST}:
            words = first[0].detail
        elif kinds and kinds <= _EMPTY_STREAM_CAUSES:
            words = self._contact.explain(driven.requests[0]) or ""
        else:
            return None
        return words if _TOO_LONG.search(words) else None

    def _unreachable_reason(self) -> str | None:
        """Return why no more requests are possible; ``None`` if they are."""
        if not (why := self._contact.unreachable()):
            return None
        left = sum(n not in self._ended and not self._drives[n] for n in range(len(self._asked)))
        return f"{why} ({left} cells were not asked)"


def _title(asked: LoadCell) -> str:
    """``context 1,024, concurrency 8``."""
    parts = [f"context {asked.context:,}"]
    if asked.request_rate is not None:
        parts.append(f"{asked.request_rate:g} requests/s")
    if asked.concurrency is not None:
        parts.append(f"concurrency {asked.concurrency}")
    return ", ".join(parts)
