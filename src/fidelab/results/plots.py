"""Plots of an axis or a bench: heat maps, curves, bars, tables and texts side by side, as data.

A plot holds the data, and the report decides how it looks.  Plots of a third party are shown like built-in ones. Curves
with the same ``key`` share one chart, with a line per arm (and per ``series``). The control and the floor are drawn as
bands.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fidelab.results.values import Record

TableValue = str | int | float | None


class Grid(Record):
    """One matrix of a heat map."""

    name: str
    """Content: ``reference``, ``candidate``, ``difference``."""
    values: tuple[tuple[float | None, ...], ...]
    """Rows from the first ``y`` on; null where nothing was measured."""
    signed: bool = False
    """Differences: coloured from the middle, below 0 is worse."""


class Heatmap(Record):
    """Values over two categories, several grids with the same labels side by side."""

    kind: Literal["heatmap"] = "heatmap"
    """Which plot this is."""
    title: str
    """Title, in a few words."""
    x_label: str
    """Quantity of the columns."""
    y_label: str
    """Quantity of the rows."""
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
    """One configuration's line in a chart that all share."""

    kind: Literal["curve"] = "curve"
    """Which plot this is."""
    key: str
    """Curves of one key share a chart."""
    title: str
    """Title, in a few words."""
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
    series: str = ""
    """Which of a configuration's lines in this chart, in words (``batch 4``); empty where a configuration has one."""
    caption: str = ""
    """Explanation of the chart, one or two sentences; the first configuration's is shown."""
    low: tuple[float | None, ...] = ()
    """Lower end of each ordinate's spread or interval; empty: none is shown."""
    high: tuple[float | None, ...] = ()
    """Upper end of each ordinate's spread or interval."""
    doubts: tuple[str, ...] = ()
    """Per point why it does not count, empty where it does: such points are drawn hollow and no line runs through."""
    names: tuple[str, ...] = ()
    """Short name of each point, printed next to it where there is room, such as the load of a latency."""
    stairs: bool = False
    """The ordinate holds until the next abscissa."""
    percent: bool = False
    """Ordinates are shares (0-1), labelled as percentages."""
    kl: bool = False
    """Ordinates are mean KLs (nats): bands of the verdict, the control and the floor are drawn in the background."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} abscissae and {len(self.y)} ordinates")
        if any(len(part) not in (0, len(self.x)) for part in (self.low, self.high, self.doubts, self.names)):
            raise ValueError(f"low, high, doubts and names need {len(self.x)} entries each, or none")
        return self


class Bars(Record):
    """One configuration's stacked bars in a chart that all share, such as the parts of its start-up time."""

    kind: Literal["bars"] = "bars"
    """Which plot this is."""
    key: str
    """Bars of one key share a chart."""
    title: str
    """Title, in a few words."""
    y_label: str
    """Quantity and unit of the lengths."""
    labels: tuple[str, ...]
    """Name of each bar, next to the configuration's name: ``cold``, ``warm``."""
    parts: dict[str, tuple[float, ...]]
    """Part → its length in each bar, in the order in which they are stacked."""
    totals: tuple[float, ...] = ()
    """The figure of each whole bar, where its parts need not sum up to it; empty: their sum is shown."""
    caption: str = ""
    """Explanation of the chart."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if any(len(lengths) != len(self.labels) for lengths in (*self.parts.values(), self.totals or self.labels)):
            raise ValueError(f"each part of {self.title!r}, and its totals, need {len(self.labels)} lengths")
        return self


class TablePlot(Record):
    """A table of its own, such as one row per item or per perturbation."""

    kind: Literal["table"] = "table"
    """Which plot this is."""
    title: str
    """Title, in a few words."""
    columns: tuple[str, ...]
    """Headings."""
    rows: tuple[tuple[TableValue, ...], ...]
    """Cells; numbers stay numbers, so that the table sorts."""
    note: str = ""
    """One line below."""

    @model_validator(mode="after")
    def _widths_agree(self) -> Self:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row of table {self.title!r} does not have {len(self.columns)} cells")
        return self


class TextPair(Record):
    """Texts of reference and candidate for one item."""

    label: str
    """Which item."""
    reference: str
    """The reference's text."""
    candidate: str
    """The candidate's text."""
    note: str = ""
    """Remark on the difference."""
    prompt: str = ""
    """End of the prompt; empty where it is not shown."""
    shared: str = ""
    """End of what both wrote before their texts part."""
    tag: str = ""
    """A word that distinguishes items (``near tie``, ``real``)."""


class Texts(Record):
    """Texts side by side."""

    kind: Literal["texts"] = "texts"
    """Which plot this is."""
    title: str
    """Title, in a few words."""
    pairs: tuple[TextPair, ...]
    """The items."""


class Choice(Record):
    """A side's most likely next token."""

    text: str
    """The token's text."""
    probability: float
    """Its probability, 0-1."""


class Place(Record):
    """One position of the text, with what both sides would write next."""

    window: int = 0
    """Number of its window, from 0 on."""
    position: int
    """Position in the window: the last token that both sides have read, from 0 on."""
    kl: float
    """KL divergence of the position, nats."""
    before: str
    """Text of the eight tokens before the next one."""
    actual: str
    """The text's own next token; empty at its end."""
    reference: Choice | None = None
    """The reference's choice; null if it is not known."""
    candidate: Choice | None = None
    """The candidate's choice."""


class Places(Record):
    """Single positions of the text, the worst first."""

    kind: Literal["places"] = "places"
    """Which plot this is."""
    title: str
    """Title, in a few words."""
    places: tuple[Place, ...]
    """The positions."""


Plot = Annotated[Heatmap | Curve | Bars | TablePlot | Texts | Places, Field(discriminator="kind")]
