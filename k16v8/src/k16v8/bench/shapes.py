"""Measured shapes: attention of models, cells of batch and length, and layers with 4-bit weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from k16v8.errors import UnknownNameError, UsageError
from k16v8.kernels.cache import storage

Kind = Literal["decode", "extend", "linear", "experts"]
Shape = tuple[int, int, int]  # query heads, KV heads, head dimension

FORMATS = {"16/16": ("bf16", "bf16"), "16/8": ("bf16", "fp8_e4m3"), "8/8": ("fp8_e4m3", "fp8_e4m3")}
GOAL_TOKENS = 32768  # the length at which goals are set
_GOAL_BATCHES = (32, 1)


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int

    @property
    def shape(self) -> Shape:
        """Shape of the model's attention."""
        return self.heads, self.kv_heads, self.head_dim


GEOMETRIES = {
    one.name: one
    for one in (
        Geometry("llama-3.1-8b", 32, 8, 128, 4096, 14336),
        Geometry("qwen2.5-7b", 28, 4, 128, 3584, 18944),
        Geometry("mistral-7b", 32, 8, 128, 4096, 14336),
        Geometry("tiny", 4, 2, 64, 256, 512),  # for tests
    )
}


def geometry(name: str) -> Geometry:
    """Return a geometry by name.

    Raises:
        UnknownNameError: If there is no such geometry.
    """
    if name not in GEOMETRIES:
        raise UnknownNameError("geometry", name, GEOMETRIES)
    return GEOMETRIES[name]


def formats(name: str) -> tuple[str, str]:
    """Return the K and V format of ``16/16``, ``16/8`` or ``8/8``, in the kernels' names.

    Raises:
        UnknownNameError: If there is no such pair.
    """
    if name not in FORMATS:
        raise UnknownNameError("formats", name, FORMATS)
    return FORMATS[name]


@dataclass(frozen=True)
class Cell:
    """``batch`` sequences of ``tokens`` tokens, the last ``queries`` of each of which attend to the whole sequence."""

    kind: Kind
    shape: Shape
    batch: int
    tokens: int
    queries: int = 1
    page: int = 16

    @property
    def key(self) -> str:
        """Key of the cell's record."""
        heads, kv_heads, dim = self.shape
        size = f"B{self.batch} T{self.tokens}"
        return f"{self.kind} {heads}/{kv_heads}/{dim} {size}" + (f" Q{self.queries}" if self.kind == "extend" else "")

    def held_bytes(self, pair: str) -> int:
        """Bytes of one cache: batch · tokens · kv_heads · D · (bytes of a K + bytes of a V value)."""
        per_value = sum(storage(name).dtype.itemsize for name in formats(pair))
        return self.batch * self.tokens * self.shape[1] * self.shape[2] * per_value

    def moved_bytes(self, pair: str) -> int:
        """Least bytes that a call moves: K and V of the cache once, the queries, the output (bfloat16)."""
        return self.held_bytes(pair) + 2 * 2 * self.batch * self.queries * self.shape[0] * self.shape[2]

    @property
    def operations(self) -> int:
        """Floating-point operations of Q·K and P·V where nothing hidden is computed: 4 · D per visible pair."""
        pairs = self.queries * (self.tokens - self.queries) + self.queries * (self.queries + 1) // 2
        return 4 * self.shape[2] * self.shape[0] * self.batch * pairs


def cells(
    geometries: Sequence[Geometry],
    *,
    batches: Iterable[int],
    lengths: Iterable[int],
    prefixes: Iterable[int] = (),
    chunk: int = 512,
    extend_batches: Iterable[int] = (1,),
    page: int = 16,
) -> list[Cell]:
    """Return decode cells (``batches`` × ``lengths``) and extend cells (``chunk`` over ``prefixes``) per shape.

    Geometries of one attention shape share their cells.  Cells that goals refer to come first, the rest from small to
    large, so that only expensive cells are missing if time ends.

    Raises:
        UsageError: If a length is not a multiple of the page.
    """
    lengths, prefixes, batches, extend_batches = map(tuple, (lengths, prefixes, batches, extend_batches))
    for what, sizes in (("length", lengths), ("prefix", prefixes), ("chunk", (chunk,) if prefixes else ())):
        for size in sizes:
            if size < 1 or size % page:
                raise UsageError(f"{what} {size} is not a multiple of the page, {page} tokens")
    found = []
    for shape in dict.fromkeys(one.shape for one in geometries):
        found += [Cell("decode", shape, batch, tokens, 1, page) for batch in batches for tokens in lengths]
        found += [
            Cell("extend", shape, batch, prefix + chunk, chunk, page) for batch in extend_batches for prefix in prefixes
        ]
    return sorted(found, key=_order)


@dataclass(frozen=True)
class ExpertGeometry:
    """Expert layers of a model: gate and up in one, and down."""

    name: str
    experts: int
    top: int
    hidden: int
    intermediate: int


EXPERT_GEOMETRIES = {
    one.name: one
    for one in (
        ExpertGeometry("qwen3-30b-a3b", 128, 8, 2048, 768),
        ExpertGeometry("mixtral-8x7b", 8, 2, 4096, 14336),
        ExpertGeometry("tiny-experts", 8, 2, 256, 128),  # for tests
    )
}


def expert_geometry(name: str) -> ExpertGeometry:
    """Return a geometry by name.

    Raises:
        UnknownNameError: If there is no such geometry.
    """
    if name not in EXPERT_GEOMETRIES:
        raise UnknownNameError("geometry of experts", name, EXPERT_GEOMETRIES)
    return EXPERT_GEOMETRIES[name]


@dataclass(frozen=True)
class WeightCell:
    """``batch`` rows times one linear layer, or ``batch`` tokens times ``top`` of ``experts`` each.

    ``shape``: inputs, outputs, group.
    """

    kind: Kind
    shape: Shape
    batch: int
    experts: int = 0
    top: int = 1
    page: int = 0  # there is no cache

    @property
    def key(self) -> str:
        """Key of the cell's record."""
        inputs, outputs, group = self.shape
        many = f" {self.top} of {self.experts}" if self.experts else ""
        return f"{self.kind}{many} {inputs}x{outputs}/{group} M{self.batch}"

    @property
    def active(self) -> int:
        """Weights that one call reads."""
        return min(self.experts, self.batch * self.top) if self.experts else 1

    def held_bytes(self, name: str) -> int:
        """Bytes of the weights that one call reads; of 4 bits: codes, zero points and 16-bit scales."""
        inputs, outputs, group = self.shape
        if name == "bf16":
            return self.active * 2 * inputs * outputs
        return self.active * (inputs * outputs // 2 + -(-inputs // group) * (outputs // 2 + 2 * outputs))

    def moved_bytes(self, name: str) -> int:
        """Least bytes that a call moves: those weights once, the activations, the output (bfloat16)."""
        inputs, outputs, _ = self.shape
        return self.held_bytes(name) + 2 * self.batch * (inputs + self.top * outputs)

    @property
    def operations(self) -> int:
        """Floating-point operations of the product."""
        inputs, outputs, _ = self.shape
        return 2 * self.batch * self.top * inputs * outputs


def weight_cells(
    geometries: Sequence[Geometry],
    experts: Sequence[ExpertGeometry],
    *,
    rows: Sequence[int],
    group: int,
) -> list[WeightCell]:
    """Linear layers of ``geometries`` (q, k and v in one; gate and up in one) and of ``experts``, small ones first.

    Raises:
        UsageError: If the kernels do not take the group size.
    """
    if group < 32 or group % 32:
        raise UsageError(f"groups of {group}; the kernels take multiples of 32")
    found: list[WeightCell] = []
    for one in geometries:
        q, kv = one.heads * one.head_dim, one.kv_heads * one.head_dim
        layers = (
            (one.hidden, q + 2 * kv),
            (q, one.hidden),
            (one.hidden, 2 * one.intermediate),
            (one.intermediate, one.hidden),
        )
        found += [WeightCell("linear", (*layer, group), batch) for layer in layers for batch in rows]
    for many in experts:
        for layer in ((many.hidden, 2 * many.intermediate), (many.intermediate, many.hidden)):
            found += [WeightCell("experts", (*layer, group), batch, many.experts, many.top) for batch in rows]
    return sorted(dict.fromkeys(found), key=lambda cell: (cell.kind == "experts", cell.held_bytes("bf16"), cell.batch))


def has_goal(cell: Cell | WeightCell) -> bool:
    """Return whether a goal refers to this cell: decode at one length for two batches, and all of extend."""
    if not isinstance(cell, Cell):
        return False
    return cell.kind == "extend" or (cell.tokens == GOAL_TOKENS and cell.batch in _GOAL_BATCHES)


def _order(cell: Cell) -> tuple[bool, bool, int, str]:
    return not has_goal(cell), cell.kind == "extend", cell.batch * cell.tokens, cell.key
