"""A query on a small SQLite database in memory, in a process of its own with little time and memory.

The file is also the program of that process, so it imports the standard library alone.  A query that a model wrote may
read tables and nothing else: no file, no setting, no extension, no write.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from functools import lru_cache
from typing import Any

MAX_ROWS = 200
_SECONDS = 20  # until the process is ended; a query of a question takes milliseconds
_CPU_SECONDS = 2
_MEMORY_BYTES = 512 << 20
_MAX_STEPS = 200_000  # of SQLite's virtual machine
_STEPS_PER_CALL = 1000
_MAX_VALUE_BYTES = 4000  # steps times this bound what a query can pile up
_MAX_QUERY_CHARS = 4000
_MAX_RESULT_CHARS = 100_000
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: _MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: _MAX_QUERY_CHARS,
    sqlite3.SQLITE_LIMIT_COLUMN: 50,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE}
_FUNCTIONS = {
    *("abs", "avg", "ceil", "ceiling", "coalesce", "concat", "concat_ws", "count", "cume_dist", "date"),
    *("datetime", "dense_rank", "first_value", "floor", "format", "glob", "group_concat", "ifnull", "iif"),
    *("instr", "julianday", "lag", "last_value", "lead", "length", "like", "lower", "ltrim", "max", "min"),
    *("mod", "nth_value", "ntile", "nullif", "percent_rank", "pow", "power", "printf", "rank", "replace"),
    *("round", "row_number", "rtrim", "sign", "sqrt", "strftime", "string_agg", "substr", "substring", "sum"),
    *("time", "total", "trim", "typeof", "unicode", "upper"),
}
_BUILDING = {sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, *_READING}
_TOO_MUCH = "the query takes too much time or memory"
_HIDDEN = ("sqlite_", "pragma_", "dbstat")  # tables of SQLite itself


class QueryError(Exception):
    """The query has no rows that can be compared; the message is a short phrase."""


@lru_cache(maxsize=256)
def rows_of(setup: str, query: str) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of a query on the tables that ``setup`` creates.

    The process that runs it gets limits on processor time, memory and files.  SQLite gets limits on steps, sizes and
    rows, and an authorizer that permits reading alone.

    Raises:
        QueryError: If the query is refused, fails, or needs too much time, memory or rows.
    """
    if len(query) > _MAX_QUERY_CHARS:
        raise QueryError(f"the query has more than {_MAX_QUERY_CHARS:,} characters")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            input=json.dumps([setup, query]),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
        )
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # killed: it wrote nothing
        raise QueryError(_TOO_MUCH) from None
    if isinstance(answer, str):
        raise QueryError(answer)
    return tuple(map(tuple, answer))


def run_query(setup: str, query: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query, in this process: :func:`rows_of` runs it in one of its own.

    Raises:
        QueryError: If the query is refused or fails.
    """
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)) as database:
        database.execute("PRAGMA temp_store = MEMORY")
        for limit, value in _LIMITS.items():
            database.setlimit(limit, value)
        database.set_authorizer(_may_build)
        database.executescript(setup)
        database.set_authorizer(_may_read)
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += _STEPS_PER_CALL
            return steps > _MAX_STEPS

        database.set_progress_handler(count, _STEPS_PER_CALL)
        try:
            rows = database.execute(query).fetchmany(MAX_ROWS + 1)
        except MemoryError:
            raise QueryError(_TOO_MUCH) from None
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise QueryError(_phrase(str(error))) from None
    if len(rows) > MAX_ROWS:
        raise QueryError(f"the query returns more than {MAX_ROWS} rows")
    return [tuple(value.hex() if isinstance(value, bytes) else value for value in row) for row in rows]


def _may_read(action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None) -> int:
    if action in _READING:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_READ and not (first or "").lower().startswith(_HIDDEN):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _may_build(action: int, _first: str | None, _second: str | None, name: str | None, _trigger: str | None) -> int:
    """Tables of questions may come from saved outputs of others, so they get what tables need and no more."""
    inside = name in (None, "main")
    return sqlite3.SQLITE_OK if inside and action in {*_BUILDING, sqlite3.SQLITE_READ} else sqlite3.SQLITE_DENY


def _phrase(error: str) -> str:
    if "not authorized" in error or "prohibited" in error or "one statement" in error:
        return f"the query is refused: {error}"
    if error == "interrupted":
        return "the query takes too many steps"
    return f"the query fails: {error[:100]}"


def _limit_process() -> None:
    """Limit time, memory and files of this process, as far as the system can."""
    import resource

    limits = {
        resource.RLIMIT_CPU: _CPU_SECONDS,
        resource.RLIMIT_AS: _MEMORY_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        with contextlib.suppress(OSError, ValueError):  # macOS has no limit of address space
            resource.setrlimit(limit, (value, value))


def main() -> None:
    """Read tables and query from standard input; write rows, or a phrase, as JSON."""
    setup, query = json.load(sys.stdin)
    _limit_process()
    try:
        answer: Any = run_query(setup, query)
    except (QueryError, sqlite3.Error, ValueError) as error:
        answer = str(error)
    try:
        text = json.dumps(answer)
    except (ValueError, MemoryError):
        text = ""
    print(text if 0 < len(text) <= _MAX_RESULT_CHARS else json.dumps("the query returns too much text"))


if __name__ == "__main__":
    main()
