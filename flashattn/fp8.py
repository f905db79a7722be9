"""Attention on 8-bit floating-point numbers (e4m3), forward only: quantising, rotating, and the public call.

Nothing here needs Triton but the call on a GPU. Chapter 14 explains what is rounded where.
"""

import functools
import importlib.util
import math

import torch

from .api import DENSE, E4M3, MAX_HEAD_DIM, _check_beside, _check_options, _check_tensors, _dtype_name
from .configs import P_SHIFT, SCALE_BLOCK
from .ops import check_can_launch, has_e4m3
from .reference import apply_softcap, visible_keys

E4M3_MAX = 448.0
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def quantize_fp8(x, *, block=None, keys_last=False):
    """Round a tensor to e4m3, scaled so that the largest entry of each head, or of each block of rows, becomes 448.

    Args:
        x: (batch, heads, seqlen, head_dim), fp16, bf16 or fp32, any strides.
        block: None for one scale per head, or 128 for one per 128 rows.
        keys_last: store the result so that the rows lie along the last axis of memory, as (batch, heads, head_dim,
            seqlen). Its shape is that of ``x`` all the same. :func:`flash_attention_fp8` reads ``v`` so, and makes
            such a copy of a ``v`` that is stored otherwise. Default False: rows as in a contiguous tensor.

    Returns:
        ``(x_fp8, scale)``: x_fp8 has the shape of ``x`` and dtype ``torch.float8_e4m3fn``, scale is fp32, (batch,
        heads) or (batch, heads, ceil(seqlen / 128)), and ``x_fp8.float() * scale`` (each scale for its rows) is about
        ``x``. An entry that is NaN or infinite becomes NaN and does not count for the scale; the scale of zeros is 1.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.

    Source: Micikevicius et al. 2022 (FP8 formats for deep learning). Chapter: 14.
    """
    _check_floating("x", x)
    if x.dim() != 4:
        raise ValueError(f"`x` must be 4-D, {DENSE}, got shape {tuple(x.shape)}")
    if block is not None and (isinstance(block, bool) or block != SCALE_BLOCK):
        raise ValueError(f"`block` must be None or {SCALE_BLOCK}, got {block!r}")
    if not isinstance(keys_last, bool):
        raise TypeError(f"`keys_last` must be True or False, got {keys_last!r}")
    batch, heads, seqlen, head_dim = x.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"`x` must have head_dim 1 to {MAX_HEAD_DIM}, got {head_dim}")
    rows = block or max(seqlen, 1)  # that share a scale
    n_blocks = math.ceil(seqlen / rows) if block else 1
    sizes = x.detach().abs().nan_to_num(0.0, 0.0).amax(dim=-1).float()
    sizes = torch.nn.functional.pad(sizes, (0, n_blocks * rows - seqlen)).view(batch, heads, n_blocks, rows)
    scale = (sizes.amax(dim=-1) / E4M3_MAX).clamp(min=2.0**-126)  # a smaller one would have lost digits itself
    scale = scale.masked_fill((sizes == 0).all(dim=-1), 1.0)
    scaled = x / scale.repeat_interleave(rows, dim=2)[:, :, :seqlen, None]
    scaled = scaled.nan_to_num(math.nan, math.nan, math.nan)  # some versions of PyTorch would make 448 of infinity
    if keys_last:
        room = math.ceil(seqlen / 16) * 16  # bytes: the step that copies of whole tiles want
        memory = x.new_zeros((batch, heads, head_dim, room), dtype=E4M3)
        quantized = memory[..., :seqlen].mT.copy_(scaled)
    else:
        quantized = scaled.to(E4M3, memory_format=torch.contiguous_format)
    return quantized, scale if block else scale[:, :, 0]


def hadamard_rotate(x, seed=0):
    """Multiply the last axis by a random rotation that spreads an outlier over all entries.

    The rotation is diag(signs) H / sqrt(head_dim), with random signs and the Hadamard matrix H of entries 1 and -1. It
    is orthogonal: with q and k rotated alike, q k^T is what it was, but for rounding.

    Args:
        x: (..., head_dim), fp16, bf16, fp32 or fp64; head_dim must be a power of two.
        seed: an int from which the signs are drawn, the same on every device. Default 0.

    Returns:
        A tensor like ``x``. The product is computed in fp32 (fp64 for fp64) and then rounded to the dtype of ``x``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or head_dim is no power of two.

    Source: Ashkboos et al. 2024 (QuaRot); Shah et al. 2024 (FlashAttention-3), section 3.3. Chapter: 14.
    """
    _check_floating("x", x, also_fp64=True)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"`seed` must be an int, got {seed!r}")
    head_dim = x.shape[-1] if x.dim() else 0
    if head_dim < 1 or head_dim & (head_dim - 1):
        raise ValueError(f"`x` must have a power of two for head_dim, got shape {tuple(x.shape)}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (x.to(dtype) @ _rotation(head_dim, seed).to(x.device, dtype)).to(x.dtype)


@functools.lru_cache(maxsize=64)
def _rotation(head_dim, seed):
    """Return diag(signs) H / sqrt(head_dim) in fp64, H by Sylvester's doubling."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < head_dim:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    signs = torch.randint(0, 2, (head_dim, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return signs * h / math.sqrt(head_dim)


def flash_attention_fp8(
    q, k, v, *, q_scale, k_scale, v_scale,
    causal=False, scale=None, window=None, softcap=None, out_dtype=torch.bfloat16, return_lse=False,
):  # fmt: skip
    """Compute attention on e4m3 tensors with scales, forward only.

    ``q * q_scale``, ``k * k_scale`` and ``v * v_scale`` are what attention is computed of. Both products run on 8-bit
    operands: probabilities, times 2^8, are rounded to e4m3. Scores, their maximum and sum, and the output are fp32.

    Args:
        q: (batch, heads, seqlen_q, head_dim), ``torch.float8_e4m3fn``, any strides, head_dim 1 to 256.
        k: (batch, heads_kv, seqlen_k, head_dim), likewise; heads as for :func:`flash_attention`.
        v: (batch, heads_kv, seqlen_k, head_dim_v), likewise. The kernel reads it in the memory order (batch, heads_kv,
            head_dim_v, seqlen_k), in which ``quantize_fp8(v, keys_last=True)`` leaves it, and copies it if need be.
        q_scale, k_scale, v_scale: fp32, over 0 (not checked: that would wait for the GPU): (batch, heads) of the tensor
            for one per head, or (batch, heads, ceil(seqlen / 128)) for one per 128 rows. Each as it likes.
        causal, scale, window, softcap, return_lse: as for :func:`flash_attention`.
        out_dtype: torch.float16, torch.bfloat16 or torch.float32. Default bf16.

    Returns:
        out (batch, heads, seqlen_q, head_dim_v) in out_dtype, contiguous; with ``return_lse=True`` ``(out, lse)``, lse
        (batch, heads, seqlen_q) fp32. A row that sees no key gives out 0, lse ``-inf``. NaN in a visible key, value or
        query shows in the output.

    What each platform gives:
        NVIDIA, compute capability 8.9 and newer: 8-bit products on the tensor cores. Older, and AMD: raises.
        CPU: the kernel in Triton's interpreter where it is on, else the same steps in PyTorch
        (:func:`flashattn.fp8.attention_fp8_emulated`): the same errors, slowly.

    Raises:
        TypeError, ValueError: as :func:`flash_attention`, or a scale has the wrong shape.
        NotImplementedError: a GPU without e4m3; an input that requires grad.

    Source: Shah et al. 2024 (FlashAttention-3), section 3.3. Chapter: 14.
    """
    scales = _check_inputs(q, k, v, dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale))
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"`out_dtype` must be torch.float16, torch.bfloat16 or torch.float32, got {out_dtype!r}")
    # A scale below 0, or of 0, changes q, whose arithmetic e4m3 does not have: a stand-in shows what would be done.
    sign, (scale, softcap, left, right) = _check_options(
        torch.ones(q.shape[-1:]), causal, scale, window, softcap, return_lse
    )
    if sign[0] != 1:
        q = (q.view(torch.uint8) ^ 0x80).view(E4M3) if sign[0] == -1 else torch.zeros_like(q)
    options = dict(scale=scale, softcap=softcap, window_left=left, window_right=right)
    shape = (*q.shape[:3], v.shape[3])
    if q.is_cuda:
        _check_e4m3(torch.cuda.get_device_capability(q.device), torch.version.hip)
        check_can_launch(q)
    if k.shape[2] == 0:
        out, lse = q.new_zeros(shape, dtype=out_dtype), q.new_full(shape[:3], -math.inf, dtype=torch.float32)
    elif q.is_cuda or _is_interpreting():
        from .fp8_kernel import attn_forward_fp8  # here, so that `import flashattn` needs no Triton

        out = q.new_empty(shape, dtype=out_dtype)
        lse = q.new_empty(shape[:3], dtype=torch.float32)
        with torch.cuda.device_of(q):
            attn_forward_fp8(q, k, v, *scales, out, lse, **options)
    else:
        out, lse = attention_fp8_emulated(q, k, v, *scales, **options)
        out = out.to(out_dtype)
    return (out, lse) if return_lse else out


def attention_fp8_emulated(
    q, k, v, q_scale, k_scale, v_scale, *, scale, softcap=None, window_left=None, window_right=None, block_n=SCALE_BLOCK
):  # fmt: skip
    """Do in PyTorch what the kernel does, and round what it rounds: the specification of ``flash_attention_fp8``.

    Args:
        q, k, v: as for :func:`flashattn.flash_attention_fp8`.
        q_scale, k_scale, v_scale: (batch, heads, 1) or (batch, heads, blocks), fp32.
        scale, softcap, window_left, window_right: numbers or None; a causal mask is ``window_right=0``.
        block_n: keys at a time, a divisor of 128. The maximum that probabilities are rounded against is that so far.

    Returns:
        ``(out, lse)``, both fp32.
    """
    group, (seqlen_q, seqlen_k) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k_scale, v_scale = (x.repeat_interleave(group, dim=1) for x in (k_scale, v_scale))
    q_rows = q_scale.repeat_interleave(SCALE_BLOCK if q_scale.shape[2] > 1 else max(seqlen_q, 1), dim=2)
    factor = q_rows[:, :, :seqlen_q, None] * (scale / math.log(2))
    offs_m = torch.arange(seqlen_q, device=q.device)[:, None]
    m_i = torch.full((*q.shape[:3], 1), torch.finfo(torch.float32).min, device=q.device)
    l_i, acc = torch.zeros_like(m_i), torch.zeros((*q.shape[:3], v.shape[3]), device=q.device)
    for start_n in range(0, seqlen_k, block_n):
        keys, block = slice(start_n, start_n + block_n), start_n // SCALE_BLOCK
        k_block, v_block = (x[:, :, min(block, x.shape[2] - 1), None, None] for x in (k_scale, v_scale))
        k_tile, v_tile = (x[:, :, keys].float().repeat_interleave(group, dim=1) for x in (k, v))
        s = (q.float() @ k_tile.mT) * (factor * k_block)
        if softcap is not None:
            s = apply_softcap(s, softcap / math.log(2))
        offs_n = torch.arange(start_n, start_n + s.shape[3], device=q.device)[None, :]
        visible = visible_keys(offs_m, offs_n, seqlen_k - seqlen_q, window=(window_left, window_right))
        s = s.masked_fill(~visible, -math.inf)
        m_new = torch.maximum(m_i, s.amax(dim=-1, keepdim=True))
        p, alpha = torch.exp2(s - m_new + P_SHIFT), torch.exp2(m_i - m_new)
        m_i, l_i = m_new, l_i * alpha + p.sum(dim=-1, keepdim=True)
        v_tile = v_tile.masked_fill(~visible.any(dim=0)[:, None], 0.0)
        acc = acc * alpha + (p.to(E4M3).float() @ v_tile) * v_block
    has_key = l_i != 0
    out = torch.where(has_key, acc / l_i, 0.0)
    lse = torch.where(has_key, (m_i + torch.log2(l_i) - P_SHIFT) * math.log(2), -math.inf)
    return out, lse[..., 0]


def _is_interpreting():
    if importlib.util.find_spec("triton") is None:
        return False
    from .primitives import INTERPRETED

    return INTERPRETED.value


def _check_e4m3(capability, hip):
    """Raise unless a GPU of this compute capability multiplies e4m3 numbers."""
    if not has_e4m3(capability, hip):
        which = "an AMD GPU" if hip else f"compute capability {capability[0]}.{capability[1]}"
        raise NotImplementedError(
            f"`q` must be on an NVIDIA GPU of compute capability 8.9 or newer, which multiplies e4m3, got {which}; "
            "flash_attention takes fp16 and bf16 there"
        )


def _check_floating(name, x, also_fp64=False):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in OUT_DTYPES and not (also_fp64 and x.dtype == torch.float64):
        wanted = "float16, bfloat16, float32 or float64" if also_fp64 else "float16, bfloat16 or float32"
        raise TypeError(f"`{name}` must be {wanted}, got {_dtype_name(x)}")


def _check_inputs(q, k, v, scales):
    """Raise unless tensors and scales go together; return the scales as (batch, heads, blocks)."""
    _check_tensors({"q": q, "k": k, "v": v}, DENSE, (E4M3,))
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"`q` must be on a CUDA device or the CPU, got {q.device}")
    shaped = []
    for (name, x), of in zip(scales.items(), (q, k, v), strict=True):
        _check_beside(name, x, q, torch.float32)
        head, blocks = tuple(of.shape[:2]), math.ceil(of.shape[2] / SCALE_BLOCK)
        if tuple(x.shape) not in (head, (*head, blocks)):
            raise ValueError(
                f"`{name}` must be {head} or, per {SCALE_BLOCK} rows, {(*head, blocks)}, got {tuple(x.shape)}"
            )
        shaped.append(x if x.dim() == 3 else x[:, :, None])
    named = dict(q=q, k=k, v=v) | scales
    for name, x in named.items():
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"`{name}` must not require grad: attention in 8 bits is forward only; detach it")
    return shaped
