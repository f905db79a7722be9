"""The public calls: every check of user input, the autograd function, and the way to the kernels."""

import importlib.util
import math
import os

import torch

from .derivative import first_derivative_only

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


def flash_attention(q, k, v, *, causal=False, scale=None, window=None, softcap=None, return_lse=False):
    """Compute softmax(scale * q @ k^T) @ v without storing the score matrix, forward and backward.

    The last query is aligned with the last key ("bottom-right"). With ``causal=True``, x for a visible key::

        seqlen_q=2, seqlen_k=5          seqlen_q=5, seqlen_k=2
            x x x x .                       . .
            x x x x x                       . .
                                            . .
                                            x .
                                            x x

    A row that sees no key gives out 0, lse ``-inf`` and zero gradients.

    Args:
        q: (batch, heads, seqlen_q, head_dim), fp16, bf16 or fp32, any strides, head_dim 1 to 256, any seqlen_q >= 0.
        k: (batch, heads_kv, seqlen_k, head_dim), dtype and device of ``q``, any strides; ``heads`` must be a multiple
            of ``heads_kv``, and query head ``h`` reads key head ``h // (heads // heads_kv)``.
        v: (batch, heads_kv, seqlen_k, head_dim), likewise. (A head dimension of its own is not supported yet.)
        causal: hide the keys after each query's own position. Default False.
        scale: factor on the scores, any finite number. Default ``1 / sqrt(head_dim)``.
        window: ``(left, right)``, a sliding window. Not supported yet; only None.
        softcap: smooth bound on the scores. Not supported yet; only None.
        return_lse: return the log-sum-exp too. Default False.

    Returns:
        out, in the shape, dtype and dense memory layout of ``q``; with ``return_lse=True`` ``(out, lse)``, where lse
        (batch, heads, seqlen_q) is fp32 and holds the natural log of the sum of exponentials of each row's visible
        scores. Gradients of q, k and v flow through both. fp16 and bf16 accumulate in fp32; fp32 is multiplied in
        full, never as TF32. Results are the same to the bit on every call.

    Raises:
        TypeError: an argument has the wrong type, or the dtype is none of the three.
        ValueError: shapes, dtypes or devices do not go together, or head_dim is over 256.
        NotImplementedError: ``window``, ``softcap`` or a head_dim of ``v`` of its own, for now; bf16 on a GPU without
            it; and differentiating the gradient again.
        RuntimeError: the tensors are on the CPU and Triton's interpreter was not switched on.
        ImportError: Triton is not installed.

    Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2. Chapters: 5 (forward), 6 (backward).
    """
    scale = _check(q, k, v, causal, scale, window, softcap, return_lse)
    _check_can_launch(q)
    # A kernel reads memory, and knows nothing of the sign that PyTorch keeps beside it for views like z.conj().imag.
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    out, lse = _FlashAttention.apply(q, k, v, causal, scale)
    return (out, lse) if return_lse else out


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        from .forward import attn_forward  # here, so that `import flashattn` needs no Triton

        with torch.cuda.device_of(q):
            out, lse, lse_log2 = attn_forward(q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse_log2)
        ctx.causal, ctx.scale = causal, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx, do, dlse):
        from .backward import attn_backward

        if do is None and dlse is None:
            return None, None, None, None, None
        q, k, v, out, lse_log2 = ctx.saved_tensors
        do = out.new_zeros(()).expand_as(out) if do is None else do.resolve_neg()
        dlse = None if dlse is None else dlse.resolve_neg()
        with torch.cuda.device_of(q):
            dq, dk, dv = attn_backward(q, k, v, out, lse_log2, do, dlse, causal=ctx.causal, scale=ctx.scale)
        return dq, dk, dv, None, None


def _check(q, k, v, causal, scale, window, softcap, return_lse):
    """Raise for any argument that does not fit; return the scale as a float."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"`{name}` must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"`{name}` must be 4-D, (batch, heads, seqlen, head_dim), got shape {tuple(x.shape)}")
        if x.dtype not in SUPPORTED_DTYPES:
            raise TypeError(f"`{name}` must be float16, bfloat16 or float32, got {_dtype_name(x)}")
        if x.layout != torch.strided:
            raise TypeError(f"`{name}` must be a dense (strided) tensor, got layout {x.layout}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"`{name}` must have dtype {_dtype_name(q)} like `q`, got {_dtype_name(x)}")
        if x.device != q.device:
            raise ValueError(f"`{name}` must be on {q.device} like `q`, got {x.device}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"`{name}` must have batch {q.shape[0]} like `q`, got {x.shape[0]}")
    batch, heads, _, head_dim = q.shape
    heads_kv = k.shape[1]
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"`q` must have head_dim 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if k.shape[3] != head_dim:
        raise ValueError(f"`k` must have head_dim {head_dim} like `q`, got {k.shape[3]}")
    if v.shape[1] != heads_kv:
        raise ValueError(f"`v` must have {heads_kv} heads like `k`, got {v.shape[1]}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"`v` must have seqlen {k.shape[2]} like `k`, got {v.shape[2]}")
    if heads == 0 or heads_kv == 0 or heads % heads_kv:
        raise ValueError(
            f"`q` must have a number of heads that is a multiple of the {heads_kv} heads of `k`, got {heads} "
            "(the layout is (batch, heads, seqlen, head_dim))"
        )
    if v.shape[3] != head_dim:
        raise NotImplementedError(f"`v` must have head_dim {head_dim} like `q` for now, got {v.shape[3]}")
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"`{name}` must be True or False, got {flag!r}")
    _check_window(window)
    if softcap is not None:
        raise NotImplementedError(f"`softcap` must be None for now, got {softcap!r}")
    return _check_scale(scale, head_dim)


def _check_scale(scale, head_dim):
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"`scale` must be a number or None, got {type(scale).__name__}")
    if not abs(scale) < 2.0**127:  # also false for NaN; the kernels need scale * log2(e) as an fp32 number
        raise ValueError(f"`scale` must be a finite fp32 number below 2**127 in size, got {scale}")
    return float(scale)


def _check_window(window):
    if window is None:
        return
    sides_ok = isinstance(window, (tuple, list)) and len(window) == 2
    if not sides_ok or not all(x is None or (isinstance(x, int) and not isinstance(x, bool)) for x in window):
        raise TypeError(f"`window` must be None or (left, right), each an int or None, got {window!r}")
    raise NotImplementedError(f"`window` must be None for now, got {window!r}")


def _check_can_launch(q):
    """Raise unless a kernel can run on the device of q: a GPU, or the CPU under Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            "flash_attention needs Triton, which is not installed (it exists for Linux; on macOS and Windows use "
            "flashattn.attention_tiled or flashattn.attention_reference). On Linux: pip install triton"
        )
    if q.is_cuda:
        if q.dtype == torch.bfloat16 and torch.version.cuda and torch.cuda.get_device_capability(q.device)[0] < 8:
            raise NotImplementedError(
                f"`q` must be float16 or float32 on this GPU, which has no bfloat16, got {_dtype_name(q)}"
            )
        return
    if q.device.type != "cpu":
        raise ValueError(f"`q` must be on a CUDA device, or on the CPU under Triton's interpreter, got {q.device}")
    from .primitives import INTERPRETED

    if not INTERPRETED.value:
        hint = " (it is set now, but Triton was imported before)" if os.environ.get("TRITON_INTERPRET") == "1" else ""
        raise RuntimeError(
            "`q` must be on a CUDA device, got cpu. To run the kernels on the CPU, slowly, in Triton's interpreter, "
            f"set TRITON_INTERPRET=1 in the environment before Triton is first imported{hint}; importing "
            "flashattn.notebook first does that where there is no GPU"
        )


def _dtype_name(x):
    return str(x.dtype).removeprefix("torch.")
