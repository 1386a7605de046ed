"""Weights are verified beside a run: the hub's names of files against their bytes, and that no file has changed."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from fidelab.core import usable_cores
from fidelab.models.reading import Relied
from fidelab.models.weights import bytes_sha256, damaged

_MAX_THREADS = 4  # that hash: beside an engine that reads the same files, a disk gives no more


class Verification:
    """Hashes files of the hub's cache in threads of its own, from now on.

    ``relied``: files that a run relies on, as :func:`fidelab.models.reading.relying` collects them.
    """

    def __init__(self, relied: Relied) -> None:
        self._relied = relied
        self._left: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._faults: dict[Path, str] = {}
        self._stop = threading.Event()
        for path in sorted(relied.named):
            self._left.put(path)
        count = min(_MAX_THREADS, len(relied.named), max(1, usable_cores() // 2))
        self._threads = [threading.Thread(target=self._work, name="hashing", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> dict[Path, str]:
        """Wait for the end. Returns the faulty files, each with the fault and its remedy; empty if there is none."""
        for thread in self._threads:
            thread.join()
        changed = {
            path: f"{path} changed while the run went on, and engines may have loaded either: run again"
            for path in self._relied.changed()
        }
        return {**changed, **self._faults}

    def stop(self) -> None:
        """Hash no further."""
        self._stop.set()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                path = self._left.get_nowait()
            except queue.Empty:
                return
            try:
                found = bytes_sha256(path, self._stop)
            except OSError as error:
                self._faults[path] = f"{path} cannot be read ({error.strerror}): run again"
                continue
            if found not in (None, path.name):
                self._faults[path] = damaged(path.name, path)
