"""Set-up and fixtures that tests of fidelab have, too."""

from __future__ import annotations

from tests.conftest import cache, make_folder, no_timings, smollm2, workers_in_this_process

__all__ = ["cache", "make_folder", "no_timings", "smollm2", "workers_in_this_process"]
