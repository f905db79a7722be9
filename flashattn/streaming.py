"""Read memory as fast as the device can, and do next to nothing with it: what decoding is held to."""

import torch
import triton
import triton.language as tl

BLOCK = 2048  # numbers of 4 bytes that a program loads at once: 16 in each of 128 threads
WANTED_PROGRAMS, MOST_BLOCKS = 1024, 16


@triton.jit
def _read_kernel(a_ptr, b_ptr, out_ptr, n_numbers, N_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up N_BLOCKS blocks of two arrays of int32, and store one sum a thread, so that nothing is left out."""
    start = tl.program_id(0).to(tl.int64) * (N_BLOCKS * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for i in tl.static_range(N_BLOCKS):
        offs = start + i * BLOCK
        mask = offs < n_numbers
        total += tl.load(a_ptr + offs, mask=mask, other=0) + tl.load(b_ptr + offs, mask=mask, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def read(a, b):
    """Read two contiguous tensors of as many bytes each, a multiple of 4; return a number a program, on the device."""
    a, b = (x.view(-1).view(torch.int32) for x in (a, b))
    n_blocks = 1
    while n_blocks < MOST_BLOCKS and a.numel() > 2 * n_blocks * BLOCK * WANTED_PROGRAMS:
        n_blocks *= 2
    n_programs = triton.cdiv(a.numel(), n_blocks * BLOCK)
    out = torch.empty(n_programs, dtype=torch.int32, device=a.device)
    _read_kernel[(n_programs,)](a, b, out, a.numel(), N_BLOCKS=n_blocks, BLOCK=BLOCK, num_warps=4)
    return out
