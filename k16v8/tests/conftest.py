"""Set-up before torch is imported, and a device for the kernel bench."""

from __future__ import annotations

import os

import pytest

# Spinning OpenMP threads starve whatever else runs on the machine; read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:  # the other cores have tests of their own
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last cache that a few inputs fill, and a bandwidth that takes no time."""
    from k16v8.bench import run, session
    from k16v8.bench.timing import Bandwidth

    monkeypatch.setattr(run, "last_level_cache", lambda device: 1 << 15)
    monkeypatch.setattr(session, "bandwidth", lambda device, seconds: Bandwidth(2e10, 1e10))
