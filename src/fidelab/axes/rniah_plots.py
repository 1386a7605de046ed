"""Plots of axis rniah: a heat map, a table, and the answers that lost a needle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fidelab.inputs.needles import Style
from fidelab.results.plots import Grid, Heatmap, Plot, TablePlot, TextPair, Texts

NeedlePlace = tuple[int, float]
_MAX_SHOWN_ANSWERS = 12  # answers shown per arm


@dataclass(frozen=True)
class Trial:
    """One prompt and its answers: ``base`` and ``cand`` are the shares of its ``codes`` that the sides returned."""

    length: int
    position: float
    trial: int
    codes: tuple[str, ...]
    base: float
    cand: float
    texts: tuple[str, str]
    failed: bool
    same: bool

    @property
    def place(self) -> NeedlePlace:
        """The cell: length and position."""
        return self.length, self.position


def needle_plots(trials: Sequence[Trial], style: Style) -> tuple[Plot, ...]:
    """Return plots of the accuracies by length and position and by length, and the answers that lost a needle."""
    shares: dict[NeedlePlace, tuple[float, float]] = {}
    for place in {trial.place for trial in trials if not trial.failed}:
        both = [(t.base, t.cand) for t in trials if t.place == place and not t.failed]
        base, cand = np.mean(both, axis=0).tolist()
        shares[place] = base, cand
    lengths = sorted({trial.length for trial in trials})
    positions = sorted({trial.position for trial in trials})
    rows = []
    for length in lengths:
        sides = np.array([both for (of, _), both in shares.items() if of == length]).reshape(-1, 2)
        base, cand = sides.mean(axis=0).tolist() if len(sides) else (None, None)
        difference = None if base is None or cand is None else 100 * (cand - base)
        rows.append((length, f"{int((sides[:, 0] > 0).sum())} of {len(sides)}", base, cand, difference))
    asked = "as a sentence to complete" if style == "cloze" else "as a question"
    table = TablePlot(
        title="Accuracy by prompt length",
        columns=("length (tokens)", "informative cells", "reference", "candidate", "difference (points)"),
        rows=tuple(rows),
        note=f"Share of needles found, asked {asked} (style {style}).",
    )
    plots: list[Plot] = [_heatmap(shares, lengths, positions), table]
    lost = [t for t in trials if t.cand < t.base and not t.failed]
    if lost:
        shown = f"{len(lost)}" if len(lost) <= _MAX_SHOWN_ANSWERS else f"first {_MAX_SHOWN_ANSWERS} of {len(lost)}"
        pairs = tuple(
            TextPair(
                label=f"{trial.length:,} tokens, position {trial.position:g}, trial {trial.trial + 1}",
                reference=trial.texts[0],
                candidate=trial.texts[1],
                note=f"hidden: {', '.join(trial.codes)}",
            )
            for trial in lost[:_MAX_SHOWN_ANSWERS]
        )
        plots.append(Texts(title=f"Needles lost ({shown})", pairs=pairs))
    return tuple(plots)


def _heatmap(
    shares: Mapping[NeedlePlace, tuple[float, float]], lengths: Sequence[int], positions: Sequence[float]
) -> Heatmap:
    def grid(name: str, side: int | None) -> Grid:
        def value(place: NeedlePlace) -> float | None:
            base, cand = shares.get(place, (0.0, 0.0))
            if place not in shares or (side is None and not base):
                return None
            return cand - base if side is None else (base, cand)[side]

        rows = tuple(tuple(value((length, position)) for position in positions) for length in lengths)
        return Grid(name=name, values=rows, signed=side is None)

    return Heatmap(
        title="Needles found, by prompt length and position",
        x_label="position in the prompt",
        y_label="prompt length (tokens)",
        x=tuple(f"{position:g}" for position in positions),
        y=tuple(f"{length:,}" for length in lengths),
        low=0.0,
        high=1.0,
        grids=(grid("reference", 0), grid("candidate", 1), grid("difference", None)),
        note="Share of needles found; no difference where the reference found none: such cells do not count.",
    )
