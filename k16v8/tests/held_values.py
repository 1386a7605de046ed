"""Values as a paged cache gives them back."""

from __future__ import annotations

import torch
from torch import Tensor

from k16v8.kernels import torch_path
from k16v8.kernels.cache import PagedCache, Scaling, dequantize


def through_a_cache(values: Tensor, scaling: Scaling) -> Tensor:
    """``[N, heads, D]`` written into a cache as e4m3 and read back in the same type; beyond its range, its end."""
    n, heads, dim = values.shape
    cache = PagedCache.allocate(1, n, heads, dim, batch=1, max_blocks=1, k_format="f32", v_scaling=scaling)
    torch_path.write(values.float(), values, cache, torch.arange(n))
    top = torch.finfo(values.dtype).max
    return dequantize(cache)[1][0].clamp(-top, top).to(values.dtype)
