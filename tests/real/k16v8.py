"""What tests of K16/V8 in vLLM and SGLang share; also in the engines' environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TIE = 0.25  # nats: two steps of bfloat16 for logits of 16 to 32; the engines' own caches move as far between batches
PREFIX = tuple(range(1000, 1096))  # three whole blocks of vLLM
PROMPTS = (
    *((*PREFIX, *range(2000 + 100 * i, 2000 + 100 * i + 5 + 30 * i)) for i in range(3)),
    tuple(range(300, 307)),
    tuple(range(400, 533)),
    (*PREFIX, 2001, 2002),
)
LAYERS = (0, 17)  # whose steps are compared with the definition


def compared(starts: Any, found: Any, wanted: Any) -> dict[str, Any]:
    """How many tokens each sequence had in a step, and how far its output is from the definition's."""
    import torch

    found, wanted = found.double().flatten(), wanted.flatten()
    return {
        "queries": starts.diff().tolist(),
        "cosine": float(torch.cosine_similarity(found, wanted, dim=0)),
        "relative_l2": float((found - wanted).norm() / wanted.norm()),
    }


def hold_the_gate(steps: Sequence[dict[str, Any]]) -> None:
    """The bounds of docs/metrics/kernels.md#kernel-gates."""
    assert len(steps) > 40
    assert min(step["cosine"] for step in steps) >= 0.99999
    assert max(step["relative_l2"] for step in steps) <= 0.0035
