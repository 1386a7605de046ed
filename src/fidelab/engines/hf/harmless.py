"""Options of engine hf that a file of somebody else may set without permission."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fidelab.engines.harmless import COUNT, NAME, Harmless, Shaped, Words, group

_PLACES = Shaped(
    re.compile(r"auto|balanced|balanced_low_0|sequential|cpu|(cuda|xpu|npu)(:\d{1,3})?", re.ASCII),
    "a device, or Transformers' own word for several",
)
_FORMAT = Shaped(
    re.compile(r"[A-Za-z]\w{0,63}(\[[\w.,=-]{0,200}\])?", re.ASCII), "a format of weights, as `int4[group=64]`"
)

HARMLESS: Mapping[str, Harmless] = {
    **group("Transformers looks the name up in its own list; `owner/name` is code of a hub", NAME, "attention"),
    **group("Transformers looks the name up in its own list", NAME, "experts-implementation"),
    **group("where layers are computed", _PLACES, "device-map"),
    **group("where layers are computed", Words(("auto",)), "tp-plan"),
    **group("fidelab's own kernels", NAME, "dequant"),
    **group("weights are rounded by fidelab", _FORMAT, "weights"),
    **group("a seed of rounding noise", COUNT, "jitter"),
    **group("what is saved", Words(("hidden", "logprobs")), "estimator"),
}
