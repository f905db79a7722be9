"""A layer of attention around the kernels: projections in, heads, projection out."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from .api import MAX_HEAD_DIM, _check_options, flash_attention, flash_attention_varlen

PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class FlashAttention(nn.Module):
    """Attend with projections for queries, keys, values and output, as ``torch.nn.MultiheadAttention`` does.

    Self-attention is ``layer(x)``, cross-attention ``layer(x, memory)``. Weights have the names, shapes and initial
    values that ``torch.nn.MultiheadAttention`` gives them, so that either loads the other's state dict, as long as the
    layer has none of ``num_heads_kv``, ``head_dim`` and PyTorch's none of ``add_bias_kv``::

        in_proj_weight  (embed_dim + 2 * width_kv, embed_dim)     where kdim == vdim == embed_dim, else
        q_proj_weight (embed_dim, embed_dim), k_proj_weight (width_kv, kdim), v_proj_weight (width_kv, vdim)
        in_proj_bias    (embed_dim + 2 * width_kv,)               queries first, then keys, then values
        out_proj.weight (embed_dim, embed_dim), out_proj.bias (embed_dim,)

    Here ``width_kv`` is ``num_heads_kv * head_dim``; with a ``head_dim`` of its own the queries take
    ``num_heads * head_dim`` rows. What differs from PyTorch's layer: a call returns the output alone, no weights; masks
    are settings, not arguments; ``batch_first`` is True unless set; a row without a key to see gives what ``out_proj``
    makes of 0 (``out_proj.bias``), where PyTorch's gives NaN.

    Args:
        embed_dim: features of ``query`` and of the output.
        num_heads: heads of the queries.
        num_heads_kv: heads of keys and values, a divisor of ``num_heads``. Default ``num_heads``.
        head_dim: features of a head, 1 to 256. Default ``embed_dim // num_heads``.
        kdim, vdim: features of ``key`` and ``value``. Default ``embed_dim``.
        bias: whether the projections add one. Default True.
        dropout: only 0: the kernels have none.
        causal, window, softcap, scale: as for :func:`flash_attention`.
        rope_base: the base of a rotary position embedding, a number over 1 such as 10000. It turns channel ``c`` and
            channel ``c + head_dim / 2`` of queries and keys by the angle ``position * rope_base ** (-2 c / head_dim)``,
            in fp32; the last query has the position of the last key. Default None: no such embedding.
        batch_first: inputs and output are (batch, seqlen, features). With False they are (seqlen, batch, features),
            which is the default of PyTorch's layer. Default True.
        device, dtype: of the weights.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
        NotImplementedError: ``dropout`` is not 0.

    Source: Vaswani et al. 2017, section 3.2.2; Su et al. 2021 (RoPE), section 3.4. Chapter: 11.
    """

    def __init__(
        self, embed_dim, num_heads, *, num_heads_kv=None, head_dim=None, kdim=None, vdim=None, bias=True, dropout=0.0,
        causal=False, window=None, softcap=None, scale=None, rope_base=None, batch_first=True, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        sizes = dict(embed_dim=embed_dim, num_heads=num_heads, num_heads_kv=num_heads_kv, head_dim=head_dim)
        _check_sizes(**sizes, kdim=kdim, vdim=vdim)
        for name, flag in (("bias", bias), ("batch_first", batch_first)):
            if not isinstance(flag, bool):
                raise TypeError(f"`{name}` must be True or False, got {flag!r}")
        if dropout != 0:
            raise NotImplementedError(
                f"`dropout` must be 0, got {dropout!r}: the kernels have none; put torch.nn.Dropout behind the layer, "
                "or use torch.nn.MultiheadAttention"
            )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first = batch_first
        _check_options(torch.empty(1, self.head_dim), causal, scale, window, softcap, return_lse=False)
        _check_rope(rope_base, self.head_dim)
        self.causal, self.window, self.softcap, self.scale, self.rope_base = causal, window, softcap, scale, rope_base

        self.widths = (num_heads * self.head_dim, *[self.num_heads_kv * self.head_dim] * 2)
        new = dict(device=device, dtype=dtype)
        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty(sum(self.widths), embed_dim, **new))
        else:
            self.register_parameter("in_proj_weight", None)
            inputs = (embed_dim, self.kdim, self.vdim)
            for name, width, features in zip(PROJECTIONS, self.widths, inputs, strict=True):
                self.register_parameter(name, nn.Parameter(torch.empty(width, features, **new)))
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(sum(self.widths), **new)) if bias else None)
        self.out_proj = nn.Linear(self.widths[0], embed_dim, bias=bias, **new)
        self._reset_in_proj()

    def reset_parameters(self):
        """Draw the weights anew, in the order and from the distributions of ``torch.nn.MultiheadAttention``."""
        self.out_proj.reset_parameters()
        self._reset_in_proj()

    def _reset_in_proj(self):
        for weight in self._in_proj_weights():
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def _in_proj_weights(self):
        """Return the one weight of all three projections, or the three."""
        names = ("in_proj_weight",) if self.in_proj_weight is not None else PROJECTIONS
        return [getattr(self, name) for name in names]

    def forward(self, query, key=None, value=None, key_padding_mask=None):
        """Return the attention of ``query`` over ``key`` and ``value``, projected.

        Args:
            query: (batch, seqlen_q, embed_dim), or as ``batch_first`` says.
            key: (batch, seqlen_k, kdim). Default None: ``query``, which makes it self-attention, as does passing the
                same tensor twice.
            value: (batch, seqlen_k, vdim). Default None: ``key``.
            key_padding_mask: (batch, seqlen_k) bool, whatever ``batch_first`` says; True for padding, on any side or
                in between. No query sees a padded key. In self-attention a padded query sees nothing, so that its
                output is ``out_proj.bias`` (PyTorch's layer computes one there, for nobody to read). A window counts
                the keys that are not padding. The tokens are packed for :func:`flash_attention_varlen` without waiting
                for the GPU, and padding takes no part in the attention. Default None: no padding.

        Returns:
            (batch, seqlen_q, embed_dim), or as ``batch_first`` says.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape or device.
            NotImplementedError: ``key_padding_mask`` in cross-attention that is causal or has a window.
            NotImplementedError, RuntimeError, ImportError: as :func:`flash_attention`.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query, key, value, key_padding_mask)
        q, k, v = self._project(query, key, value)
        if self.rope_base is not None:
            q, k = self._rotate(q, k.shape[1]), self._rotate(k, k.shape[1])
        options = dict(causal=self.causal, window=self.window, softcap=self.softcap, scale=self.scale)
        if key_padding_mask is None:
            out = flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)
        else:
            query_is_padding = key_padding_mask if key is query else None
            out = attend_packed(q, k, v, key_padding_mask, query_is_padding, options)
        return self.out_proj((out if self.batch_first else out.transpose(0, 1)).flatten(2))

    def _project(self, query, key, value):
        """Return q, k and v, (batch, seqlen, heads, head_dim) each; of one input with one matrix product."""
        weights, bias = self._in_proj_weights(), self.in_proj_bias
        if query is key and key is value and len(weights) == 1:
            projected = F.linear(query, *weights, bias).split(self.widths, dim=-1)
        else:
            weights = weights if len(weights) == 3 else weights[0].split(self.widths)
            biases = (None,) * 3 if bias is None else bias.split(self.widths)
            projected = [F.linear(*three) for three in zip((query, key, value), weights, biases, strict=True)]
        heads = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        return [x if self.batch_first else x.transpose(0, 1) for x in heads]

    def _rotate(self, x, seqlen_k):
        """Apply the rotary embedding to (batch, seqlen, heads, head_dim), whose last row has position seqlen_k - 1."""
        positions = torch.arange(seqlen_k - x.shape[1], seqlen_k, device=x.device)
        channels = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32)
        angles = positions[:, None, None] * self.rope_base ** (-channels / self.head_dim)
        cos, sin = angles.cos(), angles.sin()
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def _check_inputs(self, query, key, value, key_padding_mask):
        """Raise unless the arguments of a call go together."""
        layout = "(batch, seqlen, features)" if self.batch_first else "(seqlen, batch, features)"
        batch_axis = 0 if self.batch_first else 1
        for name, x, features in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"`{name}` must be a torch.Tensor, got {type(x).__name__}")
            if x.dim() != 3:
                raise ValueError(f"`{name}` must be 3-D, {layout}, got shape {tuple(x.shape)}")
            if x.shape[2] != features:
                raise ValueError(f"`{name}` must have {features} features, got {x.shape[2]}")
            if x.shape[batch_axis] != query.shape[batch_axis]:
                batches = query.shape[batch_axis], x.shape[batch_axis]
                raise ValueError("`{}` must have batch {} like `query`, got {}".format(name, *batches))
        if value.shape[1 - batch_axis] != key.shape[1 - batch_axis]:
            seqlens = key.shape[1 - batch_axis], value.shape[1 - batch_axis]
            raise ValueError("`value` must have seqlen {} like `key`, got {}".format(*seqlens))
        if key_padding_mask is None:
            return
        if not isinstance(key_padding_mask, torch.Tensor) or key_padding_mask.dtype != torch.bool:
            got = getattr(key_padding_mask, "dtype", type(key_padding_mask).__name__)
            raise TypeError(f"`key_padding_mask` must be a bool tensor, True for padding, got {got}")
        shape = (key.shape[batch_axis], key.shape[1 - batch_axis])
        if key_padding_mask.shape != shape:
            raise ValueError(
                f"`key_padding_mask` must be (batch, seqlen_k), {shape}, got shape {tuple(key_padding_mask.shape)}"
            )
        if key_padding_mask.device != key.device:
            raise ValueError(f"`key_padding_mask` must be on {key.device} like `key`, got {key_padding_mask.device}")
        if key is not query and (self.causal or self.window is not None):
            raise NotImplementedError(
                "`key_padding_mask` must be None where `key` is not `query` and the layer is causal or has a window, "
                "got a tensor: which query stands at which key is not known then"
            )

    def extra_repr(self):
        """Return the settings that differ from the defaults, for ``print(layer)``."""
        shown = [f"{self.embed_dim}, num_heads={self.num_heads}"]
        defaults = dict(num_heads_kv=self.num_heads, head_dim=self.embed_dim // self.num_heads)
        defaults |= dict(kdim=self.embed_dim, vdim=self.embed_dim, causal=False, window=None, softcap=None, scale=None)
        defaults |= dict(rope_base=None, batch_first=True)
        shown += [f"{name}={getattr(self, name)}" for name, x in defaults.items() if getattr(self, name) != x]
        return ", ".join(shown + ([] if self.in_proj_bias is not None else ["bias=False"]))

    @classmethod
    def from_torch(cls, layer, **options):
        """Make one with the sizes, ``batch_first`` and copies of the weights of a ``torch.nn.MultiheadAttention``.

        Args:
            layer: the layer; its dtype, device, training mode and ``requires_grad`` are kept.
            options: ``causal``, ``window``, ``softcap``, ``scale``, ``rope_base`` or ``batch_first`` of the new layer.

        Returns:
            A :class:`FlashAttention`.

        Raises:
            TypeError: ``layer`` is none.
            NotImplementedError: ``layer`` has dropout over 0, ``add_bias_kv`` or ``add_zero_attn``.
        """
        if not isinstance(layer, nn.MultiheadAttention):
            raise TypeError(f"`layer` must be a torch.nn.MultiheadAttention, got {type(layer).__name__}")
        if layer.dropout:
            raise NotImplementedError(
                f"`layer` must have dropout 0, got {layer.dropout}: the kernels have none; set layer.dropout = 0.0 to "
                "go on without"
            )
        for name, is_set in (("add_bias_kv", layer.bias_k is not None), ("add_zero_attn", layer.add_zero_attn)):
            if is_set:
                raise NotImplementedError(f"`layer` must have {name}=False, got True")
        sizes = dict(kdim=layer.kdim, vdim=layer.vdim, bias=layer.in_proj_bias is not None)
        like = dict(
            batch_first=layer.batch_first, device=layer.out_proj.weight.device, dtype=layer.out_proj.weight.dtype
        )
        return _copy_weights(layer, cls(layer.embed_dim, layer.num_heads, **sizes | like | options))

    def to_torch(self):
        """Make a ``torch.nn.MultiheadAttention`` with copies of the weights; the inverse of :meth:`from_torch`.

        A causal layer becomes one that must be told so in every call (``attn_mask=…, is_causal=True``): PyTorch's layer
        has no such setting.

        Returns:
            The layer, with the same ``batch_first``, dtype, device, training mode and ``requires_grad``.

        Raises:
            ValueError: this layer has what PyTorch's has not: ``num_heads_kv`` or ``head_dim`` of its own, ``window``,
                ``softcap``, ``scale`` or ``rope_base``.
        """
        own = dict(num_heads_kv=self.num_heads, head_dim=self.embed_dim // self.num_heads)
        own |= dict.fromkeys(("window", "softcap", "scale", "rope_base"))
        for name, needed in own.items():
            if getattr(self, name) != needed:
                raise ValueError(
                    f"`{name}` must be {needed} in a layer that torch.nn.MultiheadAttention can stand in for, "
                    f"got {getattr(self, name)}"
                )
        like = dict(device=self.out_proj.weight.device, dtype=self.out_proj.weight.dtype)
        sizes = dict(kdim=self.kdim, vdim=self.vdim, bias=self.in_proj_bias is not None, batch_first=self.batch_first)
        return _copy_weights(self, nn.MultiheadAttention(self.embed_dim, self.num_heads, **sizes, **like))


def _copy_weights(source, target):
    """Load source's weights into target, which has the same names and shapes, with its modes; return target."""
    target.load_state_dict(source.state_dict())
    for name, parameter in source.named_parameters():
        target.get_parameter(name).requires_grad_(parameter.requires_grad)
    return target.train(source.training)


def attend_packed(q, k, v, is_padding, query_is_padding, options):
    """Attend with the padded tokens moved behind the others, where flash_attention_varlen gives 0 and reads nothing.

    q, k, v and what is returned: (batch, seqlen, heads, head_dim). is_padding: (batch, seqlen_k). query_is_padding:
    (batch, seqlen_q), or None where every query is to see the keys; then which query is which is lost on the mask, and
    options may have neither causal nor window.
    """
    row_k, cu_seqlens_k = _packing(is_padding)
    # Rows are moved by writing them where they go: its gradient is a read, without atomic adds.
    k, v = (_move_rows(x.flatten(0, 1), row_k) for x in (k, v))
    q, shape = q.flatten(0, 1), q.shape[:2]
    if query_is_padding is None:
        cu_seqlens_q = torch.arange(shape[0] + 1, device=q.device) * shape[1]
        return flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options).unflatten(0, shape)
    same = query_is_padding is is_padding
    row_q, cu_seqlens_q = (row_k, cu_seqlens_k) if same else _packing(query_is_padding)
    out = flash_attention_varlen(_move_rows(q, row_q), k, v, cu_seqlens_q, cu_seqlens_k, **options)
    original_row = _move_rows(torch.arange(len(row_q), device=q.device), row_q)
    return _move_rows(out, original_row).unflatten(0, shape)


def _packing(is_padding):
    """Return where each token goes, tokens first and padding behind them, and the offsets of the sequences."""
    # Sums over the whole batch, not nonzero(): that would make the host wait for the GPU.
    lengths, flat = (~is_padding).sum(1), is_padding.flatten()
    row = torch.where(flat, lengths.sum() + flat.cumsum(0), (~flat).cumsum(0)) - 1
    return row, F.pad(lengths.cumsum(0), (1, 0))


def _move_rows(x, where):
    """Return x with its row i at row where[i]; where is a permutation."""
    return torch.empty_like(x).index_copy(0, where, x)


def _check_sizes(embed_dim, num_heads, num_heads_kv, head_dim, kdim, vdim):
    """Raise unless the sizes of a layer go together."""
    needed = dict(embed_dim=embed_dim, num_heads=num_heads)
    optional = dict(num_heads_kv=num_heads_kv, head_dim=head_dim, kdim=kdim, vdim=vdim)
    for name, x in (needed | {name: x for name, x in optional.items() if x is not None}).items():
        if isinstance(x, bool) or not isinstance(x, int):
            raise TypeError(f"`{name}` must be an int, got {x!r}")
        if x < 1:
            raise ValueError(f"`{name}` must be at least 1, got {x}")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"`embed_dim` must be a multiple of num_heads ({num_heads}), got {embed_dim}")
    if (embed_dim // num_heads if head_dim is None else head_dim) > MAX_HEAD_DIM:
        got = f"embed_dim // num_heads = {embed_dim // num_heads}" if head_dim is None else head_dim
        raise ValueError(f"`head_dim` must be at most {MAX_HEAD_DIM}, got {got}")
    if num_heads_kv is not None and num_heads % num_heads_kv:
        raise ValueError(f"`num_heads_kv` must be a divisor of num_heads ({num_heads}), got {num_heads_kv}")


def _check_rope(rope_base, head_dim):
    if rope_base is None:
        return
    if isinstance(rope_base, bool) or not isinstance(rope_base, (int, float)):
        raise TypeError(f"`rope_base` must be a number or None, got {rope_base!r}")
    if not 1 < rope_base < math.inf:
        raise ValueError(f"`rope_base` must be a finite number over 1, got {rope_base}")
    if head_dim % 2:
        raise ValueError(f"`head_dim` must be even with a rope_base, got {head_dim}")
