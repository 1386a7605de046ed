# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""Helpers of the Triton kernels: codes ↔ numbers by integer operations, exact on every target.

Triton's interpreter cuts bfloat16 instead of rounding it, multiplies bfloat16 matrices as if they were integers and
rounds FP8 wrongly (3.9).  So kernels know how they run: ``DOT`` is the type of the factors of a matrix product,
float32 under the interpreter, and conversions the interpreter gets wrong are done on bits there.
"""

import triton
import triton.language as tl


@triton.jit
def widen(raw, ODD: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr, NATIVE: tl.constexpr):
    """Convert elements of a cache to numbers of type ``DOT``, without their scale.

    Codes lie in pairs: two of 8 bits in a uint16, two of 4 bits in a uint8; ``ODD`` takes the upper one.  All are
    exact in float16.  ``NATIVE``: how the target converts this FP8 type itself (:meth:`Target.native`).
    """
    if FORMAT == "bf16":
        if tl.bfloat16 == DOT:
            x = raw
        else:
            x = (raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(DOT)
    elif FORMAT == "fp8_e4m3" or FORMAT == "fp8_e4m3fnuz":
        FNUZ: tl.constexpr = FORMAT == "fp8_e4m3fnuz"
        if NATIVE == "ptx":
            # bytes 0 and 2 (odd: 1 and 3) of two pairs, converted at once; the compiler takes five instructions for it
            x = tl.inline_asm_elementwise(
                "{ .reg .b32 t; .reg .b16 codes, none; prmt.b32 t, $1, 0, 0x4431; mov.b32 {codes, none}, t; "
                "cvt.rn.f16x2.e4m3x2 $0, codes; }"
                if ODD
                else "{ .reg .b32 t; .reg .b16 codes, none; prmt.b32 t, $1, 0, 0x4420; mov.b32 {codes, none}, t; "
                "cvt.rn.f16x2.e4m3x2 $0, codes; }",
                "=r,r",
                [raw],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            ).to(DOT)
        elif NATIVE == "cast":
            FP8: tl.constexpr = tl.float8e4b8 if FNUZ else tl.float8e4nv
            x = (raw >> (8 * ODD)).to(tl.uint8).to(FP8, bitcast=True).to(DOT)
        else:
            # The same bits in a float16, whose exponent bias is larger by 8 (fnuz: by 7).
            code = raw if ODD else raw << 8
            half = ((code & 0x8000) | ((code >> 1) & 0x3F80)).to(tl.uint16).to(tl.float16, bitcast=True)
            x = half.to(DOT) * (128.0 if FNUZ else 256.0)
            x = tl.where((code & 0xFF00) == 0x8000 if FNUZ else (code & 0x7F00) == 0x7F00, float("nan"), x).to(DOT)
    elif FORMAT == "int4" or FORMAT == "int8":
        # An integer in the low bits of the float16 1024 adds itself to it; the sign bit, flipped, makes it positive.
        BITS: tl.constexpr = 4 if FORMAT == "int4" else 8
        SIGN: tl.constexpr = 1 << (BITS - 1)
        code = (raw.to(tl.uint16) >> (BITS * ODD)) & (2 * SIGN - 1)
        x = ((code ^ SIGN) | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True).to(DOT) - (1024.0 + SIGN)
        x = x.to(DOT)
    else:
        x = raw.to(DOT)
    return x


@triton.jit
def nearest(x):
    """Round float32 ``|x| < 2^22`` to the nearest integer, half to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def narrow(x, OUT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round float32 to ``OUT``, to nearest, half to even."""
    if INTERPRETED and tl.bfloat16 == OUT:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x != x, 0x7FC0, bits).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(OUT)
    return y


@triton.jit
def token_scale(amax, TOP: tl.constexpr, INTEGER: tl.constexpr):
    """amax / top as float16: integers to nearest, floats rounded up and 1 for 0; within [2^-24, 65504]."""
    exact = tl.div_rn(amax, TOP + amax * 0)
    if INTEGER:
        exact = tl.where(amax != amax, amax, tl.minimum(tl.maximum(exact, 5.9604644775390625e-08), 65504.0))
        half = exact.to(tl.float16)
    else:
        exact = tl.minimum(tl.maximum(exact, 5.9604644775390625e-08), 65504.0)
        near = exact.to(tl.float16)
        # positive float16 numbers are in the order of their bit patterns
        bits = near.to(tl.int16, bitcast=True)
        up = tl.where(near.to(tl.float32) < exact, bits + 1, bits).to(tl.int16).to(tl.float16, bitcast=True)
        half = tl.where(amax == 0, 1.0, up.to(tl.float32)).to(tl.float16)
    return half


@triton.jit
def encode_fp8(x, FNUZ: tl.constexpr):
    """Encode float32 as e4m3 codes (uint8): to nearest, half to even, saturating. NaN stays NaN."""
    TOP: tl.constexpr = 240.0 if FNUZ else 448.0
    TINY: tl.constexpr = 0.0078125 if FNUZ else 0.015625  # the smallest normal number
    MAGIC: tl.constexpr = 8192.0 if FNUZ else 16384.0  # whose neighbours in float32 are one subnormal step apart
    BIAS: tl.constexpr = 119 if FNUZ else 120
    size = tl.minimum(tl.where(x == x, tl.abs(x), 0.0), TOP)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).to(tl.int32) - (BIAS << 3)
    small = (size + MAGIC).to(tl.int32, bitcast=True) - tl.full(size.shape, MAGIC, tl.float32).to(
        tl.int32, bitcast=True
    )
    code = tl.where(size < TINY, small, normal)
    negative = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32) << 7
    if FNUZ:
        code = tl.where(x != x, 0x80, code | tl.where(code == 0, 0, negative))
    else:
        code = tl.where(x != x, 0x7F, code) | negative
    return code.to(tl.uint8)


@triton.jit
def encode_int(x, TOP: tl.constexpr):
    """Encode float32 as integer codes (int32) in ``[-TOP, TOP]``: to nearest, half to even; 0 for NaN."""
    inside = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -TOP), TOP)
    return nearest(inside).to(tl.int32)
