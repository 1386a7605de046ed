"""Documents of the kind ``long document``: the project's pages, and a handbook of what its modules state of themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from scripts.agents_text.documents import LONG, Document, filled, sizes
from scripts.agents_text.repository import Repository

_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "RELEASING.md", "benchmarks/README.md")
_LONG = ("docs/metrics.md", "docs/design.md", "docs/failures.md")


def sections(text: str) -> list[str]:
    """Return the parts of a page, from heading to heading, without very short ones."""
    parts = [part.strip() for part in re.split(r"(?m)^(?=#{1,3} )", text) if len(part) > 200]
    return [part for part in parts if part.count("```") % 2 == 0]  # a comment in a listing looks like a heading


def _described(tree: ast.Module, module: str) -> Iterator[str]:
    """Yield what a module, its classes and functions state of themselves."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text or len(text) < 40:
            continue
        if isinstance(node, ast.Module):
            yield f"\n## {module}\n\n{text}"
        elif isinstance(node, ast.ClassDef):
            yield f"### class {node.name}\n\n{text}"
        else:
            result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            yield f"### {node.name}({ast.unparse(node.args)}){result}\n\n{text}"


def handbook(repository: Repository, *places: str) -> Iterator[str]:
    """Yield the entries of the modules below the places, in the order of their paths."""
    for name in repository.under(*places):
        yield from _described(ast.parse(repository.files[name]), name)


def build(repository: Repository) -> list[Document]:
    """Return the documents: three long ones, then parts of pages and of the handbook."""
    rest = sizes(3)[3:]
    texts: list[str] = []
    files = repository.files
    texts.append(
        filled(
            iter(
                [
                    files["docs/metrics.md"],
                    files["docs/pitfalls.md"],
                    files["docs/interpretation.md"],
                    files["docs/design.md"],
                ]
            ),
            LONG,
        )
    )
    pages = [
        part
        for name in sorted(files)
        if name.startswith("docs/")
        and name.endswith(".md")
        and not name.startswith(("docs/reference", "docs/gallery"))
        and name not in (*_LONG[:1], "docs/pitfalls.md", "docs/interpretation.md", "docs/design.md")
        for part in [files[name]]
    ]
    texts.append(filled(iter([*pages[:12]]), LONG + 60))
    rooms = (
        "src/fidelab/metrics/",
        "src/fidelab/results/",
        "src/fidelab/axes/",
        "src/fidelab/core/",
        "src/fidelab/formats/",
        "src/fidelab/captures/",
    )
    texts.append("# Handbook of the modules\n" + filled(handbook(repository, *rooms), LONG + 120))
    others = iter([files["docs/design.md"], *pages[12:], *(files[name] for name in _PAGES if name in files)])
    packages = (
        ("src/fidelab/engines/",), ("src/fidelab/bench/", "src/fidelab/report/"), ("checkpoints/",), ("k16v8/src/",), ("src/fidelab/studies/", "src/fidelab/plan/", "src/fidelab/run/", "src/fidelab/workers/"),
        ("src/fidelab/environments/", "src/fidelab/config/"), ("src/fidelab/models/", "src/fidelab/cli/"),
    )  # fmt: skip
    for number, size in enumerate(rest):
        if number < 2:
            texts.append(filled(others, size))
        else:
            texts.append("# What the modules state\n" + filled(handbook(repository, *packages[number - 2]), size))
    return [Document("long document", f"long-{number:02}", text) for number, text in enumerate(texts, 1)]
