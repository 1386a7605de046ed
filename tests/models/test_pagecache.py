"""Files leave the page cache, and that is seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fidelab.models.pagecache import evict, resident_share

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no posix_fadvise")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(1 << 20))
    path.read_bytes()
    if resident_share(path) != 1.0:
        pytest.skip("this file system keeps no page cache that mincore sees")
    return path


def test_a_file_that_was_read_is_resident_and_an_evicted_one_is_not(file: Path) -> None:
    if not evict([file]):
        pytest.skip("this file system does not let go of pages")
    share = resident_share(file)
    assert share is not None
    assert share <= 0.01


def test_no_file_is_not_a_cold_start() -> None:
    assert not evict([])


def test_a_file_that_stays_mapped_and_locked_in_is_not_said_to_be_evicted(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"fidelab-test-{os.getpid()}"  # memory is where such a file lives
    if not path.parent.is_dir():
        pytest.skip("no /dev/shm")
    try:
        path.write_bytes(os.urandom(1 << 16))
        assert not evict([path])
    finally:
        path.unlink(missing_ok=True)
