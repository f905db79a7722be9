"""The backward kernels and their launcher: delta, then dK and dV, then dQ. Chapter 6 derives and explains them.

Every element of every gradient is written by one program that adds in a fixed order, so the result is the same to
the bit each time. The price is that each tile of probabilities is recomputed twice: seven matrix products in all.
"""

import torch
import triton
import triton.language as tl

from .configs import block_config, target_of
from .primitives import LOG2E, dot, key_loop_bounds, load_tile, round_to, score_mask, store_tile


@triton.jit(do_not_specialize=["seqlen_q"])
def _attn_bwd_delta_kernel(
    out_ptr, do_ptr, delta_ptr,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    n_heads, seqlen_q,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute delta = rowsum(dO * O) for BLOCK_M rows of one head.

    Grid: (batch * n_heads * ceil(seqlen_q / BLOCK_M),). Reads its rows of out and do; writes delta.
    Source: Dao 2023 (FlashAttention-2), algorithm 2, line 4.
    """
    n_blocks_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    batch_head = pid // n_blocks_m
    offs_m = pid % n_blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    batch = (batch_head // n_heads).to(tl.int64)
    head = (batch_head % n_heads).to(tl.int64)
    out_ptr += batch * stride_ob + head * stride_oh
    do_ptr += batch * stride_dob + head * stride_doh

    out = load_tile(out_ptr, offs_m, offs_d, stride_om, stride_od, seqlen_q, HEAD_DIM, True)
    do = load_tile(do_ptr, offs_m, offs_d, stride_dom, stride_dod, seqlen_q, HEAD_DIM, True)
    # The diagonal of dO O^T adds in the same order as dP = dO V^T. A row that sees one key has O = V, so dP - delta is
    # exactly 0 there, as it must be; a plain sum leaves the rounding of numbers the size of dO V.
    diagonal = tl.arange(0, BLOCK_M)[:, None] == tl.arange(0, BLOCK_M)[None, :]
    delta = tl.sum(tl.where(diagonal, dot(do, tl.trans(out)), 0.0), axis=1)
    tl.store(delta_ptr + batch_head.to(tl.int64) * seqlen_q + offs_m, delta, mask=offs_m < seqlen_q)


@triton.jit
def _load_row_stats(lse_log2_ptr, delta_ptr, dlse_ptr, offs_m, seqlen_q, HAS_DLSE: tl.constexpr):
    """Load the base-2 lse, delta and dlse of some rows. Rows that do not exist, or see no key, get lse = inf: p = 0."""
    lse_log2 = tl.load(lse_log2_ptr + offs_m, mask=offs_m < seqlen_q, other=float("inf"))
    delta = tl.load(delta_ptr + offs_m, mask=offs_m < seqlen_q, other=0.0)
    dlse = delta
    if HAS_DLSE:
        dlse = tl.load(dlse_ptr + offs_m, mask=offs_m < seqlen_q, other=0.0)
    return tl.where(lse_log2 == float("-inf"), float("inf"), lse_log2), delta, dlse


@triton.jit
def _recompute_p_ds(
    a, b, da, db, lse_log2, delta, dlse, offs_m, offs_n, seqlen_k, shift, scale_log2,
    IS_CAUSAL: tl.constexpr, HAS_DLSE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Return one tile of P = softmax(S) and of dS = P * (dP - delta + dLSE), with S = A B^T and dP = dA dB^T.

    With (a, b, da, db) = (q, k, do, v) the tile is (queries, keys); with (k, q, v, do) it is its transpose, which is
    what dK and dV multiply with. Row statistics and offsets come shaped to broadcast against the tile.
    """
    p = tl.exp2(dot(a, tl.trans(b)) * scale_log2 - lse_log2)
    dp = dot(da, tl.trans(db)) - delta
    if HAS_DLSE:
        dp += dlse
    ds = p * dp
    if MASK:
        visible = score_mask(offs_m, offs_n, seqlen_k, shift, IS_CAUSAL)
        p = tl.where(visible, p, 0.0)
        ds = tl.where(visible, ds, 0.0)
    return p, ds


@triton.jit
def _attn_bwd_dkdv_inner(
    dk, dv, k, v, q_ptr, do_ptr, lse_log2_ptr, delta_ptr, dlse_ptr, lo, hi, offs_n, offs_d,
    stride_qm, stride_qd, stride_dom, stride_dod, seqlen_q, seqlen_k, shift, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DLSE: tl.constexpr, MASK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add what the queries lo..hi-1 contribute to dk and dv of the block's keys.

    Invariant, over the queries seen so far: dv = P^T dO, dk = dS^T Q (without the scale).
    """
    for start_m in tl.range(lo, hi, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr, offs_m, offs_d, stride_qm, stride_qd, seqlen_q, HEAD_DIM, True)
        do = load_tile(do_ptr, offs_m, offs_d, stride_dom, stride_dod, seqlen_q, HEAD_DIM, True)
        lse_log2, delta, dlse = _load_row_stats(lse_log2_ptr, delta_ptr, dlse_ptr, offs_m, seqlen_q, HAS_DLSE)
        p_t, ds_t = _recompute_p_ds(
            k, q, v, do, lse_log2[None, :], delta[None, :], dlse[None, :], offs_m[None, :], offs_n[:, None],
            seqlen_k, shift, scale_log2, IS_CAUSAL, HAS_DLSE, MASK,
        )  # fmt: skip  # (BLOCK_N, BLOCK_M)
        dv = dot(round_to(p_t, do.dtype), do, dv)
        dk = dot(round_to(ds_t, q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k"])
def _attn_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dlse_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, n_heads_kv, seqlen_q, seqlen_k, scale, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DLSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of dK and dV for one batch entry and one key head.

    Grid: (batch * n_heads_kv * ceil(seqlen_k / BLOCK_N),). Reads its rows of k and v once, and for each query head of
    the group every query block that sees one of its keys; writes its rows of dk and dv.
    Source: Dao 2023 (FlashAttention-2), algorithm 2, the outer loop over key blocks without its line for dQ.
    """
    n_blocks_n = tl.cdiv(seqlen_k, BLOCK_N)
    pid = tl.program_id(0)
    batch_head_kv = pid // n_blocks_n
    start_n = pid % n_blocks_n * BLOCK_N
    batch = (batch_head_kv // n_heads_kv).to(tl.int64)
    head_kv = (batch_head_kv % n_heads_kv).to(tl.int64)
    group = n_heads // n_heads_kv
    q_ptr += batch * stride_qb
    k_ptr += batch * stride_kb + head_kv * stride_kh
    v_ptr += batch * stride_vb + head_kv * stride_vh
    do_ptr += batch * stride_dob
    dk_ptr += batch * stride_dkb + head_kv * stride_dkh
    dv_ptr += batch * stride_dvb + head_kv * stride_dvh

    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    shift = seqlen_k - seqlen_q

    k = load_tile(k_ptr, offs_n, offs_d, stride_kn, stride_kd, seqlen_k, HEAD_DIM, True)  # (BLOCK_N, BLOCK_D)
    v = load_tile(v_ptr, offs_n, offs_d, stride_vn, stride_vd, seqlen_k, HEAD_DIM, True)  # (BLOCK_N, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)

    # Queries below `begin` see none of these keys; from full_begin on they see all of them. Keys past seqlen_k need no
    # mask: they add only to rows of dk and dv that are not stored.
    begin = 0
    full_begin = 0
    if IS_CAUSAL:
        begin = tl.minimum(tl.maximum(start_n - shift, 0) // BLOCK_M * BLOCK_M, seqlen_q)
        full_begin = tl.maximum(start_n + BLOCK_N - 1 - shift, 0)
        full_begin = tl.minimum(tl.cdiv(full_begin, BLOCK_M) * BLOCK_M, seqlen_q)

    for head in tl.range(head_kv * group, head_kv * group + group):
        head_q_ptr = q_ptr + head * stride_qh
        head_do_ptr = do_ptr + head * stride_doh
        row_offset = (batch * n_heads + head) * seqlen_q
        dk, dv = _attn_bwd_dkdv_inner(
            dk, dv, k, v, head_q_ptr, head_do_ptr,
            lse_log2_ptr + row_offset, delta_ptr + row_offset, dlse_ptr + row_offset,
            full_begin, seqlen_q, offs_n, offs_d,
            stride_qm, stride_qd, stride_dom, stride_dod, seqlen_q, seqlen_k, shift, scale_log2,
            HEAD_DIM, IS_CAUSAL, HAS_DLSE, False, BLOCK_M,
        )  # fmt: skip
        if IS_CAUSAL:
            dk, dv = _attn_bwd_dkdv_inner(
                dk, dv, k, v, head_q_ptr, head_do_ptr,
                lse_log2_ptr + row_offset, delta_ptr + row_offset, dlse_ptr + row_offset,
                begin, full_begin, offs_n, offs_d,
                stride_qm, stride_qd, stride_dom, stride_dod, seqlen_q, seqlen_k, shift, scale_log2,
                HEAD_DIM, IS_CAUSAL, HAS_DLSE, True, BLOCK_M,
            )  # fmt: skip

    store_tile(dk_ptr, dk * scale, offs_n, offs_d, stride_dkn, stride_dkd, seqlen_k, HEAD_DIM)
    store_tile(dv_ptr, dv, offs_n, offs_d, stride_dvn, stride_dvd, seqlen_k, HEAD_DIM)


@triton.jit
def _attn_bwd_dq_inner(
    dq, q, do, lse_log2, delta, dlse, k_ptr, v_ptr, lo, hi, offs_m, offs_d,
    stride_kn, stride_kd, stride_vn, stride_vd, seqlen_k, shift, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DLSE: tl.constexpr, MASK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what the keys lo..hi-1 contribute to dq. Invariant, over the keys seen so far: dq = dS K, unscaled."""
    for start_n in tl.range(lo, hi, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, offs_n, offs_d, stride_kn, stride_kd, seqlen_k, HEAD_DIM, MASK)
        v = load_tile(v_ptr, offs_n, offs_d, stride_vn, stride_vd, seqlen_k, HEAD_DIM, MASK)
        _, ds = _recompute_p_ds(
            q, k, do, v, lse_log2[:, None], delta[:, None], dlse[:, None], offs_m[:, None], offs_n[None, :],
            seqlen_k, shift, scale_log2, IS_CAUSAL, HAS_DLSE, MASK,
        )  # fmt: skip  # (BLOCK_M, BLOCK_N)
        dq = dot(round_to(ds, k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k"])
def _attn_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dlse_ptr, dq_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    n_heads, n_heads_kv, seqlen_q, seqlen_k, scale, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DLSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of dQ for one batch entry and one head.

    Grid: (batch * n_heads * ceil(seqlen_q / BLOCK_M),). Reads its rows of q and do once and every visible key and value
    once; writes its rows of dq.
    Source: Dao 2023 (FlashAttention-2), algorithm 2, the line for dQ, in a loop over key blocks of its own.
    """
    n_blocks_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    batch_head = pid // n_blocks_m
    start_m = (n_blocks_m - 1 - pid % n_blocks_m) * BLOCK_M
    batch = (batch_head // n_heads).to(tl.int64)
    head = (batch_head % n_heads).to(tl.int64)
    head_kv = head // (n_heads // n_heads_kv)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head_kv * stride_kh
    v_ptr += batch * stride_vb + head_kv * stride_vh
    do_ptr += batch * stride_dob + head * stride_doh
    dq_ptr += batch * stride_dqb + head * stride_dqh
    row_offset = batch_head.to(tl.int64) * seqlen_q

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    shift = seqlen_k - seqlen_q

    q = load_tile(q_ptr, offs_m, offs_d, stride_qm, stride_qd, seqlen_q, HEAD_DIM, True)  # (BLOCK_M, BLOCK_D)
    do = load_tile(do_ptr, offs_m, offs_d, stride_dom, stride_dod, seqlen_q, HEAD_DIM, True)  # (BLOCK_M, BLOCK_D)
    lse_log2, delta, dlse = _load_row_stats(
        lse_log2_ptr + row_offset, delta_ptr + row_offset, dlse_ptr + row_offset, offs_m, seqlen_q, HAS_DLSE
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    full_end, end = key_loop_bounds(start_m, seqlen_k, shift, IS_CAUSAL, BLOCK_M, BLOCK_N)
    dq = _attn_bwd_dq_inner(
        dq, q, do, lse_log2, delta, dlse, k_ptr, v_ptr, 0, full_end, offs_m, offs_d,
        stride_kn, stride_kd, stride_vn, stride_vd, seqlen_k, shift, scale_log2,
        HEAD_DIM, IS_CAUSAL, HAS_DLSE, False, BLOCK_N,
    )  # fmt: skip
    dq = _attn_bwd_dq_inner(
        dq, q, do, lse_log2, delta, dlse, k_ptr, v_ptr, full_end, end, offs_m, offs_d,
        stride_kn, stride_kd, stride_vn, stride_vd, seqlen_k, shift, scale_log2,
        HEAD_DIM, IS_CAUSAL, HAS_DLSE, True, BLOCK_N,
    )  # fmt: skip

    store_tile(dq_ptr, dq * scale, offs_m, offs_d, stride_dqm, stride_dqd, seqlen_q, HEAD_DIM)


def attn_backward(q, k, v, out, lse_log2, do, dlse, *, causal, scale):
    """Launch the backward kernels and return (dq, dk, dv). dlse may be None; see ``flash_attention``."""
    batch, n_heads, seqlen_q, head_dim = q.shape
    n_heads_kv, seqlen_k = k.shape[1], k.shape[2]
    target = target_of(q.device)
    scales = (scale, scale * LOG2E.value)
    sizes = (n_heads, n_heads_kv, seqlen_q, seqlen_k)
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    has_dlse = dlse is not None
    dlse = dlse.contiguous() if has_dlse else lse_log2  # without one the kernels get a pointer that they do not read
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse_log2)

    cfg = block_config("delta", head_dim, q.dtype, target, causal=causal)
    if grid := batch * n_heads * triton.cdiv(seqlen_q, cfg.block_m):
        _attn_bwd_delta_kernel[(grid,)](
            out, do, delta,
            *out.stride(), *do.stride(), n_heads, seqlen_q,
            HEAD_DIM=head_dim, BLOCK_M=cfg.block_m, BLOCK_D=cfg.block_d,
            num_warps=cfg.num_warps, num_stages=cfg.num_stages,
        )  # fmt: skip

    cfg = block_config("dkdv", head_dim, q.dtype, target, causal=causal)
    if grid := batch * n_heads_kv * triton.cdiv(seqlen_k, cfg.block_n):
        _attn_bwd_dkdv_kernel[(grid,)](
            q, k, v, do, lse_log2, delta, dlse, dk, dv,
            *strides, *dk.stride(), *dv.stride(), *sizes, *scales,
            HEAD_DIM=head_dim, IS_CAUSAL=causal, HAS_DLSE=has_dlse,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, BLOCK_D=cfg.block_d,
            num_warps=cfg.num_warps, num_stages=cfg.num_stages,
        )  # fmt: skip

    cfg = block_config("dq", head_dim, q.dtype, target, causal=causal)
    if grid := batch * n_heads * triton.cdiv(seqlen_q, cfg.block_m):
        _attn_bwd_dq_kernel[(grid,)](
            q, k, v, do, lse_log2, delta, dlse, dq,
            *strides, *dq.stride(), *sizes, *scales,
            HEAD_DIM=head_dim, IS_CAUSAL=causal, HAS_DLSE=has_dlse,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, BLOCK_D=cfg.block_d,
            num_warps=cfg.num_warps, num_stages=cfg.num_stages,
        )  # fmt: skip
    return dq, dk, dv
