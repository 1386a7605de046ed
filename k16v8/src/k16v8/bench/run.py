"""Run the cells of a bench, one contender after another: inputs, clock, check, record.

A contender's inputs lie in as many caches as it takes to exceed twice the device's last cache, called in turn, so that
no call finds its keys and values there; sets that hold the same numbers are refused.  The output that the timed calls
left is held against the definition in float64 on those very inputs, for as many sequences and heads as time allows (all
of a short cell, in any order of a long one); one that misses the gate's tolerance has no time.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from k16v8.bench.contenders import CONTENDERS, Contender, Draw, Role, WeightWork, Work
from k16v8.bench.shapes import Cell, WeightCell
from k16v8.bench.timing import Times, free_bytes, last_level_cache, measure
from k16v8.errors import EngineError, NotSupportedError, UsageError, one_line
from k16v8.gates.run import RELATIVE_L2
from k16v8.kernels.reference import Attention, attend

T = TypeVar("T")
Status = Literal["measured", "wrong", "not_supported", "no_memory", "failed", "unfinished"]
RESERVE = {"cuda": 6 << 30, "cpu": 1 << 28}  # bytes left for what kernels and the check take besides
_QUERIES = 8  # of an output that are checked, at most
_MAX_CHECKED_TOKENS = 1 << 21  # tokens that the checks of one output attend to, at most, but for one sequence's


@dataclass(frozen=True)
class Settings:
    """``kernels``: implementation of k16v8; ``seconds``: of each timing; ``cache_bytes``: the device's last cache.

    ``until``: of ``time.monotonic()``, after which nothing more is begun.
    """

    device: torch.device
    kernels: str
    cells: tuple[Cell | WeightCell, ...]
    contenders: tuple[Contender, ...] = CONTENDERS
    seconds: float = 0.2
    seed: int = 0
    cache_bytes: int = 0
    until: float = math.inf

    @property
    def last_cache(self) -> int:
        """Bytes that the inputs must exceed twice.  0 under the interpreter, whose time no cache changes."""
        if self.kernels == "interpreter":
            return 0
        return self.cache_bytes or last_level_cache(self.device)


@dataclass(frozen=True)
class Result:
    """Result of one contender at one cell; seconds are ``None`` unless its output passed.

    ``error``: relative L2 of the worst query that was checked, ``None`` where it is not finite; ``moved_bytes``: what
    the call must move at least; ``caches``: sets of inputs in turn; ``launch``: how our decode was launched.
    """

    name: str
    formats: str
    role: Role
    status: Status
    reason: str = ""
    kernel: str = ""
    seconds: float | None = None
    p10: float | None = None
    p90: float | None = None
    repeats: int = 0
    clock: str = ""
    graph: bool = False
    caches: int = 0
    moved_bytes: int = 0
    error: float | None = None
    launch: dict[str, int] = field(default_factory=dict)


def run(
    settings: Settings, cells: Iterable[Cell | WeightCell], record: dict[str, Any], save: Callable[[], None]
) -> int:
    """Measure what ``record["cells"]`` lacks of ``cells``.  Returns how many results time left out.

    ``save`` is called after every result, and before each one with a result that is ``unfinished``: a process that is
    ended leaves all but that one.  What was unfinished in the record is measured last.

    Raises:
        EngineError: If a failure left the device unusable. The record holds the failure, and a new process can
            continue.
    """
    asked = [
        (contender, cell, _entry(record, cell))
        for cell in cells
        for contender in settings.contenders
        if cell.kind in contender.kinds
    ]
    fresh = [one for one in asked if _find_result(one[2], one[0]) is None]
    # what a process did not outlive comes last: it must not keep the others from being measured again and again
    again = [one for one in asked if (known := _find_result(one[2], one[0])) and known["status"] == "unfinished"]
    left = 0
    for contender, cell, entry in (*fresh, *again):
        if time.monotonic() > settings.until:
            left += 1
            continue
        fixed = {"run": len(record["runs"]) - 1}
        _store_result(entry, contender, asdict(_unfinished(contender)) | fixed)
        save()
        result = run_one(contender, cell, settings)
        _store_result(entry, contender, asdict(result) | fixed)
        save()
        if result.status in ("failed", "no_memory"):
            check_device(settings.device, f"{contender.name} {contender.formats} at {cell.key}: {result.reason}")
    return left


def _unfinished(contender: Contender) -> Result:
    """Record of a contender while it runs; it stays if the process ends meanwhile."""
    reason = "the process was ended while this ran"
    return Result(contender.name, contender.formats, contender.role, "unfinished", reason)


def _find_result(entry: dict[str, Any], contender: Contender) -> dict[str, Any] | None:
    wanted = (contender.name, contender.formats)
    return next((one for one in entry["results"] if (one["name"], one["formats"]) == wanted), None)


def _store_result(entry: dict[str, Any], contender: Contender, result: dict[str, Any]) -> None:
    """Add a result, or replace the one of this contender."""
    known = _find_result(entry, contender)
    if known is None:
        entry["results"].append(result)
    else:
        known.clear()
        known.update(result)


def _entry(record: dict[str, Any], cell: Cell | WeightCell) -> dict[str, Any]:
    found: dict[str, Any] | None = next((one for one in record["cells"] if one["key"] == cell.key), None)
    if found is None:
        found = {"key": cell.key, **asdict(cell), "shape": list(cell.shape), "results": []}
        record["cells"].append(found)
    return found


def run_one(contender: Contender, cell: Cell | WeightCell, settings: Settings) -> Result:
    """Measure and check one contender. Whatever it raises is a result."""
    fixed = (contender.name, contender.formats, contender.role)
    try:
        result = _measured(contender, cell, settings)
    except NotSupportedError as error:
        result = Result(*fixed, "not_supported", str(error))
    except _NoMemory as error:
        result = Result(*fixed, "no_memory", str(error))
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        result = Result(*fixed, "no_memory", one_line(error))
    except Exception as error:  # libraries raise what they like
        result = Result(*fixed, "failed", f"{type(error).__name__}: {one_line(error)}")
    if result.status in ("failed", "no_memory"):
        gc.collect()  # what a traceback still holds would be missing from the next one's memory
    return result


class _NoMemory(Exception):
    """A cell that does not fit: its message says by how much."""


def _measured(contender: Contender, cell: Cell | WeightCell, settings: Settings) -> Result:
    device = settings.device
    caches = caches_needed(cell.held_bytes(contender.formats), settings.last_cache)
    draw = Draw(device, settings.seed)
    needed, free = _needed(contender, cell, settings), free_bytes(device)
    if needed > free:
        raise _NoMemory(f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    works = [contender.prepare(cell, contender.formats, draw, kernels=settings.kernels) for _ in range(caches)]
    if not _distinct(works):
        return Result(contender.name, contender.formats, contender.role, "wrong", "its sets of inputs are the same one")
    times, outputs = measure([work.call for work in works], device, settings.seconds)
    errors = [_error(work, out, cell, draw) for work, out in zip(_ends(works), _ends(outputs), strict=True)]
    worst = max(errors) if all(map(math.isfinite, errors)) else math.nan
    passed = worst <= RELATIVE_L2  # NaN fails
    error = worst if math.isfinite(worst) else None
    shown = "is not finite" if error is None else f"{error:.2g} over {RELATIVE_L2}"
    return Result(
        contender.name,
        contender.formats,
        contender.role,
        "measured" if passed else "wrong",
        "" if passed else f"relative L2 {shown}",
        works[0].kernel,
        **(_seconds(times) if passed else {}),
        caches=caches,
        moved_bytes=cell.moved_bytes(contender.formats),
        error=error,
        launch=works[0].launch if isinstance(works[0], Work) else {},
    )


def _ends(all_of_them: Sequence[T]) -> Sequence[T]:
    """The first and the last, which are one where there is one."""
    return all_of_them[:: max(1, len(all_of_them) - 1)]


def _seconds(times: Times) -> dict[str, Any]:
    return {
        "seconds": times.median,
        "p10": times.p10,
        "p90": times.p90,
        "repeats": times.repeats,
        "clock": times.clock,
        "graph": times.graph,
    }


def caches_needed(kv_bytes: int, last_cache: int) -> int:
    """Return how many sets of inputs have keys and values that together exceed twice the last cache."""
    return 2 * last_cache // kv_bytes + 1


def _needed(contender: Contender, cell: Cell | WeightCell, settings: Settings) -> int:
    caches = caches_needed(cell.held_bytes(contender.formats), settings.last_cache)
    return caches * contender.bytes_needed(cell) + RESERVE[settings.device.type]


def check_memory(settings: Settings) -> None:
    """Refuse a bench of which nothing would fit into memory.

    Raises:
        UsageError: If not even the smallest cell fits into memory.
    """
    free = free_bytes(settings.device)
    smallest = min(
        (
            _needed(contender, cell, settings)
            for cell in settings.cells
            for contender in settings.contenders
            if cell.kind in contender.kinds
        ),
        default=0,
    )
    if smallest > free:
        raise UsageError(
            f"no cell fits into the memory of {settings.device.type}: the smallest needs {smallest / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free; choose a smaller batch or length"
        )


def _error(work: Work | WeightWork, out: Tensor, cell: Cell | WeightCell, draw: Draw) -> float:
    """Relative L2 of the worst query or row among some, NaN where any of all values is."""
    if isinstance(work, WeightWork) or isinstance(cell, WeightCell):
        assert isinstance(work, WeightWork)
        return work.error(out, cell.shape[1], lambda n, most: _sample_indices(n, most, draw))
    found = work.tokens(out)
    if found.shape != work.q.shape or not bool(found.isfinite().all()):
        return math.nan
    ratio = cell.shape[0] // cell.shape[1]
    worst = 0.0
    kv_heads = cell.shape[1]
    for pair in _sample_indices(cell.batch * kv_heads, max(4, _MAX_CHECKED_TOKENS // cell.tokens), draw):
        sequence, head = divmod(pair, kv_heads)
        queries = torch.tensor(_sample_indices(cell.queries, _QUERIES, draw), device=draw.device)
        rows = sequence * cell.queries + queries
        positions = cell.tokens - cell.queries + queries
        keys, values = work.head(sequence, head)
        mine = slice(head * ratio, (head + 1) * ratio)
        q = work.q[rows, mine].double()
        exact, _ = attend(q, keys[:, None], values[:, None], positions, Attention())
        errors = (found[rows, mine].double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        worst = max(worst, errors.max().item())
    return worst


def _distinct(works: Sequence[Work | WeightWork]) -> bool:
    """Whether no two sets of inputs hold the same numbers: one that comes twice may lie in the device's last cache."""
    known = {
        tuple(
            (work.head(0, 0)[0][:1] if isinstance(work, Work) else work.dense(0, slice(0, 1))[:64]).flatten().tolist()
        )
        for work in works
    }
    return len(known) == len(works)


def _sample_indices(n: int, most: int, draw: Draw) -> list[int]:
    """The last one and random others: what a fault at an edge, or in the middle, would spoil."""
    others = draw.permutation(n).tolist()
    return sorted({n - 1, *others[: most - 1]})


def check_device(device: torch.device, after: str) -> None:
    """Check that the device still works.

    Raises:
        EngineError: If it does not. After an illegal access the context of the process stays unusable.
    """
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise EngineError(
                f"the GPU is unusable after {after}; what was measured is kept, resume with --resume"
            ) from error
