"""Quantized layers as tensors in the layouts that fidelab reads and does not write."""

from __future__ import annotations

import numpy as np

from fidelab_checkpoints.layouts import Awq, Gptq, Layout, PackQuantized, QuantizedLinear, StoredArray, pack_words


def packed(layout: Layout, linear: QuantizedLinear) -> dict[str, StoredArray]:
    """The tensors of a module, by suffix; the inverse of ``layout.unpack``."""
    if isinstance(layout, Awq):
        return layout.pack(linear)
    if linear.scale_dtype == "BF16":
        raw = (np.ascontiguousarray(linear.scales).view(np.uint32) >> 16).astype(np.uint16)
    else:
        raw = linear.scales.astype({"F16": np.float16, "F32": np.float32}[linear.scale_dtype])
    scales = StoredArray(np.ascontiguousarray(raw), linear.scale_dtype)
    if isinstance(layout, PackQuantized):
        stored = {
            "weight_packed": StoredArray(pack_words(linear.codes, linear.bits, axis=1), "I32"),
            "weight_scale": scales,
            "weight_shape": StoredArray(np.array(linear.shape, np.int64), "I64"),
        }
        if linear.zeros is not None:
            stored["weight_zero_point"] = StoredArray(pack_words(linear.zeros, linear.bits, axis=0), "I32")
        if linear.group_index is not None:
            stored["weight_g_idx"] = StoredArray(linear.group_index, "I32")
        return stored
    assert isinstance(layout, Gptq)
    zeros = np.full(linear.scales.shape, linear.midpoint, np.uint8) if linear.zeros is None else linear.zeros
    zero_words = pack_words(zeros.T, linear.bits, axis=1).view(np.uint32)
    if layout.minus_one:  # a one is subtracted from the words, not from the fields
        ones = np.ones(zero_words.shape[1] * 32 // linear.bits, np.uint8)
        zero_words = zero_words - pack_words(ones, linear.bits, axis=0).view(np.uint32)
    return {
        "qweight": StoredArray(pack_words(linear.codes.T, linear.bits, axis=0), "I32"),
        "qzeros": StoredArray(zero_words.view(np.int32), "I32"),
        "scales": StoredArray(np.ascontiguousarray(scales.values.T), linear.scale_dtype),
        "g_idx": StoredArray(linear.groups.astype(np.int32), "I32"),
    }
