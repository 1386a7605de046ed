"""A long decode as a server would run it: pages are handed back and used again, a window pushes tokens out.

A kernel may pass at every shape alone and fail in the pool, where pages hold what others left behind.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from k16v8.gates.cases import Case, fill_with_noise
from k16v8.kernels.cache import PagedCache, dequantize
from k16v8.kernels.dispatch import Kernels
from k16v8.kernels.reference import Attention, attend


def soak(
    kernels: Kernels, case: Case, *, steps: int, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[float, int, int]:
    """Decode sequences of random lengths that share few pages. Each step writes and attends to a token of each.

    What was written is remembered apart from the pages.  Returns the largest relative L2 error of a step, and how
    many pages were used again and pushed out of the window.
    """
    dice, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, page, width = len(case.lengths), case.page, 8
    cache = PagedCache.allocate(
        batch * (case.window // page + 2) + 1,
        page,
        case.kv_heads,
        case.head_dim,
        batch=batch,
        max_blocks=width,
        k_format=case.k_format,
        v_format=case.v_format,
        k_scaling=case.k_scaling,
        v_scaling=case.v_scaling,
        device=device,
    )
    fill_with_noise(cache, noise)
    free, used = list(range(len(cache.k_cache))), set[int]()
    tables: list[dict[int, int]] = [{} for _ in range(batch)]
    lengths, ends = [0] * batch, [0] * batch
    history: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(batch)]
    plan = kernels.plan(batch, case.heads, cache, split_tokens=case.split)
    attention, worst, reused, evicted = Attention(window=case.window), 0.0, 0, 0
    for _ in range(steps):
        slots = []
        for row in range(batch):
            if lengths[row] == ends[row]:  # the sequence has ended; another takes its place
                free += tables[row].values()
                tables[row], lengths[row], ends[row] = {}, 0, dice.randint(page // 2, width * page)
                history[row] = []
            at = lengths[row]
            if at % page == 0:
                block = free.pop(dice.randrange(len(free)))
                reused += block in used
                used.add(block)
                tables[row][at // page] = block
            lengths[row] = at + 1
            gone = [column for column in tables[row] if (column + 1) * page <= lengths[row] - case.window]
            evicted += len(gone)
            free += [tables[row].pop(column) for column in gone]
            slots.append(tables[row][at // page] * page + at % page)
        # what lies outside the window points nowhere
        table = [[tables[row].get(column, 1 << 30) for column in range(width)] for row in range(batch)]
        cache.block_table.copy_(torch.tensor(table, dtype=torch.int32))
        cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        new = torch.randn(3, batch, case.heads, case.head_dim, generator=noise).to(device, case.dtype)
        key, value, q = new[0][:, : case.kv_heads], new[1][:, : case.kv_heads], new[2]
        kernels.write(key, value, cache, torch.tensor(slots, device=device))
        keys, values = dequantize(cache)
        out = torch.full_like(q, float("nan"))
        out, _ = kernels.decode(q, cache, attention, out=out, plan=plan)
        for row, slot in enumerate(slots):
            place = (slot // page, slot % page)
            history[row].append((keys[place].clone(), values[place].clone()))
            k, v = (torch.stack(side) for side in zip(*history[row], strict=True))
            position = torch.tensor([len(k) - 1], device=device)
            expected, _ = attend(q[row : row + 1], k, v, position, attention)
            error = (out[row].float() - expected[0]).norm() / expected.norm()
            worst = max(worst, torch.nan_to_num(error, nan=float("inf")).item())
    return worst, reused, evicted
