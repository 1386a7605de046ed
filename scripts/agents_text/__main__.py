"""Write the shipped text ``agents``, and print what it holds.

    python -m scripts.agents_text              writes src/fidelab/inputs/data/agents.jsonl.xz, and prints its SHA-256
    python -m scripts.agents_text --describe   prints the table of docs/long-contexts.md from the file
    python -m scripts.agents_text --record N   runs the project's commands for N seconds: recorded.jsonl.xz

Run it in the root of a clone with its history and with the embedded model (``fidelab setup fetch smollm2-135m``), whose
tokenizer counts.  It reads the files and the history up to ``repository.REVISION``, ``recorded.jsonl.xz``, and the own
texts in ``languages/`` and ``chat/``.  So later changes of the code change nothing.  A new file needs its SHA-256 in
``src/fidelab/inputs/texts.py``, and the table of the page.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma

from scripts.agents_text import chat, code, languages, mathematics, prose, tables, terminals, toolcalls
from scripts.agents_text.documents import COUNTER, Document, alternating, content_of, repeated
from scripts.agents_text.record import record
from scripts.agents_text.repository import ROOT, Repository
from scripts.agents_text.sources import SOURCES

FILE = ROOT / "src" / "fidelab" / "inputs" / "data" / "agents.jsonl.xz"


def read() -> list[Document]:
    """Return the documents of the file."""
    lines = map(json.loads, lzma.decompress(FILE.read_bytes()).splitlines())
    return [Document(one["domain"], one["id"], one.get("text", ""), tuple(one.get("messages", ()))) for one in lines]


def write() -> None:
    """Build all documents and write them."""
    repository = Repository()
    kinds = []
    for module in BUILDERS:
        kinds.append(module.build(repository))
        print(f"{kinds[-1][0].kind}: {len(kinds[-1])} documents", flush=True)
    documents = alternating(kinds)
    content = "".join(f"{document.line}\n" for document in documents).encode()
    FILE.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    print(f"{FILE.relative_to(ROOT)}: {FILE.stat().st_size:,} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")
    within, between = repeated([content_of(document) for document in documents])
    print(f"most repeated within a document: {max(zip(within, (d.name for d in documents), strict=True))}")
    print(
        "most shared by two:",
        sorted(((s, documents[a].name, documents[b].name) for (a, b), s in between.items()), reverse=True)[:3],
    )


def describe() -> str:
    """Return the table of kinds: documents, tokens, longest document, sources."""
    documents = read()
    counts = [COUNTER.document(document) for document in documents]
    rows = [
        "| kind | documents | tokens | longest | from 8,192 | from 32,768 | sources |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, source in (*SOURCES.items(), ("all", "")):
        own = [count for document, count in zip(documents, counts, strict=True) if kind in ("all", document.kind)]
        if not own:
            continue
        reach = [sum(count >= least for count in own) for least in (8192, 32768)]
        rows.append(f"| {kind} | {len(own)} | {sum(own):,} | {max(own):,} | {reach[0]} | {reach[1]} | {source} |")
    return "\n".join(rows)


def main() -> None:
    """Read the options, and do what they ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--record", type=float, metavar="SECONDS")
    options = parser.parse_args()
    if options.record:
        record(options.record)
    elif options.describe:
        print(describe())
    else:
        write()


BUILDERS = (toolcalls, code, terminals, prose, tables, mathematics, languages, chat)

if __name__ == "__main__":
    main()
