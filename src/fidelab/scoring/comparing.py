"""Compare the rows of an arm with its base's while it answers, so that only the base's are stored in full."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fidelab.axes.base import Axis
from fidelab.captures.manifest import PARTIAL
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.store import drop_part_rows
from fidelab.core.errors import UNTRUSTED_DATA_ERRORS, CaptureError, FidelabError
from fidelab.workers.messages import Compared, Written

_LOGGER = logging.getLogger(__name__)


class RowComparer:
    """Compares the captures of one arm, part by part as they are written."""

    def __init__(self, axes: Mapping[str, Axis]) -> None:
        self._axes = axes
        self._pair: Pair | None = None  # of the capture that is being written, as far as it is known

    def compare(self, part: str, target: Path, base: Path | None, written: Written) -> Compared:
        """Replace the written rows by figures; rows that cannot be compared stay, and scoring says why.

        ``part``: axis or part of it that is asked.  ``target``: folder that the capture will have.  ``base``: that of
        the capture that it is compared with.
        """
        try:
            folder = target.with_name(Path(written.folder).name)
            if not folder.name.startswith(PARTIAL):  # a worker's word: no other folder is read or changed
                raise CaptureError(f"{written.folder} is not the folder of an unfinished capture")
            if self._pair is None or self._pair.test.folder != folder:
                ref, test = Capture(base or target), Capture(folder, verify=False)
                self._pair = Pair.match(ref, test, subset=True)
            pair = self._pair
            for item in written.items:
                pair.test.items[item] |= {"failed": None, "parts": written.part + 1}
            here = replace(pair, items=tuple((r, t) for r, t in pair.items if t in written.items))
            figures = self._axes[part.partition(".")[0]].figures(here)
            return Compared() if figures is None else Compared(*drop_part_rows(pair.test, written.part, dict(figures)))
        except (FidelabError, OSError, *UNTRUSTED_DATA_ERRORS) as error:
            _LOGGER.debug("%s keeps its rows: %s", target, error)
            return Compared()
