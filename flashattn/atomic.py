"""A backward pass in one nest of loops that adds to dQ atomically: what the package does not do, built to be measured.

Chapter 6 explains both ways, ``python -m flashattn.bench --suite atomics`` times them. Five matrix products where
backward.py has seven; the price is that every key block adds its part of dQ to memory, in whatever order they come, so
that the last bits of dQ differ from call to call.
"""

import torch
import triton
import triton.language as tl

from .backward import _delta_of, _recompute_p_ds
from .configs import BlockConfig, target_of
from .launch import Launch, launch
from .ops import _forward
from .primitives import (
    SIZES,
    boxes_fit,
    dot,
    grid_blocks,
    load_rows,
    load_tile,
    locate_block,
    loop_bounds,
    round_to,
    score_factors,
    stats_row,
    store_tile,
    tile_offsets,
)


@triton.jit(do_not_specialize=SIZES)
def _delta_kernel(
    out_ptr, do_ptr, delta_ptr,
    stride_ob, stride_oh, stride_om, stride_od, stride_dob, stride_doh, stride_dom, stride_dod,
    n_heads, seqlen_q, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Compute delta = rowsum(dO * O) of BLOCK_M rows. Grid: (batch * n_heads * ceil(seqlen_q / BLOCK_M),)."""
    batch, head, _, _, _, start_m = locate_block(None, None, seqlen_q, n_heads, BLOCK_M, LAST_FIRST=False)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_dv = tl.arange(0, BLOCK_DV)
    out_ptr += batch * stride_ob + head * stride_oh
    do_ptr += batch * stride_dob + head * stride_doh
    out = load_tile(out_ptr, offs_m, offs_dv, stride_om, stride_od, seqlen_q, HEAD_DIM_V)
    do = load_tile(do_ptr, offs_m, offs_dv, stride_dom, stride_dod, seqlen_q, HEAD_DIM_V)
    row = stats_row(batch, head, n_heads, seqlen_q)
    tl.store(delta_ptr + row + offs_m, _delta_of(out, do), mask=offs_m < seqlen_q)


@triton.jit(do_not_specialize=SIZES)
def _attn_bwd_atomic_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dq_sum_ptr, dk_ptr, dv_ptr, q_desc, do_desc,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, group, seqlen_q, seqlen_k, window_left, window_right, scale, score_scale, cap_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of dK and dV, as ``_attn_bwd_dkdv_kernel`` does, and add their share to every row of dQ.

    Grid: (batch * n_heads_kv * ceil(seqlen_k / BLOCK_N),). dq_sum is fp32, 0 beforehand, and without the scale.
    Source: Dao 2023 (FlashAttention-2), algorithm 2.
    """
    batch, head_kv, _, _, _, start_n = locate_block(None, None, seqlen_k, n_heads // group, BLOCK_N, LAST_FIRST=False)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    k_ptr += batch * stride_kb + head_kv * stride_kh
    v_ptr += batch * stride_vb + head_kv * stride_vh
    dk_ptr += batch * stride_dkb + head_kv * stride_dkh
    dv_ptr += batch * stride_dvb + head_kv * stride_dvh
    k = load_tile(k_ptr, offs_n, offs_d, stride_kn, stride_kd, seqlen_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
    v = load_tile(v_ptr, offs_n, offs_dv, stride_vn, stride_vd, seqlen_k, HEAD_DIM_V)  # (BLOCK_N, BLOCK_DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)

    # Invariant, over the queries seen so far: dv = P^T dO, dk = dS^T Q, dq_sum has got dS K of these keys.
    begin, full_begin, full_end, end = loop_bounds(
        start_n, seqlen_q, seqlen_q - seqlen_k, window_right, window_left, BLOCK_N, BLOCK_M
    )
    for i in tl.range(group):
        head = head_kv * group + i
        head_q_ptr = q_ptr + batch * stride_qb + head * stride_qh
        head_do_ptr = do_ptr + batch * stride_dob + head * stride_doh
        head_dq_ptr = dq_sum_ptr + batch * stride_dqb + head * stride_dqh
        row = stats_row(batch, head, n_heads, seqlen_q)
        for start_m in tl.range(begin, end, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            in_q = offs_m < seqlen_q
            q = load_rows(  # (BLOCK_M, BLOCK_D)
                q_desc, batch, head, start_m, head_q_ptr, offs_m, offs_d, stride_qm, stride_qd, seqlen_q, HEAD_DIM
            )
            do = load_rows(  # (BLOCK_M, BLOCK_DV)
                do_desc, batch, head, start_m,
                head_do_ptr, offs_m, offs_dv, stride_dom, stride_dod, seqlen_q, HEAD_DIM_V,
            )  # fmt: skip
            lse_log2 = tl.load(lse_log2_ptr + row + offs_m, mask=in_q, other=float("inf"))
            delta = tl.load(delta_ptr + row + offs_m, mask=in_q, other=0.0)
            p_t, ds_t = _recompute_p_ds(  # (BLOCK_N, BLOCK_M)
                k, q, v, do, lse_log2[None, :], 0.0, delta[None, :], -0.0, None,
                offs_m[None, :], offs_n[:, None], 0, 0,
                seqlen_q, seqlen_k, window_left, window_right, score_scale, cap_log2,
                (start_m < full_begin) | (start_m >= full_end) | (start_n + BLOCK_N > seqlen_k),
            )  # fmt: skip
            dv = dot(round_to(p_t, do.dtype), do, dv)
            ds_t = round_to(ds_t, q.dtype)
            dk = dot(ds_t, q, dk)
            tl.atomic_add(
                head_dq_ptr + tile_offsets(offs_m, offs_d, stride_dqm, stride_dqd), dot(tl.trans(ds_t), k),
                mask=in_q[:, None] & (offs_d < HEAD_DIM)[None, :], sem="relaxed",
            )  # fmt: skip

    store_tile(dk_ptr, dk * scale, offs_n, offs_d, stride_dkn, stride_dkd, seqlen_k, HEAD_DIM)
    store_tile(dv_ptr, dv, offs_n, offs_dv, stride_dvn, stride_dvd, seqlen_k, HEAD_DIM_V)


# padded head_dim -> (block_m, block_n, num_warps, num_stages) on Hopper; elsewhere, and over 128, small ones.
HOPPER = {64: (64, 64, 4, 2), 128: (64, 64, 8, 2)}
PORTABLE = (32, 32, 4, 1)


def attention_atomic(q, k, v, *, causal=False):
    """Compute attention as ``flash_attention`` does, and its gradients with atomic adds to dQ.

    Args:
        q: (batch, heads, seqlen_q, head_dim), fp16 or bf16, head_dim 1 to 256, on a device that kernels run on.
        k, v: (batch, heads_kv, seqlen_k, head_dim), in the dtype of ``q``; ``heads`` a multiple of ``heads_kv``.
        causal: as for ``flash_attention``.

    Returns:
        out, like ``q``. dQ differs in its last bits from call to call on a GPU.

    Raises:
        TypeError: another dtype. All else is unchecked: this is for measuring.

    Chapter: 6.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"`q` must be float16 or bfloat16, got {str(q.dtype).removeprefix('torch.')}")
    return _Atomic.apply(q, k, v, causal)


class _Atomic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        options = (q.shape[3] ** -0.5, None, None, 0 if causal else None)
        out, _, lse_log2, _ = _forward(q, k, v, None, None, None, *options)
        ctx.save_for_backward(q, k, v, out, lse_log2)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v, out, lse_log2 = ctx.saved_tensors
        tensors = dict(q=q, k=k, v=v, out=out, do=do, lse_log2=lse_log2, delta=torch.empty_like(lse_log2))
        tensors |= dict(dq_sum=torch.zeros_like(q, dtype=torch.float32), dk=torch.empty_like(k), dv=torch.empty_like(v))
        with torch.cuda.device_of(q):
            launch(_decide_atomic, tensors, *ctx.options)
        return (tensors["dq_sum"] * ctx.options[0]).to(q.dtype), tensors["dk"], tensors["dv"], None


def _decide_atomic(tensors, scale, softcap, window_left, window_right):
    """Return the two launches of a backward pass."""
    q, k, v, out, do, _, _, dq_sum, dk, dv = tensors.values()
    batch, n_heads, seqlen_q, head_dim = q.shape
    n_heads_kv, seqlen_k, head_dim_v = v.shape[1:]
    target = target_of(q.device)
    width = max(64, *(triton.next_power_of_2(x) for x in (head_dim, head_dim_v)))
    block_m, block_n, *schedule = HOPPER.get(width, PORTABLE) if target.matrix_units == "wgmma" else PORTABLE
    cfg = BlockConfig(block_m, block_n, width, width, *schedule)
    dims = dict(HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v)
    delta_constants = dict(HEAD_DIM_V=head_dim_v, BLOCK_M=block_m, BLOCK_DV=width, num_warps=4, enable_fp_fusion=False)
    box = (1, 1, block_m, width)
    return [
        Launch(
            _delta_kernel,
            grid=grid_blocks(batch, n_heads, seqlen_q, block_m),
            boxes={},
            numbers=(*out.stride(), *do.stride(), n_heads, seqlen_q),
            constants=delta_constants,
        ),
        Launch(
            _attn_bwd_atomic_kernel,
            grid=grid_blocks(batch, n_heads_kv, seqlen_k, block_n),
            boxes=dict(q=box, do=box)
            if boxes_fit(target, (q, do), None, None, seqlen_k - seqlen_q, window_left, window_right)
            else {},
            numbers=(
                *q.stride(), *k.stride(), *v.stride(), *do.stride(), *dq_sum.stride(), *dk.stride(), *dv.stride(),
                n_heads, n_heads // n_heads_kv, seqlen_q, seqlen_k, window_left, window_right,
                scale, *score_factors(scale, softcap),
            ),
            constants=dims | cfg.launch(),
        ),
    ]  # fmt: skip
