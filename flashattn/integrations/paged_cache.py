"""A cache for Hugging Face transformers whose keys and values lie in pages; ``flashattn_attention`` reads them there.

``from flashattn.integrations.transformers import PagedCache``. A model hands its new keys to ``Cache.update`` and gets
back what it attends to. Which of them are padding is known one call later, so that here it gets its own rows back,
marked, and ``flashattn_attention`` stores them. Another implementation of attention, which would take the new rows for
all there are, cannot do anything with them.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..paged import PagedKVCache

NEEDS = (
    "a PagedCache needs attn_implementation='flashattn', and a model that passes on to attention what the cache returns"
)


class NewRows(torch.Tensor):
    """New keys or values of one layer, ``rows``, on their way to ``cache``; all but a look at them raises."""

    @classmethod
    def of(cls, rows, cache, layer):
        marked = rows.as_subclass(cls)
        marked.rows, marked.cache, marked.layer = rows, cache, layer
        return marked

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("__get__", "dim", "size", "numel"):
            return super().__torch_function__(function, types, args, kwargs or {})
        raise NotImplementedError(NEEDS)


class PagedLayer(CacheLayerMixin):
    """What transformers asks of one layer; pages are those of all layers together."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache, layer):
        super().__init__()
        self.cache, self.layer, self.n_columns = cache, layer, 0

    def lazy_initialization(self, key_states, value_states):
        """Do nothing: the pages are there."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Mark new rows for ``flashattn_attention``, which stores them."""
        return tuple(NewRows.of(rows, self.cache, self.layer) for rows in (key_states, value_states))

    def get_seq_length(self):
        """Return the number of tokens so far, padding included."""
        return self.n_columns

    def get_mask_sizes(self, query_length):
        """Return how many keys the mask of the next call is about, and where they begin."""
        return self.n_columns + query_length, 0

    def get_max_length(self):
        """Return -1, for no bound but that of the pages."""
        return -1


class PagedCache(Cache):
    """Keep the keys and values of a batch in pages: what models take as ``cache`` (before, as ``past_key_values``).

    ::

        from flashattn.integrations.transformers import PagedCache
        cache = PagedCache.for_model(model, n_pages=1000)
        model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24

    Tokens that the attention mask says are padding, on whichever side, are not stored. Steps of 1 to 16 new tokens run
    :func:`flashattn.flash_decode` on the pages; longer ones on top of a cache, and those with padding in them, gather
    the keys first. Beam search and several answers to one prompt share pages until they differ. A mask that is more
    than causality, a window and padding is refused, as is any attention but ``attn_implementation="flashattn"``.

    Args:
        pages: a :class:`flashattn.PagedKVCache` with the model's number of layers; several caches may share it.

    Attributes:
        pages: what it was made of; ``pages.usage()`` says what is used.
        sequences: the handles in ``pages`` of the batch, empty before the first call.

    Raises:
        OutOfPages: in a forward pass, before anything is stored.

    Source: Kwon et al. 2023 (PagedAttention). Chapter: 13.
    """

    def __init__(self, pages):
        if not isinstance(pages, PagedKVCache):
            raise TypeError(f"`pages` must be a flashattn.PagedKVCache, got {type(pages).__name__}")
        super().__init__(layers=[PagedLayer(self, layer) for layer in range(pages.n_layers)])
        self.pages, self.sequences = pages, []
        self._step = self._picked = None
        self._is_first = True
        self._n_solid = 0  # so many of the last columns have a token in every sequence

    @classmethod
    def for_model(cls, model, n_pages, page_size=64, dtype=None, **options):
        """Make a cache with pages of its own for a model.

        Args:
            model: a decoder of transformers.
            n_pages, page_size, options: as for :class:`flashattn.PagedKVCache`.
            dtype: default: the model's.
        """
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        heads_kv = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        sizes = dict(n_layers=config.num_hidden_layers, page_size=page_size, dtype=dtype or model.dtype)
        return cls(PagedKVCache(n_pages, heads_kv, head_dim, device=model.device, **sizes, **options))

    def fork(self):
        """Return another cache with the same tokens, in the same pages until one of the two writes into one."""
        other = PagedCache(self.pages)
        other.sequences = [self.pages.fork(sequence) for sequence in self.sequences]
        for mine, its in zip(self.layers, other.layers, strict=True):
            its.n_columns = mine.n_columns
        other._n_solid = self._n_solid
        return other

    def reset(self):
        """Free all pages; the cache is as new."""
        for sequence in self.sequences:
            self.pages.free(sequence)
        self.__init__(self.pages)

    # ---- What flashattn_attention calls.

    def store(self, layer, key, value, attention_mask):
        """Store new rows of one layer, padding left out, and say how to attend to them.

        Args:
            layer: 0 to n_layers - 1.
            key, value: (batch, heads_kv, n_tokens, head_dim).
            attention_mask: what ``flashattn_mask`` returned, None or (batch, all tokens) bool.

        Returns:
            A ``Step`` where ``flash_decode`` can attend, None where it takes ``dense`` keys.
        """
        n_columns = self.layers[layer].n_columns + key.shape[2]
        if self._step is None or self._step_columns != n_columns:  # the first layer of a forward pass
            self._begin_step(key, attention_mask, n_columns)
        step = self._step
        if self._picked is not None:
            rows = (x.transpose(1, 2).flatten(0, 1)[self._picked] for x in (key, value))
        else:
            rows = (key, value)
        self.pages.write(step, *rows, layer)
        self.layers[layer].n_columns = n_columns
        return None if self._is_first or self._picked is not None or key.shape[2] > 16 else step

    def dense(self, layer, key, value, attention_mask):
        """Return all keys and values as (batch, heads_kv, all tokens, head_dim), 0 where padding stands."""
        if self._is_first:
            return key, value
        stored = [self.pages.contents(sequence, layer) for sequence in self.sequences]
        if attention_mask is None:
            return tuple(torch.stack(x).to(key.dtype) for x in zip(*stored, strict=True))
        results = []
        for parts, like in zip(zip(*stored, strict=True), (key, value), strict=True):
            rows = like.new_zeros(*attention_mask.shape, like.shape[1], like.shape[3])
            rows[attention_mask] = torch.cat(parts, dim=1).transpose(0, 1).to(like.dtype)
            results.append(rows.transpose(1, 2))
        return tuple(results)

    def _begin_step(self, key, attention_mask, n_columns):
        """Make room for the new tokens of a forward pass."""
        batch, n_new = len(key), key.shape[2]
        if attention_mask is not None and attention_mask.dim() != 2:
            raise NotImplementedError(
                f"`attention_mask` must be about padding alone with a PagedCache, got one of shape "
                f"{tuple(attention_mask.shape)}: use a DynamicCache"
            )
        is_first = not self.sequences
        if not is_first and batch != len(self.sequences):
            raise ValueError(f"`input_ids` must have batch {len(self.sequences)} like the PagedCache, got {batch}")
        counts, lengths = [n_new] * batch, None
        if attention_mask is not None:  # waits for the device, once a forward pass
            counts, lengths = torch.stack((attention_mask[:, -n_new:].sum(1), attention_mask.sum(1))).tolist()
        sequences = [self.pages.allocate() for _ in range(batch)] if is_first else self.sequences
        before = [self.pages.length(sequence) for sequence in sequences]
        after = [n + count for n, count in zip(before, counts, strict=True)]
        if after != (lengths or [n_columns] * batch):
            raise ValueError(
                f"`attention_mask` must show the tokens in the PagedCache, {after} with the new ones, got "
                f"{lengths or [n_columns] * batch}"
            )
        is_solid = counts == [n_new] * batch
        try:
            step = self.pages.reserve(sequences, n_new if is_solid else counts)
        except RuntimeError:
            for sequence in sequences if is_first else ():
                self.pages.free(sequence)
            raise
        self._step, self._step_columns, self._is_first, self.sequences = step, n_columns, is_first, sequences
        self._picked = None if is_solid else attention_mask[:, -n_new:].flatten().nonzero()[:, 0]
        self._n_solid = self._n_solid + n_new if is_solid else 0

    # ---- What generate calls.

    def crop(self, tokens_to_remove):
        """Forget the last tokens; ``tokens_to_remove`` is 0 or negative, as transformers has it."""
        n = -tokens_to_remove
        if n < 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative, got {tokens_to_remove}")
        if n > self._n_solid:
            raise NotImplementedError(
                f"`tokens_to_remove` must not reach tokens with padding beside them, {self._n_solid} at most, got {n}"
            )
        for sequence in self.sequences:
            self.pages.truncate(sequence, self.pages.length(sequence) - n)
        for layer in self.layers:
            layer.n_columns -= n
        self._n_solid -= n
        self._step = None

    def batch_select_indices(self, indices):
        """Keep these sequences of the batch, in this order; one may come several times."""
        kept = [self.pages.fork(self.sequences[i]) for i in indices.tolist()]
        for sequence in self.sequences:
            self.pages.free(sequence)
        self.sequences, self._step = kept, None

    def reorder_cache(self, beam_idx):
        """Give each beam the tokens of the beam that it goes on from: in shared pages."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats):
        """Repeat each sequence: in shared pages."""
        self.batch_select_indices(torch.arange(len(self.sequences)).repeat_interleave(repeats))

    @property
    def batch_size(self):
        """Return the number of sequences, -1 before the first call."""
        return len(self.sequences) or -1
