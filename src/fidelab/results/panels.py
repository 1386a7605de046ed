"""What an axis shows beyond its figures: heat maps, curves, tables and texts side by side, as data.

An axis says what is to be seen, the report decides how it looks; so a third-party axis is shown like our own.
Curves of one ``key`` are drawn into one chart, a line per arm, the control and the floor as bands.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["Curve", "Divergence", "Grid", "Heatmap", "Panel", "Record", "TablePanel", "TextPair", "Texts"]

Cell = str | int | float | None


class Record(BaseModel):
    """Frozen, strict, without NaN: the base of everything in ``report.json``."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_serialization_defaults_required=True,  # what is written names every field
        validate_by_name=True,
        validate_by_alias=True,
    )


class Grid(Record):
    """One matrix of a heat map."""

    name: str
    """What it shows: ``reference``, ``candidate``, ``difference``."""
    values: tuple[tuple[float | None, ...], ...]
    """Rows from the first ``y`` on; null where nothing was measured."""
    signed: bool = False
    """Differences: coloured from the middle, below 0 is worse."""


class Heatmap(Record):
    """Values over two categories, several grids with the same labels side by side."""

    kind: Literal["heatmap"] = "heatmap"
    """Which panel this is."""
    title: str
    """What is shown, in a few words."""
    x_label: str
    """What the columns are."""
    y_label: str
    """What the rows are."""
    x: tuple[str, ...]
    """Labels of the columns."""
    y: tuple[str, ...]
    """Labels of the rows."""
    low: float
    """Value at the cold end of the scale."""
    high: float
    """Value at the warm end of the scale."""
    grids: tuple[Grid, ...]
    """The matrices."""
    note: str = ""
    """One line below."""

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        for grid in self.grids:
            if len(grid.values) != len(self.y) or any(len(row) != len(self.x) for row in grid.values):
                raise ValueError(f"grid {grid.name!r} is not {len(self.y)} × {len(self.x)}")
        return self


class Curve(Record):
    """One arm's line in a chart that all arms share."""

    kind: Literal["curve"] = "curve"
    """Which panel this is."""
    key: str
    """Curves of one key share a chart."""
    title: str
    """What is shown, in a few words."""
    x_label: str
    """Quantity and unit of the abscissa."""
    y_label: str
    """Quantity and unit of the ordinate."""
    x: tuple[float, ...]
    """Abscissae, rising."""
    y: tuple[float | None, ...]
    """Ordinates; null is a gap."""
    log_x: bool = False
    """Logarithmic abscissa."""
    log_y: bool = False
    """Logarithmic ordinate."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} abscissae and {len(self.y)} ordinates")
        return self


class TablePanel(Record):
    """A table of its own, such as one row per item or per perturbation."""

    kind: Literal["table"] = "table"
    """Which panel this is."""
    title: str
    """What is shown, in a few words."""
    columns: tuple[str, ...]
    """Headings."""
    rows: tuple[tuple[Cell, ...], ...]
    """Cells; numbers stay numbers, so that the table sorts."""
    note: str = ""
    """One line below."""

    @model_validator(mode="after")
    def _widths_agree(self) -> Self:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row of table {self.title!r} does not have {len(self.columns)} cells")
        return self


class TextPair(Record):
    """What reference and candidate wrote for one item."""

    label: str
    """Which item."""
    reference: str
    """The reference's text."""
    candidate: str
    """The candidate's text."""
    note: str = ""
    """What to see in it."""


class Texts(Record):
    """Texts side by side."""

    kind: Literal["texts"] = "texts"
    """Which panel this is."""
    title: str
    """What is shown, in a few words."""
    pairs: tuple[TextPair, ...]
    """The items."""


Panel = Annotated[Heatmap | Curve | TablePanel | Texts, Field(discriminator="kind")]


class Divergence(Record):
    """Where a candidate's greedy text leaves the reference's."""

    item: Annotated[int, Field(ge=0)]
    """Number of the prompt, from 0."""
    at: Annotated[int, Field(ge=0)]
    """Index of the first differing token."""
    margin: float | None = None
    """The reference's top-1 minus the candidate's token (nats); under 0.1 a near tie; null where a side had ended."""
    prompt: str = ""
    """End of the prompt, as text."""
    shared: str = ""
    """End of what both wrote."""
    reference: str = ""
    """How the reference goes on; empty: it ends here."""
    candidate: str = ""
    """How the candidate goes on; empty: it ends here."""
