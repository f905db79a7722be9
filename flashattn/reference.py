"""Eager attention: the specification that every other implementation here is tested against.

It builds the whole score matrix, so it needs O(seqlen_q * seqlen_k) memory. Chapter 1 measures that.
"""

import math

import torch


def visible_keys(offs_m, offs_n, shift, *, causal=False, window=None):
    """Say which keys each query sees: the one definition of every mask in this package.

    The last query is aligned with the last key ("bottom-right"), so query ``i`` stands at key position
    ``i + shift`` with ``shift = seqlen_k - seqlen_q``. With ``causal=True`` and x for visible::

        seqlen_q=2, seqlen_k=5          seqlen_q=5, seqlen_k=2
            x x x x .                       . .
            x x x x x                       . .
                                            . .
                                            x .
                                            x x

    Args:
        offs_m: query indices, an integer tensor that broadcasts against ``offs_n``.
        offs_n: key indices, likewise.
        shift: ``seqlen_k - seqlen_q``.
        causal: hide keys after the query's own position.
        window: ``(left, right)``: show only keys from ``i + shift - left`` to ``i + shift + right``;
            None on a side means no bound on that side.

    Returns:
        A boolean tensor of the broadcast shape, True where the key is visible.
    """
    distance = offs_n - offs_m - shift
    left, right = window if window is not None else (None, None)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance <= 0
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def apply_softcap(s, softcap):
    """Bound the scores smoothly to (-softcap, softcap); None leaves them as they are."""
    return s if softcap is None else softcap * torch.tanh(s / softcap)


def attention_reference(
    q, k, v, *, causal=False, scale=None, window=None, softcap=None, score=None, visible=None
):  # fmt: skip
    """Compute softmax(scale * q @ k^T) @ v with every intermediate in memory.

    Matrix products run in the dtype of the inputs, the softmax in fp32 (fp64 for fp64 inputs). Called on
    ``.double()`` inputs it is the truth of the tests; called on the inputs themselves it is the
    "same-dtype eager" whose error sets the budget (see ``flashattn.testing``).

    Args:
        q: (batch, heads, seqlen_q, head_dim), any floating dtype, any device.
        k: (batch, heads_kv, seqlen_k, head_dim); ``heads`` must be a multiple of ``heads_kv``. Query head
            ``h`` reads key head ``h // (heads // heads_kv)``.
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        causal, window: see :func:`flashattn.reference.visible_keys`.
        scale: factor on the scores, default ``1 / sqrt(head_dim)``.
        softcap: bound on the scores' size, applied after ``scale`` and before the mask; default none.
        score: a function that takes the scores then, (batch, heads, seqlen_q, seqlen_k), and returns those that count;
            default none.
        visible: a boolean tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k): a key is hidden where it is
            False, as well as where ``causal`` and ``window`` hide it; default none.

    Returns:
        ``(out, lse)``: out (batch, heads, seqlen_q, head_dim_v) in the dtype of ``v``; lse (batch, heads,
        seqlen_q), the natural log of the sum of exponentials of each row's visible scores, fp32 (fp64 for
        fp64). A row that sees no key gives out 0, lse -inf and zero gradients.

    Source: Vaswani et al. 2017, equation 1. Chapter: 1, "The memory wall".
    """
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale

    s = (q @ k.mT) * scale
    s = apply_softcap(s.to(torch.promote_types(s.dtype, torch.float32)), softcap)
    s = s if score is None else score(s)
    offs_m = torch.arange(seqlen_q, device=q.device)[:, None]
    offs_n = torch.arange(seqlen_k, device=q.device)[None, :]
    in_window = visible_keys(offs_m, offs_n, seqlen_k - seqlen_q, causal=causal, window=window)
    visible = in_window if visible is None else in_window & visible
    s = s.masked_fill(~visible, -math.inf)

    lse = torch.logsumexp(s, dim=-1)
    has_key = visible.any(dim=-1)
    p = torch.exp(s - lse.masked_fill(~has_key, 0)[..., None])
    return p.to(v.dtype) @ v, lse
