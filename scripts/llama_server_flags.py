"""Record the flags of llama-server: names, variables and numbers of values, from its help or from its README.

    llama-server --help | python scripts/llama_server_flags.py
    python scripts/llama_server_flags.py llama.cpp/tools/server/README.md [--write]

It prints the flags that fidelab's table has otherwise or lacks.  ``--write`` records all in
``tests/engines/llama_server_flags.json``, which the tests read.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from fidelab.engines.llamacpp.flags import FLAGS

RECORD = Path(__file__).resolve().parents[1] / "tests" / "engines" / "llama_server_flags.json"
_NAMES = re.compile(r"(-{1,2}[A-Za-z][\w.-]*)(?:,\s+|(?=\s|$))")
_VARIABLE = re.compile(r"\(env: (\w+)\)")
_ROW = re.compile(r"\| `(-.*?[^\\])` \|(.*)")

Facts = tuple[list[str], int, str]
"""Names, number of values, variable."""


def read_flags(text: str) -> list[Facts]:
    """Return the flags of a help text or of the README's tables."""
    if rows := [match.groups() for line in text.splitlines() if (match := _ROW.match(line))]:
        return [_facts(head, rest) for head, rest in rows]
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("-") and not line.startswith("---"):
            head, _, rest = re.sub(r",\s+(?=-)", ", ", line).partition("  ")
            found.append((head, rest))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line}")
    return [_facts(head, rest) for head, rest in found]


def _facts(head: str, rest: str) -> Facts:
    names, at = [], 0
    while match := _NAMES.match(head, at):
        names.append(match[1])
        at = match.end()
    values = head[at:].split()
    variable = _VARIABLE.search(rest)
    # a value in brackets or braces may contain spaces
    return (
        names,
        len(values) if values == [word for word in values if word.isupper()] else 1,
        (variable[1] if variable else ""),
    )


def differences(facts: list[Facts]) -> list[str]:
    """Return a line for each flag that fidelab's table lacks or has otherwise."""
    table = {name: flag for flag in FLAGS for name in (*flag.names, *flag.off)}
    lines = []
    for names, values, variable in facts:
        flags = {table.get(name) for name in names}
        flag = next(iter(flags))
        if flag is None or len(flags) > 1:
            lines.append(f"{', '.join(names)}: {'absent' if flags == {None} else 'not one row'}")
        elif len(flag.values) != values or variable not in ("", flag.variable):  # older lists have fewer variables
            lines.append(f"{names[-1]}: {values} values, {variable!r}; the table has {flag.values}, {flag.variable!r}")
    return lines


def main() -> int:
    """Print the differences, and write the record if asked."""
    files = [Path(word) for word in sys.argv[1:] if word != "--write"]
    facts = read_flags(files[0].read_text() if files else sys.stdin.read())
    if len(facts) < 100:
        print(f"only {len(facts)} flags found: is this the help of llama-server?", file=sys.stderr)
        return 2
    if "--write" in sys.argv:
        RECORD.write_text("[\n" + ",\n".join(json.dumps(each) for each in facts) + "\n]\n")
    print("\n".join(lines := differences(facts)) or f"{len(facts)} flags, all as in the table")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
