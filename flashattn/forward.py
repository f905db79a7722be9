"""The forward kernel and its launcher. Chapter 5 builds the kernel up step by step."""

import torch
import triton
import triton.language as tl

from .configs import block_config, target_of
from .primitives import (
    LOG2E,
    dot,
    key_loop_bounds,
    load_tile,
    natural_log,
    online_softmax_update,
    round_to,
    row_has_key,
    score_mask,
    store_tile,
)


@triton.jit
def _attn_fwd_inner(
    acc, m_i, l_i, q, k_ptr, v_ptr, lo, hi, offs_m, offs_d,
    stride_kn, stride_kd, stride_vn, stride_vd, seqlen_k, shift, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the keys lo..hi-1 into (acc, m_i, l_i). With MASK=False the caller vouches that all of them are visible.

    Invariant, over the keys seen so far: m_i = max s, l_i = sum 2^(s - m_i), acc = sum 2^(s - m_i) v.
    """
    for start_n in tl.range(lo, hi, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, offs_n, offs_d, stride_kn, stride_kd, seqlen_k, HEAD_DIM, MASK)  # (BLOCK_N, BLOCK_D)
        s_log2 = dot(q, tl.trans(k)) * scale_log2  # (BLOCK_M, BLOCK_N)
        if MASK:
            visible = score_mask(offs_m[:, None], offs_n[None, :], seqlen_k, shift, IS_CAUSAL)
            s_log2 = tl.where(visible, s_log2, float("-inf"))
        p, alpha, m_i, l_i = online_softmax_update(s_log2, m_i, l_i)
        v = load_tile(v_ptr, offs_n, offs_d, stride_vn, stride_vd, seqlen_k, HEAD_DIM, MASK)  # (BLOCK_N, BLOCK_D)
        acc = dot(round_to(p, v.dtype), v, acc * alpha[:, None])
    return acc, m_i, l_i


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k"])
def _attn_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, lse_log2_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    n_heads, n_heads_kv, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of the output and their log-sum-exp for one batch entry and one head.

    Grid: (batch * n_heads * ceil(seqlen_q / BLOCK_M),), the blocks of one head next to each other.
    Reads its rows of q once and every visible key and value once; writes its rows of out, of lse, and of lse in base 2,
    which is what the backward pass needs: converted back and forth, a score would not be what it was.
    Source: Dao 2023 (FlashAttention-2), algorithm 1.
    """
    # Which rows of which head. The last rows come first: under a causal mask they are the longest.
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
    out_ptr += batch * stride_ob + head * stride_oh
    lse_ptr += batch_head.to(tl.int64) * seqlen_q
    lse_log2_ptr += batch_head.to(tl.int64) * seqlen_q

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    shift = seqlen_k - seqlen_q

    q = load_tile(q_ptr, offs_m, offs_d, stride_qm, stride_qd, seqlen_q, HEAD_DIM, True)  # (BLOCK_M, BLOCK_D)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    full_end, end = key_loop_bounds(start_m, seqlen_k, shift, IS_CAUSAL, BLOCK_M, BLOCK_N)
    acc, m_i, l_i = _attn_fwd_inner(
        acc, m_i, l_i, q, k_ptr, v_ptr, 0, full_end, offs_m, offs_d,
        stride_kn, stride_kd, stride_vn, stride_vd, seqlen_k, shift, scale_log2,
        HEAD_DIM, IS_CAUSAL, False, BLOCK_N,
    )  # fmt: skip
    acc, m_i, l_i = _attn_fwd_inner(
        acc, m_i, l_i, q, k_ptr, v_ptr, full_end, end, offs_m, offs_d,
        stride_kn, stride_kd, stride_vn, stride_vd, seqlen_k, shift, scale_log2,
        HEAD_DIM, IS_CAUSAL, True, BLOCK_N,
    )  # fmt: skip

    # A row without keys has l_i = 0 and acc = 0: dividing by 1 instead gives out = 0 and lse = -inf.
    l_i = tl.where(row_has_key(offs_m, seqlen_k, shift, IS_CAUSAL), l_i, 1.0)
    store_tile(out_ptr, acc / l_i[:, None], offs_m, offs_d, stride_om, stride_od, seqlen_q, HEAD_DIM)
    lse_log2 = m_i + tl.log2(l_i)
    tl.store(lse_ptr + offs_m, natural_log(lse_log2), mask=offs_m < seqlen_q)
    tl.store(lse_log2_ptr + offs_m, lse_log2, mask=offs_m < seqlen_q)


def attn_forward(q, k, v, *, causal, scale):
    """Launch the forward kernel on checked inputs and return (out, lse, lse_log2); see ``flash_attention``."""
    batch, n_heads, seqlen_q, head_dim = q.shape
    n_heads_kv, seqlen_k = k.shape[1], k.shape[2]
    out = torch.empty_like(q)
    lse = torch.empty(batch, n_heads, seqlen_q, dtype=torch.float32, device=q.device)
    lse_log2 = torch.empty_like(lse)
    cfg = block_config("forward", head_dim, q.dtype, target_of(q.device), causal=causal)
    grid = (batch * n_heads * triton.cdiv(seqlen_q, cfg.block_m),)
    if grid[0] == 0:
        return out, lse, lse_log2
    _attn_fwd_kernel[grid](
        q, k, v, out, lse, lse_log2,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        n_heads, n_heads_kv, seqlen_q, seqlen_k, scale * LOG2E.value,
        HEAD_DIM=head_dim, IS_CAUSAL=causal,
        BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, BLOCK_D=cfg.block_d,
        num_warps=cfg.num_warps, num_stages=cfg.num_stages,
    )  # fmt: skip
    return out, lse, lse_log2
