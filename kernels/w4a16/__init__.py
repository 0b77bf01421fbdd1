"""INT4 and INT8 weights times fp16 activations: the packed layout, its kernels and its reference."""

from .layout import W4A16Weight, paired_rows
from .ops import dequantize, reserve, w4a16_gated, w4a16_linear
from .ref import dequantize_ref, gated_ref, linear_ref

__all__ = [
    "W4A16Weight",
    "dequantize",
    "dequantize_ref",
    "gated_ref",
    "linear_ref",
    "paired_rows",
    "reserve",
    "w4a16_gated",
    "w4a16_linear",
]
