"""Documents of the kind ``languages``: texts that were written for this project, in the files of ``languages/``.

A file has pieces, each under a title ``= Title``, and lists of phrases, the same ones in every language.  Notes are made of
the phrases, and translations of the same notes into several languages.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.agents_text.documents import SHORT, Document, filled, shuffled, sizes
from scripts.agents_text.repository import Repository

_NAMES = {
    "ar": "العربية", "bn": "বাংলা", "de": "Deutsch", "el": "Ελληνικά", "es": "Español", "fa": "فارسی", "fr": "Français", "he": "עברית", "hi": "हिन्दी",
    "it": "Italiano", "ja": "日本語", "ko": "한국어", "ru": "Русский", "th": "ไทย", "tr": "Türkçe", "uk": "Українська", "vi": "Tiếng Việt", "zh": "中文",
}  # fmt: skip
_FULL_STOP = {"zh": "。", "ja": "。", "hi": "।", "bn": "।", "th": ""}
_PER_DOCUMENT = {0: 17, 1: 17}  # pieces of the long documents; the others have fewer


@dataclass(frozen=True)
class _Language:
    code: str
    pieces: tuple[str, ...]
    openings: tuple[str, ...]
    clauses: tuple[str, ...]
    endings: tuple[str, ...]

    def sentence(self, opening: int, clause: int, ending: int) -> str:
        """Return two sentences of three phrases."""
        space = "" if self.code in ("zh", "ja") else " "
        first = f"{self.openings[opening]}{space}{self.clauses[clause]}{_FULL_STOP.get(self.code, '.')}"
        return f"{first}{space}{self.endings[ending]}"


def _read(path: Path) -> _Language:
    text, openings, clauses, endings = re.split(r"\[(?:openings|clauses|endings)\]\n", path.read_text("utf-8"))
    pieces = tuple(part.strip() for part in re.split(r"(?m)^= ", text) if part.strip())
    lists = [
        tuple(line.strip() for line in phrases.splitlines() if line.strip()) for phrases in (openings, clauses, endings)
    ]
    return _Language(path.stem, pieces, lists[0], lists[1], lists[2])


def languages() -> dict[str, _Language]:
    """Return the languages by their codes."""
    found = [_read(path) for path in sorted((Path(__file__).parent / "languages").glob("*.txt"))]
    assert len({(len(one.openings), len(one.clauses), len(one.endings)) for one in found}) == 1
    return {one.code: one for one in found}


def _letters(text: str) -> str:
    counted = Counter(letter for letter in text if not letter.isspace()).most_common(24)
    return "\n".join(
        f"{letter}  U+{ord(letter):04X}  {unicodedata.name(letter, '?').lower()}  {count}" for letter, count in counted
    )


def build(repository: Repository, seed: int = 71) -> list[Document]:
    """Return the documents; a piece is in one document only."""
    known = languages()
    left = {code: shuffled(one.pieces, seed) for code, one in known.items()}
    documents = []
    for number, size in enumerate(sizes(2)):
        order = random.Random(f"{seed} {number}")
        count = 18 if number < 2 else 4
        codes = (
            sorted(known)
            if number < 2
            else [sorted(known)[(number * 3 + step * 5) % len(known)] for step in range(count)]
        )
        order.shuffle(codes)
        own: list[tuple[str, str]] = []
        wanted = _PER_DOCUMENT.get(number, 1 if size < SHORT + 9 else 5)
        for code in [*codes, *sorted(known, key=lambda one: -len(left[one]))]:
            if left[code] and len(own) < wanted:
                own.append((code, left[code].pop()))
        used: set[tuple[str, int, int]] = set()

        def numbers(
            code: str, order: random.Random = order, used: set[tuple[str, int, int]] = used
        ) -> tuple[int, int, int]:
            one = known[code]
            while True:
                found = (
                    order.randrange(len(one.openings)),
                    order.randrange(len(one.clauses)),
                    order.randrange(len(one.endings)),
                )
                if (code, found[0], found[1]) not in used:
                    used.add((code, found[0], found[1]))
                    return found

        def pieces(
            order: random.Random = order, own: list[tuple[str, str]] = own, codes: list[str] = codes
        ) -> Iterator[str]:
            last = ""
            while True:
                choice = order.random()
                if own and (choice < 0.36 or not last):
                    code, piece = own.pop()
                    last = piece
                    yield f"{_NAMES[code]} — {piece}"
                elif choice < 0.62:
                    code = order.choice(codes)
                    last = " ".join(known[code].sentence(*numbers(code)) for _ in range(order.randint(3, 8)))
                    yield f"{_NAMES[code]}: {last}"
                elif choice < 0.93 or not last:
                    several = order.sample(codes, min(len(codes), order.randint(2, 4)))
                    rows = []
                    for row in range(1, order.randint(2, 4) + 1):
                        chosen = numbers(several[0])
                        rows += [f"{row}. {_NAMES[code]}: {known[code].sentence(*chosen)}" for code in several]
                    yield "\n".join(rows)
                else:
                    yield _letters(last)

        documents.append(Document("languages", f"languages-{number + 1:02}", filled(pieces(), size)))
    return documents
