"""The repository at the pinned revision, and what must not stay in a text that is made from it."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
REVISION = "331472a7814f1c96fcf65d645c407e473116ae0c"
OWN = ("src/", "tests/", "k16v8/", "checkpoints/", "benchmarks/", "docs/", "schema/", "examples/", "scripts/")
LEFT_OUT = ("tests/engines/", "src/fidelab/inputs/data/", "src/fidelab/doctor/constraints")  # lists of other projects
_REPLACED = (
    (r"\b[\w.+-]+@[\w-]+\.[\w.-]*\w", "name at example"),
    (r"\b(?:19|20)\d\d-[01]\d-[0-3]\d(?:[T_ ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?Z?)?", "day-0"),
    (r"\b20\d{6}-\d{6}\b", "run-0"),
    (
        r"\b[0-3]?\d\.? (?:January|February|March|April|May|June|July|August|September|October|November|December)\b",
        "day 0",
    ),
    (r"\b(?:January|February|March|April|June|July|August|September|October|November|December)(?= \d)", "month"),
    (r"\bMay (?=\d)", "month "),
    (r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? \d\d? [A-Z][a-z]{2} \d{4}(?: \d\d:\d\d:\d\d)?", "day 0"),
    (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "127.0.0.1"),
    (r"/(?:work|root|home|tmp)\b/?", "~/"),
    (r"~/\.pyenv/versions/[\d.]+/lib/", "lib/"),
    (r"(?<=[\w.,;:] )@(?=[A-Za-z])", "at "),
    (r"(?<=[(`\"'/])@(?=[A-Za-z])", "at "),
    (r"\b[\w-]+\.(?:local|internal|lan|corp|intra)\b", "host"),
    (r"<(?=\||/?s>|[be]os>|(?:start|end)_of_turn>)", "< "),  # tokens of chat templates
    (r"\x1b\[[0-9;?]*[A-Za-z]", ""),
    (r"[\x00-\x08\x0b-\x1f\x7f\ufeff]", ""),
    (r"[ \t]+(?=\n)", ""),
)
_CHANGES = tuple((re.compile(pattern), new) for pattern, new in _REPLACED)


def clean(text: str) -> str:
    """Return the text without paths of a machine, addresses, dates, handles and control characters."""
    for pattern, new in _CHANGES:
        text = pattern.sub(new, text)
    return text


def git(*arguments: str) -> str:
    """Return the output of git in the repository."""
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True).stdout.decode()


class Repository:
    """Files and history of the pinned revision."""

    revision = REVISION

    @cached_property
    def files(self) -> dict[str, str]:
        """Text of each file of the project's own, by its path, in the order of the paths."""
        packed = subprocess.run(("git", "archive", REVISION), cwd=ROOT, check=True, capture_output=True).stdout
        found: dict[str, str] = {}
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:
                name = member.name
                if not member.isfile() or name.startswith(LEFT_OUT) or ("/" in name and not name.startswith(OWN)):
                    continue
                file = archive.extractfile(member)
                assert file is not None
                try:
                    found[name] = clean(file.read().decode())
                except UnicodeDecodeError:
                    continue
        return dict(sorted(found.items()))

    def under(self, *places: str, suffix: str = ".py", least: int = 0) -> list[str]:
        """Return the paths below ``places`` that end in ``suffix`` and have at least so many characters."""
        return [
            name
            for name, text in self.files.items()
            if name.startswith(places) and name.endswith(suffix) and len(text) >= least
        ]

    @cached_property
    def revisions(self) -> list[str]:
        """Revisions up to the pinned one, oldest first."""
        return git("rev-list", "--reverse", REVISION).split()

    def grep(self, pattern: str, *places: str) -> list[str]:
        """Return the lines ``path:number:text`` below ``places`` that match."""
        wanted = re.compile(pattern)
        return [
            f"{name}:{number}:{line}"
            for name, text in self.files.items()
            if name.startswith(places)
            for number, line in enumerate(text.splitlines(), 1)
            if wanted.search(line)
        ]

    def extracted(self, folder: Path) -> Path:
        """Write the revision's files into a folder, and return it."""
        packed = subprocess.run(("git", "archive", REVISION), cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        return folder
