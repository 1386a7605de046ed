"""Choose a format for each group of weights, with the least total cost within a budget of bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def allocate(costs: Floats, sizes: Floats, budget: float) -> NDArray[np.intp]:
    """Choose a column for each group so that the sum of costs is least and the sum of sizes stays within the budget.

    The multiple-choice knapsack problem as a mixed-integer linear program (HiGHS), solved to one part in a million, or
    to what 60 seconds reach.  See docs/metrics/causes.md#weight-sensitivity.

    Args:
        costs, sizes: [groups, choices]; a choice of infinite cost is never taken.
        budget: in the unit of sizes.

    Returns:
        The chosen column of each group, [groups].

    Raises:
        ValueError: If even the smallest choices exceed the budget.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, identity, kron

    groups, choices = costs.shape
    allowed = np.isfinite(costs)
    least = np.where(allowed, sizes, np.inf).min(axis=1).sum()
    if least > budget:
        raise ValueError(f"the smallest choices take {least:,.0f}, the budget is {budget:,.0f}")
    each = csr_array(kron(identity(groups), np.ones((1, choices))))
    scale = float(sizes.max())
    total = csr_array(sizes.reshape(1, -1) / scale)
    found = milp(
        np.where(allowed, costs, 0.0).ravel() / (float(costs[allowed].max()) or 1.0),
        constraints=[LinearConstraint(each, 1, 1), LinearConstraint(total, -np.inf, budget / scale)],
        integrality=np.ones(groups * choices),
        bounds=Bounds(0, allowed.ravel().astype(float)),
        options={"mip_rel_gap": 1e-6, "time_limit": 60},
    )
    if found.x is None:
        raise ValueError(f"no choice was found: {found.message}")
    return np.asarray(found.x.reshape(groups, choices).argmax(axis=1))


def exchanges(
    columns: NDArray[np.intp], costs: Floats, sizes: Floats, budget: float, most: int
) -> list[NDArray[np.intp]]:
    """Return other choices within the budget, sorted by their sum of costs.

    Each moves one group to another column, or exchanges the columns of two groups.  See
    docs/metrics/causes.md#sensitivity-of-keys-and-values.

    Args:
        columns: choice to start from, [groups].
        costs, sizes, budget: as in :func:`allocate`.
        most: maximum length of the list.
    """
    groups, choices = costs.shape
    moves = [{group: column} for group in range(groups) for column in range(choices) if column != columns[group]]
    swaps = [{a: columns[b], b: columns[a]} for a in range(groups) for b in range(a) if columns[a] != columns[b]]
    found = list[tuple[float, int, NDArray[np.intp]]]()
    rows = np.arange(groups)
    for number, change in enumerate([*moves, *swaps]):
        other = columns.copy()
        for group, column in change.items():
            other[group] = column
        cost = float(costs[rows, other].sum())
        if np.isfinite(cost) and sizes[rows, other].sum() <= budget:
            found.append((cost, number, other))
    return [other for _, _, other in sorted(found, key=lambda one: one[:2])[:most]]
