"""FlashAttention in Triton, derived step by step in the book of which this package is part.

Importing it loads PyTorch and nothing else: Triton with the first kernel call, matplotlib with the first figure.
"""

from .api import flash_attention, flash_attention_varlen, scaled_dot_product_attention
from .module import FlashAttention
from .reference import attention_reference
from .tiled import attention_tiled

__all__ = [
    "FlashAttention",
    "attention_reference",
    "attention_tiled",
    "flash_attention",
    "flash_attention_varlen",
    "scaled_dot_product_attention",
]
__version__ = "0.1.0"
