"""FlashAttention in Triton, derived step by step in the book of which this package is part.

Importing it loads PyTorch and nothing else: Triton with the first kernel call, matplotlib with the first figure.
"""

from .api import backend, flash_attention, flash_attention_varlen, scaled_dot_product_attention
from .decode import flash_decode
from .fp8 import flash_attention_fp8, hadamard_rotate, quantize_fp8
from .module import FlashAttention
from .paged import PagedKVCache
from .reference import attention_reference
from .tiled import attention_tiled

# Their modules import Triton, so they come when they are first asked for, and not with a star import.
_NEED_TRITON = {"TileMask": "masks", "sparse_attention": "sparse"}


def __getattr__(name):
    """Import what needs Triton."""
    if name not in _NEED_TRITON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f".{_NEED_TRITON[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"flashattn.{name} needs Triton, which is not installed (it exists for Linux)") from error


__all__ = [
    "FlashAttention",
    "PagedKVCache",
    "attention_reference",
    "attention_tiled",
    "backend",
    "flash_attention",
    "flash_attention_fp8",
    "flash_attention_varlen",
    "flash_decode",
    "hadamard_rotate",
    "quantize_fp8",
    "scaled_dot_product_attention",
]
__version__ = "0.1.0"
