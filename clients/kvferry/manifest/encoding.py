"""Encodings: how the stored bytes of a component are read. Each has one name, whatever an engine calls it.

A width is not a meaning: fp8_e4m3fn and fp8_e5m2 both lie in uint8. Two sides are paired only where their encodings are
equal. Bytes that nobody has described are `opaque:NAME`: they may be moved whole, and never cut.
"""

from __future__ import annotations

ENCODINGS = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2,
    "fp8_e4m3fn": 1, "fp8_e4m3fnuz": 1, "fp8_e5m2": 1, "fp8_e5m2fnuz": 1, "e8m0": 1,
    "nvfp4": 1, "mxfp4": 1, "int4": 1, "uint4": 1,
    "int8_per_token_head": 1, "fp8_e4m3fn_per_token_head": 1, "fp8_e4m3fnuz_per_token_head": 1,
    "uint4_per_token_head": 1, "fp32_zero4": 4, "fp8_ds_mla": 1, "nvfp4_ds_mla": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element. An element of nvfp4 and mxfp4 (e2m1), int4 and uint4 is a pair of values, the first in the low
half of the byte; their scales are components of their own, with encodings of their own (fp8_e4m3fn, e8m0, ...).

`_per_token_head`: to be multiplied by a scale of each token and head, an fp32 (without it the scale is the layer's).
uint4_per_token_head: of a vector that vLLM has turned by its randomized Hadamard transform; what means zero is in the
low four bits of the scale's mantissa, an fp32_zero4.

Rows of a token, which nothing divides: fp8_ds_mla, 656 bytes (512 fp8_e4m3fn, an fp32 scale for each 128 of them, 64
bf16); nvfp4_ds_mla, 352 (512 e2m1 in pairs, 64 fp8_e4m3fn, an fp8_e4m3fn scale for each 16 of the 512, permuted)."""

OF_DTYPE = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3fn",
    "float8_e4m3fnuz": "fp8_e4m3fnuz", "float8_e5m2": "fp8_e5m2", "float8_e5m2fnuz": "fp8_e5m2fnuz",
    "float8_e8m0fnu": "e8m0",
}  # fmt: skip
"""The encoding that a dtype names by itself. Integers and bools say nothing: engines keep raw bytes in them."""

ALIASES = OF_DTYPE | {
    "fp8": "fp8_e4m3fn", "fp8_e4m3": "fp8_e4m3fn", "e4m3": "fp8_e4m3fn", "e5m2": "fp8_e5m2", "half": "fp16",
    "float": "fp32", "double": "fp64",
}  # fmt: skip
"""Engines' names of what ENCODINGS has under another; no manifest may use them."""

OPAQUE = "opaque:"


def encoding_of(name: str, whose: str) -> str:
    """The encoding that an engine calls `name` (`fp8` is fp8_e4m3fn); where nobody has described it,
    `opaque:WHOSE.NAME`. On GPUs whose `fp8` is fp8_e4m3fnuz the caller knows better."""
    known = ALIASES.get(name, name)
    return known if known in ENCODINGS else f"{OPAQUE}{whose}.{name}"


def meaning(dtype: str, encoding: str | None) -> str:
    """The encoding of elements of a dtype: `encoding`, else the dtype's own, else opaque."""
    return encoding or OF_DTYPE.get(dtype) or f"{OPAQUE}{dtype}"


def is_opaque(meaning: str) -> bool:
    return meaning.startswith(OPAQUE)


def is_known(encoding: str) -> bool:
    """Whether a manifest may name it."""
    return encoding in ENCODINGS or (is_opaque(encoding) and encoding != OPAQUE)


def fits(dtype: str, itemsize: int, encoding: str) -> bool:
    """Whether elements of this dtype may be so encoded. Float dtypes have their own encoding only, integers any of
    their width; every dtype may be opaque."""
    return is_opaque(encoding) or (encoding == OF_DTYPE.get(dtype, encoding) and ENCODINGS[encoding] == itemsize)
