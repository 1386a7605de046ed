"""The names that fidelab uses of this package; it finds this module by the entry point ``fidelab.checkpoints``."""

from __future__ import annotations

from fidelab_checkpoints.audit import Audit, audit
from fidelab_checkpoints.convert import CERTIFICATE, convert
from fidelab_checkpoints.files import open_checkpoint
from fidelab_checkpoints.fragile import make_fragile
from fidelab_checkpoints.kv_scales import refuse_unscalable, write_kv_scales
from fidelab_checkpoints.layouts import quantized_modules
from fidelab_checkpoints.modules import modules_of
from fidelab_checkpoints.quantizer import tail
from fidelab_checkpoints.recipe import (
    Fidelity,
    Layers,
    Plan,
    Recipe,
    edge_and_global,
    fitting_groups,
    plan,
    read_recipe,
)
from fidelab_checkpoints.rules import RULES, Finding

WORKER = "fidelab_checkpoints.quantizer"
"""The module that quantizes, run in the environment of llm-compressor."""

__all__ = [
    "CERTIFICATE",
    "RULES",
    "WORKER",
    "Audit",
    "Fidelity",
    "Finding",
    "Layers",
    "Plan",
    "Recipe",
    "audit",
    "convert",
    "edge_and_global",
    "fitting_groups",
    "make_fragile",
    "modules_of",
    "open_checkpoint",
    "plan",
    "quantized_modules",
    "read_recipe",
    "refuse_unscalable",
    "tail",
    "write_kv_scales",
]
