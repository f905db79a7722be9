"""FlashAttention as loops in plain PyTorch: the algorithm of the kernels, with the kernels' names.

Every tile that a kernel would hold on chip is a small tensor here; batch and heads ride along as leading
dimensions. Nothing of size seqlen_q x seqlen_k is ever built. Chapter 3 derives the forward pass, chapter 6
the backward pass. It is slow, runs anywhere, and supports every argument of the reference.
"""

import math

import torch

from .derivative import first_derivative_only
from .reference import apply_softcap, visible_keys


def key_range(start_m, end_m, seqlen_k, shift, *, causal=False, window=None):
    """Return the half-open range of keys that queries start_m..end_m-1 can see between them."""
    left, right = window if window is not None else (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    lo = 0 if left is None else start_m + shift - left
    hi = seqlen_k if right is None else end_m + shift + right
    return max(lo, 0), min(hi, seqlen_k)


def _score_tile(q, k, start_m, start_n, shift, *, causal, scale, window, softcap):
    """Return one tile of scores, -inf where masked, and which of them are visible."""
    s = apply_softcap((q @ k.mT) * scale, softcap)
    offs_m = torch.arange(start_m, start_m + q.shape[-2], device=q.device)[:, None]
    offs_n = torch.arange(start_n, start_n + k.shape[-2], device=q.device)[None, :]
    visible = visible_keys(offs_m, offs_n, shift, causal=causal, window=window)
    return s.masked_fill(~visible, -math.inf), visible


def online_softmax_update(s, m_i, l_i):
    """Take one tile of scores into the running maximum and sum.

    Args:
        s: (..., block_m, block_n) scores, -inf where masked.
        m_i: (..., block_m) largest score so far, -inf at the start.
        l_i: (..., block_m) sum of exp(score - m_i) so far, 0 at the start.

    Returns:
        ``(p, alpha, m_i, l_i)``: p = exp(s - m_i) with the new maximum, and the factor alpha that brings what
        was accumulated under the old maximum to the new one. While a row has seen no key, m_i is -inf and
        -inf - -inf would be NaN; 0 takes its place there, so that p and alpha come out as 0.
    """
    m_new = torch.maximum(m_i, s.amax(dim=-1))
    m_safe = m_new.masked_fill(m_new == -math.inf, 0)
    p = torch.exp(s - m_safe[..., None])
    alpha = torch.exp(m_i - m_safe)
    return p, alpha, m_new, l_i * alpha + p.sum(dim=-1)


def tiled_forward(q, k, v, *, causal=False, scale=None, window=None, softcap=None, block_m=64, block_n=64):
    """Run the forward pass tile by tile. Arguments and results are those of ``attention_reference``.

    Scores, softmax and accumulator are fp32 (fp64 for fp64 inputs); the probabilities are rounded to the
    dtype of ``v`` before they meet it, as on a tensor core.

    Source: Dao 2023 (FlashAttention-2), algorithm 1. Chapter: 3, "Tiling".
    """
    heads_kv, seqlen_q, seqlen_k = k.shape[1], q.shape[2], k.shape[2]
    shift = seqlen_k - seqlen_q
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    mask = dict(causal=causal, window=window)
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = _by_group(q, heads_kv), k[:, :, None], v[:, :, None]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=acc_dtype)

    for start_m in range(0, seqlen_q, block_m):
        end_m = min(start_m + block_m, seqlen_q)
        q_tile = q[..., start_m:end_m, :].to(acc_dtype)
        has_key = torch.zeros(end_m - start_m, dtype=torch.bool, device=q.device)
        m_i = torch.full(q_tile.shape[:-1], -math.inf, dtype=acc_dtype, device=q.device)
        l_i = torch.zeros_like(m_i)
        acc = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])

        lo, hi = key_range(start_m, end_m, seqlen_k, shift, **mask)
        for start_n in range(lo // block_n * block_n, hi, block_n):
            end_n = min(start_n + block_n, seqlen_k)
            k_tile = k[..., start_n:end_n, :].to(acc_dtype)
            v_tile = v[..., start_n:end_n, :]
            s, visible = _score_tile(q_tile, k_tile, start_m, start_n, shift, scale=scale, softcap=softcap, **mask)
            has_key |= visible.any(dim=-1)
            p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i)
            acc = acc * alpha[..., None] + p.to(v.dtype).to(acc_dtype) @ v_tile.to(acc_dtype)

        out[..., start_m:end_m, :] = (acc / l_i.masked_fill(~has_key, 1)[..., None]).to(out.dtype)
        lse[..., start_m:end_m] = m_i + torch.log(l_i)
    return out.flatten(1, 2), lse.flatten(1, 2)


def tiled_backward(
    q, k, v, out, lse, do, dlse=None, *, causal=False, scale=None, window=None, softcap=None, block_m=64, block_n=64
):
    """Run the backward pass tile by tile, recomputing each tile of probabilities from ``lse``.

    Two passes: dK and dV with one loop over query blocks per key block, then dQ with one loop over key blocks
    per query block, so that every output has one writer.

    Args:
        q, k, v, causal, scale, window, softcap: as given to the forward pass.
        out, lse: what the forward pass returned.
        do: gradient of out, shape of out.
        dlse: gradient of lse, shape of lse, or None for zero.

    Returns:
        ``(dq, dk, dv)`` in the shapes and dtypes of q, k, v.

    Source: Dao 2023 (FlashAttention-2), algorithm 2, with dQ in a loop of its own. Chapter: 6.
    """
    heads_kv, seqlen_q, seqlen_k = k.shape[1], q.shape[2], k.shape[2]
    shift = seqlen_k - seqlen_q
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    mask = dict(causal=causal, window=window)
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    q, out, do, lse = (_by_group(x, heads_kv) for x in (q, out, do, lse))
    k, v = k[:, :, None], v[:, :, None]
    delta = (do.to(acc_dtype) * out.to(acc_dtype)).sum(dim=-1)
    dlse = torch.zeros_like(delta) if dlse is None else _by_group(dlse, heads_kv)
    dq = torch.zeros(q.shape, dtype=acc_dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=acc_dtype, device=q.device)
    dv = torch.zeros(v.shape, dtype=acc_dtype, device=q.device)

    def tile(start_m, start_n):
        """Recompute p and ds of one tile; also return the slices it covers and its q, k, do."""
        rows, cols = slice(start_m, start_m + block_m), slice(start_n, start_n + block_n)
        q_tile, do_tile = q[..., rows, :].to(acc_dtype), do[..., rows, :].to(acc_dtype)
        k_tile, v_tile = k[..., cols, :].to(acc_dtype), v[..., cols, :].to(acc_dtype)
        s, visible = _score_tile(q_tile, k_tile, start_m, start_n, shift, scale=scale, softcap=softcap, **mask)
        lse_tile = lse[..., rows]
        p = torch.exp(s - lse_tile.masked_fill(lse_tile == -math.inf, 0)[..., None])
        dp = do_tile @ v_tile.mT
        ds = p * (dp - delta[..., rows, None] + dlse[..., rows, None])
        if softcap is not None:
            ds = ds * (1 - (s / softcap) ** 2)
        ds = ds.masked_fill(~visible, 0)
        return rows, cols, p.to(q.dtype).to(acc_dtype), ds.to(q.dtype).to(acc_dtype), q_tile, k_tile, do_tile

    def tiles_in_reach(start_m, start_n):
        lo, hi = key_range(start_m, min(start_m + block_m, seqlen_q), seqlen_k, shift, **mask)
        return lo < min(start_n + block_n, seqlen_k) and start_n < hi

    for start_n in range(0, seqlen_k, block_n):
        for start_m in range(0, seqlen_q, block_m):
            if tiles_in_reach(start_m, start_n):
                rows, cols, p, ds, q_tile, _, do_tile = tile(start_m, start_n)
                dv[..., cols, :] += (p.mT @ do_tile).sum(dim=2, keepdim=True)
                dk[..., cols, :] += (ds.mT @ q_tile).sum(dim=2, keepdim=True) * scale
    for start_m in range(0, seqlen_q, block_m):
        for start_n in range(0, seqlen_k, block_n):
            if tiles_in_reach(start_m, start_n):
                rows, cols, p, ds, _, k_tile, _ = tile(start_m, start_n)
                dq[..., rows, :] += ds @ k_tile * scale
    return dq.flatten(1, 2).to(q.dtype), dk[:, :, 0].to(k.dtype), dv[:, :, 0].to(v.dtype)


def _by_group(x, heads_kv):
    """Split the head dimension: (batch, heads, ...) to (batch, heads_kv, heads // heads_kv, ...)."""
    return x.unflatten(1, (heads_kv, x.shape[1] // heads_kv))


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, kwargs):
        out, lse = tiled_forward(q, k, v, **kwargs)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kwargs = kwargs
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx, do, dlse):
        return *tiled_backward(*ctx.saved_tensors, do, dlse, **ctx.kwargs), None


def attention_tiled(q, k, v, *, causal=False, scale=None, window=None, softcap=None, block_m=64, block_n=64):
    """Compute attention tile by tile, differentiably: ``attention_reference`` without the N x N matrices.

    Arguments and results are those of :func:`flashattn.attention_reference`; ``block_m`` queries meet
    ``block_n`` keys at a time. Gradients of q, k and v flow through both out and lse.

    Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2. Chapters: 3 and 6.
    """
    kwargs = dict(causal=causal, scale=scale, window=window, softcap=softcap, block_m=block_m, block_n=block_n)
    return _TiledAttention.apply(q, k, v, kwargs)
