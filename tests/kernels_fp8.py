"""A kernel for tests/test_fp8.py, in a file of its own: importing it imports Triton."""

import triton
import triton.language as tl

from flashattn.fp8_kernel import round_to_e4m3


@triton.jit
def store_rounded(x_ptr, rounded_ptr, N: tl.constexpr):
    """Store N numbers, rounded to e4m3, into rounded_ptr, a tensor of that type."""
    offs = tl.arange(0, N)
    tl.store(rounded_ptr + offs, round_to_e4m3(tl.load(x_ptr + offs)))
