"""The backward kernels and their launcher: dQ and delta, then dK and dV. Chapter 6 derives and explains them.

Every element of every gradient is written by one program that adds in a fixed order, so the result is the same to
the bit each time. The price is that each tile of probabilities is recomputed twice: seven matrix products in all.
"""

import triton
import triton.language as tl

from .configs import block_config, target_of
from .launch import Launch, launch
from .primitives import (
    NO_STRIDES,
    SIZES,
    add_bias,
    boxes_fit,
    boxes_pay,
    dot,
    grid_blocks,
    load_rows,
    load_tile,
    locate_block,
    loop_bounds,
    round_to,
    rows_are_regular,
    rows_to_load,
    score_factors,
    score_mask,
    scores_from,
    sequence_rows,
    stats_row,
    store_tile,
)


@triton.jit
def _load_stat(desc, batch, head, start, ptr, row, offs_m, seqlen_q, OTHER: tl.constexpr):
    """Load one number for each of BLOCK_M rows, of which the first is start; OTHER where they are given nowhere.

    row is where the numbers of this head begin. Rows that do not exist get any value. OTHER changes nothing: p is 0
    for an infinite lse, x - 0 and x + -0 are x, and the compiler drops both.
    """
    if desc is not None:
        x = tl.reshape(desc.load([batch.to(tl.int32), head.to(tl.int32), start]), offs_m.shape)
    elif ptr is not None:
        x = tl.load(ptr + row + offs_m, mask=offs_m < seqlen_q, other=OTHER)
    else:
        x = tl.full(offs_m.shape, OTHER, tl.float32)
    return x


@triton.jit
def _delta_of(out, do):
    """Return delta = rowsum(dO * O) of a tile of rows, as the diagonal of dO O^T.

    The product adds in the same order as dP = dO V^T. A row that sees one key has O = V, so dP - delta is exactly 0
    there, as it must be; a plain sum leaves the rounding of numbers the size of dO V.
    Source: Dao 2023 (FlashAttention-2), algorithm 2, line 4.
    """
    rows = tl.arange(0, out.shape[0])
    return tl.sum(tl.where(rows[:, None] == rows[None, :], dot(do, tl.trans(out)), 0.0), axis=1)


@triton.jit
def _recompute_p_ds(
    a, b, da, db, lse_log2, lse_low, delta, dlse, bias_ptr, offs_m, offs_n, stride_bias_m, stride_bias_n,
    seqlen_q, seqlen_k, window_left, window_right, score_scale, cap_log2, is_masked,
):  # fmt: skip
    """Return one tile of P = softmax(S) and of dS = P * (dP - delta + dLSE) * slope, with dP = dA dB^T.

    S is made of A B^T as in the forward pass; slope is its derivative by scale * A B^T, 1 without a softcap. With
    (a, b, da, db) = (q, k, do, v) the tile is (queries, keys); with (k, q, v, do) it is its transpose, which is what dK
    and dV multiply with. Row statistics and offsets come shaped to broadcast against the tile.
    """
    s, factor, slope = scores_from(dot(a, tl.trans(b)), score_scale, cap_log2)
    s_log2 = s * factor
    if bias_ptr is not None:
        s_log2 = add_bias(s_log2, bias_ptr, offs_m, offs_n, stride_bias_m, stride_bias_n, seqlen_q, seqlen_k)
    p = tl.exp2(s_log2 - lse_log2 - lse_low)
    ds = p * (dot(da, tl.trans(db)) - delta + dlse)
    if cap_log2 is not None:
        ds *= slope
    if is_masked:
        visible = score_mask(offs_m, offs_n, seqlen_k, seqlen_k - seqlen_q, window_left, window_right)
        visible = visible & (offs_m < seqlen_q)  # a query that is not there is 0, and 0 times an infinite key NaN
        p = tl.where(visible, p, 0.0)
        ds = tl.where(visible, ds, 0.0)
    return p, ds


@triton.jit(do_not_specialize=SIZES)
def _attn_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, bias_ptr, lse_log2_ptr, lse_low_ptr, dlse_ptr, dq_ptr, delta_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, k_desc, v_desc,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    n_heads, group, n_sequences, seqlen_q, seqlen_k, window_left, window_right, scale, score_scale, cap_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of dQ, and of the delta that the other kernel needs, for one sequence and one head.

    Grid: that of the forward kernel. Reads its rows of q, out and do once and every visible key and value once; writes
    its rows of dq and delta.
    Source: Dao 2023 (FlashAttention-2), algorithm 2, the line for dQ, in a loop over key blocks of its own.
    """
    batch, head, sequence, row_q, length_q, start_m = locate_block(
        cu_seqlens_q_ptr, n_sequences, seqlen_q, n_heads, BLOCK_M, LAST_FIRST=True
    )
    row_k, length_k = sequence_rows(cu_seqlens_k_ptr, sequence, n_sequences, seqlen_k)
    head_kv = head // group
    q_ptr += batch * stride_qb + head * stride_qh + row_q * stride_qm
    k_ptr += batch * stride_kb + head_kv * stride_kh + row_k * stride_kn
    v_ptr += batch * stride_vb + head_kv * stride_vh + row_k * stride_vn
    out_ptr += batch * stride_ob + head * stride_oh + row_q * stride_om
    do_ptr += batch * stride_dob + head * stride_doh + row_q * stride_dom
    dq_ptr += batch * stride_dqb + head * stride_dqh + row_q * stride_dqm
    if bias_ptr is not None:
        bias_ptr += batch * stride_bias_b + head * stride_bias_h

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)

    q = load_tile(q_ptr, offs_m, offs_d, stride_qm, stride_qd, length_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    do = load_tile(do_ptr, offs_m, offs_dv, stride_dom, stride_dod, length_q, HEAD_DIM_V)  # (BLOCK_M, BLOCK_DV)
    out = load_tile(out_ptr, offs_m, offs_dv, stride_om, stride_od, length_q, HEAD_DIM_V)  # (BLOCK_M, BLOCK_DV)
    delta = _delta_of(out, do)
    row = stats_row(batch, head, n_heads, seqlen_q) + row_q
    tl.store(delta_ptr + row + offs_m, delta, mask=offs_m < length_q)
    lse_log2 = _load_stat(None, batch, head, start_m, lse_log2_ptr, row, offs_m, length_q, float("inf"))
    lse_low = _load_stat(None, batch, head, start_m, lse_low_ptr, row, offs_m, length_q, 0.0)
    dlse = _load_stat(None, batch, head, start_m, dlse_ptr, row, offs_m, length_q, -0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    # Invariant, over the keys seen so far: dq = dS K (without the scale).
    begin, full_begin, full_end, end = loop_bounds(
        start_m, length_k, length_k - length_q, window_left, window_right, BLOCK_M, BLOCK_N
    )
    for start_n in tl.range(begin, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        rows_n = rows_to_load(offs_n, start_m, length_q, length_k, window_left, window_right, BLOCK_M)
        k = load_rows(  # (BLOCK_N, BLOCK_D)
            k_desc, batch, head_kv, start_n, k_ptr, rows_n, offs_d, stride_kn, stride_kd, length_k, HEAD_DIM
        )
        v = load_rows(  # (BLOCK_N, BLOCK_DV)
            v_desc, batch, head_kv, start_n, v_ptr, rows_n, offs_dv, stride_vn, stride_vd, length_k, HEAD_DIM_V
        )
        _, ds = _recompute_p_ds(  # (BLOCK_M, BLOCK_N)
            q, k, do, v, lse_log2[:, None], lse_low[:, None], delta[:, None], dlse[:, None], bias_ptr,
            offs_m[:, None], offs_n[None, :], stride_bias_m, stride_bias_n,
            length_q, length_k, window_left, window_right, score_scale, cap_log2,
            (start_n < full_begin) | (start_n >= full_end),
        )  # fmt: skip
        dq = dot(round_to(ds, k.dtype), k, dq)

    store_tile(dq_ptr, dq * scale, offs_m, offs_d, stride_dqm, stride_dqd, length_q, HEAD_DIM)


@triton.jit(do_not_specialize=SIZES)
def _attn_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, bias_ptr, lse_log2_ptr, lse_low_ptr, delta_ptr, dlse_ptr, dk_ptr, dv_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, q_desc, do_desc, lse_log2_desc, delta_desc,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, group, n_sequences, seqlen_q, seqlen_k, window_left, window_right, scale, score_scale, cap_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of dK and dV for one sequence and one key head.

    Grid: (batch * n_heads_kv * ceil(seqlen_k / BLOCK_N),), or as ``locate_block`` says for packed sequences. Reads its
    rows of k and v once, and for each query head of the group every query block that sees one of its keys; writes its
    rows of dk and dv.
    Source: Dao 2023 (FlashAttention-2), algorithm 2, the outer loop over key blocks without its line for dQ.
    """
    batch, head_kv, sequence, row_k, length_k, start_n = locate_block(
        cu_seqlens_k_ptr, n_sequences, seqlen_k, n_heads // group, BLOCK_N, LAST_FIRST=False
    )
    row_q, length_q = sequence_rows(cu_seqlens_q_ptr, sequence, n_sequences, seqlen_q)
    q_ptr += batch * stride_qb + row_q * stride_qm
    k_ptr += batch * stride_kb + head_kv * stride_kh + row_k * stride_kn
    v_ptr += batch * stride_vb + head_kv * stride_vh + row_k * stride_vn
    do_ptr += batch * stride_dob + row_q * stride_dom
    dk_ptr += batch * stride_dkb + head_kv * stride_dkh + row_k * stride_dkn
    dv_ptr += batch * stride_dvb + head_kv * stride_dvh + row_k * stride_dvn

    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    shift = length_k - length_q

    k = load_tile(k_ptr, offs_n, offs_d, stride_kn, stride_kd, length_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
    v = load_tile(v_ptr, offs_n, offs_dv, stride_vn, stride_vd, length_k, HEAD_DIM_V)  # (BLOCK_N, BLOCK_DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)

    # Invariant, over the queries seen so far: dv = P^T dO, dk = dS^T Q (without the scale).
    # Queries where, in the other two kernels, there are keys: the same bounds, seen from the other side.
    begin, full_begin, full_end, end = loop_bounds(
        start_n, length_q, -shift, window_right, window_left, BLOCK_N, BLOCK_M
    )
    for i in tl.range(group):
        head = head_kv * group + i
        head_bias_ptr = bias_ptr
        if bias_ptr is not None:
            head_bias_ptr += batch * stride_bias_b + head * stride_bias_h
        for start_m in tl.range(begin, end, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_rows(  # (BLOCK_M, BLOCK_D)
                q_desc, batch, head, start_m,
                q_ptr + head * stride_qh, offs_m, offs_d, stride_qm, stride_qd, length_q, HEAD_DIM,
            )  # fmt: skip
            do = load_rows(  # (BLOCK_M, BLOCK_DV)
                do_desc, batch, head, start_m,
                do_ptr + head * stride_doh, offs_m, offs_dv, stride_dom, stride_dod, length_q, HEAD_DIM_V,
            )  # fmt: skip
            row = stats_row(batch, head, n_heads, seqlen_q) + row_q
            lse_log2 = _load_stat(
                lse_log2_desc, batch, head, start_m, lse_log2_ptr, row, offs_m, length_q, float("inf")
            )
            lse_low = _load_stat(None, batch, head, start_m, lse_low_ptr, row, offs_m, length_q, 0.0)
            delta = _load_stat(delta_desc, batch, head, start_m, delta_ptr, row, offs_m, length_q, 0.0)
            dlse = _load_stat(None, batch, head, start_m, dlse_ptr, row, offs_m, length_q, -0.0)
            p_t, ds_t = _recompute_p_ds(  # (BLOCK_N, BLOCK_M)
                k, q, v, do, lse_log2[None, :], lse_low[None, :], delta[None, :], dlse[None, :], head_bias_ptr,
                offs_m[None, :], offs_n[:, None], stride_bias_m, stride_bias_n,
                length_q, length_k, window_left, window_right, score_scale, cap_log2,
                (start_m < full_begin) | (start_m >= full_end),
            )  # fmt: skip
            dv = dot(round_to(p_t, do.dtype), do, dv)
            dk = dot(round_to(ds_t, q.dtype), q, dk)

    store_tile(dk_ptr, dk * scale, offs_n, offs_d, stride_dkn, stride_dkd, length_k, HEAD_DIM)
    store_tile(dv_ptr, dv, offs_n, offs_dv, stride_dvn, stride_dvd, length_k, HEAD_DIM_V)


def attn_backward(
    q, k, v, bias, out, lse_log2, lse_low, do, dlse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, *,
    scale, softcap, window_left, window_right, decide=None,
):  # fmt: skip
    """Launch the backward kernels; they write dq, dk and dv. Arguments as for ``attn_forward``; dlse may be None."""
    tensors = dict(
        q=q, k=k, v=v, do=do, bias=bias, out=out, lse_log2=lse_log2, lse_low=lse_low,
        delta=lse_log2.new_empty(lse_log2.shape), dlse=dlse, dq=dq, dk=dk, dv=dv,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    launch(decide or decide_backward, tensors, scale, softcap, window_left, window_right)


def decide_backward(tensors, scale, softcap, window_left, window_right):
    """Return the launches of a backward pass: dQ and delta, then dK and dV. One with nothing to write is left out."""
    q, k, v, do, bias, out, *_, dq, dk, dv, cu_seqlens_q, _ = tensors.values()
    batch, n_heads, seqlen_q, head_dim = q.shape
    n_heads_kv, seqlen_k, head_dim_v = v.shape[1:]
    n_sequences = None if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    target = target_of(q.device)
    strides = (*q.stride(), *k.stride(), *v.stride(), *(NO_STRIDES if bias is None else bias.stride()), *do.stride())
    sizes = (n_heads, n_heads // n_heads_kv, n_sequences, seqlen_q, seqlen_k, window_left, window_right)
    factors = (scale, *score_factors(scale, softcap))
    sequences = (n_sequences, seqlen_k - seqlen_q, window_left, window_right)
    launches = []

    def blocks(direction):
        causal, regular = window_right is not None, rows_are_regular(q, k, v, do, out)
        return block_config(direction, head_dim, head_dim_v, q.dtype, target, causal=causal, regular=regular)

    def fit(*streamed):
        return boxes_pay(q, k) and boxes_fit(target, streamed, bias, *sequences)

    if dq.numel():
        cfg = blocks("dq")
        boxes = dict(k=(1, 1, cfg.block_n, cfg.block_d), v=(1, 1, cfg.block_n, cfg.block_dv))
        launches.append(Launch(
            _attn_bwd_dq_kernel,
            grid=grid_blocks(batch, n_heads, seqlen_q, cfg.block_m, n_sequences),
            boxes=boxes if fit(k, v) else {},
            numbers=(*strides, *out.stride(), *dq.stride(), *sizes, *factors),
            constants=dict(HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v) | cfg.launch(),
        ))  # fmt: skip
    if dk.numel():
        cfg = blocks("dkdv")
        box = (1, 1, cfg.block_m)
        boxes = dict(q=(*box, cfg.block_d), do=(*box, cfg.block_dv), lse_log2=box, delta=box)
        launches.append(Launch(
            _attn_bwd_dkdv_kernel,
            grid=grid_blocks(batch, n_heads_kv, seqlen_k, cfg.block_n, n_sequences),
            # Boxes of 16 row statistics, 64 bytes, Triton 3.6 puts where no copy can write.
            boxes=boxes if cfg.block_m >= 32 and fit(q, do) else {},
            numbers=(*strides, *dk.stride(), *dv.stride(), *sizes, *factors),
            constants=dict(HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v) | cfg.launch(),
        ))  # fmt: skip
    return launches
