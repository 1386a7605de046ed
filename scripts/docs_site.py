"""Hook of mkdocs: pages that lie outside of docs/, and links that leave it.

The front page is README.md; a few more documents of the root are pages of the site.  On GitHub links lead to where
files lie in the repository; here they lead to the page, or, where there is none, only their text stays.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {  # file of the repository: page of the site
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/RESULTS.md": "project/results.md",
}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages."""
    sources = {target: source for source, target in PAGES.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _relinked(part, here, page.file.src_uri) for part in parts)


def _relinked(text: str, here: str, place: str) -> str:
    def link(match: re.Match[str]) -> str:
        name, hash_, fragment = match[2].partition("#")
        if not name or "://" in name or name.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), name))
        if (ROOT / path).is_dir() and f"{path}/README.md" in PAGES:
            path = f"{path}/README.md"
        target = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target is None:
            return match[1]
        return f"[{match[1]}]({os.path.relpath(target, posixpath.dirname(place) or '.')}{hash_}{fragment})"

    return LINK.sub(link, text)
