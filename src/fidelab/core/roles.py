"""Roles of the configurations of a run: ``reference``, ``control``, ``candidate:NAME``, and these."""

from __future__ import annotations

CONTROL = "control"  # the role of the control; "control:ATTENTION": of the control on another kernel path
TRUTH = "truth"  # the role of the reference's 32-bit twin
EXACT = "exact"  # the role of the 32-bit cache under exact attention; "exact:NAME": a candidate's format there
QUERIES = "queries"  # "queries:NAME": a candidate on a kernel that leaves queries in the model's type
FLOOR = "floor"
TWIN = "twin"  # "twin:NAME": that candidate with other last bits


def base_of(role: str) -> str:
    """Return the role of the arm that this one is compared with; empty if there is none."""
    kind, _, name = role.partition(":")
    return {"reference": "", EXACT: EXACT if name else "", TWIN: f"candidate:{name}"}.get(kind, "reference")


def kind_of(role: str) -> str:
    """Return the role without the name of the configuration that it belongs to: ``candidate:q8_0`` → ``candidate``."""
    return role.partition(":")[0]


def is_partial(role: str) -> bool:
    """Whether this role answers only some of the items, as a repeat of the reference or a twin does."""
    return kind_of(role) in (FLOOR, TWIN)
