"""The schema of ``study.json``, and that what is left out of it is found again."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import jsonschema
import pytest

from fidelab.core import Status
from fidelab.results.measurement import Definition
from fidelab.results.study import SCHEMA, Study, StudyRow

SCHEMA_FILE = Path(__file__).parents[2] / "schema" / "fidelab.study-0.schema.json"


def study(documents: int | None = 8) -> Study:
    rows = (
        StudyRow(status=Status.OK, at={"group": "a", "format": "x"}, metrics=(Definition("kld")(0.5),)),
        StudyRow(status=Status.FAILED, reason="it crashed", at={"group": "b", "format": "x"}),
    )
    return Study(
        schema=SCHEMA,
        run_id="x",
        created=datetime(2026, 5, 4, tzinfo=UTC),
        fidelab_version="0",
        command="",
        kind="sensitivity",
        title="x",
        windows=8,
        n_rows=2040,
        documents=documents,
        columns=("group", "kld"),
        rows=rows,
    )


def test_the_schema_file_is_that_of_the_model() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == Study.json_schema()


def test_what_is_written_fits_the_schema_and_reads_as_the_same_study() -> None:
    text = study().to_json()
    jsonschema.validate(json.loads(text), Study.json_schema())
    assert Study.model_validate_json(text) == study()


def test_every_row_that_failed_is_a_fault_with_its_reason_and_what_is_not_supported_is_none() -> None:
    other = StudyRow(status=Status.NOT_SUPPORTED, reason="no such format", at={"group": "c"})
    found = study()
    assert found.model_copy(update={"rows": (*found.rows, other)}).faults == ["b x failed: it crashed"]


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        (8, "8 windows, 2,040 rows of 8 documents"),
        (1, "8 windows, 2,040 rows of 1 document; intervals over fewer than 6 documents are preliminary"),
        (None, "8 windows, 2,040 rows"),
    ],
)
def test_the_sample_says_over_how_many_documents_intervals_are(documents: int | None, said: str) -> None:
    assert study(documents).sample == said
