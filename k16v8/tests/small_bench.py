"""What tests of the kernel bench measure: cells of a tiny model on the CPU, in no time."""

from __future__ import annotations

import torch

from k16v8.bench.contenders import CONTENDERS
from k16v8.bench.run import Settings
from k16v8.bench.shapes import Cell, geometry

CPU = torch.device("cpu")
TINY = geometry("tiny")
DECODE = Cell("decode", TINY.shape, 2, 64)
EXTEND = Cell("extend", TINY.shape, 2, 96, 32)
OURS = CONTENDERS[1]
SETTINGS = Settings(CPU, "torch", (DECODE,), seconds=0.0, cache_bytes=1 << 15)
