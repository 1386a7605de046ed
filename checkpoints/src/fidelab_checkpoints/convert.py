"""Convert quantized weights from one layout to another without changing a weight, and certify it.

Targets are AWQ and dense weights.

Codes, zero points and scales are rearranged, never recomputed: groups are split by repeating scales, narrower codes are
kept in wider ones, a negative scale turns into a positive one with codes and zero point mirrored.  Weights that the
target cannot hold exactly are refused, unless a loss is allowed. Then only those weights are rounded to the nearest
values of the target, and the certificate reports the error.

Each module is read, repacked and written, then read again from both checkpoints and compared.  The source is opened for
reading only.  The target is written under a temporary name next to its own and renamed when the certificate is
complete.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fidelab.core import format_bytes
from fidelab.core.errors import InputError, OutputError, UnknownNameError, UsageError
from fidelab.core.paths import expand
from fidelab.core.scratch import scratch
from fidelab.models.weights import INDEX
from fidelab_checkpoints.files import RAW, Checkpoint, TensorInfo, open_checkpoint, to_floats
from fidelab_checkpoints.layouts import (
    ACTIVATION_PARTS,
    Awq,
    QuantizedLinear,
    QuantizedModule,
    StoredArray,
    method_of,
    quantized_modules,
)

_log = logging.getLogger(__name__)

CERTIFICATE = "certificate.json"
TARGETS = ("awq", "safetensors")
DTYPES = {"keep": None, "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types in which tensors of 16 or 32 bits may be stored; ``keep``: as they are, and dequantized weights as float32."""

_BITS = 4  # of AWQ
_MAX_SHARD_BYTES = 5 << 30  # bytes of weights per file
_ROWS = 1 << 22  # number of weights that are dequantized at a time
_EXTRA_DISK_BYTES = 64 << 20  # bytes of disk for config, tokenizer and certificate
_SMALLEST_GROUP = 16  # inputs; no engine has kernels for smaller groups
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".h5", ".msgpack", ".onnx"}
_REWRITTEN = {"config.json", INDEX, "quantize_config.json", "quant_config.json", "recipe.yaml", CERTIFICATE}
_SIDE_FILES = (".json", ".jinja", ".txt", ".model")  # suffixes of configuration and tokenizer
_FLOATS = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}


@dataclass
class Compared:
    """Difference between a tensor's values in the source and in the target."""

    name: str
    values: int = 0
    differing: int = 0
    max_error: float = 0.0
    squared_error: float = 0.0
    squared: float = 0.0

    def add(self, source: NDArray[np.float32], target: NDArray[np.float32]) -> None:
        """Take further values of the tensor into account; NaN equals NaN."""
        self.values += source.size
        same = (source == target) | (np.isnan(source) & np.isnan(target))
        if same.all():
            return
        error = np.abs(source.astype(np.float64) - target)[~same]
        self.differing += error.size
        self.max_error = max(self.max_error, float(np.nan_to_num(error, nan=np.inf).max()))
        self.squared_error += float(np.square(error).sum())
        self.squared += float(np.square(source, dtype=np.float64).sum())

    def record(self) -> dict[str, Any]:
        """Return the difference as plain data for the certificate."""
        record = {"name": self.name, "values": self.values, "differing": self.differing, "max_error": self.max_error}
        return record if not self.differing else {**record, "relative_rms_error": self.relative}

    @property
    def relative(self) -> float:
        """Root mean square of the error relative to that of the values, over the values compared."""
        return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0


@dataclass
class Certificate:
    """Result of a conversion and of comparing both checkpoints.

    Attributes:
        modules: quantized modules, dequantized from both checkpoints.
        tensors: the other tensors, whose values were compared.
        dropped: tensors of the source that the target cannot hold, with the reason.
        notes: remarks for users of the target.
    """

    source: str
    target: Path
    method: str
    to: str
    settings: dict[str, Any]
    modules: list[Compared] = field(default_factory=list)
    tensors: list[Compared] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> list[Compared]:
        """All modules and tensors."""
        return [*self.modules, *self.tensors]

    @property
    def differing(self) -> list[Compared]:
        """Modules and tensors of which a value differs."""
        return [compared for compared in self.compared if compared.differing]

    @property
    def exact(self) -> bool:
        """Whether every value of the target equals the source's."""
        return not self.differing

    @property
    def worst(self) -> Compared:
        """The tensor with the largest error."""
        return max(self.compared, key=lambda compared: compared.max_error, default=Compared(""))

    def record(self) -> dict[str, Any]:
        """Return the certificate as plain data."""
        return {
            "schema": "fidelab.certificate/1",
            "source": self.source,
            "from": self.method,
            "to": self.to,
            "exact": self.exact,
            "max_error": self.worst.max_error,
            "settings": self.settings,
            "counts": {
                "modules": len(self.modules),
                "tensors": len(self.tensors),
                "values": sum(compared.values for compared in self.compared),
                "tensors_differing": len(self.differing),
                "dropped": len(self.dropped),
            },
            "notes": self.notes,
            "dropped": self.dropped,
            "modules": [compared.record() for compared in self.modules],
            "tensors": [compared.record() for compared in self.tensors],
        }

    def line(self) -> str:
        """Return the certificate as one line of text."""
        count = sum(compared.values for compared in self.compared)
        what = f"{len(self.modules)} quantized modules and {len(self.tensors)} other tensors"
        if self.exact:
            return f"{self.method} to {self.to}: {what} compared, all {count:,} values are equal"
        squares = sum(c.squared for c in self.differing) or 1
        total = math.sqrt(sum(c.squared_error for c in self.differing) / squares)
        return (
            f"{self.method} to {self.to}: {what} compared, {len(self.differing)} differ, by at most "
            f"{self.worst.max_error:.3g} ({self.worst.name}), root mean square {100 * total:.3g}% of their values'"
        )


def convert(source: str | Path, target: Path, to: str, *, lossy: bool = False, dtype: str = "keep") -> Certificate:
    """Write the checkpoint ``source`` in another layout as the new folder ``target``; ``to``: one of :data:`TARGETS`.

    Args:
        lossy: whether weights may be rounded where the target cannot hold them.
        dtype: one of :data:`DTYPES`.

    Raises:
        UsageError: If the target exists or lies within the source, or the layout or type is unknown.
        InputError: If the source cannot be read, or the target cannot hold it.  The message names the modules and the
            reason.
        OutputError: If the target cannot be written, or its disk has no room.
    """
    if to not in TARGETS:
        raise UnknownNameError("layout", to, TARGETS)
    if dtype not in DTYPES:
        raise UnknownNameError("data type", dtype, DTYPES)
    target = expand(target)
    with open_checkpoint(source) as checkpoint:
        check_target(checkpoint, target)
        if checkpoint.format == "gguf":
            raise InputError(f"{source} is a GGUF file; convert needs a folder with safetensors")
        plan = _plan(checkpoint, to, lossy=lossy, dtype=DTYPES[dtype])
        check_room(target, plan.nbytes)
        with whole_folder(target) as folder:
            certificate = _convert(plan, folder)
            certificate.source, certificate.target = str(source), target
            text = json.dumps(certificate.record(), indent=1)
            (folder / CERTIFICATE).write_text(text + "\n", encoding="utf-8")
    return certificate


def check_target(checkpoint: Checkpoint, target: Path) -> None:
    """Refuse a target that exists, has no parent folder, or lies within the source."""
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists; name a new folder, since nothing is overwritten")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a folder; create it, the target is written there")
    folder = checkpoint.folder.resolve()
    if folder in target.resolve().parents and checkpoint.format != "gguf":
        raise UsageError(f"{target} lies within the source {folder}, which is not written to; name a folder outside it")


def check_room(target: Path, size: int) -> None:
    """Refuse to write ``size`` bytes if the disk has no room for them."""
    free = shutil.disk_usage(target.parent).free
    if size + _EXTRA_DISK_BYTES > free:
        needed, left = format_bytes(size + _EXTRA_DISK_BYTES, free)
        raise OutputError(
            f"{target} needs about {needed}, {left} are free in {target.parent}: "
            "make room, or name a folder on another disk"
        )


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a folder next to ``target`` that becomes the target, or is removed on failure."""
    try:
        with scratch("checkpoint", beside=target) as room:
            folder = room / "target"
            folder.mkdir()
            yield folder
            folder.replace(target)
    except OSError as error:
        raise OutputError(
            f"cannot write {target} ({error.strerror or error}); no files were left there, and the source is unchanged"
        ) from error


def copy_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the weights of a checkpoint with its configuration and tokenizer.

    Weight files that the checkpoint does not use, such as pickled ones, stay behind: some loaders would read them.
    """
    for path in checkpoint.folder.iterdir():
        if path.is_file() and (path in checkpoint.files or path.suffix in _SIDE_FILES):
            shutil.copyfile(path, folder / path.name)


# --------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class _Facts:
    """Facts of a module that decide how it can be stored, read from all its tensors except the codes."""

    name: str
    shape: tuple[int, int]
    kind: str
    bits: int
    groups: int
    group_size: int
    negative: bool
    runs: frozenset[int] | None  # group sizes in which inputs of an index are in order; None: no index


@dataclass(frozen=True)
class _Plan:
    """How each module is stored."""

    source: Checkpoint
    method: str
    to: str
    modules: dict[str, QuantizedModule]
    group_size: int  # 0: one group per output
    rounded: dict[str, str]  # modules that lose, and why
    lossy: bool
    dtype: str | None
    carried: dict[str, TensorInfo]
    dropped: dict[str, str]
    notes: list[str]
    nbytes: int


def _plan(source: Checkpoint, to: str, *, lossy: bool, dtype: str | None) -> _Plan:
    if source.quantization is None and to != "safetensors":
        raise InputError(
            f"{source.name} is not quantized (its config has no quantization_config): converting changes no weight; "
            "fidelab checkpoint quantize makes quantized checkpoints"
        )
    if source.quantization is None and dtype is None:
        raise InputError(f"{source.name} is dense already; name the type that it shall have with --dtype")
    packing = method_of(source.quantization) if source.quantization else "dense"
    named = str((source.quantization or {}).get("quant_method", "dense"))
    method = packing if packing.startswith(named) else f"{named} ({packing})"
    if packing == named == to:
        raise InputError(f"{source.name} is {to} already; there is nothing to convert")
    modules = quantized_modules(source.tensors, source.quantization)
    if source.quantization is not None and not modules:
        raise InputError(f"{source.name} says it is {named}, but none of its tensors is of a quantized module")
    parts = {tensor for module in modules.values() for tensor in module.parts.values()}
    carried = {name: info for name, info in source.tensors.items() if name not in parts}
    _check_duplicates(source, modules, carried)
    facts = [_facts(source, module) for module in modules.values()]
    activations = [
        module.parts[part] for module in modules.values() for part in ACTIVATION_PARTS if part in module.parts
    ]
    dropped = dict.fromkeys(activations, "scale of a layer's inputs: the target rounds weights only")
    for name in [name for name in carried if name.endswith((".k_scale", ".v_scale", ".q_scale"))]:
        dropped[name] = "scale of a KV cache: the target's configuration cannot hold it"
        del carried[name]
    notes = ["scales of activations or of a KV cache were dropped: only weights are quantized"] if dropped else []
    if to == "safetensors":
        size = sum(math.prod(fact.shape) for fact in facts) * _FLOATS[dtype or "F32"]
        return _Plan(
            *(source, method, to, modules, 0, {}, lossy, dtype, carried, dropped, notes),
            nbytes=size + sum(info.nbytes for info in carried.values()) * (2 if dtype == "F32" else 1),
        )
    rounded: dict[str, str] = {}
    whole = [fact for fact in facts if not (why := _awq_refusal(fact)) or rounded.setdefault(fact.name, why) is None]
    group_size, out_of_order = _common_group(whole, facts)
    rounded |= out_of_order
    if rounded and not lossy:
        name, why = next(iter(rounded.items()))
        more = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        raise InputError(
            f"{to} cannot hold module {name}{more} of {source.name} without loss: {why}; --lossy rounds such weights "
            "and reports the error, --to safetensors keeps them"
        )
    if mirrored := sum(fact.negative for fact in whole if fact.name not in rounded):
        notes.append(f"{mirrored} modules had negative scales: codes and zero points were mirrored")
    weights = sum(math.prod(fact.shape) * _BITS // 8 + 4 * fact.shape[1] for fact in facts)
    scales = sum(fact.shape[0] * (fact.shape[1] // group_size + 1 if group_size else 1) * 5 for fact in facts)
    return _Plan(
        *(source, method, to, modules, group_size, rounded, lossy, dtype, carried, dropped, notes),
        nbytes=weights + scales + sum(info.nbytes for info in carried.values()),
    )


def _check_duplicates(
    source: Checkpoint, modules: Mapping[str, QuantizedModule], carried: Mapping[str, TensorInfo]
) -> None:
    """Check that there are no duplicates.

    Raises:
        InputError: If two files hold a tensor with different contents, or a module is both quantized and not.
    """
    for info in source.copies:
        first = source.tensors[info.name]
        if not source.equals(first, source, info):
            raise InputError(
                f"{source.name} holds tensor {info.name} twice with different contents, in {first.file.name} and "
                f"{info.file.name}: which one counts depends on the reader; fetch the model again"
            )
    both = next((name for name in modules if f"{name}.weight" in carried), None)
    if both is not None:
        raise InputError(
            f"{source.name} holds module {both} twice, quantized and as {both}.weight: which one counts depends on "
            "the reader; fetch the model again"
        )


def _facts(source: Checkpoint, module: QuantizedModule) -> _Facts:
    """Read the small tensors of a module; the codes are represented by a zero of their shape."""
    codes = {"qweight", "weight_packed", "weight"}
    stored = {
        part: StoredArray(np.broadcast_to(np.zeros((), RAW[info.dtype]), source.tensors[tensor].shape), info.dtype)
        if part in codes
        else StoredArray(source.read(tensor), info.dtype)
        for part, tensor in module.parts.items()
        for info in (source.tensors[tensor],)
    }
    linear = module.unpack(stored)
    if not np.isfinite(linear.scales).all():
        raise InputError(
            f"module {module.name} of {source.name} has scales that are not finite: its weights are not numbers; "
            "fidelab checkpoint audit says what else is wrong"
        )
    runs = None
    if linear.group_index is not None:
        sizes = (size for size in (linear.group_size >> n for n in range(12)) if size >= _SMALLEST_GROUP)
        runs = frozenset(size for size in sizes if linear.regrouped(size) is not None)
    return _Facts(
        name=module.name,
        shape=linear.shape,
        kind=linear.kind,
        bits=linear.bits,
        groups=linear.scales.shape[1],
        group_size=linear.group_size,
        negative=bool(np.signbit(linear.scales).any()),
        runs=runs,
    )


def _awq_refusal(fact: _Facts) -> str | None:
    """Return why AWQ cannot hold a module, whatever its groups are; ``None`` if it can."""
    if fact.kind != "int":
        return f"its weights are {fact.kind}, the target's integers"
    if fact.bits > _BITS:
        return f"its weights have {fact.bits} bits, the target's {_BITS}"
    return f"{fact.shape[0]} outputs do not fill its words" if fact.shape[0] % 8 else None


def _common_group(whole: list[_Facts], every: list[_Facts]) -> tuple[int, dict[str, str]]:
    """Return one group size for all modules, and the modules that it does not fit, with the reasons.

    A size of 0 means one group per output.

    ``whole``: those whose weights the target can hold; the others are rounded.
    """
    grouped = [fact.group_size for fact in whole if fact.groups > 1]
    if not grouped and len(whole) == len(every):
        return 0, {}
    inputs = [fact.shape[1] for fact in every]
    size = math.gcd(*inputs, *(grouped or [128]))
    finer = (size >> n for n in range(12) if size >> n >= _SMALLEST_GROUP)  # smaller groups may be in order
    size = next((s for s in finer if all(s in fact.runs for fact in whole if fact.runs)), size)
    if size < _SMALLEST_GROUP:
        size = math.gcd(*inputs, 128)
    if size < _SMALLEST_GROUP:
        odd = min(every, key=lambda fact: math.gcd(fact.shape[1], 128))
        raise InputError(
            f"module {odd.name} has {odd.shape[1]} inputs, which are not in groups of {_SMALLEST_GROUP} or more that "
            "all modules share; --to safetensors writes them dense"
        )
    return size, {fact.name: why for fact in whole if (why := _ungrouped(fact, size))}


def _ungrouped(fact: _Facts, size: int) -> str | None:
    """Return why a module's groups cannot become groups of ``size`` inputs; ``None`` if they can."""
    if fact.runs is None:
        return f"its groups of {fact.group_size} inputs are not multiples of {size}" if fact.group_size % size else None
    if size in fact.runs:
        return None
    return (
        "its g_idx (desc_act, act-order) assigns inputs to groups out of their order, which needs an index that the "
        "target lacks"
    )


# ---------------------------------------------------------------------------------------------------- reading, fitting


def _load(checkpoint: Checkpoint, module: QuantizedModule) -> QuantizedLinear:
    parts = module.parts.items()
    return module.unpack({p: StoredArray(checkpoint.read(name), checkpoint.tensors[name].dtype) for p, name in parts})


def _fitted(plan: _Plan, linear: QuantizedLinear, name: str) -> QuantizedLinear:
    """Return a module's weights as the plan stores them."""
    size = plan.group_size or linear.shape[1]
    if name in plan.rounded:
        linear = _rounded(linear, size)
    elif (ordered := linear.regrouped(size)) is not None:
        linear = ordered.with_positive_scales()
    else:
        raise InputError(f"module {name} has no groups of {size} inputs in their order")
    if linear.zeros is None:  # codes and midpoints of fewer bits stay as they are
        linear = replace(linear, zeros=np.full(linear.scales.shape, linear.midpoint, np.uint8))
    linear = replace(linear, bits=_BITS)
    if plan.dtype is not None and plan.dtype != linear.scale_dtype:
        scales = to_floats(_cast(linear.scales, plan.dtype, f"{name} (scales)", plan.lossy), plan.dtype)
        linear = replace(linear, scales=scales, scale_dtype=plan.dtype)
    return linear


def _rounded(linear: QuantizedLinear, group_size: int) -> QuantizedLinear:
    """Return the weights rounded to the nearest of 16 values between each group's smallest and largest (0 included)."""
    n, k = linear.shape
    groups = k // group_size
    codes, most = np.empty((n, k), np.uint8), (1 << _BITS) - 1
    scales, zeros = np.empty((n, groups), np.float32), np.empty((n, groups), np.uint8)
    for start, stop in _blocks(n, k):
        weight = linear.rows(start, stop).dequantize().reshape(stop - start, groups, group_size)
        low, high = np.minimum(weight.min(axis=2), 0), np.maximum(weight.max(axis=2), 0)
        step = ((high - low) / most).astype(np.float16).astype(np.float32)
        step[step == 0] = 1
        zero = np.clip(np.rint(-low / step), 0, most)
        code = np.clip(np.rint(weight / step[:, :, None]) + zero[:, :, None], 0, most)
        codes[start:stop] = code.reshape(stop - start, k)
        scales[start:stop], zeros[start:stop] = step, zero
    if not np.isfinite(scales).all():
        raise InputError("weights beyond the range of float16 cannot be rounded to a target with float16 scales")
    return QuantizedLinear(codes, scales, zeros, None, group_size, _BITS)


def _blocks(n: int, k: int) -> Iterator[tuple[int, int]]:
    step = max(1, _ROWS // max(1, k))
    for start in range(0, n, step):
        yield start, min(n, start + step)


def _cast(values: NDArray[np.float32], dtype: str, name: str, lossy: bool) -> NDArray[Any]:
    """Return values in a type as it is stored.

    Raises:
        InputError: If values overflow, or are rounded although that is not allowed.
    """
    if dtype == "F32":
        return values
    if dtype == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        nearest = bits + (0x7FFF + (bits >> 16 & 1))  # ties to even
        cast: NDArray[Any] = np.where(np.isnan(values), bits >> 16 | 1, nearest >> 16).astype(np.uint16)
    else:
        with np.errstate(over="ignore"):
            cast = values.astype(np.float16)
    back = to_floats(cast, dtype)
    lost = np.isfinite(values) & ~np.isfinite(back)
    type_name = next(text for text, kind in DTYPES.items() if kind == dtype)
    if lost.any():
        raise InputError(
            f"{name} holds {int(lost.sum()):,} values beyond the range of {type_name}, up to "
            f"{float(np.abs(values[lost]).max()):.6g}: they would become infinite; keep its type (without --dtype)"
        )
    if not lossy and not np.array_equal(back, values, equal_nan=True):
        raise InputError(
            f"{name} cannot be stored as {type_name} without loss (largest error "
            f"{float(np.nanmax(np.abs(back - values))):.3g}); --lossy allows it and reports the error, "
            "without --dtype types stay"
        )
    return cast


# ------------------------------------------------------------------------------------------------------------ writing


class _Writer:
    """Writes safetensors files tensor by tensor, part by part, and the header of each file last.

    The space for the header is kept at the file's beginning and filled with blanks.
    """

    def __init__(self, folder: Path, most_header: int) -> None:
        self._folder = folder
        self._room = -(-most_header // 8) * 8
        self._files: list[Path] = []
        self._entries: dict[str, Any] = {}
        self._out: BinaryIO | None = None
        self._at = 0
        self._places: dict[str, int] = {}
        self.total = 0

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...], size: int) -> Callable[[NDArray[Any]], None]:
        """Begin a tensor of ``size`` bytes; the returned object receives its values in order."""
        if self._out is None or (self._at and self._at + size > _MAX_SHARD_BYTES):
            self._finish()
            self._files.append(self._folder / f"part-{len(self._files) + 1}.safetensors")
            self._out = self._files[-1].open("wb")
            self._out.seek(8 + self._room)
            self._at = 0
        self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [self._at, self._at + size]}
        self._places[name] = len(self._files)
        self._at += size
        self.total += size
        out = self._out

        def write(values: NDArray[Any]) -> None:
            out.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

        return write

    def close(self) -> None:
        """Write the last header, name the files and write the index."""
        self._finish()
        count = len(self._files)
        names = ["model.safetensors"]
        if count > 1:
            names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
            index = {
                "metadata": {"total_size": self.total},
                "weight_map": {name: names[place - 1] for name, place in sorted(self._places.items())},
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        for file, name in zip(self._files, names, strict=True):
            file.rename(self._folder / name)

    def abort(self) -> None:
        """Close the open file."""
        if self._out is not None:
            self._out.close()
            self._out = None

    def _finish(self) -> None:
        if self._out is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":")).encode()
        room = self._room
        if len(header) > room:
            raise OutputError(f"the header of {self._files[-1].name} needs {len(header)} bytes, {room} were kept")
        self._out.seek(0)
        self._out.write(room.to_bytes(8, "little") + header + b" " * (room - len(header)))
        self._out.close()
        self._out, self._entries = None, {}


def _convert(plan: _Plan, folder: Path) -> Certificate:
    source = plan.source
    names = [*plan.carried, *(name for module in plan.modules.values() for name in module.parts.values())]
    writer = _Writer(folder, 256 + sum(len(json.dumps(name)) + 180 for name in names))
    try:
        for name, module in plan.modules.items():
            linear = _load(source, module)
            if plan.to == "safetensors":
                _write_dense(plan, writer, name, linear)
            else:
                try:
                    stored = Awq().pack(_fitted(plan, linear, name))
                except ValueError as error:
                    raise InputError(f"{plan.to} cannot hold module {name} of {source.name}: {error}") from None
                for part, (values, dtype) in stored.items():
                    writer.tensor(f"{name}.{part}", dtype, values.shape, values.nbytes)(values)
        for name, info in plan.carried.items():
            dtype = plan.dtype if plan.dtype and info.dtype in _FLOATS else info.dtype
            size = info.nbytes if dtype == info.dtype else math.prod(info.shape) * _FLOATS[dtype]
            write = writer.tensor(name, dtype, info.shape, size)
            for chunk in source.chunks(info):
                same = dtype == info.dtype
                write(chunk if same else _cast(to_floats(chunk, info.dtype), dtype, name, plan.lossy))
        writer.close()
    finally:
        writer.abort()
    quantization = _quantization(plan)
    config = {key: value for key, value in source.config.items() if key not in _LEGACY_KEYS}
    if quantization is not None:
        config["quantization_config"] = quantization
    dtype_name = next((text for text, kind in DTYPES.items() if kind == plan.dtype and kind), None)
    if dtype_name is None and plan.to == "safetensors":
        dtype_name = "float32"
    if dtype_name is not None:
        config |= {key: dtype_name for key in ("dtype", "torch_dtype") if key in config} or {"dtype": dtype_name}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _carry_files(source.folder, folder)
    return _certify(plan, folder, quantization)


_LEGACY_KEYS = {"quantization_config", "compression_config"}


def _write_dense(plan: _Plan, writer: _Writer, name: str, linear: QuantizedLinear) -> None:
    dtype = plan.dtype or "F32"
    write = writer.tensor(f"{name}.weight", dtype, linear.shape, math.prod(linear.shape) * _FLOATS[dtype])
    for start, stop in _blocks(*linear.shape):
        write(_cast(linear.rows(start, stop).dequantize(), dtype, f"{name}.weight", plan.lossy))


def _carry_files(source: Path, folder: Path) -> None:
    """Copy the files that are neither weights nor rewritten: tokenizer, templates, license, code."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS and path.name not in _REWRITTEN and path.name[0] != ".":
            shutil.copyfile(path, folder / path.name)


def _quantization(plan: _Plan) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of the target."""
    if plan.to == "safetensors":
        return None
    kept = [name.removesuffix(".weight") for name, info in plan.carried.items() if _is_linear(name, info)]
    if not any(name.rpartition(".")[2] == "lm_head" for name in (*plan.modules, *kept)):
        kept.append("lm_head")  # which has no tensor where it shares the embedding's
    quantized = "\n".join(plan.modules)
    listed = [name for name in kept if name not in quantized]
    if len(listed) < len(kept):  # vLLM searches module names for these names
        others = [name for name in kept if name in quantized]
        more = f" and {len(others) - 1} more are" if len(others) > 1 else " is"
        plan.notes.append(
            f"{others[0]}{more} not quantized and not listed in modules_to_not_convert: readers would take quantized "
            "modules whose names begin in the same way for listed ones, too"
        )
    return {
        "quant_method": "awq",
        "bits": _BITS,
        "group_size": plan.group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": listed or None,
    }


def _is_linear(name: str, info: TensorInfo) -> bool:
    """Return whether a tensor may be the weight of a linear layer: two dimensions, and not an embedding by its name."""
    if not name.endswith(".weight") or len(info.shape) != 2 or info.dtype not in _FLOATS:
        return False
    return not re.search(r"(embed|wte|wpe|norm)[^.]*\.weight$", name)


# --------------------------------------------------------------------------------------------------------- certificate


def _certify(plan: _Plan, folder: Path, quantization: dict[str, Any] | None) -> Certificate:
    """Compare both checkpoints value by value, from their files.

    Raises:
        OutputError: If the target lacks a tensor, has one too many, or differs although nothing was allowed to.
    """
    source = plan.source
    certificate = Certificate(
        source.name, folder, plan.method, plan.to, quantization or {}, dropped=plan.dropped, notes=plan.notes
    )
    with open_checkpoint(folder) as target:
        modules = quantized_modules(target.tensors, quantization)
        expected = plan.modules.keys() if plan.to == "awq" else set[str]()
        weights = {f"{name}.weight" for name in plan.modules} if plan.to == "safetensors" else set[str]()
        parts = {tensor for module in modules.values() for tensor in module.parts.values()}
        if modules.keys() != expected or target.tensors.keys() - parts != plan.carried.keys() | weights:
            odd = (modules.keys() ^ expected) | ((target.tensors.keys() - parts) ^ (plan.carried.keys() | weights))
            raise OutputError(f"the target does not hold what it should, first {min(odd)}; please report this")
        for name, module in plan.modules.items():
            linear, compared = _load(source, module), Compared(name)
            if plan.to == "safetensors":
                start = 0
                for chunk in target.chunks(f"{name}.weight", 4 * _ROWS):
                    values = to_floats(chunk, target.tensors[f"{name}.weight"].dtype).reshape(-1, linear.shape[1])
                    compared.add(linear.rows(start, start + len(values)).dequantize(), values)
                    start += len(values)
            else:
                written = _load(target, modules[name])
                for start, stop in _blocks(*linear.shape):
                    compared.add(linear.rows(start, stop).dequantize(), written.rows(start, stop).dequantize())
            certificate.modules.append(compared)
        for name, info in plan.carried.items():
            compared, there = Compared(name), target.tensors[name]
            if there.dtype == info.dtype:
                compared.values = math.prod(info.shape)
                if not source.equals(info, target, there):
                    raise OutputError(f"tensor {name} was carried over and differs; please report this")
            else:
                own = source.chunks(info, _ROWS * _FLOATS[info.dtype])  # equally many values of both at a time
                for mine, theirs in zip(own, target.chunks(there, _ROWS * _FLOATS[there.dtype]), strict=True):
                    compared.add(to_floats(mine, info.dtype), to_floats(theirs, there.dtype))
            certificate.tensors.append(compared)
    if not plan.lossy and not certificate.exact:
        raise OutputError(f"{certificate.worst.name} differs though no loss was allowed; please report this")
    return certificate
