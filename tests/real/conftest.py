"""Tests on real engines in environments of their own: ``make test-engines``.

Where an environment is absent they skip; with ``FIDELAB_REQUIRE_ENGINES=1`` that is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import USERS_CACHE

pytest.register_assert_rewrite("tests.real.contract", "tests.real.harness", "tests.real.k16v8")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    required = os.environ.get("FIDELAB_REQUIRE_ENGINES") == "1"
    if required and report.skipped and HERE in item.path.parents and "installed" in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"skipped, although engines are required: {report.longrepr}"
    return report


@pytest.fixture(scope="session", autouse=True)
def users_cache() -> Iterator[None]:
    """The cache with the engines that are installed on this machine; before fixtures that ask for one."""
    with mock.patch.dict(os.environ, {"FIDELAB_CACHE": os.environ[USERS_CACHE]}):
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights, in float32; see ``harness.odd_checkpoint``."""
    from tests.real.harness import odd_checkpoint

    return odd_checkpoint(tmp_path_factory.mktemp("checkpoint") / "odd")
