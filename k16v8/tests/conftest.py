"""Set-up before torch is imported."""

from __future__ import annotations

import os

# Spinning OpenMP threads starve whatever else runs on the machine; read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:  # the other cores have tests of their own
    os.environ.setdefault("OMP_NUM_THREADS", "1")
