"""Numbers by which kernels know the kinds of a cache."""

import triton.language as tl

FP16 = tl.constexpr(0)
BF16 = tl.constexpr(1)
INT8 = tl.constexpr(2)
FP8 = tl.constexpr(3)
INT4 = tl.constexpr(4)
KIND_NUMBERS = {"float16": 0, "bfloat16": 1, "int8": 2, "fp8": 3, "int4": 4}
