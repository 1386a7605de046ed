"""Documents of the kind ``tables and JSON``."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Iterator
from typing import Any

from scripts.agents_text.documents import Document, filled, sizes
from scripts.agents_text.repository import Repository

_LEFT_OUT = ("environment", "env", "device", "packages", "variables")  # of a machine
_FUNCTIONS = ("sin", "cos", "tan", "exp", "log1p", "sqrt", "cbrt", "gamma", "erf", "atan", "sinh", "log2")


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _markdown(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def _csv(rows: list[list[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _functions(order: random.Random) -> str:
    names = order.sample(_FUNCTIONS, order.randint(3, 6))
    step, start = order.choice((0.01, 0.05, 0.125, 0.2, 1 / 3)), order.randint(1, 30) / 10
    rows = [["x", *names]]
    for i in range(order.randint(15, 40)):
        x = start + i * step
        rows.append([f"{x:.4f}", *(f"{getattr(math, name)(x):.{order.randint(5, 7)}g}" for name in names)])
    return f"Table of {', '.join(names)} from {start} in steps of {step:.4g}\n\n" + order.choice(
        (_aligned, _markdown, _csv)
    )(rows)


def _sizes_of_files(repository: Repository, order: random.Random) -> str:
    place = order.choice(
        sorted({name.rsplit("/", 1)[0] + "/" for name in repository.under("src/", "tests/", "k16v8/", "checkpoints/")})
    )
    rows = [["file", "lines", "characters", "longest", "defs", "imports"]]
    for name in repository.under(place)[:40]:
        lines = repository.files[name].splitlines()
        counted = [sum(line.lstrip().startswith(word) for line in lines) for word in ("def ", "import ")]
        rows.append(
            [
                name,
                str(len(lines)),
                str(len(repository.files[name])),
                str(max(map(len, lines), default=0)),
                *map(str, counted),
            ]
        )
    return f"Files of {place}\n\n" + order.choice((_aligned, _markdown, _csv))(rows)


def _records(order: random.Random) -> str:
    """An inventory that adds up: a JSON document with nested lists, and its totals."""
    things = (
        "bolts",
        "washers",
        "belts",
        "lamps",
        "filters",
        "gaskets",
        "valves",
        "hoses",
        "fuses",
        "relays",
        "screws",
        "nuts",
        "pumps",
        "seals",
        "springs",
        "cables",
    )
    places = ("north hall", "cellar", "yard", "attic", "van 2", "van 5", "workshop", "counter")
    stock: list[dict[str, Any]] = []
    for _ in range(order.randint(8, 22)):
        amounts = {place: order.randint(0, 400) for place in order.sample(places, order.randint(1, 4))}
        price = order.randint(5, 90000)
        total = sum(amounts.values())
        item: dict[str, Any] = {
            "item": f"{order.choice(things)}-{order.randint(100, 999)}",
            "cents": price,
            "stock": amounts,
            "total": total,
            "value": price * total,
        }
        if order.random() < 0.4:
            item["replaces"] = [f"{order.choice(things)}-{order.randint(100, 999)}" for _ in range(order.randint(1, 3))]
        if order.random() < 0.3:
            item["note"] = order.choice(
                ("count again", None, "fragile", "supplier changes", "order before it runs out", "two sizes in one box")
            )
        stock.append(item)
    return json.dumps(
        {"inventory": stock, "items": len(stock), "value": sum(item["value"] for item in stock)},
        indent=order.choice((None, 1, 2)),
    )


def _shapes(order: random.Random) -> str:
    """Bytes of a cache for shapes of models, computed."""
    rows = [["layers", "KV heads", "head dim", "bits", "bytes/token", "at 8,192 (MB)", "at 131,072 (GB)"]]
    for _ in range(order.randint(12, 30)):
        layers, heads, dim, bits = (
            order.randint(12, 96),
            order.choice((1, 2, 4, 8, 16)),
            order.choice((64, 80, 96, 128, 256)),
            order.choice((4.5, 6.5, 8, 8.5, 16, 32)),
        )
        size = layers * heads * dim * 2 * bits / 8
        rows.append(
            [
                *map(str, (layers, heads, dim, bits)),
                f"{size:,.0f}",
                f"{size * 8192 / 1e6:,.1f}",
                f"{size * 131072 / 1e9:,.3f}",
            ]
        )
    return "Size of a cache by shape\n\n" + order.choice((_aligned, _markdown))(rows)


def _scalars(order: random.Random) -> str:
    """A configuration as YAML-like lines with numbers that follow from one another."""
    lines = []
    for number in range(order.randint(6, 14)):
        rate, load, wait = order.randint(10, 900), order.randint(1, 64), order.randint(1, 90)
        lines += [
            f"worker_{number}:",
            f"  rate: {rate}",
            f"  load: {load}",
            f"  wait_ms: {wait}",
            f"  served: {rate * load}",
            f"  busy: {rate * wait / 1000:.3f}",
            f"  tags: [{', '.join(order.sample(['blue', 'cold', 'spare', 'edge', 'old', 'hot', 'wide'], 3))}]",
        ]
    return "\n".join(lines)


_COMPUTED = (_functions, _records, _shapes, _scalars)


def _parts(value: Any, path: str = "") -> Iterator[str]:
    """Yield parts of a JSON document of at most about 9,000 characters, each with its path."""
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if key not in _LEFT_OUT}
    text = json.dumps(value, indent=1, ensure_ascii=False)
    if len(text) < 9000 or not isinstance(value, dict | list):
        if len(text) > 120:
            yield f"{path or '/'}\n{text[:9000]}"
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield from _parts(inner, f"{path}/{key}")


def _schema(repository: Repository, name: str) -> Iterator[str]:
    for key, value in json.loads(repository.files[name]).get("$defs", {}).items():
        yield f"{name}#/$defs/{key}\n{json.dumps(value, indent=2)}"


def _rows(text: str, first: int, order: random.Random) -> Iterator[str]:
    head, *rows = text.splitlines()
    at = first
    while at < len(rows):
        count = order.randint(25, 70)
        yield f"rows {at + 1} to {at + count}\n{head}\n" + "\n".join(rows[at : at + count])
        at += count


def build(repository: Repository, seed: int = 51) -> list[Document]:
    """Return the documents; each mixes computed tables with one stored source."""
    files = repository.files
    golden = [name for name in files if name.startswith("tests/golden/data/") and name.endswith(".json")]
    results = [name for name in files if name.startswith("benchmarks/results/") and name.endswith(".json")]
    documents = []
    for number, size in enumerate(sizes(3), 1):
        order = random.Random(f"{seed} {number}")
        stored: list[Iterator[str]] = []
        if number == 1:
            stored = [
                _schema(repository, "schema/fidelab.report-1.schema.json"),
                _rows(files["tests/golden/data/rows.csv"], 0, order),
            ]
        elif number == 2:
            stored = [
                _rows(files["tests/golden/data/studies.csv"], 0, order),
                _parts(json.loads(files[results[0]])),
                _parts(json.loads(files[results[1]])),
            ]
        elif number == 3:
            stored = [
                _schema(repository, "schema/fidelab.study-0.schema.json"),
                _parts(json.loads(files["tests/golden/data/arithmetic.json"])),
            ]
        else:
            stored = [
                _parts(json.loads(files[golden[number % len(golden)]])),
                _rows(files["tests/golden/data/rows.csv"], 900 + 330 * number, order),
            ]
            if number - 2 < len(results):
                stored.append(_parts(json.loads(files[results[number - 2]])))

        def pieces(order: random.Random = order, stored: list[Iterator[str]] = stored) -> Iterator[str]:
            while True:
                if order.random() < 0.45:
                    piece = next(order.choice(stored), None)
                    if piece is not None:
                        yield piece
                        continue
                yield _sizes_of_files(repository, order) if order.random() < 0.12 else order.choice(_COMPUTED)(order)

        documents.append(Document("tables and JSON", f"tables-{number:02}", filled(pieces(), size)))
    return documents
