"""Hugging Face transformers: importing this module makes ``attn_implementation="flashattn"`` known to it.

::

    import flashattn.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashattn", dtype=torch.bfloat16)

transformers asks two functions of an implementation. The first, ``flashattn_mask``, is called once a forward pass with
the pattern of the mask as a function of indices; the second, ``flashattn_attention``, in each layer with what the first
returned. Three things are returned, and nothing that they cannot say is passed over:

- None: causal, sliding or full attention without padding. The kernels know these; no mask is stored.
- (batch, seqlen_k) bool, True for a token: the same with padding, on any side. Prefill and training pack the tokens;
  one query at a time reads the mask where it lies.
- (batch, 1, seqlen_q, seqlen_k) bool: every other pattern (packed ``position_ids``, static caches, blocks of images, a
  window over a cache with padding inside, a window to both sides), and whatever 4-D mask the caller made. Right, but
  it takes a byte for each pair.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.utils.import_utils import is_tracing

from ..api import (
    DENSE,
    _autocast,
    _check_attn_mask,
    _check_options,
    _check_tensors,
    flash_attention,
    flash_attention_varlen,
)
from ..module import attend_packed
from ..ops import attention
from .paged_cache import NewRows, PagedCache

__all__ = ["NAME", "PagedCache", "flashattn_attention", "flashattn_mask"]
NAME = "flashattn"
# What a model may pass that changes the result and that the kernels do not have.
REFUSED = ("s_aux", "sinks", "indices", "block_indices", "head_mask", "layer_head_mask")


def flashattn_attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, sliding_window="not said",
    softcap=None, position_bias=None, cu_seq_lens_q=None, cu_seq_lens_k=None, **kwargs,
):  # fmt: skip
    """Attend as transformers' attention interface has it: one layer's queries over its keys, projections excluded.

    Args:
        module: the layer; its ``is_causal`` and ``config`` are read where the call does not say.
        query: (batch, heads, seqlen_q, head_dim).
        key, value: (batch, heads_kv, seqlen_k, head_dim), not repeated for grouped queries, or what a
            :class:`PagedCache` returned, whose pages hold the others.
        attention_mask: what ``flashattn_mask`` returned, or a 4-D mask, boolean or additive. A 4-D mask says everything
            about who sees whom; else ``is_causal`` and ``sliding_window`` do, the last query at the last key.
        dropout: only 0.
        scaling, softcap: ``scale`` and ``softcap`` of :func:`flashattn.flash_attention`.
        is_causal: default ``module.is_causal``.
        sliding_window: the keys a causal query sees, its own included. None: all.
        position_bias: (1 or batch, heads, seqlen_q, seqlen_k), added to the scores; must not require grad.
        cu_seq_lens_q, cu_seq_lens_k: offsets of sequences packed into a batch of one.
        kwargs: what else a model passes.

    Returns:
        ``(out, None)``, out (batch, seqlen_q, heads, head_dim): no attention weights are returned.

    Raises:
        NotImplementedError: dropout over 0, ``output_attentions``, attention sinks, a selection of keys, a head mask, a
            bias that requires grad, a window that is not causal or not said.
        TypeError, ValueError, RuntimeError, ImportError: as :func:`flashattn.flash_attention`.

    Source: the documentation of ``transformers.AttentionInterface``. Chapter: 11.
    """
    _refuse(dropout, position_bias, kwargs)
    pages, layer = (key.cache, key.layer) if isinstance(key, NewRows) else (None, None)
    query, key, value = _autocast(query, *(x.rows if isinstance(x, NewRows) else x for x in (key, value)))
    is_whole = attention_mask is not None and attention_mask.dim() == 4
    causal, window = (False, None) if is_whole else _causal_and_window(module, is_causal, sliding_window)
    options = dict(causal=causal, window=window, softcap=softcap, scale=scaling)
    if pages is not None:
        if cu_seq_lens_q is not None:
            raise NotImplementedError(f"`cu_seq_lens_q` must be None with a PagedCache in {NAME}, got a tensor")
        step = pages.store(layer, key, value, attention_mask)
        if step is not None and position_bias is None and (causal or query.shape[2] == 1):
            options.pop("causal")
            return pages.pages.attend(query, step, layer, **options).transpose(1, 2), None
        key, value = pages.dense(layer, key, value, attention_mask)
    if attention_mask is None and position_bias is None:
        if cu_seq_lens_q is not None:
            return _varlen(query, key, value, cu_seq_lens_q, cu_seq_lens_k, options), None
        return flash_attention(query, key, value, **options).transpose(1, 2), None
    if not is_whole and cu_seq_lens_q is not None:
        raise NotImplementedError(
            f"`cu_seq_lens_q` must be None with a padding mask or a position bias in {NAME}, got a tensor"
        )
    if is_whole or position_bias is not None or query.shape[2] == 1:
        return _masked(query, key, value, attention_mask, position_bias, options).transpose(1, 2), None
    is_padding = ~attention_mask
    # A causal query must be packed with its own key, or its place is lost; others see all keys from any place.
    of_queries = is_padding[:, key.shape[2] - query.shape[2] :] if causal else None
    rows = (x.transpose(1, 2) for x in (query, key, value))
    return attend_packed(*rows, is_padding, of_queries, options), None


def flashattn_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function, attention_mask=None,
    local_size=None, **kwargs,
):  # fmt: skip
    """Return the smallest thing that says what a mask says; see the head of this file.

    Args:
        batch_size, q_length, kv_length: sizes.
        q_offset, kv_offset: the position of the first query and of the first key.
        mask_function: (batch, head, query, key) to True where the key is seen.
        attention_mask: (batch, tokens so far) bool, False for padding, or None.
        local_size: the window that ``mask_function`` may be of.
        kwargs: what else transformers passes: use_vmap, device, config, …

    Returns:
        None, (batch, kv_length) bool, or (batch, 1, q_length, kv_length) bool.

    Source: the documentation of ``transformers.AttentionMaskInterface``. Chapter: 11.
    """
    is_full = mask_function is bidirectional_mask_function
    is_sliding = (
        not is_full and local_size is not None and _same(mask_function, sliding_window_causal_mask_function(local_size))
    )
    # A static cache has room behind the last query, and its offset is a tensor: the kernels would have to wait for it.
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    known = is_full or (ends_together and (is_sliding or mask_function is causal_mask_function))
    if known:
        if attention_mask is None:
            return None
        mask = prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length]
        if is_tracing(mask):  # its values are not to be had
            known = not is_sliding
        elif mask.all():
            return None
        elif is_sliding:  # packing closes gaps, and a window would reach across
            known = (mask.int().diff(dim=1).abs().sum(1) <= 1).all()
        if known:
            return mask
    kwargs |= dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, **kwargs,
    )  # fmt: skip


def _refuse(dropout, position_bias, kwargs):
    """Raise for what a model asks that the kernels do not have."""
    if dropout:
        raise NotImplementedError(
            f"`dropout` must be 0 in {NAME}, got {dropout}: set the model's attention dropout to 0 "
            "(attention_dropout, attention_probs_dropout_prob or attn_pdrop in its config), or use sdpa"
        )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            f"`output_attentions` must be False in {NAME}, which has no weights to return: use eager"
        )
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"`{name}` must be None in {NAME}, got {type(kwargs[name]).__name__}: use eager")
    if position_bias is not None and position_bias.requires_grad:
        raise NotImplementedError(
            f"`position_bias` must not require grad in {NAME}: to train with a learned bias use sdpa; for inference "
            "call the model under torch.no_grad()"
        )


def _causal_and_window(module, is_causal, sliding_window):
    """Return causal and window as flash_attention takes them."""
    config = getattr(module, "config", None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # A decoder made an encoder by its config gets a full mask, but its layers go on saying that they are causal.
    causal = bool(causal) and getattr(config, "is_causal", True) is not False
    if sliding_window == "not said":
        sliding_window = getattr(config, "sliding_window", None) if causal else None
        if sliding_window is not None:
            raise NotImplementedError(
                f"`sliding_window` must be passed to {NAME} by a model whose config has one, and "
                f"{type(module).__name__} does not: use sdpa"
            )
    if sliding_window is None:
        return causal, None
    if not causal:
        raise NotImplementedError(
            f"`sliding_window` must be None in {NAME} without a mask or causality, got {sliding_window}"
        )
    return causal, (sliding_window - 1, 0)


def _varlen(query, key, value, cu_seq_lens_q, cu_seq_lens_k, options):
    if len(query) != 1:
        raise ValueError(f"`cu_seq_lens_q` must come with a batch of 1, got {len(query)}")
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    return flash_attention_varlen(*rows, cu_seq_lens_q, cu_seq_lens_k, **options)[None]


def _masked(query, key, value, mask, position_bias, options):
    """Attend under a mask or a bias that is read where it lies; return (batch, heads, seqlen_q, head_dim)."""
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None]
    if position_bias is not None:
        if mask is None:
            mask = position_bias
        else:
            mask = position_bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else position_bias + mask
    _check_tensors(dict(query=query, key=key, value=value), DENSE)
    mask = _check_attn_mask(mask, False, (*query.shape[:3], key.shape[2]), query.device)
    query, (scale, softcap, left, right) = _check_options(
        query, options["causal"], options["scale"], options["window"], options["softcap"], False
    )
    return attention(query, key, value, mask, None, None, scale, softcap, left, right)[0]


def _same(f, g):
    """Say whether two functions are one, or made by the same code around the same values."""
    if f is g:
        return True
    if isinstance(f, tuple) and isinstance(g, tuple):
        return len(f) == len(g) and all(map(_same, f, g))
    if not (callable(f) and callable(g)):
        return type(f) is type(g) is int and f == g
    if getattr(f, "__code__", None) is not getattr(g, "__code__", f):
        return False
    cells = ([cell.cell_contents for cell in x.__closure__ or ()] for x in (f, g))
    return _same(*map(tuple, cells))


def _register():
    AttentionInterface.register(NAME, flashattn_attention)
    AttentionMaskInterface.register(NAME, flashattn_mask)
    # transformers takes any name with "flash" in it for one of the CUDA packages and would load that for a new model.
    load = getattr(modeling_utils, "lazy_import_flash_attention", None)
    if load is not None and not hasattr(load, "before_flashattn"):

        def load_unless_ours(implementation, *args, **kwargs):
            return None if implementation == NAME else load(implementation, *args, **kwargs)

        load_unless_ours.before_flashattn = load
        modeling_utils.lazy_import_flash_attention = load_unless_ours


_register()
