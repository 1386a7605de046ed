"""A run that these tests share with those of tests/run."""

from tests.run.conftest import plain

__all__ = ["plain"]
