"""The implementations that ``flashattn.bench`` measures side by side, all called in one way.

A builder in IMPLEMENTATIONS takes a :class:`Shape` and returns the ways to call an implementation on it, as {name:
function of (q, k, v)}; only flex has more than one, and names for them. It raises for a shape that the implementation
does not know. To measure another one, add its builder, and its name to PEERS.
"""

import contextlib
import functools
import importlib
import math
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from .api import flash_attention


class Shape(NamedTuple):
    """What is computed, whoever computes it. window is ``(left, right)`` as for ``flash_attention``, or None."""

    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"
    window: tuple[int, int] | None = None

    def __str__(self):
        heads = self.heads if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        mask = ("causal" if self.causal else "full") + (f" window {sum(self.window) + 1}" if self.window else "")
        return f"{self.dtype} B={self.batch} H={heads} N={self.seqlen} D={self.head_dim} {mask}"

    def sizes(self):
        """Return the six sizes in the order of the functions of ``flashattn.cost``."""
        return self.batch, self.heads, self.heads_kv, self.seqlen, self.seqlen, self.head_dim


def naive_attention(q, k, v, *, causal=False):
    """Compute attention the way chapter 1 does, every matrix in memory; causal for seqlen_q = seqlen_k."""
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]))
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return torch.softmax(s, dim=-1) @ v


def _eager(shape):
    if shape.window or shape.heads != shape.heads_kv:
        raise NotImplementedError("no window and no grouped queries")
    return {"": functools.partial(naive_attention, causal=shape.causal)}


def _flashattn(shape):
    return {"": functools.partial(flash_attention, causal=shape.causal, window=shape.window)}


def _flashattn_atomic(shape):
    from .atomic import attention_atomic  # here, so that this file needs no Triton

    if shape.window:
        raise NotImplementedError("no window")
    return {"": functools.partial(attention_atomic, causal=shape.causal)}


def _sdpa(shape):
    if shape.window:
        raise NotImplementedError("no window")
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
    mask = None
    if shape.causal:
        rule = causal_window if shape.window else causal
        mask = create_block_mask(rule, None, None, shape.seqlen, shape.seqlen, device="cuda")
    options = dict(block_mask=mask, enable_gqa=shape.heads != shape.heads_kv)
    return {way: functools.partial(torch.compile(flex_attention, dynamic=False, mode=way), **options) for way in ways}


@functools.lru_cache
def fa3_module():
    """Return FlashAttention-3, built from its repository or from PyPI's fa3-fwd, or None where neither is installed."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)


def _fa3(shape):
    if shape.window:
        raise NotImplementedError("no window")

    def call(q, k, v):  # its layout is (batch, seqlen, heads, head_dim); some versions return the lse too
        out = fa3_module().flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=shape.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return {"": call}


IMPLEMENTATIONS = {
    "flashattn": _flashattn,
    "flashattn_atomic": _flashattn_atomic,
    "sdpa_flash": _sdpa,
    "sdpa_cudnn": _sdpa,
    "sdpa_efficient": _sdpa,
    "flex": flex,
    "fa3": _fa3,
    "eager": _eager,
}
PEERS = ("flashattn", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "fa3")
FORWARD_ONLY = {"fa3"}
BACKENDS = {
    "sdpa_flash": "FLASH_ATTENTION",
    "sdpa_cudnn": "CUDNN_ATTENTION",
    "sdpa_efficient": "EFFICIENT_ATTENTION",
}


def backend(impl):
    """Return a context in which PyTorch's attention is this one; entered once, so that no timed call pays for it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, BACKENDS[impl])) if impl in BACKENDS else contextlib.nullcontext()
