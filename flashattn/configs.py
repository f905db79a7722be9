"""Block sizes, warps and pipeline stages as plain functions of what is known before a launch.

Nothing is tuned at call time: the same call always runs the same kernel. The numbers come from compiling for each
target without one (registers, spills, shared memory) and from a sweep on an H200.
"""

import functools
from typing import NamedTuple

import torch


class Target(NamedTuple):
    """What the choice of blocks needs to know about a GPU.

    arch: compute capability as an integer, 90 for 9.0. shared_bytes: shared memory one block may use.
    """

    arch: int
    shared_bytes: int


class BlockConfig(NamedTuple):
    """A launch: block_m queries by block_n keys, head_dim padded to block_d, and how the compiler schedules it."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


# Shared memory per block after opt-in, in bytes. CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability".
SHARED_BYTES = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


INTERPRETER = Target(arch=0, shared_bytes=0)


@functools.lru_cache
def _target_of_cuda(index):
    properties = torch.cuda.get_device_properties(index)
    return Target(properties.major * 10 + properties.minor, properties.shared_memory_per_block_optin)


def target_of(device):
    """Return the Target of a torch device; the CPU stands for the interpreter."""
    return _target_of_cuda(device.index) if device.type == "cuda" else INTERPRETER


# (direction, padded head_dim) -> (block_m, block_n, num_warps, num_stages), smallest padded head_dim first. Each was
# compiled for its targets without a GPU (tests/test_targets.py): it fits the shared memory and, in fp16 and bf16 from
# compute capability 8.0 on, spills no registers.
HOPPER = {
    ("forward", 64): (64, 64, 4, 3), ("forward", 128): (64, 64, 4, 3), ("forward", 256): (64, 64, 8, 2),
    ("dkdv", 64): (32, 64, 4, 2), ("dkdv", 128): (32, 128, 8, 2), ("dkdv", 256): (32, 32, 8, 2),
    ("dq", 64): (64, 64, 4, 3), ("dq", 128): (128, 64, 8, 3), ("dq", 256): (64, 64, 8, 2),
}  # fmt: skip
# Without a causal mask larger blocks or deeper pipelines are faster.
HOPPER_FULL = HOPPER | {
    ("forward", 64): (64, 128, 4, 2), ("forward", 128): (128, 64, 8, 2),
    ("dkdv", 64): (32, 64, 4, 3), ("dq", 64): (128, 64, 8, 3),
}  # fmt: skip
# Everything else with tensor cores, down to 99 KiB of shared memory (8.6, 8.9, 12.0).
PORTABLE = {
    ("forward", 64): (64, 64, 4, 2), ("forward", 128): (64, 64, 8, 2), ("forward", 256): (32, 32, 8, 2),
    ("dkdv", 64): (32, 64, 8, 2), ("dkdv", 128): (32, 64, 8, 2), ("dkdv", 256): (16, 32, 8, 2),
    ("dq", 64): (64, 64, 4, 2), ("dq", 128): (64, 64, 8, 2), ("dq", 256): (32, 32, 8, 2),
}  # fmt: skip
# Compute capability 10.x compiles these two otherwise: with the blocks above they spill.
BLACKWELL = PORTABLE | {("forward", 256): (64, 64, 8, 2), ("dkdv", 128): (32, 32, 8, 2)}
# fp32 products, and everything on compute capability 7.5, run on the ordinary cores: operands fill the registers.
NO_TENSOR_CORES = {64: (32, 32, 4, 1), 128: (32, 16, 4, 1), 256: (16, 16, 4, 1)}


def block_config(direction, head_dim, dtype, target, *, causal):
    """Choose the launch of one kernel.

    Args:
        direction: "forward", "delta", "dkdv" or "dq".
        head_dim: 1 to 256; tiles are padded to the next power of two, at least 16.
        dtype: torch.float16, torch.bfloat16 or torch.float32.
        target: a :class:`Target`.
        causal: whether the kernel skips keys after the diagonal.

    Returns:
        A :class:`BlockConfig`.
    """
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    width = max(64, block_d)
    if target == INTERPRETER:
        choice = (64, 64, 4, 1)
    elif direction == "delta":
        choice = (64 if dtype != torch.float32 and target.arch >= 80 else 16, 0, 4, 1)
    elif dtype == torch.float32 or target.arch < 80:
        choice = NO_TENSOR_CORES[width]
    elif target.arch == 90:
        choice = (HOPPER if causal else HOPPER_FULL)[direction, width]
    else:
        choice = (BLACKWELL if target.arch // 10 == 10 else PORTABLE)[direction, width]
    block_m, block_n, num_warps, num_stages = choice
    return BlockConfig(block_m, block_n, block_d, num_warps, num_stages)
