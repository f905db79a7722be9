"""The forward kernel and its launcher. Chapter 5 builds the kernel up step by step."""

import triton
import triton.language as tl

from .configs import block_config, target_of
from .launch import Launch, launch
from .primitives import (
    LOWEST,
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
    natural_log,
    online_softmax_update,
    round_to,
    row_has_key,
    rows_are_regular,
    rows_to_load,
    score_factors,
    score_mask,
    scores_from,
    sequence_rows,
    stats_row,
    store_tile,
)


@triton.jit(do_not_specialize=SIZES)
def _attn_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_ptr, lse_log2_ptr, lse_low_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, k_desc, v_desc,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    stride_ob, stride_oh, stride_om, stride_od,
    n_heads, group, n_sequences, seqlen_q, seqlen_k, window_left, window_right, score_scale, cap_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of the output and their log-sum-exp for one sequence and one head.

    Grid: (batch * n_heads * ceil(seqlen_q / BLOCK_M),), or as ``locate_block`` says for packed sequences.
    Reads its rows of q once and every visible key and value once; writes its rows of out, of lse, and of lse in base 2,
    which is what the backward pass needs: converted back and forth, a score would not be what it was.
    The descriptors, bias_ptr, the cu_seqlens, the window's sides and cap_log2 are None where a call has none; no code
    is left of them.
    Source: Dao 2023 (FlashAttention-2), algorithm 1.
    """
    # Which rows of which head.
    batch, head, sequence, row_q, length_q, start_m = locate_block(
        cu_seqlens_q_ptr, n_sequences, seqlen_q, n_heads, BLOCK_M, LAST_FIRST=True
    )
    row_k, length_k = sequence_rows(cu_seqlens_k_ptr, sequence, n_sequences, seqlen_k)
    head_kv = head // group
    q_ptr += batch * stride_qb + head * stride_qh + row_q * stride_qm
    k_ptr += batch * stride_kb + head_kv * stride_kh + row_k * stride_kn
    v_ptr += batch * stride_vb + head_kv * stride_vh + row_k * stride_vn
    out_ptr += batch * stride_ob + head * stride_oh + row_q * stride_om
    lse_ptr += (batch * n_heads + head) * seqlen_q + row_q
    lse_log2_ptr += stats_row(batch, head, n_heads, seqlen_q) + row_q
    if lse_low_ptr is not None:
        lse_low_ptr += stats_row(batch, head, n_heads, seqlen_q) + row_q
    if bias_ptr is not None:
        bias_ptr += batch * stride_bias_b + head * stride_bias_h

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    shift = length_k - length_q

    q = load_tile(q_ptr, offs_m, offs_d, stride_qm, stride_qd, length_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    m_i = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)

    # Invariant, over the keys seen so far: m_i = max s, l_i = sum 2^(s - m_i), acc = sum 2^(s - m_i) v.
    begin, full_begin, full_end, end = loop_bounds(
        start_m, length_k, shift, window_left, window_right, BLOCK_M, BLOCK_N
    )
    # At least one tile, if need be a hidden one: in a loop that may not run at all, ptxas lets no wgmma overlap.
    end = tl.maximum(end, begin + 1)
    tl.assume(end > begin)
    for start_n in tl.range(begin, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        rows_n = rows_to_load(offs_n, start_m, length_q, length_k, window_left, window_right, BLOCK_M)
        k = load_rows(  # (BLOCK_N, BLOCK_D)
            k_desc, batch, head_kv, start_n, k_ptr, rows_n, offs_d, stride_kn, stride_kd, length_k, HEAD_DIM
        )
        s, factor, _ = scores_from(dot(q, tl.trans(k)), score_scale, cap_log2)  # (BLOCK_M, BLOCK_N)
        if bias_ptr is not None:
            s = add_bias(
                s * factor, bias_ptr, offs_m[:, None], offs_n[None, :],
                stride_bias_m, stride_bias_n, length_q, length_k,
            )  # fmt: skip
            factor = 1.0
        if (start_n < full_begin) | (start_n >= full_end):
            visible = score_mask(offs_m[:, None], offs_n[None, :], length_k, shift, window_left, window_right)
            s = tl.where(visible, s, float("-inf"))
        p, alpha, m_i, l_i = online_softmax_update(s, factor, m_i, l_i)
        v = load_rows(  # (BLOCK_N, BLOCK_DV)
            v_desc, batch, head_kv, start_n, v_ptr, rows_n, offs_dv, stride_vn, stride_vd, length_k, HEAD_DIM_V
        )
        acc = dot(round_to(p, v.dtype), v, acc * alpha[:, None])

    # A row without keys has l_i = 0, and acc = 0 or, if the hidden tile held one, NaN: its out is 0, its lse -inf.
    has_key = row_has_key(offs_m, length_k, shift, window_left, window_right)
    if bias_ptr is not None:
        has_key = has_key & (l_i != 0.0)
    l_i = tl.where(has_key, l_i, 1.0)
    out = tl.where(has_key[:, None], acc / l_i[:, None], 0.0)
    store_tile(out_ptr, out, offs_m, offs_dv, stride_om, stride_od, length_q, HEAD_DIM_V)
    lse_log2 = m_i + tl.log2(l_i)
    lse = tl.where(has_key, natural_log(lse_log2), float("-inf"))
    tl.store(lse_ptr + offs_m, lse, mask=offs_m < length_q)
    # With infinity in its place the backward pass makes p = 0 of a row without keys.
    tl.store(lse_log2_ptr + offs_m, tl.where(has_key, lse_log2, float("inf")), mask=offs_m < length_q)
    if lse_low_ptr is not None:
        # What lse_log2 lost in rounding: in fp32 it would show, and under a mask of -1e38 it is all of log2(l_i).
        lse_low = tl.where(has_key, tl.log2(l_i) - (lse_log2 - m_i), 0.0)
        tl.store(lse_low_ptr + offs_m, lse_low, mask=offs_m < length_q)


def attn_forward(
    q, k, v, bias, out, lse, lse_log2, lse_low, cu_seqlens_q, cu_seqlens_k, *,
    scale, softcap, window_left, window_right, decide=None,
):  # fmt: skip
    """Launch the forward kernel on checked inputs; it writes out, lse, lse_log2 and lse_low. See ``flash_attention``.

    bias is None or (batch, n_heads, seqlen_q, seqlen_k): added to the scores, or, as uint8, 0 where hidden. lse_low may
    be None. The cu_seqlens are None, or the offsets of sequences packed into a batch of 1. scale is over 0. decide
    chooses the launches; by default it is :func:`decide_forward`.
    """
    tensors = dict(
        q=q, k=k, v=v, bias=bias, out=out, lse=lse, lse_log2=lse_log2, lse_low=lse_low,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    launch(decide or decide_forward, tensors, scale, softcap, window_left, window_right)


def decide_forward(tensors, scale, softcap, window_left, window_right):
    """Return the one launch of a forward pass, in a list."""
    q, k, v, bias, out, cu_seqlens_q = (tensors[name] for name in ("q", "k", "v", "bias", "out", "cu_seqlens_q"))
    batch, n_heads, seqlen_q, head_dim = q.shape
    n_heads_kv, seqlen_k, head_dim_v = v.shape[1:]
    if out.numel() == 0:
        return []
    n_sequences = None if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    target = target_of(q.device)
    causal, regular = window_right is not None, rows_are_regular(q, k, v)
    cfg = block_config("forward", head_dim, head_dim_v, q.dtype, target, causal=causal, regular=regular)
    sequences = (n_sequences, seqlen_k - seqlen_q, window_left, window_right)
    fit = boxes_pay(q, k) and boxes_fit(target, (k, v), bias, *sequences)
    numbers = (
        *q.stride(), *k.stride(), *v.stride(), *(NO_STRIDES if bias is None else bias.stride()), *out.stride(),
        n_heads, n_heads // n_heads_kv, n_sequences, seqlen_q, seqlen_k, window_left, window_right,
        *score_factors(scale, softcap),
    )  # fmt: skip
    return [
        Launch(
            _attn_fwd_kernel,
            grid=grid_blocks(batch, n_heads, seqlen_q, cfg.block_m, n_sequences),
            boxes=dict(k=(1, 1, cfg.block_n, cfg.block_d), v=(1, 1, cfg.block_n, cfg.block_dv)) if fit else {},
            numbers=numbers,
            constants=dict(HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v) | cfg.launch(),
        )
    ]
