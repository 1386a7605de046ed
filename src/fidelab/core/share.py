"""Shares as users write them: ``1%`` or ``0.01``, with one message for all options, settings and policies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class ShareBounds:
    """Range of a share; by default above 0% and below 100%.  As metadata of a field, pydantic parses the field with it.

    A bare number of 1 or more is refused, since ``1`` may be meant as 1% or as 100%.

    Attributes:
        zero: 0% is allowed.
        whole: 100% is allowed, written so.
        beyond: more than 100% is allowed, written so.
        signed: negative shares are allowed, as for differences.
    """

    zero: bool = False
    whole: bool = False
    beyond: bool = False
    signed: bool = False

    def parse(self, value: Any) -> float:
        """Return the share that a text or a number stands for.

        >>> ShareBounds().parse("1%"), ShareBounds().parse("0.01"), ShareBounds(whole=True).parse("100%")
        (0.01, 0.01, 1.0)

        Raises:
            ValueError: If it is not a share in the range.
        """
        shown = repr(value) if isinstance(value, str) and not _is_number(value) else str(value)
        if isinstance(value, float):
            shown = f"{value:g}"
        text = value.strip() if isinstance(value, str) else value
        percent = isinstance(text, str) and text.endswith("%")
        try:
            number = math.nan if isinstance(value, bool) else float(text.removesuffix("%") if percent else text)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or (number < 0 and not self.signed):
            raise ValueError(f"{shown} is not a share: write 1% or 0.01")
        if not percent and abs(number) >= 1:
            example = f"{number:g}% or {number / 100:g}" if abs(number) < 100 else "1% or 0.01"
            raise ValueError(f"{shown} is not a share: write {example}")
        share = number / 100 if percent else number
        if share == 0 and not self.zero:
            raise ValueError(f"{shown} is not a share above 0%: write 1% or 0.01")
        if abs(share) > 1 and not self.beyond:
            raise ValueError(f"{shown} is not a share up to 100%: write 1% or 0.01")
        if abs(share) == 1 and not (self.whole or self.beyond):
            raise ValueError(f"{shown} is not a share below 100%: write 1% or 0.01")
        return share

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        # As dictionaries, which is what pydantic_core's functions return: this room imports no package.
        validator = {"type": "no-info", "function": self.parse}
        schema = {"type": "function-before", "function": validator, "schema": handler(source)}
        # what is written has to read as the same share
        written = {
            "type": "function-plain",
            "function": lambda share: f"{100 * share:.17g}%" if isinstance(share, float) and abs(share) >= 1 else share,
            "when_used": "json",
        }
        return {**schema, "serialization": written} if self.whole or self.beyond else schema


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text.strip().removesuffix("%")))
    except ValueError:
        return False


Share = Annotated[float, ShareBounds()]
"""A share above 0% and below 100%: a limit that limits something."""
WholeShare = Annotated[float, ShareBounds(whole=True)]
"""A share above 0%, and 100% if written so."""
Increase = Annotated[float, ShareBounds(zero=True, beyond=True)]
"""A relative rise: 0% and more than 100% are allowed."""

LIMIT = ShareBounds(zero=True, whole=True)
"""Range of a limit on a share that was measured."""
CHANGE_LIMIT = ShareBounds(zero=True, whole=True, signed=True)
"""Range of a limit on a difference of two shares."""
