"""Block sizes, warps and pipeline stages as plain functions of what is known before a launch.

Nothing is tuned at call time: the same call always runs the same kernel. The numbers come from compiling for each
target without one (registers, spills, shared memory) and from a sweep on an H200.
"""

import functools
from typing import NamedTuple

import torch


class Target(NamedTuple):
    """What the choice of blocks needs to know about a GPU.

    matrix_units: "none"; "mma" (operands in registers: compute capability 8.x, 12.x), "wgmma" (operands in shared
    memory: 9.0), "tcgen05" (accumulators in a memory of their own: 10.x, 11.x) or "mfma" (AMD).
    shared_bytes: shared memory that one block may use. registers: 32-bit registers that one block may use.
    """

    name: str
    matrix_units: str
    shared_bytes: int
    registers: int = 65536

    @property
    def has_boxes(self):
        """Whether tiles are loaded as boxes (TMA) where they can be. Compute capability 10 and 12 could; not tried."""
        return self.matrix_units == "wgmma" or self.name == "interpreter"


class BlockConfig(NamedTuple):
    """A launch: block_m queries by block_n keys, head dimensions padded to block_d and block_dv, and its schedule."""

    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    num_warps: int
    num_stages: int

    def launch(self):
        """Return the keyword arguments of a launch.

        The compiler may not make one rounding of a product and a sum: the largest score, rounded, minus the same score,
        not rounded, is not 0, and at 10^9 it is some 100.
        """
        blocks = dict(BLOCK_M=self.block_m, BLOCK_N=self.block_n, BLOCK_D=self.block_d, BLOCK_DV=self.block_dv)
        return blocks | dict(num_warps=self.num_warps, num_stages=self.num_stages, enable_fp_fusion=False)


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", after opt-in; CDNA 3 ISA reference
# guide. Triton 3.3 and newer does not use the tensor cores of 7.5.
TARGETS = {
    target.name: target
    for target in (
        Target("sm_75", "none", 65536),
        Target("sm_80", "mma", 166912),
        Target("sm_86", "mma", 101376),
        Target("sm_89", "mma", 101376),
        Target("sm_90", "wgmma", 232448),
        Target("sm_100", "tcgen05", 232448),
        Target("sm_120", "mma", 101376),
        Target("gfx942", "mfma", 65536, 131072),
    )
}
INTERPRETER = Target("interpreter", "none", 0, 0)


@functools.lru_cache
def _target_of_gpu(index):
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        return TARGETS.get(name, Target(name, "none", properties.shared_memory_per_block))
    major = properties.major
    units = "none" if major < 8 else {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}.get(major, "mma")
    name = f"sm_{major}{properties.minor}"
    if name in TARGETS and not hasattr(properties, "shared_memory_per_block_optin"):
        return TARGETS[name]  # torch 2.6 does not say how much shared memory a block may use
    return Target(name, units, properties.shared_memory_per_block_optin)


def target_of(device):
    """Return the Target of a torch device; the CPU stands for the interpreter."""
    return _target_of_gpu(device.index) if device.type == "cuda" else INTERPRETER


# (direction, padded head_dim) -> (block_m, block_n, num_warps, num_stages), smallest padded head_dim first. Each was
# compiled for its targets without a GPU (tests/test_targets.py): it fits the shared memory and, in fp16 and bf16 from
# compute capability 8.0 on, spills no registers with Triton 3.6 and 3.7 (but for the one entry that says so).
# Hopper, tuned with tiles loaded as boxes. Row by row these spill, but with one choice for both, results are the same
# to the bit whatever the strides.
HOPPER = {
    ("forward", 64): (64, 128, 4, 2), ("forward", 128): (64, 64, 4, 3), ("forward", 256): (128, 64, 8, 2),
    ("dkdv", 64): (64, 64, 4, 3), ("dkdv", 128): (64, 64, 4, 2), ("dkdv", 256): (64, 64, 8, 2),
    ("dq", 64): (64, 128, 4, 3), ("dq", 128): (128, 64, 8, 3), ("dq", 256): (128, 32, 8, 3),
}  # fmt: skip
# Without a causal mask this is 5 to 10 % faster than the block that spills nothing, though it spills 120 bytes.
HOPPER_FULL = HOPPER | {("forward", 128): (128, 64, 4, 2)}
# Triton 3.6 compiles some products on wgmma so that they read next to their tile, wrong numbers or none of the block's
# memory: tiles 16 wide, and 32 wide or 32 high where the columns of k lie behind each other and the rows of v begin
# anywhere (B47 in tests/test_cases.py). So no side is shorter than 32, nor than 64 where rows are not regular.
HOPPER_IRREGULAR = {("dq", 256): (64, 64, 8, 2)}
# Everything else with tensor cores, down to 99 KiB of shared memory (8.6, 8.9, 12.0).
PORTABLE = {
    ("forward", 64): (64, 64, 4, 2), ("forward", 128): (64, 64, 8, 2), ("forward", 256): (32, 32, 8, 2),
    ("dkdv", 64): (64, 32, 8, 2), ("dkdv", 128): (16, 64, 8, 2), ("dkdv", 256): (16, 32, 8, 1),
    ("dq", 64): (64, 64, 4, 2), ("dq", 128): (64, 64, 8, 2), ("dq", 256): (32, 32, 4, 2),
}  # fmt: skip
# Compute capability 10.x compiles these two otherwise: with the blocks above they spill.
BLACKWELL = PORTABLE | {("forward", 256): (64, 64, 8, 2), ("dkdv", 128): (32, 32, 8, 2)}
# fp32 products, and everything on compute capability 7.5, run on the ordinary cores: operands fill the registers.
SMALL = {64: (32, 32, 4, 1), 128: (32, 16, 4, 1), 256: (16, 16, 4, 1)}

# Attention on e4m3 tensors: rows that share a scale where a whole head does not (a tile lies within such a block), and
# probabilities are rounded as 2^P_SHIFT times what they are (fp8_kernel.py says why).
SCALE_BLOCK = 128
P_SHIFT = 8.0

# The shared memory that the tables for matrix units were tried with. A device with less gets the small blocks.
TRIED_WITH = {"mma": 101376, "wgmma": 232448, "tcgen05": 232448, "mfma": 65536}


def block_config(direction, head_dim, head_dim_v, dtype, target, *, causal, regular=True):
    """Choose the launch of one kernel.

    Args:
        direction: "forward", "dq" or "dkdv".
        head_dim, head_dim_v: 1 to 256; tiles are padded to the next power of two, at least 16 (on
            Hopper's matrix units 32, or 64 if not ``regular``).
        dtype: torch.float16, torch.bfloat16 or torch.float32.
        target: a :class:`Target`.
        causal: whether the kernel skips keys after the diagonal.
        regular: ``primitives.rows_are_regular`` of the tensors that tiles are loaded from.

    Returns:
        A :class:`BlockConfig`.
    """
    on_matrix_units = dtype != torch.float32 and target.matrix_units != "none"
    narrowest = (32 if regular else 64) if on_matrix_units and target.matrix_units == "wgmma" else 16
    block_d, block_dv = (max(narrowest, 1 << (size - 1).bit_length()) for size in (head_dim, head_dim_v))
    width = max(64, block_d, block_dv)
    if target == INTERPRETER:
        choice = (64, 64, 4, 1)
    elif not on_matrix_units or target.shared_bytes < TRIED_WITH[target.matrix_units]:
        choice = SMALL[width]
    elif target.matrix_units == "wgmma":
        choice = ((HOPPER if causal else HOPPER_FULL) | ({} if regular else HOPPER_IRREGULAR))[direction, width]
    else:
        choice = (BLACKWELL if target.matrix_units == "tcgen05" else PORTABLE)[direction, width]
    block_m, block_n, num_warps, num_stages = choice
    return BlockConfig(block_m, block_n, block_d, block_dv, num_warps, num_stages)


class HopperConfig(NamedTuple):
    """A launch of the forward kernel in Gluon: groups of 64 queries by block_n keys, with so many buffers of keys.

    registers: what a thread of a computing group may use. q_in_registers: a group copies its queries there once, and
    the matrix units need not read them from shared memory at every step. persistent: one program for each
    multiprocessor, which takes tile after tile and loads the next one's first blocks during the last one's; else a
    program for each tile, which the GPU hands out as others end. chunk: key heads that are worked on at one time.
    """

    block_n: int
    block_d: int
    block_dv: int
    groups: int
    stages: int
    registers: int
    q_in_registers: bool
    persistent: bool
    chunk: int

    def launch(self):
        """Return the keyword arguments of a launch. There is no fused multiply-add but where the kernel says so."""
        blocks = dict(BLOCK_N=self.block_n, BLOCK_D=self.block_d, BLOCK_DV=self.block_dv, GROUPS=self.groups)
        blocks |= dict(STAGES=self.stages, REGISTERS=self.registers, Q_IN_REGISTERS=self.q_in_registers)
        return blocks | dict(num_warps=4, enable_fp_fusion=False)


def hopper_config(head_dim, head_dim_v, seqlen_q, *, masked):
    """Choose the launch of the forward kernel in Gluon; head dimensions up to 128. Measured on an H200.

    masked: whether the call is causal or has a window.
    """
    block_d, block_dv = (64 if size <= 64 else 128 for size in (head_dim, head_dim_v))
    narrow = max(block_d, block_dv) == 64
    if narrow and not masked and seqlen_q > 1024:
        return HopperConfig(128, 64, 64, 3, 3, 160, q_in_registers=False, persistent=True, chunk=32)
    # Under a mask tiles differ: where many wait, the GPU hands them out more evenly than a fixed order would.
    persistent = not masked or seqlen_q <= 1024
    chunk = 4 if persistent or narrow else 16
    return HopperConfig(128, block_d, block_dv, 2, 3 if narrow else 2, 240, True, persistent, chunk)


class HopperBackwardConfig(NamedTuple):
    """A launch of the backward kernel in Gluon: block_m queries a step, so many buffers of Q and of dO."""

    block_m: int
    block_d: int
    q_stages: int
    do_stages: int
    registers: int

    def launch(self):
        """Return the keyword arguments of a launch."""
        blocks = dict(BLOCK_M=self.block_m, BLOCK_D=self.block_d, Q_STAGES=self.q_stages, DO_STAGES=self.do_stages)
        return blocks | dict(REGISTERS=self.registers, num_warps=4, enable_fp_fusion=False)


def hopper_backward_config(head_dim):
    """Choose the launch of the backward kernel in Gluon; head dimensions up to 128, the same of q and v when padded."""
    return HopperBackwardConfig(128, 64, 3, 2, 240) if head_dim <= 64 else HopperBackwardConfig(64, 128, 3, 2, 240)


@functools.lru_cache
def multiprocessors(index):
    """Return how many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(index).multi_processor_count
