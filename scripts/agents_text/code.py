"""Documents of the kind ``code``: what an agent reads of a repository."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from scripts.agents_text.documents import Document, filled, shuffled, sizes
from scripts.agents_text.record import recorded
from scripts.agents_text.repository import Repository, git

_WORDS = (
    r"raise InputError", r"^class .*Error", r"def test_.*nan", r"@dataclass", r"np\.float32", r"\bzip\(", r"subprocess", r"Protocol",
    r"yield from", r"lru_cache|@cache", r"TYPE_CHECKING", r"functools", r"isinstance\(.*dict", r"json\.loads", r"threading", r"math\.",
    r"contextlib", r"sys\.exit|SystemExit", r"re\.compile", r"logging", r"os\.environ", r"asyncio", r"Literal\[", r"monkeypatch", r"pytest\.raises",
    r"torch\.float8", r"struct\.", r"sorted\(.*key", r"next\(iter", r"assert .*==.*approx", r"property", r"field\(default_factory",
)  # fmt: skip


def diffs(repository: Repository, seed: int, least: int = 1500, most: int = 14000) -> Iterator[str]:
    """Yield changes of sources in an order that the seed gives."""
    for revision in shuffled(repository.revisions[1:], seed):
        body = git(
            "show",
            "--format=%s",
            "--no-color",
            "--no-ext-diff",
            revision,
            "--",
            "*.py",
            ":!tests/engines",
            ":!src/fidelab/inputs/data",
        )
        body = re.sub(r"^index .*\n", "", body, flags=re.M)
        if least <= len(body) <= most:
            subject, _, change = body.partition("\n")
            yield f"$ git show {revision[:7]}  # {subject}\n{change.strip()}"


def _numbered(text: str) -> str:
    return "\n".join(f"{number:>5}  {line}" for number, line in enumerate(text.splitlines(), 1))


def build(repository: Repository, seed: int = 11) -> list[Document]:
    """Return the documents: whole files, with greps, changes and failed tests between them."""
    order = random.Random(seed)
    files = iter(
        shuffled(repository.under("src/", "k16v8/", "checkpoints/", "benchmarks/", "tests/", least=2500), seed)
    )
    changes = diffs(repository, seed)
    failures = iter(
        shuffled(
            (f"$ {one['command']}\n{one['output']}" for one in recorded("failure") if len(one["output"]) > 600), seed
        )[::2]
    )
    words = iter(shuffled(_WORDS, seed))

    def session() -> Iterator[str]:
        while True:
            choice = order.random()
            name = next(files)
            text = repository.files[name]
            if choice < 0.50:
                yield f"$ cat {name}\n{text}"
            elif choice < 0.64:
                yield f"$ cat -n {name}\n{_numbered(text)}"
            elif choice < 0.86:
                yield next(changes)
            elif choice < 0.93:
                word = next(words, None)
                if word is not None:
                    lines = repository.grep(word, "src/", "k16v8/src/", "checkpoints/src/")
                    start = order.randrange(max(1, len(lines) - 40))
                    yield (
                        f"$ grep -rnE {word!r} src k16v8/src checkpoints/src | sed -n {start + 1},{start + 40}p\n"
                        + "\n".join(lines[start : start + 40])
                    )
            else:
                failed = next(failures, None)
                if failed is not None:
                    yield failed

    return [
        Document("code", f"code-{number:02}", filled(session(), size))
        for number, size in enumerate(sizes(3, huge=1), 1)
    ]
