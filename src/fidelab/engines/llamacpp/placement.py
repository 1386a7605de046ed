"""Where llama.cpp puts weights, and metadata that it overrides: options that are arrays in its C interface.

The texts are those of llama-server's flags.  They are checked without the library and turned into arrays with it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fidelab.core.errors import UsageError
from fidelab.engines.llamacpp.library import function
from fidelab.engines.options import SWITCH, Value, one_of, switched

NUMA = ("distribute", "isolate", "numactl")  # in the order of ggml's numbers, from 1 on
# Tensors of a block that its feed-forward network has: of mixtures of experts, and dense.
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_DENSE = r"\.ffn_(up|down|gate)\."
_KINDS = ("int", "float", "bool", "str")  # of metadata, in the order of llama.cpp's numbers
_MAX_TEXT = 127  # bytes of a key or a text of metadata
_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_DECIMAL = r"\d+(\.\d+)?"
_LAYERS: Value = (lambda text: re.fullmatch(r"[0-9]{1,5}", text) is not None, "a number of layers")

OPTIONS: Mapping[str, Value] = {
    "tensor-split": (
        lambda text: re.fullmatch(rf"{_DECIMAL}([,/]+{_DECIMAL})*", text) is not None,
        "a share for each GPU, as 3,1",
    ),
    "main-gpu": (lambda text: re.fullmatch(r"[0-9]{1,3}", text) is not None, "the number of a GPU"),
    "devices": (
        lambda text: re.fullmatch(r"[\w.:-]+(,[\w.:-]+)*", text) is not None,
        "names of devices with commas between them, or none",
    ),
    "override-tensor": (
        lambda text: all(map(_is_override, text.split(","))),
        "PATTERN=BUFFER, several with commas between them, each PATTERN a regular expression",
    ),
    "cpu-moe": SWITCH,
    "n-cpu-moe": _LAYERS,
    "n-cpu-ffn": _LAYERS,
    "numa": one_of(*NUMA),
    "override-kv": (
        lambda text: all(_metadata(part) is not None for part in text.split(",")),
        "KEY=TYPE:VALUE, several with commas between them, TYPE one of int, float, bool, str",
    ),
}
"""Option → check of its text, and the description of valid texts."""


def _is_override(text: str) -> bool:
    match = re.fullmatch(r"([^=]+)=([^=]+)", text)
    try:
        return match is not None and bool(re.compile(match[1]))
    except re.error:  # llama.cpp would end the process
        return False


def _metadata(text: str) -> tuple[str, int, int | float | bool | str] | None:
    """Return key, number of the type and value of ``KEY=TYPE:VALUE``; ``None`` for another text."""
    match = re.fullmatch(r"([^=]+)=(int|float|bool|str):(.*)", text, re.DOTALL)
    if match is None or max(len(match[1].encode()), len(match[3].encode())) > _MAX_TEXT:
        return None
    key, kind, raw = match.groups()
    read: Mapping[str, Callable[[str], int | float | bool | str]] = {
        "int": int,
        "float": float,
        "bool": {"true": True, "false": False}.__getitem__,
        "str": str,
    }
    try:
        return key, _KINDS.index(kind), read[kind](raw)
    except (KeyError, ValueError):
        return None


def _parts(text: str) -> list[str]:
    return text.split(",") if text else []


def overrides(options: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return patterns of tensors and the buffers that they go to, in the order in which llama.cpp tries them."""
    found = [(part.partition("=")[0], part.partition("=")[2]) for part in _parts(options.get("override-tensor", ""))]
    if switched(options.get("cpu-moe", "no")):
        found.append((_EXPERTS, "CPU"))
    for key, pattern in (("n-cpu-moe", _EXPERTS), ("n-cpu-ffn", _DENSE)):
        found += [(rf"blk\.{layer}{pattern}", "CPU") for layer in range(int(options.get(key, "0")))]
    return found


class _Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p)]


class Placement:
    """Fields of ``llama_model_params`` that options of placement mean.

    ``kept``: objects that have to live until the model is loaded.
    """

    def __init__(self, native: Any, options: Mapping[str, str]) -> None:
        """Build the arrays, and tell llama.cpp about NUMA, which it wants to know before it loads a model.

        Raises:
            UsageError: If this build has no such device or buffer. The message names those that it has.
        """
        self.fields: dict[str, Any] = {}
        self.kept: list[Any] = []
        self._native = native
        if numa := options.get("numa"):
            native.llama_numa_init(1 + NUMA.index(numa))
        if text := options.get("tensor-split"):
            self._tensor_split([float(share) for share in re.split("[,/]+", text)])
        if text := options.get("devices"):
            self._devices(text.split(","))
        if pairs := overrides(options):
            self._overrides(pairs)
        if text := options.get("override-kv"):
            self._metadata(text.split(","))
        if number := options.get("main-gpu"):
            self.fields["main_gpu"] = int(number)

    def _tensor_split(self, shares: Sequence[float]) -> None:
        most = int(self._native.llama_max_devices())
        if len(shares) > most:
            raise UsageError(f"engine llamacpp: tensor-split has {len(shares)} shares, and this build {most} devices")
        array = (ctypes.c_float * most)(*shares)
        self.kept.append(array)
        self.fields["tensor_split"] = array

    def _all_devices(self) -> dict[str, int]:
        """Name → device of ggml."""
        count = function("ggml_backend_dev_count", ctypes.c_size_t)()
        get = function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
        name = function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
        found = [get(n) for n in range(count)]
        return {name(device).decode(): device for device in found}

    def _devices(self, names: Sequence[str]) -> None:
        chosen: list[int] = []
        if list(names) != ["none"]:
            kind = function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
            known = {name: device for name, device in self._all_devices().items() if kind(device) != _CPU}
            for name in names:
                if name not in known:
                    listed = f"it has {', '.join(known)}" if known else "it has none but the CPU: write none"
                    raise UsageError(f"engine llamacpp: this build has no device {name!r}; {listed}")
                chosen.append(known[name])
        array = (ctypes.c_void_p * (len(chosen) + 1))(*chosen, None)
        self.kept.append(array)
        self.fields["devices"] = ctypes.addressof(array)

    def _overrides(self, pairs: Sequence[tuple[str, str]]) -> None:
        buffer = function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
        name = function("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
        known = {name(found).decode(): found for device in self._all_devices().values() if (found := buffer(device))}
        array = (_Override * (len(pairs) + 1))()
        for n, (pattern, where) in enumerate(pairs):
            if where not in known:
                raise UsageError(f"engine llamacpp: this build has no buffer {where!r}; it has {', '.join(known)}")
            array[n] = _Override(pattern.encode(), known[where])
        self.kept.append(array)
        self.fields["tensor_buft_overrides"] = ctypes.addressof(array)

    def _metadata(self, texts: Sequence[str]) -> None:
        structure = self._native.llama_model_kv_override
        array = (structure * (len(texts) + 1))()  # an empty key ends it
        for one, text in zip(array, texts, strict=False):
            found = _metadata(text)
            assert found is not None, "options were checked"
            one.key, one.tag = found[0].encode(), found[1]
            member = ("val_i64", "val_f64", "val_bool", "val_str")[found[1]]
            setattr(one.value, member, found[2].encode() if isinstance(found[2], str) else found[2])
        self.kept.append(array)
        self.fields["kv_overrides"] = array
