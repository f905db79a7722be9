"""The public calls and every check of what users pass to them."""

import math
from typing import NamedTuple

import torch

from .ops import attention, check_can_launch

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
E4M3 = torch.float8_e4m3fn
MAX_HEAD_DIM = 256
MAX_ROWS = 2**30  # so that a row plus a window stays a 32-bit number
DENSE = "(batch, heads, seqlen, head_dim)"
PACKED = "(total, heads, head_dim)"


def flash_attention(q, k, v, *, causal=False, scale=None, window=None, softcap=None, return_lse=False):
    """Compute softmax(scale * q @ k^T) @ v without storing the score matrix, forward and backward.

    The last query is aligned with the last key ("bottom-right"): query ``i`` stands at key position
    ``i + seqlen_k - seqlen_q``. With x for a visible key::

                  seqlen_q=2, seqlen_k=5             seqlen_q=5, seqlen_k=2
                causal   window=(1,0)  (0,1)        causal   window=(1,0)  (0,1)
              x x x x .   . . x x .  . . . x x        . .        . .        . .
              x x x x x   . . . x x  . . . . x        . .        . .        . .
                                                      . .        . .        x .
                                                      x .        x .        x x
                                                      x x        x x        . x

    ``window=(left, right)`` shows ``left + right + 1`` keys: ``left`` before a query's own position, its own, ``right``
    after it. ``window=(w, 0)`` and ``causal=True`` with ``window=(w, None)`` are the same. A row that sees no key gives
    out 0, lse ``-inf`` and zero gradients.

    Args:
        q: (batch, heads, seqlen_q, head_dim), fp16, bf16 or fp32, any strides, head_dim 1 to 256, any seqlen_q >= 0.
        k: (batch, heads_kv, seqlen_k, head_dim), dtype and device of ``q``, any strides; ``heads`` must be a multiple
            of ``heads_kv``, and query head ``h`` reads key head ``h // (heads // heads_kv)``.
        v: (batch, heads_kv, seqlen_k, head_dim_v), likewise, head_dim_v 1 to 256.
        causal: hide the keys after each query's own position. Default False.
        scale: factor on the scores, any finite number. Default ``1 / sqrt(head_dim)``.
        window: ``(left, right)``, each an int >= 0, or None for no bound on that side. Default None: no window.
        softcap: bound the scores smoothly: ``softcap * tanh(score / softcap)``, after ``scale`` and before the mask.
            A number > 0. Default None: scores as they are.
        return_lse: return the log-sum-exp too. Default False.

    Returns:
        out (batch, heads, seqlen_q, head_dim_v), in the dtype of ``q`` and with its order of dimensions in memory; with
        ``return_lse=True`` ``(out, lse)``, where lse (batch, heads, seqlen_q) is fp32 and holds the natural log of the
        sum of exponentials of each row's visible scores. Gradients of q, k and v flow through both.

    What each dtype, device and platform gives:
        fp16, bf16: products on the tensor cores, sums in fp32; probabilities are rounded before they meet v.
        fp32: multiplied in full, never as TF32, on the ordinary cores: exact, and many times slower.
        NVIDIA, compute capability 8.0 and newer: everything. 7.5 (T4): fp16, fp32, no tensor cores; bf16 raises.
        CPU: Triton's interpreter, slow, where ``TRITON_INTERPRET=1`` was set before Triton came in; else it raises.
        macOS, Windows: Triton does not exist there, so the call raises; ``attention_tiled`` works.
        NVIDIA, compute capability 9.0 (H100, H200): kernels of their own where they can run, see :func:`backend`.
        Results are the same to the bit on every call, but for dq of those kernels, whose parts are added in any order.
        Under ``torch.use_deterministic_algorithms(True)`` gradients come from the portable kernels: always the same.
        NaN or infinity in a visible input shows in the output.
        Under ``torch.autocast`` the inputs are cast to the autocast dtype. ``torch.compile``, ``torch.export``,
        activation checkpointing, CUDA graphs and ``torch.func`` (``vmap``, ``grad``) work; forward-mode and second
        derivatives raise.

    Raises:
        TypeError: an argument has the wrong type, or the dtype is none of the three.
        ValueError: shapes, dtypes or devices do not go together, a head_dim is over 256, or a number is out of range.
        NotImplementedError: bf16 on a GPU without it; forward-mode derivatives.
        RuntimeError: the tensors are on the CPU and Triton's interpreter was not switched on; second derivatives.
        ImportError: Triton is not installed.

    Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2. Chapters: 5 (forward), 6 (backward).
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors({"q": q, "k": k, "v": v}, DENSE)
    q, options = _check_options(q, causal, scale, window, softcap, return_lse)
    out, lse = attention(q, k, v, None, None, None, *options)
    return (out, lse) if return_lse else out


class Backend(NamedTuple):
    """Which kernels a call runs, "hopper" or "portable", and why not those for Hopper."""

    name: str
    reason: str | None


def backend(q, k, v, *, causal=False, scale=None, window=None, softcap=None):
    """Say which kernels the forward pass of ``flash_attention`` would run on these arguments, without running them.

    On GPUs of compute capability 9.0 (H100, H200) calls that are long enough run kernels written for them, in Gluon:
    fp16 or bf16, head dimensions up to 128, rows without gaps, no softcap; causal or not, windows, grouped heads, any
    lengths. All other calls run the portable kernels in Triton. Both keep the same error budget, but not the same bits;
    backward, those for Hopper take 4 bytes more for each element of ``q``.
    The environment variable FLASHATTN_BACKEND fixes the choice for all calls: ``portable``, or ``hopper``, which raises
    where it cannot.

    Args:
        q, k, v, causal, scale, window, softcap: as for :func:`flash_attention`.

    Returns:
        A :class:`flashattn.api.Backend`: ``name`` is "hopper" or "portable"; ``reason`` is None for the former.

    Raises:
        As :func:`flash_attention`.

    Source: Shah et al. 2024 (FlashAttention-3), for the kernels for Hopper. Chapter: 16.
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors({"q": q, "k": k, "v": v}, DENSE)
    q, options = _check_options(q, causal, scale, window, softcap, False)
    check_can_launch(q)
    from .backends import explain  # here, since it needs Triton

    name, reason = explain(q, k, v, *options[1:])
    return Backend(name, reason)


def flash_attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *,
    causal=False, scale=None, window=None, softcap=None, return_lse=False, max_seqlen_q=None, max_seqlen_k=None,
):  # fmt: skip
    """Compute attention within each of many sequences of any lengths, packed one behind the other without padding.

    Sequence ``i`` has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1] - 1`` and the keys
    ``cu_seqlens_k[i]`` to ``cu_seqlens_k[i + 1] - 1``; either may be none. Masks apply within each sequence as in
    :func:`flash_attention`. Tokens past the last offset belong to no sequence: their out and gradients are 0, their lse
    ``-inf``, whatever they hold.

    Args:
        q: (total_q, heads, head_dim). Dtypes, devices, strides and head dimensions as for :func:`flash_attention`.
        k: (total_k, heads_kv, head_dim).
        v: (total_k, heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (n_sequences + 1,) int32 or int64, on the device of ``q``. They must begin with 0,
            not decrease, and end at or below the total. That is a contract, not checked: that would wait for the GPU.
        causal, scale, window, softcap, return_lse: as for :func:`flash_attention`.
        max_seqlen_q, max_seqlen_k: an int or None. Other packages need them; here each program finds its sequence in
            the offsets, so that they are not used and a wrong value does no harm.

    Returns:
        out (total_q, heads, head_dim_v); with ``return_lse=True`` ``(out, lse)``, lse (heads, total_q), fp32.

    Raises:
        As :func:`flash_attention`.

    Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2. Chapters: 5 (forward), 6 (backward).
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors({"q": q, "k": k, "v": v}, PACKED)
    cu_seqlens_q, cu_seqlens_k = _check_offsets(q, cu_seqlens_q, cu_seqlens_k)
    for name, x in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, int)):
            raise TypeError(f"`{name}` must be an int or None, got {x!r}")
    q, options = _check_options(q, causal, scale, window, softcap, return_lse)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out, lse = attention(q, k, v, None, cu_seqlens_q, cu_seqlens_k, *options)
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """Stand in for ``torch.nn.functional.scaled_dot_product_attention``: same signature, same results, these kernels.

    ``is_causal`` is aligned top-left here, as in PyTorch: query ``i`` sees the keys up to ``i`` whatever the lengths
    are. (:func:`flash_attention` aligns bottom-right: with a cache of keys that is what a model means.)

    Supported: inputs of 2 to any number of dimensions, ``(..., heads, seqlen, head_dim)``, whose leading dimensions
    broadcast; ``value`` with a head dimension of its own; no rows, no keys or no batch; ``attn_mask`` boolean (True for
    visible) or additive, broadcast over batch and heads and read where it lies; ``is_causal``; ``scale``;
    ``enable_gqa``; a row that sees no key gives 0.

    Args:
        query: (..., heads, seqlen_q, head_dim), fp16, bf16 or fp32.
        key: (..., heads_kv, seqlen_k, head_dim).
        value: (..., heads_kv, seqlen_k, head_dim_v).
        attn_mask: broadcasts to (..., heads, seqlen_q, seqlen_k); bool, fp16, bf16 or fp32. Added to the scores in
            fp32.
        dropout_p: only 0.
        is_causal: only without attn_mask.
        scale: factor on the scores. Default ``1 / sqrt(head_dim)``.
        enable_gqa: let heads be a multiple of heads_kv.

    Returns:
        (..., heads, seqlen_q, head_dim_v), in the dtype of ``query``.

    Raises:
        NotImplementedError: ``dropout_p`` over 0, or an attn_mask that requires grad: use PyTorch's own.
        TypeError, ValueError, RuntimeError, ImportError: as :func:`flash_attention`.

    Source: the documentation of ``torch.nn.functional.scaled_dot_product_attention``. Chapter: 5.
    """
    query, key, value = _autocast(query, key, value)
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"`{name}` must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() < (3 if enable_gqa else 2):
            raise ValueError(f"`{name}` must be at least {'3' if enable_gqa else '2'}-D, got shape {tuple(x.shape)}")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"`{name}` must be True or False, got {flag!r}")
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p <= 1:
        raise ValueError(f"`dropout_p` must be a number from 0 to 1, got {dropout_p!r}")
    if dropout_p > 0:
        raise NotImplementedError(
            f"`dropout_p` must be 0, got {dropout_p}: for dropout use torch.nn.functional.scaled_dot_product_attention"
        )

    # One batch dimension and one of heads; without enable_gqa heads broadcast as the batch does.
    n_kept = 3 if enable_gqa else 2
    try:
        leading = torch.broadcast_shapes(*(x.shape[:-n_kept] for x in named.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        raise ValueError(
            f"`query`, `key` and `value` must broadcast in their leading dimensions, got {shapes}"
        ) from None
    named = {name: x.expand(*leading, *x.shape[-n_kept:]) for name, x in named.items()}
    leading = named["query"].shape[:-2]
    if 0 in leading:  # nothing to compute; matmul gives the shape, and gradients theirs
        return (named["query"] @ named["key"].mT) @ named["value"]
    named = {name: _as_4d(x) for name, x in named.items()}
    _check_tensors(named, DENSE)
    query, key, value = named.values()
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    bias = _check_attn_mask(attn_mask, is_causal, (*leading, seqlen_q, seqlen_k), query.device)
    query, scale = _check_scale(query, scale)
    # The kernels align the last query with the last key; this right edge aligns the first with the first.
    window_right = seqlen_q - seqlen_k if is_causal else None
    out, _ = attention(query, key, value, bias, None, None, scale, None, None, window_right)
    return out.reshape(*leading, *out.shape[2:])


def _as_4d(x):
    """Give x exactly two leading dimensions: of more, the first ones are flattened into one batch."""
    return x[(None,) * (4 - x.dim())] if x.dim() <= 4 else x.flatten(0, x.dim() - 4)


def _check_attn_mask(attn_mask, is_causal, shape, device):
    """Return the mask broadcast to (batch, heads, seqlen_q, seqlen_k), or None."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"`attn_mask` must be a torch.Tensor or None, got {type(attn_mask).__name__}")
    if is_causal:
        raise ValueError("`attn_mask` must be None with is_causal=True, got a tensor")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"`attn_mask` must be bool, float16, bfloat16 or float32, got {_dtype_name(attn_mask)}")
    if attn_mask.device != device:
        raise ValueError(f"`attn_mask` must be on {device} like `query`, got {attn_mask.device}")
    if attn_mask.requires_grad:
        raise NotImplementedError(
            "`attn_mask` must not require grad: for a learned bias use FlexAttention or "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    try:
        attn_mask = attn_mask.expand(shape)
    except RuntimeError:
        raise ValueError(f"`attn_mask` must broadcast to {tuple(shape)}, got {tuple(attn_mask.shape)}") from None
    return _as_4d(attn_mask)


def _autocast(*tensors):
    """Cast to the autocast dtype, as PyTorch's own attention does, where autocast is on."""
    device = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if getattr(x, "dtype", None) in SUPPORTED_DTYPES else x for x in tensors)


def _check_tensors(named, layout, dtypes=SUPPORTED_DTYPES):
    """Raise unless q, k and v, under the names the caller knows them by, go together."""
    (q_name, q), (k_name, k), (v_name, v) = named.items()
    n_dims = layout.count(",") + 1
    for name, x in named.items():
        _check_dense(name, x, layout)
        if x.dtype not in dtypes:
            wanted = "float16, bfloat16 or float32" if dtypes == SUPPORTED_DTYPES else _dtype_name(dtypes[0])
            raise TypeError(f"`{name}` must be {wanted}, got {_dtype_name(x)}")
    for name, x in ((k_name, k), (v_name, v)):
        if x.dtype != q.dtype:
            raise ValueError(f"`{name}` must have dtype {_dtype_name(q)} like `{q_name}`, got {_dtype_name(x)}")
        if x.device != q.device:
            raise ValueError(f"`{name}` must be on {q.device} like `{q_name}`, got {x.device}")
        if n_dims == 4 and x.shape[0] != q.shape[0]:
            raise ValueError(f"`{name}` must have batch {q.shape[0]} like `{q_name}`, got {x.shape[0]}")
    head_axis, row_axis = (1, 2) if n_dims == 4 else (1, 0)
    head_dim, heads, heads_kv = q.shape[-1], q.shape[head_axis], k.shape[head_axis]
    for name, x in ((q_name, q), (v_name, v)):
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"`{name}` must have head_dim 1 to {MAX_HEAD_DIM}, got {x.shape[-1]}")
    if k.shape[-1] != head_dim:
        raise ValueError(f"`{k_name}` must have head_dim {head_dim} like `{q_name}`, got {k.shape[-1]}")
    if v.shape[head_axis] != heads_kv:
        raise ValueError(f"`{v_name}` must have {heads_kv} heads like `{k_name}`, got {v.shape[head_axis]}")
    if v.shape[row_axis] != k.shape[row_axis]:
        raise ValueError(f"`{v_name}` must have seqlen {k.shape[row_axis]} like `{k_name}`, got {v.shape[row_axis]}")
    if heads == 0 or heads_kv == 0 or heads % heads_kv:
        raise ValueError(
            f"`{q_name}` must have a number of heads that is a multiple of the {heads_kv} heads of `{k_name}`, "
            f"got {heads} (the layout is {layout})"
        )
    for name, x in ((q_name, q), (k_name, k)):
        if x.shape[row_axis] > MAX_ROWS:
            raise ValueError(f"`{name}` must have at most 2**30 rows a head, got {x.shape[row_axis]}")


def _check_dense(name, x, layout):
    """Raise unless x is a dense tensor with the dimensions that layout names."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(x).__name__}")
    n_dims = layout.count(",") + 1
    if x.dim() != n_dims:
        raise ValueError(f"`{name}` must be {n_dims}-D, {layout}, got shape {tuple(x.shape)}")
    if x.layout != torch.strided:
        raise TypeError(f"`{name}` must be a dense (strided) tensor, got layout {x.layout}")


def _check_beside(name, x, q, *dtypes, kind="a torch.Tensor"):
    """Raise unless x, of which a call has one beside q, is a tensor of one of the dtypes, on the device of q."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"`{name}` must be {kind}, got {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"`{name}` must be {' or '.join(map(_dtype_name, dtypes))}, got {_dtype_name(x)}")
    if x.device != q.device:
        raise ValueError(f"`{name}` must be on {q.device} like `q`, got {x.device}")


def _check_offsets(q, *offsets):
    """Raise unless both cu_seqlens have the right type and size; what they contain is a contract."""
    for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True):
        _check_beside(name, x, q, torch.int32, torch.int64)
        if x.dim() != 1 or len(x) == 0:
            raise ValueError(f"`{name}` must be 1-D, (n_sequences + 1,), got shape {tuple(x.shape)}")
    if len(offsets[0]) != len(offsets[1]):
        raise ValueError(
            f"`cu_seqlens_k` must have length {len(offsets[0])} like `cu_seqlens_q`, got {len(offsets[1])}"
        )
    return [x.contiguous() for x in offsets]


def _check_options(q, causal, scale, window, softcap, return_lse):
    """Return q and (scale, softcap, window_left, window_right) as the kernels take them."""
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"`{name}` must be True or False, got {flag!r}")
    q, scale = _check_scale(q, scale)
    if softcap is not None:
        if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
            raise TypeError(f"`softcap` must be a number or None, got {type(softcap).__name__}")
        if not (0 < softcap < 2.0**127 and abs(scale) / softcap < 2.0**127):
            raise ValueError(f"`softcap` must be a positive fp32 number (and scale / softcap another), got {softcap}")
        softcap = float(softcap)
    left, right = _check_window(window)
    if causal:
        right = 0  # a window's right side is at least 0
    return q, (scale, softcap, left, right)


def _check_scale(q, scale):
    """Return q and a scale over 0: the kernels find the maximum of a row of q k before they multiply it."""
    if scale is None:
        return q, 1 / math.sqrt(q.shape[-1])
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"`scale` must be a number or None, got {type(scale).__name__}")
    if not abs(scale) < 2.0**127:  # also false for NaN; the kernels need scale * log2(e) as an fp32 number
        raise ValueError(f"`scale` must be a finite fp32 number below 2**127 in size, got {scale}")
    if abs(scale) < 2.0**-120:
        return q * 0, 1.0
    return (q, float(scale)) if scale > 0 else (-q, -float(scale))


def _check_window(window):
    if window is None:
        return None, None
    sides_ok = isinstance(window, (tuple, list)) and len(window) == 2
    if not sides_ok or not all(x is None or (isinstance(x, int) and not isinstance(x, bool)) for x in window):
        raise TypeError(f"`window` must be None or (left, right), each an int or None, got {window!r}")
    if any(x is not None and x < 0 for x in window):
        raise ValueError(f"`window` must have sides of 0 or more, and None (not -1) for no bound, got {window!r}")
    return tuple(None if x is None else min(x, MAX_ROWS) for x in window)


def _dtype_name(x):
    """Name a dtype, or that of a tensor."""
    return str(getattr(x, "dtype", x)).removeprefix("torch.")
