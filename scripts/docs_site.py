"""Hook of mkdocs: pages that lie outside of docs/, links that leave it, and the list of pages for programs.

The front page is README.md; a few more documents of the root are pages of the site.  On GitHub links lead to where
files lie in the repository; here they lead to the page, or, where there is none, only their text stays.

    python scripts/docs_site.py      writes llms.txt
"""

from __future__ import annotations

import os.path
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

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
    from mkdocs.structure.files import File  # llms.txt is written without mkdocs

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


WIDTHS = {"76.25em": "68.75em", "76.234375em": "68.734375em"}
"""Where the theme puts the navigation away, and where this site does: at 1,200 px it still shows."""


def on_post_build(config: Any) -> None:
    """Show the navigation from 1,100 px on.  The theme has no setting for it: its files hold the widths."""
    for file in (Path(config["site_dir"]) / "assets" / "stylesheets").glob("*.css"):
        text = file.read_text("utf-8")
        for old, new in WIDTHS.items():
            text = text.replace(old, new)
        file.write_text(text, "utf-8")


class _Settings(yaml.SafeLoader):
    """Reads mkdocs.yml without the objects that it names."""


_Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def navigation() -> list[tuple[str, str, str]]:
    """Section, title and file of the repository of every page, in the order of the navigation."""
    files = {page: source for source, page in PAGES.items()}
    settings = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), _Settings)
    return [(top, name, files.get(page, f"docs/{page}")) for top, name, page in _pages(settings["nav"])]


def _pages(entries: list[dict[str, Any]], top: str = "") -> Iterator[tuple[str, str, str]]:
    for entry in entries:
        for name, inner in entry.items():
            if isinstance(inner, list):
                yield from _pages(inner, top or name)
            else:
                yield top, name, inner


def first_sentence(text: str) -> str:
    """The first sentence of a document's prose, without marks and links."""
    for paragraph in FENCE.sub("", text).split("\n\n"):
        plain = LINK.sub(r"\1", paragraph.strip()).replace("**", "").replace("\n", " ")
        if plain[:1] not in ("", "#", "|", "!", "-", "<"):
            return re.split(r"(?<=[.?]) ", plain)[0].rstrip(":.")
    return ""


def llms_text() -> str:
    """llms.txt: every page with its first sentence, for programs that read documentation."""
    readme = (ROOT / "README.md").read_text("utf-8")
    lines = ["# fidelab", "", f"> {first_sentence(readme)}."]
    section = None
    for top, name, file in navigation():
        if top != section:
            lines += ["", f"## {top}", ""]
            section = top
        sentence = first_sentence((ROOT / file).read_text("utf-8"))
        lines.append(f"- [{name}]({file})" + (f": {sentence}." if sentence else ""))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(llms_text(), "utf-8")
