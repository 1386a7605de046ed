"""Installed engines say which cache formats they have; each has a row in the table."""

from __future__ import annotations

import pytest

from fidelab.engines.base import engine_class
from fidelab.engines.format_names import names_of
from fidelab.environments.listing import listing
from tests.real.harness import installed


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["llamacpp", "sglang", "vllm"])
def test_every_name_that_an_installed_engine_takes_has_a_row(engine: str) -> None:
    installed(engine)
    places = [place for place in listing([engine]) if place.problem is None and place.environment is not None]
    assert places
    for place in places:
        assert place.kv_names
        assert {*place.kv_names} <= {*names_of(engine_class(engine))}, place.name
