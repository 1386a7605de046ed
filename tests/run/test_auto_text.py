"""The text that is read where none is named: long documents on a GPU and on servers, else the package's short ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fidelab.config.experiment import validate
from fidelab.config.schema import Experiment
from fidelab.plan.resolve import _text_of

CORE = {"trajectory": {}, "kld": {"windows": 32, "looks": [8, 16]}}


def asked(axes: Mapping[str, Any] = CORE, engine: str = "hf", **more: Any) -> Experiment:
    data = {"model": "smollm2-135m", "engine": engine, "candidates": ["int8"], "axes": axes, **more}
    return validate(data, "a test")


@pytest.mark.parametrize(
    ("engine", "device", "text", "kld"),
    [
        ("hf", "cpu", "default", CORE["kld"]),
        ("vllm", "cpu", "default", CORE["kld"]),
        ("hf", "cuda", "agents", {"protocol": "depth"}),
        ("llamacpp", "cuda:1", "agents", {"protocol": "depth"}),
        ("openai", "cpu", "agents", {"protocol": "depth", "n_ctx": 2048}),
    ],
)
def test_core_reads_long_documents_where_they_take_no_longer(
    engine: str, device: str, text: str, kld: dict[str, Any]
) -> None:
    found, axes = _text_of(asked(engine=engine), device)
    assert (found, axes["kld"]) == (text, kld)


@pytest.mark.parametrize(
    "axes",
    [
        {"kld": {"windows": 8, "n_ctx": 512}},
        {"kld": {"n_ctx": 2048}},
        {"kld": {"windows": 12}},
        {"kld": {"protocol": "full"}},
        {"kld": {}, "perplexity": {}},
        {"trajectory": {}},
    ],
)
def test_a_size_that_is_given_and_other_tests_of_text_keep_the_short_one(axes: dict[str, Any]) -> None:
    assert _text_of(asked(axes), "cuda") == ("default", axes)


def test_a_text_that_is_named_stays(tmp_path: Any) -> None:
    for name in ("default", "agents", "domains"):
        assert _text_of(asked(text=name), "cuda") == (name, CORE)
