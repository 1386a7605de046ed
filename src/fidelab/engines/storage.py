"""How engines store keys and values: by themselves, by a plug-in, or emulated; and what differs from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stored = Literal["native", "plug-in", "emulated"]
"""In the engine's own cache, in that of a plug-in, or in more bits than the format has."""


@dataclass(frozen=True)
class LayerFormats:
    """Cache formats that a plan by layer may use on one engine.

    ``any_format``: any format in any layer, keys and values apart; else one format, in all layers that do not keep the
    compute type.  ``formats``: those that Transformers rounds to the same numbers as this engine stores; empty: all.
    ``per_token_head``: integers that have a scale for each token and head on this engine.
    """

    any_format: bool = False
    formats: tuple[str, ...] = ()
    per_token_head: tuple[str, ...] = ()


ANY_FORMAT = LayerFormats(any_format=True)
