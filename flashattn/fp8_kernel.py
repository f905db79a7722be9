"""The forward kernel on e4m3 inputs, and its launcher. Chapter 14 lays it beside ``forward.py``."""

import triton
import triton.language as tl

from . import configs
from .configs import SCALE_BLOCK, BlockConfig, target_of
from .launch import Launch, launch
from .primitives import (
    INTERPRETED,
    LOWEST,
    SIZES,
    dot,
    grid_blocks,
    load_rows,
    load_tile,
    locate_block,
    loop_bounds,
    natural_log,
    row_has_key,
    rows_are_regular,
    rows_to_load,
    score_factors,
    score_mask,
    scores_from,
    store_tile,
)

# Probabilities are at most 1, and e4m3 reaches from 2^-9 to 448. Times 2^8 they use nearly all of that; the sum that
# they are divided by grows by as much, so that nothing has to take the factor out again.
P_SHIFT = tl.constexpr(configs.P_SHIFT)
TINY = tl.constexpr(2.0**-126)  # the least normal fp32 number


@triton.jit
def round_to_e4m3(x):
    """Round fp32 numbers to the nearest of e4m3, ties to even, those over 448 to 448, as a GPU's instruction does.

    The interpreter rounds ties up and makes a number of NaN: there it is done by hand, to 3 bits after the leading one,
    and under 2^-6 to multiples of 2^-9.
    """
    if INTERPRETED:
        is_nan = x != x
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        small = (x + 24576.0) - 24576.0  # 1.5 * 2^14: fp32 numbers of that size are 2^-9 apart
        rounded = tl.where(tl.abs(x) < 0.015625, small, rounded)
        bits = tl.minimum(tl.maximum(rounded, -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.where(is_nan, 0x7F, bits).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def dot_e4m3(a, b):
    """Multiply two e4m3 tiles, (M, K) by (K, N); the result is fp32. The interpreter knows neither it nor their NaN."""
    if INTERPRETED:
        a_is_nan = (a.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F
        b_is_nan = (b.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F
        a, b = tl.where(a_is_nan, float("nan"), a.to(tl.float32)), tl.where(b_is_nan, float("nan"), b.to(tl.float32))
    return dot(a, b)


@triton.jit
def exp2_of_product(s, factor, shift, HEAD_DIM: tl.constexpr):
    """Return 2^(s * factor + shift), where shift is P_SHIFT less the row's largest s * factor, rounded.

    One rounding in place of two saves one instruction of some seven a score, and makes the sum exact but for what that
    largest product lost when it was rounded: that is the same in a whole row and cancels, as long as it is small. Where
    scores are in the millions it is not small, and both are rounded.
    """
    if factor * (448.0 * 448.0 * HEAD_DIM) < 4194304.0:  # 2^22; fp32 numbers below it are at most 1/4 apart
        x = tl.fma(s, tl.broadcast_to(factor, s.shape), tl.broadcast_to(shift, s.shape))
    else:
        x = s * factor + shift
    return tl.exp2(x)


@triton.jit
def block_scale(scale_ptr, start, stride, PER_BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr):
    """Return the scale of the tile that begins at row start, one that there is, of the head scale_ptr points to."""
    if PER_BLOCK:
        return tl.load(scale_ptr + start // SCALE_BLOCK * stride)
    else:
        return tl.load(scale_ptr)


@triton.jit(do_not_specialize=SIZES)
def _attn_fp8_kernel(
    q_ptr, k_ptr, vt_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, k_desc, vt_desc,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vd, stride_vn,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_qsb, stride_qsh, stride_qsm, stride_ksb, stride_ksh, stride_ksn, stride_vsb, stride_vsh, stride_vsn,
    n_heads, group, seqlen_q, seqlen_k, window_left, window_right, score_scale, cap_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    Q_PER_BLOCK: tl.constexpr, K_PER_BLOCK: tl.constexpr, V_PER_BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of the output and their log-sum-exp for one head, from e4m3 q, k and (transposed) v.

    Grid: (batch * n_heads * ceil(seqlen_q / BLOCK_M),).
    Reads its rows of q once and every visible key and value once; writes its rows of out and of lse.
    What differs from ``_attn_fwd_kernel``: a product of two e4m3 tiles stands for itself times their two scales; p is
    rounded to e4m3 before it meets v; v lies (head_dim, seqlen), because a matrix unit reads 8-bit operands along the
    dimension that it sums over; and each product begins a new sum. Hopper keeps some 14 bits of a sum of 8-bit
    products: within one tile that is enough, and from tile to tile acc is summed in fp32.
    Source: Dao 2023 (FlashAttention-2), algorithm 1; Shah et al. 2024 (FlashAttention-3), section 3.3.
    """
    batch, head, sequence, row_q, length_q, start_m = locate_block(
        None, None, seqlen_q, n_heads, BLOCK_M, LAST_FIRST=True
    )
    head_kv = head // group
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head_kv * stride_kh
    vt_ptr += batch * stride_vb + head_kv * stride_vh
    out_ptr += batch * stride_ob + head * stride_oh
    lse_ptr += (batch * n_heads + head) * seqlen_q
    q_scale_ptr += batch * stride_qsb + head * stride_qsh
    k_scale_ptr += batch * stride_ksb + head_kv * stride_ksh
    v_scale_ptr += batch * stride_vsb + head_kv * stride_vsh

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    shift = seqlen_k - seqlen_q

    q = load_tile(q_ptr, offs_m, offs_d, stride_qm, stride_qd, seqlen_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    score_scale *= block_scale(q_scale_ptr, start_m, stride_qsm, Q_PER_BLOCK, SCALE_BLOCK)
    if not K_PER_BLOCK:
        score_scale *= block_scale(k_scale_ptr, 0, 0, False, SCALE_BLOCK)
    m_i = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)

    # Invariant, over the keys seen so far: m_i = max s, l_i = sum 2^(s - m_i + P_SHIFT), acc likewise with v.
    begin, full_begin, full_end, end = loop_bounds(
        start_m, seqlen_k, shift, window_left, window_right, BLOCK_M, BLOCK_N
    )
    end = tl.maximum(end, begin + 1)  # as in _attn_fwd_kernel
    tl.assume(end > begin)
    for start_n in tl.range(begin, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        rows_n = rows_to_load(offs_n, start_m, length_q, seqlen_k, window_left, window_right, BLOCK_M)
        k = load_rows(  # (BLOCK_N, BLOCK_D)
            k_desc, batch, head_kv, start_n, k_ptr, rows_n, offs_d, stride_kn, stride_kd, seqlen_k, HEAD_DIM
        )
        scale_row = tl.minimum(start_n, seqlen_k - 1)  # the tile of rows that see nothing may begin at the end
        factor = score_scale
        if K_PER_BLOCK:
            factor *= block_scale(k_scale_ptr, scale_row, stride_ksn, True, SCALE_BLOCK)
        factor = tl.where(tl.abs(factor) < TINY, TINY, factor)  # a hidden key's -inf times 0 would be NaN
        s, factor, _ = scores_from(dot_e4m3(q, tl.trans(k)), factor, cap_log2)  # (BLOCK_M, BLOCK_N)
        if (start_n < full_begin) | (start_n >= full_end):
            visible = score_mask(offs_m[:, None], offs_n[None, :], seqlen_k, shift, window_left, window_right)
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1) * factor)
        p = exp2_of_product(s, factor, (-m_new + P_SHIFT)[:, None], HEAD_DIM)
        alpha = tl.exp2(m_i - m_new)
        m_i, l_i = m_new, l_i * alpha + tl.sum(p, axis=1)
        vt = load_columns(  # (BLOCK_DV, BLOCK_N)
            vt_desc, batch, head_kv, start_n, vt_ptr, offs_dv, rows_n, stride_vd, stride_vn, seqlen_k, HEAD_DIM_V
        )
        pv = dot_e4m3(round_to_e4m3(p), tl.trans(vt))
        if V_PER_BLOCK:
            pv *= block_scale(v_scale_ptr, scale_row, stride_vsn, True, SCALE_BLOCK)
        acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), pv)

    has_key = row_has_key(offs_m, seqlen_k, shift, window_left, window_right)
    l_i = tl.where(has_key, l_i, 1.0)
    if not V_PER_BLOCK:
        acc *= block_scale(v_scale_ptr, 0, 0, False, SCALE_BLOCK)
    out = tl.where(has_key[:, None], acc / l_i[:, None], 0.0)
    store_tile(out_ptr, out, offs_m, offs_dv, stride_om, stride_od, seqlen_q, HEAD_DIM_V)
    lse = tl.where(has_key, natural_log(m_i + (tl.log2(l_i) - P_SHIFT)), float("-inf"))
    tl.store(lse_ptr + offs_m, lse, mask=offs_m < seqlen_q)


@triton.jit
def load_columns(
    desc, batch, head, start, ptr, offs_r, offs_c, stride_r, stride_c, n_columns, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Load the (head_dim, keys) tile of one head that begins at key start, as a box where there is a descriptor.

    Keys from n_columns on and rows from HEAD_DIM on are 0 and are not read.
    """
    if desc is not None:
        box = desc.load([batch.to(tl.int32), head.to(tl.int32), 0, start])
        return tl.reshape(box, (offs_r.shape[0], offs_c.shape[0]))
    else:
        return tl.trans(load_tile(ptr, offs_c, offs_r, stride_c, stride_r, n_columns, HEAD_DIM))


# padded head_dim -> (block_m, block_n, num_warps, num_stages, most registers a thread or None). block_m and block_n
# divide SCALE_BLOCK: a tile has one scale. With 168 registers three blocks of 4 warps share a multiprocessor, and while
# one multiplies another takes exponentials. Compiled for their targets without spills (tests/test_fp8.py).
HOPPER = {64: (64, 128, 4, 2, 168), 128: (64, 128, 4, 2, 168), 256: (64, 128, 8, 2, None)}
# The same without boxes: the addresses of rows need registers. At 256 they spill all the same. No side of a product on
# wgmma is shorter than 64 (see HOPPER_IRREGULAR in configs.py).
HOPPER_ROWS = {64: (64, 64, 4, 2, None), 128: (128, 64, 8, 2, None), 256: (64, 128, 8, 2, None)}
# Everything else that has e4m3: compiled, and not run.
PORTABLE = {64: (64, 64, 8, 2, None), 128: (64, 64, 8, 2, None), 256: (32, 32, 8, 2, None)}
INTERPRETER = (64, 64, 4, 1, None)


def fp8_config(head_dim, head_dim_v, target, boxes=True):
    """Return (the launch, most registers a thread or None) for tiles that are loaded as boxes, or row by row.

    Tiles are padded to powers of two, at least 64: one instruction sums at least 32 8-bit products.
    """
    block_d, block_dv = (max(64, 1 << (size - 1).bit_length()) for size in (head_dim, head_dim_v))
    width = max(block_d, block_dv)
    if target.name == "interpreter":
        choice = INTERPRETER
    elif target.matrix_units == "wgmma":
        choice = (HOPPER if boxes else HOPPER_ROWS)[width]
    else:
        choice = PORTABLE[width]
    block_m, block_n, num_warps, num_stages, registers = choice
    return BlockConfig(block_m, block_n, block_d, block_dv, num_warps, num_stages), registers


def keys_last(v):
    """Return v transposed, (batch, heads, head_dim, seqlen), its rows regular: where they are not, in a copy."""
    vt = v.mT
    if not rows_are_regular(vt):
        room = triton.cdiv(v.shape[2], 16) * 16  # bytes
        vt = v.new_empty((*v.shape[:2], v.shape[3], room))[..., : v.shape[2]].copy_(vt)
    return vt


def boxes_fit_fp8(target, k, vt, shift, window_left, window_right):
    """Say whether all tiles of k and of v, transposed, can be loaded as boxes; see ``boxes_fit`` in primitives.py."""
    every_key_is_seen = (window_left is None or window_left >= shift) and (window_right is None or window_right >= 0)
    return target.has_boxes and every_key_is_seen and rows_are_regular(k, vt)


def attn_forward_fp8(q, k, v, q_scale, k_scale, v_scale, out, lse, *, scale, softcap, window_left, window_right):
    """Launch the kernel on checked inputs; it writes out and lse. See ``flash_attention_fp8``.

    Scales are (batch, heads, 1) or (batch, heads, blocks). There is at least one key; scale is over 0.
    """
    tensors = dict(q=q, k=k, vt=keys_last(v), q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse)
    launch(_decide_fp8, tensors, scale, softcap, window_left, window_right)


def _decide_fp8(tensors, scale, softcap, window_left, window_right):
    """Return the one launch of a forward pass, in a list."""
    q, k, vt, q_scale, k_scale, v_scale, out, _ = tensors.values()
    batch, n_heads, seqlen_q, head_dim = q.shape
    n_heads_kv, head_dim_v, seqlen_k = vt.shape[1:]
    if out.numel() == 0:
        return []
    target = target_of(q.device)
    fit = boxes_fit_fp8(target, k, vt, seqlen_k - seqlen_q, window_left, window_right)
    cfg, registers = fp8_config(head_dim, head_dim_v, target, fit)
    scales = (q_scale, k_scale, v_scale)
    numbers = (
        *q.stride(), *k.stride(), *vt.stride(), *out.stride(), *(stride for x in scales for stride in x.stride()),
        n_heads, n_heads // n_heads_kv, seqlen_q, seqlen_k, window_left, window_right, *score_factors(scale, softcap),
    )  # fmt: skip
    per_block = (x.shape[2] > 1 for x in scales)
    constants = dict(zip(("Q_PER_BLOCK", "K_PER_BLOCK", "V_PER_BLOCK"), per_block, strict=True))
    constants |= dict(HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, SCALE_BLOCK=SCALE_BLOCK) | cfg.launch()
    constants |= dict(maxnreg=registers) if registers else {}
    return [
        Launch(
            _attn_fp8_kernel,
            grid=grid_blocks(batch, n_heads, seqlen_q, cfg.block_m),
            boxes=dict(k=(1, 1, cfg.block_n, cfg.block_d), vt=(1, 1, cfg.block_dv, cfg.block_n)) if fit else {},
            numbers=numbers,
            constants=constants,
        )
    ]
