"""The implementations that ``flashattn.bench`` measures side by side, all called in one way.

A builder in IMPLEMENTATIONS takes a :class:`Shape` and returns the ways to call an implementation on it, as {name:
function of (q, k, v)}; only flex has more than one, and names for them. It raises for a shape that the implementation
does not know. To measure another one, add its builder, and its name to PEERS.
"""

import contextlib
import functools
import importlib
import math
import os
import unittest.mock
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from .api import flash_attention
from .decode import flash_decode
from .fp8 import flash_attention_fp8


class Shape(NamedTuple):
    """What is computed, whoever computes it. window is ``(left, right)`` as for ``flash_attention``, or None.

    n_tokens: how many queries there are, the last of seqlen tokens, as in a step of decoding; None for all.
    mask: instead of causal and window a mask of suite "sparse" by its name, ``Mask(name)``; empty for none.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"
    window: tuple[int, int] | None = None
    n_tokens: int | None = None
    mask: str = ""

    def __str__(self):
        heads = self.heads if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        mask = ("causal" if self.causal else "full") + (f" window {sum(self.window) + 1}" if self.window else "")
        mask = self.mask or (mask if self.n_tokens is None else f"new tokens {self.n_tokens}")
        return f"{self.dtype} B={self.batch} H={heads} N={self.seqlen} D={self.head_dim} {mask}"

    def sizes(self):
        """Return the six sizes in the order of the functions of ``flashattn.cost``."""
        seqlen_q = self.seqlen if self.n_tokens is None else self.n_tokens
        return self.batch, self.heads, self.heads_kv, seqlen_q, self.seqlen, self.head_dim


class Mask:
    """A mask of suite "sparse" in the three ways in which it is asked for, the same for the same name.

    Args:
        name: "window 1024" (causal, as many keys), "documents" (causal, within documents of random lengths), or "blocks
            0.25" (that share of the key blocks of 128, at random for each query block of 128).
        seqlen: of queries and keys.
        device: where its tensors go.

    Attributes:
        rule: a function of b, h, i and j, index tensors, that says whether query i sees key j: FlexAttention's
            ``mask_mod``.
    """

    BLOCK = 128

    def __init__(self, name, seqlen, device):
        self.kind, _, number = name.partition(" ")
        self.seqlen, self.device = seqlen, device
        generator = torch.Generator().manual_seed(0)
        if self.kind == "window":
            self.n_keys = n_keys = int(number)
            self.rule = lambda b, h, i, j: (i >= j) & (i - j < n_keys)
        elif self.kind == "documents":
            lengths = torch.randint(256, 2560, (seqlen // 256 + 1,), generator=generator)
            self.ids = ids = torch.arange(len(lengths)).repeat_interleave(lengths)[:seqlen].int().to(device)
            self.rule = lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])
        elif self.kind == "blocks":
            n_blocks = -(-seqlen // self.BLOCK)
            k = max(1, round(float(number) * n_blocks))
            self.index = torch.rand(n_blocks, n_blocks, generator=generator).topk(k).indices.to(device)
            chosen = torch.zeros(n_blocks, n_blocks, dtype=torch.bool, device=device).scatter_(1, self.index, True)
            self.rule = lambda b, h, i, j: chosen[i // 128, j // 128]
        else:
            raise NotImplementedError(f"no mask {name!r}")

    def visible(self):
        """Return all of it as a boolean tensor, for the reference."""
        rows = torch.arange(self.seqlen, device=self.device)
        return self.rule(0, 0, rows[:, None], rows[None, :])

    def tile_mask(self):
        """Return it as a :class:`flashattn.masks.TileMask`."""
        from . import masks

        if self.kind == "window":
            return masks.causal() & masks.sliding_window(self.n_keys - 1)
        if self.kind == "documents":
            return masks.causal() & masks.documents(self.ids)
        return masks.selected_blocks(self.index, self.BLOCK)


def sparse_tiles(shape, device):
    """Return the ``masks.Tiles`` of a shape with a mask."""
    sizes = (shape.batch, shape.heads, shape.seqlen, shape.seqlen)
    return Mask(shape.mask, shape.seqlen, device).tile_mask().tiles(*sizes, device=device, block=Mask.BLOCK)


def naive_attention(q, k, v, *, causal=False):
    """Compute attention the way chapter 1 does, every matrix in memory; causal for seqlen_q = seqlen_k."""
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]))
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return torch.softmax(s, dim=-1) @ v


def _eager(shape):
    if shape.window or shape.mask or shape.heads != shape.heads_kv:
        raise NotImplementedError("no window, no other mask and no grouped queries")
    return {"": functools.partial(naive_attention, causal=shape.causal)}


def _flashattn(shape):
    if shape.n_tokens:
        return {"": _Paged()}
    if shape.mask:
        from .sparse import sparse_attention

        return {"": functools.partial(sparse_attention, mask=sparse_tiles(shape, "cuda"))}
    return {"": functools.partial(flash_attention, causal=shape.causal, window=shape.window)}


def _flashattn_atomic(shape):
    from .atomic import attention_atomic  # here, so that this file needs no Triton

    if shape.window:
        raise NotImplementedError("no window")
    return {"": functools.partial(attention_atomic, causal=shape.causal)}


class _Paged:
    """Call flash_decode on K and V, which the first call puts into pages, in random order and in new memory."""

    PAGE_SIZE = 64

    def __call__(self, q, k, v):
        if not hasattr(self, "pages"):
            batch, heads_kv, seqlen, _ = k.shape
            n_pages = seqlen // self.PAGE_SIZE
            order = torch.randperm(batch * n_pages, generator=torch.Generator().manual_seed(0)).to(q.device)
            table = torch.empty_like(order)
            table[order] = torch.arange(batch * n_pages, device=q.device)  # page i of all goes to place table[i]
            self.pages = [
                x.unflatten(2, (n_pages, self.PAGE_SIZE)).transpose(1, 2).flatten(0, 1)[order] for x in (k, v)
            ]
            self.table = table.view(batch, n_pages).to(torch.int32)
            self.seqlens = torch.full((batch,), seqlen, dtype=torch.int32, device=q.device)
        return flash_decode(q, *self.pages, self.table, self.seqlens)


def _read(shape):
    if not shape.n_tokens:
        raise NotImplementedError("reads what a step of decoding reads")

    def kernel(q, k, v):
        from .streaming import read  # here: it needs Triton

        return read(k, v)

    return {"kernel": kernel, "sum": lambda q, k, v: (k.sum(), v.sum())}


def _sdpa_decode(shape):
    """One new token sees all keys, without a mask. Query heads of one key head are passed as such or as queries."""
    if shape.n_tokens != 1:
        raise NotImplementedError("one new token only")

    def folded(q, k, v):
        queries = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
        return scaled_dot_product_attention(queries, k, v).view(q.shape)

    ways = {"grouped": functools.partial(scaled_dot_product_attention, enable_gqa=True), "folded": folded}
    return ways if shape.heads != shape.heads_kv else {"": scaled_dot_product_attention}


def _sdpa(shape):
    if shape.window or shape.mask:
        raise NotImplementedError("no window and no other mask")
    if shape.n_tokens:
        return _sdpa_decode(shape)
    grouped = dict(enable_gqa=True) if shape.heads != shape.heads_kv else {}
    return {"": functools.partial(scaled_dot_product_attention, is_causal=shape.causal, **grouped)}


FLEX_WAYS = ("default", "max-autotune-no-cudagraphs")


def flex(shape, ways=FLEX_WAYS):
    """Compile PyTorch's FlexAttention for a shape, in each of several ways (modes of ``torch.compile``)."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b, h, i, j):
        return i >= j

    def causal_window(b, h, i, j):
        return (i >= j) & (i - j <= shape.window[0])

    torch._functorch.config.donated_buffer = False  # else a compiled backward refuses to run twice on one graph
    torch._dynamo.reset()  # else the shapes of a suite are more than it is willing to recompile for
    if shape.mask:
        ways = ways[:1]  # the other takes minutes for each mask
    mask = None
    if shape.causal or shape.mask:
        rule = Mask(shape.mask, shape.seqlen, "cuda").rule if shape.mask else causal_window if shape.window else causal
        mask = create_block_mask(rule, None, None, shape.seqlen, shape.seqlen, device="cuda")
    if shape.n_tokens:  # it has a kernel for few queries, with no choices that would take minutes to try
        ways = ways[:1]
    options = dict(block_mask=mask, enable_gqa=shape.heads != shape.heads_kv)
    return {way: functools.partial(torch.compile(flex_attention, dynamic=False, mode=way), **options) for way in ways}


@functools.lru_cache
def fa3_module():
    """Return FlashAttention-3, built from its repository or from PyPI's fa3-fwd, or None where neither is installed."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)


def _fa3(shape):
    if shape.window or shape.mask:
        raise NotImplementedError("no window and no other mask")

    def call(q, k, v):  # its layout is (batch, seqlen, heads, head_dim); some versions return the lse too
        out = fa3_module().flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=shape.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return {"": call}


def _flashattn_fp8(shape):
    return {"": lambda arguments: flash_attention_fp8(**arguments, causal=shape.causal)}


def _fa3_fp8(shape):
    import inspect

    module = fa3_module()
    if "q_descale" not in inspect.signature(module.flash_attn_func).parameters:
        raise NotImplementedError("this build takes no scales")

    def call(arguments):  # every head's scale is that of a key head too; v is copied to the layout that it takes
        q, k, v = (arguments[name].transpose(1, 2) for name in "qkv")
        scales = {f"{name}_descale": arguments[f"{name}_scale"] for name in "qkv"}
        out = module.flash_attn_func(q, k, v, causal=shape.causal, **scales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return {"": call}


# Those in EIGHT_BIT are functions of one argument, a dict of what ``flash_attention_fp8`` takes.
IMPLEMENTATIONS = {
    "flashattn": _flashattn,
    "flashattn_portable": _flashattn,
    "flashattn_atomic": _flashattn_atomic,
    "sdpa_flash": _sdpa,
    "sdpa_cudnn": _sdpa,
    "sdpa_efficient": _sdpa,
    "flex": flex,
    "fa3": _fa3,
    "eager": _eager,
    "read": _read,
    "flashattn_fp8": _flashattn_fp8,
    "fa3_fp8": _fa3_fp8,
}
PEERS = ("flashattn", "flashattn_portable", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "fa3")
FORWARD_ONLY = {"fa3"}
EIGHT_BIT = {"flashattn_fp8", "fa3_fp8"}
BACKENDS = {
    "sdpa_flash": "FLASH_ATTENTION",
    "sdpa_cudnn": "CUDNN_ATTENTION",
    "sdpa_efficient": "EFFICIENT_ATTENTION",
}


def backend(impl):
    """Return a context in which attention, PyTorch's or ours, is this one.

    It is entered once, so that no timed call pays for it. flashattn is what runs by default, flashattn_portable the
    portable kernels.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if impl == "flashattn_portable":
        return unittest.mock.patch.dict(os.environ, FLASHATTN_BACKEND="portable")
    return sdpa_kernel(getattr(SDPBackend, BACKENDS[impl])) if impl in BACKENDS else contextlib.nullcontext()
