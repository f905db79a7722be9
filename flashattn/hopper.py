"""The forward kernel for Hopper (compute capability 9.0), in Gluon. Chapter 16 builds it step by step.

Triton decides which warps do what, when tiles are copied and where they lie. Gluon, which comes with Triton, leaves all
of that to the kernel. Here one warp copies tiles and two or three groups of four warps, each with 64 rows of its own,
multiply; a group computes softmax while the matrix units work for the others.
"""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from .configs import hopper_config, multiprocessors
from .launch import Launch
from .primitives import LOG2E, LOWEST, SIZES, loop_bounds, natural_log, row_has_key, score_mask, stats_row

ROWS = gl.constexpr(64)  # the rows of a group: what one of its instructions multiplies
HUGE = gl.constexpr(2.0**28)  # see _softmax_update
GLUON_TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
SINGLE = ("lse_log2", "delta", "dq_sum")  # what is fp32 of all that is copied as boxes
OPTIONAL = (gl.tensor, gl.constexpr)  # a number, or None where a call has none


@aggregate
class _Call:
    """The sizes of the call and of its tiles, which every warp needs to know. ROWS * GROUPS queries make a tile."""

    n_heads: gl.tensor
    group: gl.tensor
    n_blocks: gl.tensor
    n_tiles: gl.tensor
    chunk: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    window_left: OPTIONAL
    window_right: OPTIONAL
    BLOCK_N: gl.constexpr
    BLOCK_D: gl.constexpr
    BLOCK_DV: gl.constexpr
    GROUPS: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, n_heads, group, n_blocks, n_tiles, chunk, seqlen_q, seqlen_k, window_left, window_right,
        BLOCK_N, BLOCK_D, BLOCK_DV, GROUPS, STAGES,
    ):  # fmt: skip
        self.n_heads, self.group = n_heads, group
        self.n_blocks, self.n_tiles, self.chunk = n_blocks, n_tiles, chunk
        self.seqlen_q, self.seqlen_k = seqlen_q, seqlen_k
        self.window_left = gl.constexpr(None) if window_left is None else window_left
        self.window_right = gl.constexpr(None) if window_right is None else window_right
        self.BLOCK_N, self.BLOCK_D, self.BLOCK_DV = gl.constexpr(BLOCK_N), gl.constexpr(BLOCK_D), gl.constexpr(BLOCK_DV)
        self.GROUPS, self.STAGES = gl.constexpr(GROUPS), gl.constexpr(STAGES)

    @gluon.jit
    def locate(self, tile):
        """Return (batch, head, first query) of a tile.

        Tiles go through the heads chunk by chunk, so that the keys and values that are read at one time fit the cache;
        within a chunk the last queries come first, which under a causal mask see the most keys.
        """
        first = tile // (self.chunk * self.n_blocks) * self.chunk
        n = gl.minimum(self.chunk, self.n_tiles // self.n_blocks - first)
        i = tile - first * self.n_blocks
        head = first + i % n
        return head // self.n_heads, head % self.n_heads, (self.n_blocks - 1 - i // n) * (ROWS * self.GROUPS)

    @gluon.jit
    def key_blocks(self, start_m):
        """Return (first key, number of blocks) of the keys that the tile at start_m sees: one block at least."""
        begin, _, _, end = loop_bounds(
            start_m, self.seqlen_k, self.seqlen_k - self.seqlen_q, self.window_left, self.window_right,
            ROWS * self.GROUPS, self.BLOCK_N,
        )  # fmt: skip
        return begin, gl.maximum(gl.cdiv(end - begin, self.BLOCK_N), 1)


@aggregate
class _Shared:
    """Tiles in shared memory, and for each a pair of barriers: it is full, and it may be overwritten."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, q_full, q_free, k_full, k_free, v_full, v_free):
        self.q, self.k, self.v = q, k, v
        self.q_full, self.q_free = q_full, q_free
        self.k_full, self.k_free = k_full, k_free
        self.v_full, self.v_free = v_full, v_free


@aggregate
class _Result:
    """Where the output and its statistics go."""

    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    lse_log2_ptr: gl.tensor
    stride_ob: OPTIONAL
    stride_oh: OPTIONAL
    stride_om: OPTIONAL
    HEAD_DIM_V: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, out_ptr, lse_ptr, lse_log2_ptr, stride_ob, stride_oh, stride_om, HEAD_DIM_V):
        self.out_ptr, self.lse_ptr, self.lse_log2_ptr = out_ptr, lse_ptr, lse_log2_ptr
        self.stride_ob, self.stride_oh, self.stride_om = stride_ob, stride_oh, stride_om
        self.HEAD_DIM_V = gl.constexpr(HEAD_DIM_V)


@gluon.jit
def _barriers(N: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate N barriers; each ends a phase after so many arrivals. A wait for the phase before the first returns."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def _copy(desc, coordinates, full, free, tile, phase, BYTES: gl.constexpr):
    """Wait until a tile is free, and have the memory system copy a box there; full completes when it has arrived."""
    mbarrier.wait(free, phase ^ 1)
    mbarrier.expect(full, BYTES)
    tma.async_copy_global_to_shared(desc, coordinates, full, tile)


@gluon.jit
def _load(q_desc, k_desc, v_desc, shared, call):
    """What the loading warp does: keep the tiles in shared memory full."""
    i = 0
    n = 0
    for tile in range(gl.program_id(0), call.n_tiles, gl.num_programs(0)):
        batch, head, start_m = call.locate(tile)
        head_kv = head // call.group
        begin, n_keys = call.key_blocks(start_m)
        for g in gl.static_range(call.GROUPS):
            _copy(
                q_desc, [batch, head, start_m + g * ROWS, 0],
                shared.q_full.index(g), shared.q_free.index(g), shared.q.index(g), n & 1, ROWS * call.BLOCK_D * 2,
            )  # fmt: skip
        for j in range(n_keys):
            stage = i % call.STAGES
            phase = i // call.STAGES & 1
            start_n = begin + (n_keys - 1 - j) * call.BLOCK_N
            _copy(
                k_desc, [batch, head_kv, start_n, 0], shared.k_full.index(stage), shared.k_free.index(stage),
                shared.k.index(stage), phase, call.BLOCK_N * call.BLOCK_D * 2,
            )  # fmt: skip
            _copy(
                v_desc, [batch, head_kv, start_n, 0], shared.v_full.index(stage), shared.v_free.index(stage),
                shared.v.index(stage), phase, call.BLOCK_N * call.BLOCK_DV * 2,
            )  # fmt: skip
            i += 1
        n += 1


@gluon.jit
def _issue_scores(q, zero, shared, i, call):
    """Start S = Q K^T with block i of all blocks of this program."""
    stage = i % call.STAGES
    mbarrier.wait(shared.k_full.index(stage), i // call.STAGES & 1)
    k = shared.k.index(stage).reshape([call.BLOCK_N, call.BLOCK_D])
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _issue_output(p, acc, shared, i, call):
    """Start O += P V with block i of all blocks of this program."""
    stage = i % call.STAGES
    mbarrier.wait(shared.v_full.index(stage), i // call.STAGES & 1)
    v = shared.v.index(stage).reshape([call.BLOCK_N, call.BLOCK_DV])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _hide(s, start_n, full_begin, full_end, offs_m, keys, shift, call):
    """Return the scores of the block at start_n with -inf where a query does not see the key."""
    if (start_n < full_begin) | (start_n >= full_end):
        visible = score_mask(
            (offs_m - start_n)[:, None],
            keys[None, :],
            call.seqlen_k - start_n,
            shift,
            call.window_left,
            call.window_right,
        )
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def _softmax_update(s, factor, power, s_max, l_i):
    """Take one tile of scores into the running maximum and sum: p = 2^(s * factor - m) with one rounding, not two.

    m is the rounded s_max * factor, so p of the largest score is 2^(what m lost), not 1. Where that could be much,
    from HUGE on, the factor gives way to the next power of two, whose products are exact: scores that differ at all
    then differ by so much that either factor makes p 0 or 1.
    Returns (p, alpha, s_max, l_i); alpha is what the accumulator must be multiplied with.
    """
    new_max = gl.maximum(s_max, gl.max(s, axis=1))
    row_factor = gl.where(gl.abs(new_max * factor) < HUGE, factor, power)
    m = gl.maximum(new_max * row_factor, LOWEST)
    p = gl.exp2(gl.fma(s, row_factor[:, None].broadcast_to(s.shape), -m[:, None].broadcast_to(s.shape)))
    alpha = gl.exp2(gl.maximum(s_max * row_factor, LOWEST) - m)
    return p, alpha, new_max, l_i * alpha + gl.sum(p, axis=1)


@gluon.jit
def _compute(g, result, shared, call, factor, power, Q_IN_REGISTERS: gl.constexpr):
    """What group g of four warps does: rows g * ROWS to g * ROWS + ROWS - 1 of each tile of its program.

    S = Q K^T of a block is issued before O += P V of the block before it, so that the matrix units work on the latter
    while this group computes the former's softmax.
    """
    DTYPE: gl.constexpr = shared.q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, call.BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, call.BLOCK_DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // call.BLOCK_DV, call.BLOCK_DV // 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    keys = gl.arange(0, call.BLOCK_N, layout=gl.SliceLayout(0, s_layout))
    zero = gl.full([ROWS, call.BLOCK_N], 0.0, gl.float32, layout=s_layout)
    shift = call.seqlen_k - call.seqlen_q
    i = 0
    n = 0
    for tile in range(gl.program_id(0), call.n_tiles, gl.num_programs(0)):
        batch, head, start_m = call.locate(tile)
        begin, n_keys = call.key_blocks(start_m)
        start_m += g * ROWS
        _, full_begin, full_end, _ = loop_bounds(
            start_m, call.seqlen_k, shift, call.window_left, call.window_right, ROWS, call.BLOCK_N
        )
        offs_m = start_m + gl.arange(0, ROWS, layout=rows)
        s_max = gl.full([ROWS], LOWEST, gl.float32, layout=rows)
        l_i = gl.full([ROWS], 0.0, gl.float32, layout=rows)
        acc = gl.full([ROWS, call.BLOCK_DV], 0.0, gl.float32, layout=o_layout)
        start_n = begin + (n_keys - 1) * call.BLOCK_N

        mbarrier.wait(shared.q_full.index(g), n & 1)
        q = shared.q.index(g).reshape([ROWS, call.BLOCK_D])
        if Q_IN_REGISTERS:
            q = q.load(gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2))
            mbarrier.arrive(shared.q_free.index(g))
        s = _issue_scores(q, zero, shared, i, call)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(shared.k_free.index(i % call.STAGES))
        s = _hide(s, start_n, full_begin, full_end, offs_m, keys, shift, call)
        p, alpha, s_max, l_i = _softmax_update(s, factor, power, s_max, l_i)
        p = gl.convert_layout(p.to(DTYPE), p_layout)
        for _ in range(1, n_keys):
            i += 1
            start_n -= call.BLOCK_N
            s = _issue_scores(q, zero, shared, i, call)
            acc = _issue_output(p, acc, shared, i - 1, call)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(shared.k_free.index(i % call.STAGES))
            s = _hide(s, start_n, full_begin, full_end, offs_m, keys, shift, call)
            p, alpha, s_max, l_i = _softmax_update(s, factor, power, s_max, l_i)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(shared.v_free.index((i - 1) % call.STAGES))
            acc *= gl.convert_layout(alpha, o_rows)[:, None]
            p = gl.convert_layout(p.to(DTYPE), p_layout)
        if not Q_IN_REGISTERS:
            mbarrier.arrive(shared.q_free.index(g))
        acc = _issue_output(p, acc, shared, i, call)

        # The statistics, while the last product runs.
        has_key = row_has_key(offs_m, call.seqlen_k, shift, call.window_left, call.window_right)
        l_i = gl.where(has_key, l_i, 1.0)
        m = s_max * factor
        # What m lost in rounding: the backward pass, which rounds the product too, must find p of the largest score.
        lost = gl.fma(s_max, gl.full([ROWS], 0.0, gl.float32, layout=rows) + factor, -m)
        lse_log2 = m + (gl.log2(l_i) - gl.where(gl.abs(m) < HUGE, lost, 0.0))
        exists = offs_m < call.seqlen_q
        lse = gl.where(has_key, natural_log(lse_log2), float("-inf"))
        gl.store(result.lse_ptr + (batch.to(gl.int64) * call.n_heads + head) * call.seqlen_q + offs_m, lse, mask=exists)
        stats = stats_row(batch.to(gl.int64), head, call.n_heads, call.seqlen_q)
        gl.store(result.lse_log2_ptr + stats + offs_m, gl.where(has_key, lse_log2, float("inf")), mask=exists)

        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.v_free.index(i % call.STAGES))
        i += 1
        n += 1
        # A row without keys has in acc what the hidden block left there, NaN perhaps.
        has_key = gl.convert_layout(has_key.to(gl.int32), o_rows) != 0
        out = gl.where(has_key[:, None], acc / gl.convert_layout(l_i, o_rows)[:, None], 0.0)
        out = gl.convert_layout(out.to(DTYPE), store_layout)
        offs_m = start_m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, store_layout))
        offs_d = gl.arange(0, call.BLOCK_DV, layout=gl.SliceLayout(0, store_layout))
        ptrs = result.out_ptr + batch.to(gl.int64) * result.stride_ob + head.to(gl.int64) * result.stride_oh
        ptrs += offs_m.to(gl.int64)[:, None] * result.stride_om + offs_d[None, :]
        gl.store(ptrs, out, mask=(offs_m < call.seqlen_q)[:, None] & (offs_d < result.HEAD_DIM_V)[None, :])


@gluon.jit(do_not_specialize=[*SIZES, "n_blocks", "n_tiles", "chunk"])
def _hopper_fwd_kernel(
    out_ptr, lse_ptr, lse_log2_ptr, q_desc, k_desc, v_desc, stride_ob, stride_oh, stride_om,
    n_heads, group, n_blocks, n_tiles, chunk, seqlen_q, seqlen_k, window_left, window_right, factor, power,
    HEAD_DIM_V: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, REGISTERS: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute the output and its log-sum-exp, ROWS * GROUPS rows of one head after the other.

    Grid: any number of programs up to n_tiles = batch * n_heads * n_blocks; each takes every so-manieth tile. REGISTERS
    is what a thread of a computing group may use; the loading warp makes do with 24.
    Source: Shah et al. 2024 (FlashAttention-3), algorithms 1 and 2.
    """
    call = _Call(
        n_heads, group, n_blocks, n_tiles, chunk, seqlen_q, seqlen_k, window_left, window_right,
        BLOCK_N, BLOCK_D, BLOCK_DV, GROUPS, STAGES,
    )  # fmt: skip
    result = _Result(out_ptr, lse_ptr, lse_log2_ptr, stride_ob, stride_oh, stride_om, HEAD_DIM_V)
    shared = _Shared(
        gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout),
        _barriers(GROUPS, 1), _barriers(GROUPS, 1),
        _barriers(STAGES, 1), _barriers(STAGES, GROUPS),
        _barriers(STAGES, 1), _barriers(STAGES, GROUPS),
    )  # fmt: skip
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (0, result, shared, call, factor, power, Q_IN_REGISTERS)),
                (_compute, (1, result, shared, call, factor, power, Q_IN_REGISTERS)),
                (_load, (q_desc, k_desc, v_desc, shared, call)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (0, result, shared, call, factor, power, Q_IN_REGISTERS)),
                (_compute, (1, result, shared, call, factor, power, Q_IN_REGISTERS)),
                (_compute, (2, result, shared, call, factor, power, Q_IN_REGISTERS)),
                (_load, (q_desc, k_desc, v_desc, shared, call)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def layouts_of(boxes, dtype):
    """Return {name: how its box lies in shared memory}: so that its columns can be read without bank conflicts.

    dtype: torch's, of the tensors of a call; its statistics and sums are fp32.
    """
    half = GLUON_TYPES[dtype]
    types = {name: gl.float32 if name in SINGLE else half for name in boxes}
    return {name: gl.NVMMASharedLayout.get_default_for(list(box), types[name]) for name, box in boxes.items()}


def boxes_of(cfg):
    """Return {name: shape of a box} of what the kernel loads."""
    tiles = dict(q=(ROWS.value, cfg.block_d), k=(cfg.block_n, cfg.block_d), v=(cfg.block_n, cfg.block_dv))
    return {name: (1, 1, *tile) for name, tile in tiles.items()}


def decide_forward(tensors, scale, window_left, window_right):
    """Return the one launch of a forward pass, in a list, of a call that ``backends.why_not_hopper`` lets pass."""
    q, v, out = tensors["q"], tensors["v"], tensors["out"]
    batch, n_heads, seqlen_q, head_dim = q.shape
    n_heads_kv, seqlen_k, head_dim_v = v.shape[1:]
    masked = window_left is not None or window_right is not None
    cfg = hopper_config(head_dim, head_dim_v, seqlen_q, masked=masked)
    n_blocks = triton.cdiv(seqlen_q, ROWS.value * cfg.groups)
    n_tiles = batch * n_heads * n_blocks
    group = n_heads // n_heads_kv
    boxes = boxes_of(cfg)
    factor = scale * LOG2E.value
    numbers = (
        *out.stride()[:3], n_heads, group, n_blocks, n_tiles, cfg.chunk * group, seqlen_q, seqlen_k,
        window_left, window_right, factor, 2.0 ** math.ceil(math.log2(factor)),
    )  # fmt: skip
    return [
        Launch(
            _hopper_fwd_kernel,
            grid=min(n_tiles, multiprocessors(q.device.index)) if cfg.persistent else n_tiles,
            boxes=boxes,
            numbers=numbers,
            constants=dict(HEAD_DIM_V=head_dim_v, DTYPE=GLUON_TYPES[q.dtype]) | cfg.launch(),
            layouts=layouts_of(boxes, q.dtype),
        )
    ]
