"""The output head of a GGUF file, replayed on states that are rounded as ggml rounds them.

ggml multiplies the blocks of the head with states that it has rounded itself, to 8 bits for most types of the head.
The library's own function rounds them.  The product of both, as float32 numbers, is then the live logits up to
the order of summation, and captures keep the rounded states: at 49,152 tokens and 576 channels 1/43 of rows of
log-probabilities in 16 bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import Array, BFloat16, to_float32
from fidelab.core.errors import EngineError
from fidelab.engines.llamacpp.library import USE_LOGPROBS, LlamaModel, function

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Nats, mean over the rows of a check.  The order of summation costs 1e-11; heads of q4_1 and q5_1 also read sums of the
# rounded state, in 16 bits, which costs 1e-6 where logits reach 50.
_KL = 1e-5
# The numbers of types in ggml's enumeration → the bytes as numbers.
_UNQUANTIZED: Mapping[int, Callable[[Bytes], Array]] = {
    0: lambda raw: raw.view("<f4"),
    1: lambda raw: raw.view("<f2"),
    30: lambda raw: BFloat16(raw.view("<u2")),
}
# The blocks of the types that ggml rounds states to: it reads them in products alone, so it has no function for that.
_BLOCKS: Mapping[int, np.dtype[Any]] = {
    8: np.dtype([("scale", "<f2"), ("codes", "i1", 32)]),  # q8_0
    9: np.dtype([("scale", "<f2"), ("sum", "<f2"), ("codes", "i1", 32)]),  # q8_1
    15: np.dtype([("scale", "<f4"), ("codes", "i1", 256), ("sums", "<i2", 16)]),  # q8_K
}
_CONVERT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _Open(ctypes.Structure):
    """``gguf_init_params``"""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


class _Type(ctypes.Structure):
    """``ggml_type_traits``"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("values", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("bytes", ctypes.c_size_t),
        ("quantized", ctypes.c_bool),
        ("to_float", _CONVERT),
        ("from_float", _CONVERT),
    )


class _CPUType(ctypes.Structure):
    """``ggml_type_traits_cpu``"""

    _fields_ = (("from_float", _CONVERT), ("product", ctypes.c_void_p), ("rounds_to", ctypes.c_int))


class LlamaHead:
    """Logits are ``softcap(scale · (rounded(state) @ weightᵀ))``; ``sentinels`` holds (cosine, KL) of every check.

    Args:
        model, path: the loaded model, and its file.
        weight, tensor: the names of the head's matrix in the file, and of the states in graphs.
        states, live: some states before the head [n, d] and their live logits [n, V].

    Raises:
        EngineError: If the file or this build has no such head, or the states and the head do not give the logits.
    """

    def __init__(self, model: LlamaModel, path: Path, weight: str, tensor: str, states: Floats, live: Floats) -> None:
        self.tensor = tensor
        try:
            self._weight, self._round = _read(path, weight, (live.shape[-1], states.shape[-1]))
        except AttributeError as error:
            raise EngineError(f"this build of llama.cpp has no {error}: {USE_LOGPROBS}") from None
        self.sentinels: list[tuple[float, float]] = []
        self._arrays: dict[str, Array] = {"weight": self._weight}
        self._softcap = model.setting("final_logit_softcapping")
        # Architectures differ in whether they multiply or divide by it.
        named = model.setting("logit_scale")
        factors = [1.0, *((named, 1 / named) if named else ())]
        inputs = self.rounded(states)
        self._scale = min(factors, key=lambda scale: float(np.linalg.norm(self._replay(inputs, scale) - live)))
        self.check(inputs, live)

    def fields(self) -> dict[str, Any]:
        """Return the fields of an answer that describe the head. The arrays are the same every time."""
        return {"head": self._arrays, "softcap": self._softcap, "scale": self._scale}

    def rounded(self, states: Floats) -> Floats:
        """Return rounded states [n, d] to multiply with the head. A row with a non-finite number becomes NaN."""
        inputs = self._round(np.ascontiguousarray(states))
        inputs[~np.isfinite(states).all(axis=-1)] = np.nan
        return inputs

    def check(self, inputs: Floats, live: Floats) -> None:
        """Replay some rows of rounded states and compare with the live logits.

        See docs/metrics/distributions.md#estimators.

        Raises:
            EngineError: If scoring would compute other distributions than the model did.
        """
        usable = ~np.isnan(inputs).any(axis=-1)  # a row of NaN comes from the format and is marked failed by the scorer
        if not usable.any():
            return
        p, q = (x.astype(np.float64) for x in (live[usable], self._replay(inputs[usable], self._scale)))
        norms = np.linalg.norm(p, axis=-1) * np.linalg.norm(q, axis=-1)
        cosine = float(((p * q).sum(axis=-1) / norms).min())
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        kl = max(0.0, float((np.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean()))
        self.sentinels.append((cosine, kl))
        if not kl <= _KL:
            raise EngineError(
                f"hidden state × head does not replay this model's logits (cosine {cosine:.6f}, KL {kl:.2g}): "
                f"{USE_LOGPROBS}"
            )

    def _replay(self, inputs: Floats, scale: float) -> Floats:
        logits = (inputs @ self._weight.T) * np.float32(scale)
        return np.tanh(logits / self._softcap) * np.float32(self._softcap) if self._softcap else logits


def _read(path: Path, name: str, shape: tuple[int, int]) -> tuple[Floats, Callable[[Floats], Floats]]:
    """Matrix [V, d] of this name in a GGUF file, and the type that ggml rounds its inputs to.

    Raises:
        AttributeError: If this build lacks a function.
    """
    kind, raw = _tensor(path, name)
    size = shape[0] * shape[1]
    about = function("ggml_get_type_traits", ctypes.POINTER(_Type), ctypes.c_int)
    of_cpu = function("ggml_get_type_traits_cpu", ctypes.POINTER(_CPUType), ctypes.c_int)
    found = about(kind).contents
    if size // found.values * found.bytes != len(raw):
        raise EngineError(f"{path}: {name} has {len(raw)} bytes, which is not {shape[0]} × {shape[1]}: {USE_LOGPROBS}")
    target = int(of_cpu(kind).contents.rounds_to)
    into, convert = about(target).contents, of_cpu(target).contents.from_float

    def rounded(states: Floats) -> Floats:
        blocks = np.empty(states.size // into.values * into.bytes, dtype=np.uint8)
        convert(states.ctypes.data, blocks.ctypes.data, states.size)
        return _floats(blocks, target).reshape(states.shape)

    def weight() -> Floats:
        floats = np.empty(shape, dtype=np.float32)
        found.to_float(raw.ctypes.data, floats.ctypes.data, size)
        return floats

    return _floats(raw, kind).reshape(shape) if kind in _UNQUANTIZED else weight(), rounded


def _floats(raw: Bytes, kind: int) -> Floats:
    """The numbers of a plain type, or of one that ggml rounds states to."""
    if kind in _UNQUANTIZED:
        return to_float32(_UNQUANTIZED[kind](raw), copy=True)
    if kind not in _BLOCKS:
        raise EngineError(f"llama.cpp rounds states to a type that is unknown here ({kind}): {USE_LOGPROBS}")
    blocks = raw.view(_BLOCKS[kind])
    return np.asarray(blocks["codes"] * blocks["scale"].astype(np.float32)[:, None], dtype=np.float32).ravel()


def _tensor(path: Path, name: str) -> tuple[int, Bytes]:
    """The type and the bytes of a tensor in a GGUF file."""
    pointer = ctypes.c_void_p
    file = function("gguf_init_from_file", pointer, ctypes.c_char_p, _Open)(str(path).encode(), _Open(True, None))
    index = function("gguf_find_tensor", ctypes.c_int64, pointer, ctypes.c_char_p)(file, name.encode()) if file else -1
    if index < 0:
        raise EngineError(f"{path} has no {name}: {USE_LOGPROBS}")
    try:
        kind = function("gguf_get_tensor_type", ctypes.c_int, pointer, ctypes.c_int64)(file, index)
        size = function("gguf_get_tensor_size", ctypes.c_size_t, pointer, ctypes.c_int64)(file, index)
        start = function("gguf_get_tensor_offset", ctypes.c_size_t, pointer, ctypes.c_int64)(file, index)
        start += function("gguf_get_data_offset", ctypes.c_size_t, pointer)(file)
    finally:
        function("gguf_free", None, pointer)(file)
    return kind, np.fromfile(path, dtype=np.uint8, count=size, offset=start)


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
