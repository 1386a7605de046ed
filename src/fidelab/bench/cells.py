"""What becomes of a bench whose cells ended one way or another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fidelab.core import Status
from fidelab.results.axis_record import Outcome

__all__ = ["outcome_of"]


def outcome_of(cells: Sequence[Outcome]) -> dict[str, Any]:
    """Status and reason of the whole: fine where some cell is and none failed; else as the first that did not end well.

    Cells that cannot be (longer than the model's positions) do not spoil the others.
    """
    failed = next((cell for cell in cells if cell.status is Status.FAILED), None)
    other = failed or next((cell for cell in cells if cell.status is not Status.OK), None)
    if other is None or (failed is None and any(cell.status is Status.OK for cell in cells)):
        return {"status": Status.OK}
    return {"status": other.status, "reason": other.reason}
