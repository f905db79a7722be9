"""The backward kernels for Hopper (compute capability 9.0), in Gluon. Chapter 16 explains them.

One pass over blocks of keys computes dK, dV and dQ: five matrix products where the portable kernels need seven. dQ of a
query is a sum over all blocks of keys, which different programs compute; they add it up in memory, in fp32. In which
order is left to chance, and dQ's last bits with it. (To have them wait for their turn took longer than the portable
kernels take, in every cell of suite core.)
"""

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from .backward import _delta_of
from .configs import hopper_backward_config
from .hopper import GLUON_TYPES, OPTIONAL, _barriers, layouts_of
from .launch import Launch, Scratch
from .primitives import LOG2E, SIZES, load_tile, loop_bounds, stats_row, tile_offsets

group_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.7 renamed it
BLOCK_N = gl.constexpr(128)  # keys of a program: 64 for each of two groups of four warps
HALF = gl.constexpr(64)
PIECE = gl.constexpr(64 * 64)  # numbers of dQ that a group adds at once
NOWHERE = gl.constexpr(0x40000000)  # a row behind every tensor's last: a box there is not written
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon_core.builtin
def _add_box(desc, coordinates, source, _semantic=None):
    """Have the memory system add a box in shared memory to one in global memory: Gluon has no function for that yet."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, source.handle)


@aggregate
class _Call:
    """The sizes of the call and of its tiles, which every warp needs to know."""

    n_blocks: gl.tensor
    n_heads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    window_left: OPTIONAL
    window_right: OPTIONAL
    BLOCK_M: gl.constexpr
    BLOCK_D: gl.constexpr
    Q_STAGES: gl.constexpr
    DO_STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, n_blocks, n_heads, group, seqlen_q, seqlen_k, window_left, window_right,
        BLOCK_M, BLOCK_D, Q_STAGES, DO_STAGES,
    ):  # fmt: skip
        self.n_blocks, self.n_heads, self.group = n_blocks, n_heads, group
        self.seqlen_q, self.seqlen_k = seqlen_q, seqlen_k
        self.window_left = gl.constexpr(None) if window_left is None else window_left
        self.window_right = gl.constexpr(None) if window_right is None else window_right
        self.BLOCK_M, self.BLOCK_D = gl.constexpr(BLOCK_M), gl.constexpr(BLOCK_D)
        self.Q_STAGES, self.DO_STAGES = gl.constexpr(Q_STAGES), gl.constexpr(DO_STAGES)

    @gluon.jit
    def locate(self):
        """Return (batch, key head, block of keys) of this program."""
        program = gl.program_id(0)
        n_heads_kv = self.n_heads // self.group
        head = program // self.n_blocks
        return head // n_heads_kv, head % n_heads_kv, program % self.n_blocks

    @gluon.jit
    def query_blocks(self, start_n):
        """Return (first query, full_begin, full_end, number of blocks): the queries that see the keys from start_n on.

        Between full_begin and full_end, which is empty where some of the keys do not exist, no mask is needed.
        """
        begin, full_begin, full_end, end = loop_bounds(
            start_n, self.seqlen_q, self.seqlen_q - self.seqlen_k, self.window_right, self.window_left,
            BLOCK_N, self.BLOCK_M,
        )  # fmt: skip
        full_end = gl.where(start_n + BLOCK_N > self.seqlen_k, 0, full_end)
        return begin, full_begin, full_end, gl.maximum(gl.cdiv(end - begin, self.BLOCK_M), 0)

    @gluon.jit
    def queries_of(self, n):
        """Return (first, end): the queries that see key n; none where there is no such key."""
        shift = self.seqlen_k - self.seqlen_q
        first = gl.zeros_like(n)
        end = gl.where(n < self.seqlen_k, self.seqlen_q, 0)
        if self.window_right is not None:
            first = n - (shift + self.window_right)
        if self.window_left is not None:
            end = gl.minimum(end, gl.where(n < self.seqlen_k, n - (shift - self.window_left - 1), 0))
        return first, end


@aggregate
class _Shared:
    """Tiles in shared memory and their barriers. Of the last three, each of the two groups has its own part."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    do_free: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_free: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, do, lse, delta, numbers, kv_full, q_full, q_free, do_full, do_free, ds, ds_full, ds_free, dq
    ):
        self.q, self.k, self.v, self.do, self.lse, self.delta, self.numbers = q, k, v, do, lse, delta, numbers
        self.kv_full, self.q_full, self.q_free, self.do_full, self.do_free = kv_full, q_full, q_free, do_full, do_free
        self.ds, self.ds_full, self.ds_free, self.dq = ds, ds_full, ds_free, dq


@gluon.jit
def _load(q_desc, k_desc, v_desc, do_desc, lse_log2_desc, delta_desc, shared, call):
    """What the loading warp does: K and V of this program once, then Q, dO and their statistics block by block."""
    batch, head_kv, block = call.locate()
    start_n = block * BLOCK_N
    begin, _, _, n_queries = call.query_blocks(start_n)
    mbarrier.expect(shared.kv_full.index(0), 2 * BLOCK_N * call.BLOCK_D * 2)
    for g in gl.static_range(2):
        at = [batch, head_kv, start_n + HALF * g, 0]
        tma.async_copy_global_to_shared(k_desc, at, shared.kv_full.index(0), shared.k.index(g))
        tma.async_copy_global_to_shared(v_desc, at, shared.kv_full.index(0), shared.v.index(g))
    i = 0
    for h in range(call.group):
        head = head_kv * call.group + h
        for j in range(n_queries):
            start_m = begin + j * call.BLOCK_M
            stage = i % call.Q_STAGES
            full = shared.q_full.index(stage)
            mbarrier.wait(shared.q_free.index(stage), (i // call.Q_STAGES & 1) ^ 1)
            mbarrier.expect(full, call.BLOCK_M * (call.BLOCK_D * 2 + 4))
            tma.async_copy_global_to_shared(q_desc, [batch, head, start_m, 0], full, shared.q.index(stage))
            tma.async_copy_global_to_shared(lse_log2_desc, [batch, head, start_m], full, shared.lse.index(stage))
            stage = i % call.DO_STAGES
            full = shared.do_full.index(stage)
            mbarrier.wait(shared.do_free.index(stage), (i // call.DO_STAGES & 1) ^ 1)
            mbarrier.expect(full, call.BLOCK_M * (call.BLOCK_D * 2 + 4))
            tma.async_copy_global_to_shared(do_desc, [batch, head, start_m, 0], full, shared.do.index(stage))
            tma.async_copy_global_to_shared(delta_desc, [batch, head, start_m], full, shared.delta.index(stage))
            i += 1


@gluon.jit
def _issue_dq(g: gl.constexpr, j, shared, call):
    """Start this group's half of dQ = dS K of step j, over all keys: half the columns, or the rows of 128 queries."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, HALF, 16])
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dq = warpgroup_mma_init(gl.full([HALF, HALF], 0.0, gl.float32, layout=layout))
    far = j >> 30  # 0, which the compiler does not know: addresses that all steps share would fill registers
    for half in gl.static_range(2):
        ds_t = shared.ds.index((j & 1) * 2 + half)
        k = shared.k.index(half + far)
        if call.BLOCK_M == HALF:
            k = k._reinterpret(k.dtype, [call.BLOCK_D // HALF, HALF, HALF], tile).index(g)
        else:
            ds_t = ds_t._reinterpret(k.dtype, [2, HALF, HALF], tile).index(g)
            k = k.reshape([HALF, call.BLOCK_D])
        dq = warpgroup_mma(ds_t.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def _stage_dq(g: gl.constexpr, dq, shared):
    """Put dQ into shared memory, in the order (column / 8, warp, row in 8, thread in 4, row / 8 in 2, column in 2).

    So what a thread holds, 16 bytes at a time, lies side by side, and no two of its warp want one bank at once.
    ``_hopper_dq_kernel`` undoes it.
    """
    pieces = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([PIECE // 32, 32])
    shared.dq.index(g).store(pieces)
    fence_async_shared()


@gluon.jit
def _add_dq(g: gl.constexpr, dq_sum_desc, batch, head, start_m, shared, call):
    """Have the memory system add what is staged to dQ of the queries from start_m on."""
    piece = ((batch * call.n_heads + head) * gl.cdiv(call.seqlen_q, call.BLOCK_M) + start_m // call.BLOCK_M) * 2 + g
    _add_box(dq_sum_desc, [gl.where(start_m < call.seqlen_q, piece * (PIECE // 32), NOWHERE), 0], shared.dq.index(g))


@gluon.jit
def _probabilities(s, q_stage, start_m, masked, first_m, end_m, factor, shared, call):
    """Return P^T of a block of scores S^T; 0 where a query does not see the key, or one of the two does not exist."""
    columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    lse_log2 = shared.lse.index(q_stage)._reinterpret(gl.float32, [call.BLOCK_M], FLAT).load(columns)
    p = gl.exp2(s * factor - lse_log2[None, :])
    if masked:
        m = shared.numbers.load(columns)  # 0, 1, 2, ...: computed, they would fill registers through the whole loop
        visible = m[None, :] < (end_m - start_m)[:, None]
        if call.window_right is not None:
            visible = visible & (m[None, :] >= (first_m - start_m)[:, None])
        p = gl.where(visible, p, 0.0)
    return p


@gluon.jit
def _step(
    g: gl.constexpr, j, dk, dv, batch, start_m, dq_head, dq_m, masked, first_m, end_m, factor,
    dq_sum_desc, shared, call,
):  # fmt: skip
    """Do step j: P^T, dS^T and dV of a block of queries, dK of the block before it and dQ of the one before that.

    The matrix units get S^T, dK and dQ to do, behind which this group computes P^T; then dP^T and dV, behind which it
    computes dS^T. dQ comes two steps late, so that the groups, of which each needs the other's dS, can drift apart.
    """
    DTYPE: gl.constexpr = shared.q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, call.BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, call.BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    zero = gl.full([HALF, call.BLOCK_M], 0.0, gl.float32, layout=s_layout)
    far = j >> 30  # see _issue_dq
    buffer = j & 1
    q_stage = j % call.Q_STAGES
    last_stage = (j + call.Q_STAGES - 1) % call.Q_STAGES
    do_stage = j % call.DO_STAGES
    q = shared.q.index(q_stage).reshape([call.BLOCK_M, call.BLOCK_D])
    q_before = shared.q.index(last_stage).reshape([call.BLOCK_M, call.BLOCK_D])
    do = shared.do.index(do_stage).reshape([call.BLOCK_M, call.BLOCK_D])
    k = shared.k.index(g + far).reshape([HALF, call.BLOCK_D])
    v = shared.v.index(g + far).reshape([HALF, call.BLOCK_D])
    mine = 2 * g + buffer
    theirs = 2 * (1 - g) + buffer

    mbarrier.wait(shared.q_full.index(q_stage), j // call.Q_STAGES & 1)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    # Before step 0 there is no dS: what this makes of chance in step 0 is overwritten in step 1.
    dk = warpgroup_mma(shared.ds.index((buffer ^ 1) * 2 + g), q_before, dk, use_acc=j > 1, is_async=True)
    if j > 1:
        mbarrier.wait(shared.ds_full.index(theirs), (j // 2 + 1) & 1)
        dq = _issue_dq(g, j, shared, call)
        s_done = warpgroup_mma_wait(3, deps=[s])
        p = _probabilities(s_done, q_stage, start_m, masked, first_m, end_m, factor, shared, call)
        dq, dk_done = warpgroup_mma_wait(0, deps=[dq, dk])
        _stage_dq(g, dq, shared)
    else:
        s_done = warpgroup_mma_wait(1, deps=[s])
        p = _probabilities(s_done, q_stage, start_m, masked, first_m, end_m, factor, shared, call)
        dk_done = warpgroup_mma_wait(0, deps=[dk])

    mbarrier.wait(shared.do_full.index(do_stage), j // call.DO_STAGES & 1)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), p_layout), do, dv, is_async=True)
    group_barrier()
    if j > 1:
        _add_dq(g, dq_sum_desc, batch, dq_head, dq_m, shared, call)
    mbarrier.arrive(shared.ds_free.index(mine))
    mbarrier.arrive(shared.q_free.index(last_stage), pred=j > 0)
    dp = warpgroup_mma_wait(1, deps=[dp])
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    delta = shared.delta.index(do_stage)._reinterpret(gl.float32, [call.BLOCK_M], FLAT).load(columns)
    ds = p * (dp - delta[None, :])
    if masked:
        ds = gl.where(p != 0.0, ds, 0.0)  # dP of what is not seen may be NaN
    mbarrier.wait(shared.ds_free.index(theirs), j // 2 & 1)  # the other group is done with dS of two steps before
    shared.ds.index(buffer * 2 + g).store(ds.to(DTYPE))
    fence_async_shared()
    tma.store_wait(0)  # the thread that had dQ added waits until it has left; the barrier makes that known to all
    group_barrier()
    mbarrier.arrive(shared.ds_full.index(mine))
    dv = warpgroup_mma_wait(0, deps=[dv])
    mbarrier.arrive(shared.do_free.index(do_stage))
    return dk_done, dv


@gluon.jit
def _compute(g: gl.constexpr, dq_sum_desc, dk_desc, dv_desc, shared, call, factor, scale):
    """What group g of four warps does: dK and dV of its 64 keys, and half of each dQ that the program adds."""
    DTYPE: gl.constexpr = shared.q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, call.BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, call.BLOCK_D, 16])
    batch, head_kv, block = call.locate()
    start_n = block * BLOCK_N
    begin, full_begin, full_end, n_queries = call.query_blocks(start_n)
    start_n += HALF * g
    first_m, end_m = call.queries_of(start_n + gl.arange(0, HALF, layout=gl.SliceLayout(1, s_layout)))
    dk = gl.full([HALF, call.BLOCK_D], 0.0, gl.float32, layout=d_layout)
    dv = gl.full([HALF, call.BLOCK_D], 0.0, gl.float32, layout=d_layout)

    # Where dQ of the last step and the one before goes; before there are any, behind the last row. All four begin
    # with values of their own: Triton takes a name for unchanged that a loop gives the first value of another one.
    head = head_kv * call.group
    start_m = begin
    last_head = head - 1
    last_m = call.seqlen_q + 1
    dq_head = head - 2
    dq_m = call.seqlen_q + 2
    end = begin + n_queries * call.BLOCK_M
    n_steps = call.group * n_queries
    mbarrier.wait(shared.kv_full.index(0), 0)
    for j in range(n_steps):
        masked = (start_m < full_begin) | (start_m >= full_end)
        dk, dv = _step(
            g, j, dk, dv, batch, start_m, dq_head, dq_m, masked, first_m, end_m, factor,
            dq_sum_desc, shared, call,
        )  # fmt: skip
        dq_head = last_head
        dq_m = last_m
        last_head = head
        last_m = start_m
        start_m += call.BLOCK_M
        head = gl.where(start_m == end, head + 1, head)
        start_m = gl.where(start_m == end, begin, start_m)

    # dK of the last step, dQ of the last two.
    q_before = shared.q.index((n_steps + call.Q_STAGES - 1) % call.Q_STAGES).reshape([call.BLOCK_M, call.BLOCK_D])
    dk = warpgroup_mma(shared.ds.index((n_steps + 1) % 2 * 2 + g), q_before, dk, use_acc=n_steps > 1, is_async=True)
    mbarrier.wait(shared.ds_full.index(2 * (1 - g) + (n_steps & 1)), (n_steps // 2 + 1) & 1)
    dq = _issue_dq(g, n_steps, shared, call)
    dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
    _stage_dq(g, dq, shared)
    mbarrier.wait(shared.ds_full.index(2 * (1 - g) + ((n_steps + 1) & 1)), ((n_steps + 1) // 2 + 1) & 1)
    dq = _issue_dq(g, n_steps + 1, shared, call)
    group_barrier()
    _add_dq(g, dq_sum_desc, batch, dq_head, dq_m, shared, call)
    # No one needs this group's V any more: dV and dK leave through its place. Boxes end with the last key.
    v = shared.v.index(g).reshape([HALF, call.BLOCK_D])
    v.store(dv.to(DTYPE))
    fence_async_shared()
    tma.store_wait(0)
    group_barrier()
    tma.async_copy_shared_to_global(dv_desc, [batch, head_kv, start_n, 0], shared.v.index(g))
    dq = warpgroup_mma_wait(0, deps=[dq])
    _stage_dq(g, dq, shared)
    tma.store_wait(0)
    group_barrier()
    _add_dq(g, dq_sum_desc, batch, last_head, last_m, shared, call)
    v.store((gl.where(n_steps > 0, dk, 0.0) * scale).to(DTYPE))
    fence_async_shared()
    group_barrier()
    tma.async_copy_shared_to_global(dk_desc, [batch, head_kv, start_n, 0], shared.v.index(g))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*SIZES, "n_blocks"])
def _hopper_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_log2_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc,
    n_blocks, n_heads, group, seqlen_q, seqlen_k, window_left, window_right, factor, scale,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr,
    DTYPE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of dK and dV of one key head, and add what these keys contribute to dQ.

    Grid: (batch * n_heads_kv * n_blocks,). dq_sum must be 0 before: pieces of 64 x 64 as ``_stage_dq`` orders them, two
    for each block of queries.
    Sources: Dao 2023 (FlashAttention-2), algorithm 2; Shah et al. 2024 (FlashAttention-3), section 3.
    """
    call = _Call(
        n_blocks, n_heads, group, seqlen_q, seqlen_k, window_left, window_right,
        BLOCK_M, BLOCK_D, Q_STAGES, DO_STAGES,
    )  # fmt: skip
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    numbers = gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [4], [0]))
    shared = _Shared(
        gl.allocate_shared_memory(DTYPE, [Q_STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(DTYPE, [2, 1, 1, HALF, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [2, 1, 1, HALF, BLOCK_D], v_desc.layout),
        gl.allocate_shared_memory(DTYPE, [DO_STAGES, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, 1, 1, BLOCK_M], lse_log2_desc.layout),
        gl.allocate_shared_memory(gl.float32, [DO_STAGES, 1, 1, BLOCK_M], delta_desc.layout),
        gl.allocate_shared_memory(gl.int32, [BLOCK_M], FLAT, numbers),
        _barriers(1, 1),
        _barriers(Q_STAGES, 1), _barriers(Q_STAGES, 2),
        _barriers(DO_STAGES, 1), _barriers(DO_STAGES, 2),
        gl.allocate_shared_memory(DTYPE, [4, HALF, BLOCK_M], ds_layout),
        _barriers(4, 1), _barriers(4, 1),
        gl.allocate_shared_memory(gl.float32, [2, PIECE // 32, 32], dq_sum_desc.layout),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (0, dq_sum_desc, dk_desc, dv_desc, shared, call, factor, scale)),
            (_compute, (1, dq_sum_desc, dk_desc, dv_desc, shared, call, factor, scale)),
            (_load, (q_desc, k_desc, v_desc, do_desc, lse_log2_desc, delta_desc, shared, call)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=[*SIZES, "n_pieces"])
def _hopper_delta_kernel(
    out_ptr, do_ptr, dlse_ptr, delta_ptr, dq_sum_ptr,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, n_heads, seqlen_q, n_pieces,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute delta - dLSE of BLOCK_M rows, and write the zeros to which their dQ will be added.

    Grid: (batch * n_heads * n_pieces * 64 / BLOCK_D,): all rows of dq_sum, of which the last may not be queries.
    """
    n_blocks = n_pieces // (BLOCK_D // 64)
    program = tl.program_id(0)
    batch = (program // n_blocks // n_heads).to(tl.int64)
    head = (program // n_blocks % n_heads).to(tl.int64)
    offs_m = program % n_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    out_ptr += batch * stride_ob + head * stride_oh
    do_ptr += batch * stride_dob + head * stride_doh
    out = load_tile(out_ptr, offs_m, offs_d, stride_om, 1, seqlen_q, HEAD_DIM_V)
    do = load_tile(do_ptr, offs_m, offs_d, stride_dom, 1, seqlen_q, HEAD_DIM_V)
    delta = _delta_of(out, do)
    if dlse_ptr is not None:
        dlse_ptr += stats_row(batch, head, n_heads, seqlen_q)
        delta -= tl.load(dlse_ptr + offs_m, mask=offs_m < seqlen_q, other=0.0)
    tl.store(delta_ptr + stats_row(batch, head, n_heads, seqlen_q) + offs_m, delta, mask=offs_m < seqlen_q)
    numbers = tl.arange(0, BLOCK_M * BLOCK_D)
    tl.store(
        dq_sum_ptr + program.to(tl.int64) * (BLOCK_M * BLOCK_D) + numbers, tl.zeros([BLOCK_M * BLOCK_D], tl.float32)
    )


@triton.jit(do_not_specialize=[*SIZES, "n_pieces"])
def _hopper_dq_kernel(
    dq_sum_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqm, n_heads, seqlen_q, n_pieces, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scale and round one piece of dQ, 64 x 64. Grid: (batch * n_heads * n_pieces,)."""
    program = tl.program_id(0)
    batch = (program // n_pieces // n_heads).to(tl.int64)
    head = (program // n_pieces % n_heads).to(tl.int64)
    piece = program % n_pieces
    x = tl.load(dq_sum_ptr + program.to(tl.int64) * 4096 + tl.arange(0, 4096))
    x = tl.reshape(tl.permute(tl.reshape(x * scale, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5)), (64, 64))
    offs_m = piece // (BLOCK_D // 64) * 64 + tl.arange(0, 64)
    offs_d = piece % (BLOCK_D // 64) * 64 + tl.arange(0, 64)
    ptrs = dq_ptr + batch * stride_dqb + head * stride_dqh + tile_offsets(offs_m, offs_d, stride_dqm, 1)
    mask = (offs_m < seqlen_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(ptrs, x.to(dq_ptr.dtype.element_ty), mask=mask)


def boxes_of(cfg):
    """Return {name: shape of a box} of what the kernel loads, stores and adds."""
    boxes = dict.fromkeys(("k", "v", "dk", "dv"), (1, 1, HALF.value, cfg.block_d))
    boxes |= dict.fromkeys(("q", "do"), (1, 1, cfg.block_m, cfg.block_d))
    return boxes | dict.fromkeys(("lse_log2", "delta"), (1, 1, cfg.block_m)) | dict(dq_sum=(PIECE.value // 32, 32))


def decide_backward(tensors, scale, window_left, window_right):
    """Return the launches of a backward pass, of a call that ``backends.why_not_hopper`` lets pass."""
    q, k, do, out, dlse, dq = (tensors[name] for name in ("q", "k", "do", "out", "dlse", "dq"))
    batch, n_heads, seqlen_q, head_dim = q.shape
    n_heads_kv, seqlen_k = k.shape[1:3]
    cfg = hopper_backward_config(head_dim)
    n_pieces = 2 * triton.cdiv(seqlen_q, cfg.block_m)  # of a head
    heads = batch * n_heads
    n_blocks = triton.cdiv(seqlen_k, BLOCK_N.value)
    window = (window_left, window_right)
    boxes = boxes_of(cfg)
    return [
        Scratch("dq_sum", (heads * n_pieces * PIECE.value // 32, 32), torch.float32),
        Launch(
            _hopper_delta_kernel,
            grid=heads * n_pieces * HALF.value // cfg.block_d,
            boxes={},
            numbers=(*out.stride()[:3], *do.stride()[:3], n_heads, seqlen_q, n_pieces),
            constants=dict(HEAD_DIM_V=do.shape[3], BLOCK_M=HALF.value, BLOCK_D=cfg.block_d, num_warps=4),
        ),
        Launch(
            _hopper_bwd_kernel,
            grid=batch * n_heads_kv * n_blocks,
            boxes=boxes,
            numbers=(n_blocks, n_heads, n_heads // n_heads_kv, seqlen_q, seqlen_k, *window, scale * LOG2E.value, scale),
            constants=dict(DTYPE=GLUON_TYPES[q.dtype]) | cfg.launch(),
            layouts=layouts_of(boxes, q.dtype),
        ),
        Launch(
            _hopper_dq_kernel,
            grid=heads * n_pieces,
            boxes={},
            numbers=(*dq.stride()[:3], n_heads, seqlen_q, n_pieces, scale),
            constants=dict(HEAD_DIM=head_dim, BLOCK_D=cfg.block_d, num_warps=4),
        ),
    ]
