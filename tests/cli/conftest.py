"""A run that these tests share with those of tests/runs."""

from tests.runs.conftest import plain

__all__ = ["plain"]
