"""Decode: attend from the newest tokens of each sequence to all of its keys, which lie in pages. Chapter 13."""

import torch

from .api import (
    E4M3,
    MAX_HEAD_DIM,
    MAX_ROWS,
    SUPPORTED_DTYPES,
    _check_beside,
    _check_dense,
    _check_options,
    _dtype_name,
)
from .ops import _new_out, check_can_launch, has_e4m3

MAX_TOKENS = 16
PAGE_SIZES = (16, 32, 64, 128, 256)
PAGES = "(n_pages, heads, page_size, head_dim)"
N_TENSORS = 7  # of the operator's arguments
PLANS = {}  # kind of call -> decode_kernels.Plan
MOST_PLANS = 4096  # with more, all are forgotten


def flash_decode(
    q, k_pages, v_pages, page_table, seqlens, *,
    scale=None, window=None, softcap=None, k_scale=None, v_scale=None, return_lse=False,
):  # fmt: skip
    """Attend from the 1 to 16 newest tokens of each sequence to all its keys, which lie in pages anywhere in a store.

    Key ``j`` of sequence ``b`` is row ``j % page_size`` of page ``page_table[b, j // page_size]``. The keys of the new
    tokens are among them, the last ones, and the tokens are causal among themselves: token ``t`` of ``n`` stands at key
    position ``seqlens[b] - n + t``. With n_tokens=2, page_size=4 (16 in truth), x for a visible key::

        page_table[b] = 7, 2, -1          page 7     page 2
        seqlens[b] = 7           token 0  x x x x    x x . -
                                 token 1  x x x x    x x x -     - is a page's tail, never read

    All query heads that share a key head are computed together, so that K and V are read once. The work is split along
    the keys as well, as far as the device has room, and the parts are merged by their softmax statistics.

    Args:
        q: (batch, heads, n_tokens, head_dim), fp16, bf16 or fp32, any strides, n_tokens 1 to 16, head_dim 1 to 256.
        k_pages: (n_pages, heads_kv, page_size, head_dim), any strides (a store laid out as (n_pages, page_size,
            heads_kv, head_dim) is passed transposed), page_size 16, 32, 64, 128 or 256; ``heads`` must be a multiple of
            ``heads_kv``. In the dtype of ``q``, or in ``torch.float8_e4m3fn``.
        v_pages: (n_pages, heads_kv, page_size, head_dim_v), likewise, with the dtype of ``k_pages``.
        page_table: (batch, max_pages) int32. Entries that no visible key needs may hold anything.
        seqlens: (batch,) int32: the number of keys of each sequence, its new tokens included, at most
            ``max_pages * page_size``. With 0, and for tokens before the first key, out is 0 and lse ``-inf``. That the
            table names pages that exist is a contract, not checked: that would wait for the GPU.
        scale, softcap: as for :func:`flash_attention`.
        window: ``(left, right)`` as for :func:`flash_attention`; as with ``causal=True`` there, only ``left`` matters:
            a token sees its own key and ``left`` before it.
        k_scale, v_scale: what numbers of fp8 pages are multiplied by: fp32 on the device of ``q``, one number, of shape
            (), or one for each key head, (heads_kv,). Default None: 1.
        return_lse: return the log-sum-exp too. Default False.

    Returns:
        out (batch, heads, n_tokens, head_dim_v), in the dtype of ``q``; with ``return_lse=True`` ``(out, lse)``, lse
        (batch, heads, n_tokens), fp32. There are no gradients. The call never waits for the GPU, can be recorded in a
        CUDA graph and compiled by ``torch.compile``; results are the same to the bit on every call of the same shapes.

    Raises:
        TypeError, ValueError, RuntimeError, ImportError: as :func:`flash_attention`.
        ValueError: ``n_tokens`` or ``page_size`` is none that is offered; scales for pages that are not fp8.
        NotImplementedError: bf16 on a GPU without it; fp8 pages on an NVIDIA GPU before compute capability 8.9 or
            another maker's; an input that requires grad while gradients are recorded.

    Source: Kwon et al. 2023 (PagedAttention); Dao et al. 2023 (Flash-Decoding). Chapter: 13.
    """
    tensors = (q, k_pages, v_pages, page_table, seqlens, k_scale, v_scale)
    key = _kind_of_call(tensors, scale, window, softcap, return_lse)
    plan = PLANS.get(key)
    if plan is None or (
        torch.is_grad_enabled() and (q.requires_grad or k_pages.requires_grad or v_pages.requires_grad)
    ):
        tensors, options = _check(*tensors, scale, window, softcap, return_lse)
        if key is None:
            out, lse = torch.ops.flashattn.decode(*tensors, *options)
            return (out, lse) if return_lse else out
        plan = _plan(*tensors, *options)
        if tensors[0] is q:  # else its sign, or a scale of 0, went into q: that is not a plan for the next q
            if len(PLANS) >= MOST_PLANS:
                PLANS.clear()
            PLANS[key] = plan
    out, lse = plan(*tensors)
    return (out, lse) if return_lse else out


def _kind_of_call(tensors, *options):
    """Return all of a call that its checks, its plan and its kernels depend on, or None for one not to be remembered.

    That is a call of torch.compile and its kin, and one whose arguments are not what they should be.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    layouts = []
    for x in tensors:
        if type(x) is torch.Tensor and x.layout is torch.strided and not x.is_neg():
            layouts.append((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16))
        elif x is None:
            layouts.append(None)
        else:
            return None
    key = (*layouts, *options, type(options[-1]))
    return key if not isinstance(options[1], list) else None


def _check(q, k_pages, v_pages, page_table, seqlens, k_scale, v_scale, scale, window, softcap, return_lse):
    """Raise unless the arguments of ``flash_decode`` go together; return the tensors and options of the operator."""
    stores = dict(q=q, k_pages=k_pages, v_pages=v_pages)
    _check_pages(stores)
    _check_tables(q, page_table, seqlens)
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_page_scale(name, x, k_pages, q)
    q, (scale, softcap, window_left, _) = _check_options(q, True, scale, window, softcap, return_lse)
    if torch.is_grad_enabled():
        for name, x in stores.items():
            if x.requires_grad:
                raise NotImplementedError(
                    f"`{name}` must not require grad: flash_decode has no gradients; call it under torch.no_grad(), or "
                    "train with flash_attention"
                )
    return (q, k_pages, v_pages, page_table, seqlens, k_scale, v_scale), (scale, softcap, window_left)


def _check_pages(tensors):
    """Raise unless q and the two stores of pages go together."""
    q, k_pages, v_pages = tensors.values()
    for name, x in tensors.items():
        _check_dense(name, x, "(batch, heads, n_tokens, head_dim)" if name == "q" else PAGES)
        if x.device != q.device:
            raise ValueError(f"`{name}` must be on {q.device} like `q`, got {x.device}")
    if q.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"`q` must be float16, bfloat16 or float32, got {_dtype_name(q)}")
    if k_pages.dtype not in (q.dtype, E4M3):
        raise ValueError(f"`k_pages` must be {_dtype_name(q)} like `q`, or float8_e4m3fn, got {_dtype_name(k_pages)}")
    if v_pages.dtype != k_pages.dtype:
        raise ValueError(f"`v_pages` must be {_dtype_name(k_pages)} like `k_pages`, got {_dtype_name(v_pages)}")
    if not 1 <= q.shape[2] <= MAX_TOKENS:
        raise ValueError(f"`q` must have 1 to {MAX_TOKENS} tokens, got {q.shape[2]}; for more there is flash_attention")
    for name, x in (("q", q), ("v_pages", v_pages)):
        if not 1 <= x.shape[3] <= MAX_HEAD_DIM:
            raise ValueError(f"`{name}` must have head_dim 1 to {MAX_HEAD_DIM}, got {x.shape[3]}")
    if k_pages.shape[3] != q.shape[3]:
        raise ValueError(f"`k_pages` must have head_dim {q.shape[3]} like `q`, got {k_pages.shape[3]}")
    if k_pages.shape[2] not in PAGE_SIZES:
        raise ValueError(f"`k_pages` must have page_size 16, 32, 64, 128 or 256, got {k_pages.shape[2]}")
    if v_pages.shape[:3] != k_pages.shape[:3]:
        sizes = "n_pages, heads and page_size"
        raise ValueError(
            f"`v_pages` must have {sizes} {tuple(k_pages.shape[:3])} like `k_pages`, got {tuple(v_pages.shape[:3])}"
        )
    heads, heads_kv = q.shape[1], k_pages.shape[1]
    if heads == 0 or heads_kv == 0 or heads % heads_kv:
        raise ValueError(
            f"`q` must have a number of heads that is a multiple of the {heads_kv} heads of `k_pages`, got {heads}"
        )


def _check_tables(q, page_table, seqlens):
    """Raise unless the page table and the lengths have the right type and size; what they contain is a contract."""
    for name, x, layout in (("page_table", page_table, "(batch, max_pages)"), ("seqlens", seqlens, "(batch,)")):
        _check_beside(name, x, q, torch.int32)
        n_dims = 2 if name == "page_table" else 1
        if x.dim() != n_dims or x.shape[0] != q.shape[0]:
            raise ValueError(f"`{name}` must be {layout} with batch {q.shape[0]} like `q`, got shape {tuple(x.shape)}")
    if page_table.shape[1] * PAGE_SIZES[0] > MAX_ROWS:
        raise ValueError(
            f"`page_table` must have at most {MAX_ROWS // PAGE_SIZES[0]} pages a sequence, got {page_table.shape[1]}"
        )


def _check_page_scale(name, x, k_pages, q):
    """Raise unless a scale of fp8 pages has the right type and size."""
    if x is None:
        return
    if k_pages.dtype != E4M3:
        raise ValueError(
            f"`{name}` must be None for pages that are not float8_e4m3fn, got pages in {_dtype_name(k_pages)}"
        )
    _check_beside(name, x, q, torch.float32, kind="a torch.Tensor or None")
    heads_kv = k_pages.shape[1]
    if x.shape not in ((), (heads_kv,)):
        raise ValueError(f"`{name}` must have shape () or ({heads_kv},), one for each key head, got {tuple(x.shape)}")


def _plan(q, k_pages, v_pages, page_table, seqlens, k_scale, v_scale, scale, softcap, window_left):
    check_can_launch(q)
    is_8_bit = k_pages.dtype == E4M3
    if is_8_bit and q.is_cuda and not has_e4m3(torch.cuda.get_device_capability(q.device), torch.version.hip):
        raise NotImplementedError(
            "`k_pages` must be in the dtype of `q` on this GPU: float8_e4m3fn needs compute capability 8.9 or newer"
        )
    from .decode_kernels import Plan  # here, so that `import flashattn` needs no Triton

    return Plan(
        q, k_pages, v_pages, page_table, seqlens, k_scale, v_scale,
        scale=scale, softcap=softcap, window_left=window_left,
    )  # fmt: skip


def _decode(*arguments):
    tensors = [x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in arguments[:N_TENSORS]]
    return _plan(*tensors, *arguments[N_TENSORS:])(*tensors)


torch.library.define(
    "flashattn::decode",
    "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor seqlens, Tensor? k_scale, Tensor? v_scale, "
    "float scale, float? softcap, int? window_left) -> (Tensor, Tensor)",
)
torch.library.impl("flashattn::decode", ("cpu", "cuda"), _decode)


@torch.library.register_fake("flashattn::decode")
def _fake_decode(q, k_pages, v_pages, *_):
    return _new_out(q, v_pages.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
