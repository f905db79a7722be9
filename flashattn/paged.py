"""Keys and values of many growing sequences, in pages of one store: nothing is moved when a sequence grows.

A page has room for page_size tokens. Which pages a sequence has is in a table, so that they may lie anywhere, and
several sequences may have one page together as long as none of them writes into it. Chapter 13 derives it.
"""

from typing import NamedTuple

import torch

from .api import E4M3, MAX_HEAD_DIM, SUPPORTED_DTYPES
from .decode import PAGE_SIZES, flash_decode

WIDTHS = 8  # page tables have a multiple of so many columns: fewer shapes that kernels must be launched anew for


class OutOfPages(RuntimeError):
    """Raised where there are too few free pages; nothing was changed. ``needed`` and ``free`` are numbers of pages."""

    def __init__(self, needed, free):
        super().__init__(f"{needed} pages are needed and {free} are free: free a sequence, or make a larger cache")
        self.needed, self.free = needed, free


class Usage(NamedTuple):
    """What the pages of a cache hold, in bytes of K and V in all layers.

    reserved_bytes: the whole store. allocated_bytes: pages that some sequence has. used_bytes: the tokens in them, each
    once. logical_bytes: the tokens of all sequences, as they would be without sharing.
    """

    reserved_bytes: int
    allocated_bytes: int
    used_bytes: int
    logical_bytes: int

    @property
    def waste(self):
        """Return the share of the allocated bytes that holds no token; 0 where nothing is allocated."""
        return 1 - self.used_bytes / self.allocated_bytes if self.allocated_bytes else 0.0


class Step(NamedTuple):
    """Some sequences after room was made for their new tokens, as ``flash_decode`` takes them.

    page_table: (batch, max_pages) int32; entries that no token needs are -1. seqlens: (batch,) int32, new tokens
    included. pages, rows: where each new token lies, (new tokens of all,) int64, one sequence after the other.
    n_tokens: how many tokens each sequence gets, an int if all get as many, else a list. It holds until one of them
    changes.
    """

    page_table: torch.Tensor
    seqlens: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor
    n_tokens: int | list


class PagedKVCache:
    """Keep K and V of many sequences in pages.

    ::

        cache = PagedKVCache(1024, heads_kv, head_dim, n_layers=2)
        a, b = cache.allocate(), cache.allocate()
        step = cache.reserve([a, b], 1)  # room for a token each; OutOfPages if there is none
        for layer in range(2):  # q, k and v are (2, heads, 1, head_dim)
            cache.write(step, k, v, layer)
            out = cache.attend(q, step, layer)
        c = cache.fork(a)  # has a's tokens, and so far a's pages
        cache.free(a)

    Which page belongs to whom is kept on the host; K, V, page tables and lengths are on the device, and no call but
    ``contents`` waits for it.

    Args:
        n_pages: pages in the store, an int > 0.
        n_heads_kv: key heads.
        head_dim: 1 to 256.
        n_layers: layers of the model, which share the page tables. Default 1.
        page_size: tokens of a page: 16, 32, 64, 128 or 256. Default 64.
        head_dim_v: of V. Default ``head_dim``.
        dtype: fp16, bf16, fp32, or ``torch.float8_e4m3fn``, whose numbers stand for themselves times a scale. Default
            bf16.
        device: Default: PyTorch's default device.
        k_scale, v_scale: scales of an fp8 cache, fp32, that broadcast to (n_layers, n_heads_kv). Default None: 1.

    Attributes:
        k_pages: (n_layers, n_pages, n_heads_kv, page_size, head_dim); v_pages likewise with head_dim_v.

    Raises:
        TypeError, ValueError: an argument is not as said.

    Source: Kwon et al. 2023 (PagedAttention), section 4. Chapter: 13.
    """

    def __init__(
        self, n_pages, n_heads_kv, head_dim, *, n_layers=1, page_size=64, head_dim_v=None, dtype=torch.bfloat16,
        device=None, k_scale=None, v_scale=None,
    ):  # fmt: skip
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        for name, x in (("n_pages", n_pages), ("n_heads_kv", n_heads_kv), ("n_layers", n_layers)):
            _check_count(name, x)
        for name, x in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            _check_count(name, x, most=MAX_HEAD_DIM)
        if page_size not in PAGE_SIZES:
            raise ValueError(f"`page_size` must be 16, 32, 64, 128 or 256, got {page_size!r}")
        if dtype not in (*SUPPORTED_DTYPES, E4M3):
            raise TypeError(f"`dtype` must be float16, bfloat16, float32 or float8_e4m3fn, got {dtype}")
        self.page_size, self.n_layers = page_size, n_layers
        rows = (n_layers, n_pages, n_heads_kv, page_size)
        self.k_pages = torch.empty(*rows, head_dim, dtype=dtype, device=device)
        self.v_pages = torch.empty(*rows, head_dim_v, dtype=dtype, device=device)
        self.device = self.k_pages.device
        self._layers = [*zip(self.k_pages.unbind(0), self.v_pages.unbind(0), strict=True)]
        self.k_scale, self.v_scale = (self._scales(*x) for x in (("k_scale", k_scale), ("v_scale", v_scale)))
        self._free = list(range(n_pages - 1, -1, -1))
        self._owners = [0] * n_pages  # sequences that have the page
        self._sequences = {}  # handle -> _Sequence
        self._next_handle = 0
        self._slots = []  # rows of the table that nobody has
        self._table = torch.full((0, WIDTHS), -1, dtype=torch.int32, device=device)

    @property
    def n_free(self):
        """Return the number of pages that nobody has."""
        return len(self._free)

    def length(self, sequence):
        """Return the number of tokens of a sequence."""
        return self._find(sequence).length

    # ---- Sequences.

    def allocate(self):
        """Begin a sequence without tokens, and so without pages; return the handle by which other calls know it."""
        return self._add(_Sequence([], 0, self._slot()))

    def fork(self, sequence, n_tokens=None):
        """Begin a sequence with the first tokens of another one, without copying them; return its handle.

        Both have the pages together. Whoever first writes into the last one, if it is not full, gets a copy of it.

        Args:
            sequence: a handle.
            n_tokens: how many tokens to take, 0 to the length of ``sequence``. Default: all.
        """
        parent = self._find(sequence)
        n_tokens = parent.length if n_tokens is None else self._check_length(parent, n_tokens)
        child = _Sequence(parent.pages[: self._n_pages(n_tokens)], n_tokens, self._slot())
        for page in child.pages:
            self._owners[page] += 1
        self._enter([(child.slot, i, page) for i, page in enumerate(child.pages)])
        return self._add(child)

    def truncate(self, sequence, n_tokens):
        """Keep the first n_tokens of a sequence, 0 to its length, and free the pages that the others leave empty."""
        kept = self._find(sequence)
        kept.length = self._check_length(kept, n_tokens)
        first_empty = self._n_pages(n_tokens)
        self._release(kept.pages[first_empty:])
        self._enter([(kept.slot, i, -1) for i in range(first_empty, len(kept.pages))])
        del kept.pages[first_empty:]

    def free(self, sequence):
        """End a sequence; its pages are free, but for those that others have too."""
        self.truncate(sequence, 0)
        self._slots.append(self._sequences.pop(sequence).slot)

    # ---- Tokens.

    def pages_needed(self, sequences, n_tokens):
        """Return how many free pages ``reserve`` would take, for a scheduler to ask before.

        Args:
            sequences, n_tokens: as for :meth:`reserve`.
        """
        needed, left = 0, {}
        for sequence, n_new in zip(*self._check_batch(sequences, n_tokens), strict=True):
            needed += self._n_pages(sequence.length + n_new) - len(sequence.pages)
            if n_new and sequence.length % self.page_size:
                page = sequence.pages[-1]
                owners = left.get(page, self._owners[page])
                if owners > 1:  # this one takes a copy, and leaves the page to the others
                    needed += 1
                    left[page] = owners - 1
        return needed

    def reserve(self, sequences, n_tokens=1):
        """Make room for new tokens at the end of sequences, and say where they go: to be followed by ``write``.

        Args:
            sequences: handles, each once.
            n_tokens: new tokens of each sequence, an int >= 0 for all or a list.

        Returns:
            A :class:`flashattn.paged.Step`.

        Raises:
            OutOfPages: there are too few free pages, ``needed`` and ``free`` say how many. Nothing is changed.
            KeyError: a handle is unknown. TypeError, ValueError: an argument is not as said.
        """
        batch, counts = self._check_batch(sequences, n_tokens)
        needed = self.pages_needed(sequences, n_tokens)
        if needed > len(self._free):
            raise OutOfPages(needed, len(self._free))
        entries, copies = [], []
        for sequence, n_new in zip(batch, counts, strict=True):
            begin, end = sequence.length, sequence.length + n_new
            last = begin // self.page_size
            if n_new and begin % self.page_size and self._owners[sequence.pages[last]] > 1:
                shared, sequence.pages[last] = sequence.pages[last], self._take()
                self._owners[shared] -= 1
                copies.append((shared, sequence.pages[last]))
                entries.append((sequence.slot, last, sequence.pages[last]))
            while len(sequence.pages) < self._n_pages(end):
                sequence.pages.append(self._take())
                entries.append((sequence.slot, len(sequence.pages) - 1, sequence.pages[-1]))
            sequence.length = end
        self._enter(entries)
        if copies:
            source, target = self._upload(copies, 2)
            for store in (self.k_pages, self.v_pages):
                store[:, target] = store[:, source]
        return self._step(batch, counts, n_tokens if isinstance(n_tokens, int) else counts)

    def step(self, sequences):
        """Return a :class:`flashattn.paged.Step` without new tokens: the sequences as they are."""
        return self.reserve(sequences, 0)

    def write(self, step, k, v, layer=0):
        """Store K and V of the new tokens of a step in one layer.

        Args:
            step: what ``reserve`` returned last for these sequences.
            k: (batch, n_heads_kv, n_tokens, head_dim), or, where the sequences get different numbers of tokens, packed:
                (new tokens of all, n_heads_kv, head_dim). In an fp8 cache it is divided by the scale and rounded here;
                what is too large for fp8 becomes its largest number.
            v: likewise, with head_dim_v.
            layer: 0 to n_layers - 1.

        Raises:
            TypeError, ValueError: a shape or dtype is not as said.
        """
        self._check_layer(layer)
        k, v = (self._check_rows(*x, step) for x in (("k", k, self.k_pages), ("v", v, self.v_pages)))
        for x, store, scale in ((k, self.k_pages, self.k_scale), (v, self.v_pages, self.v_scale)):
            if store.dtype == E4M3:
                x = x.float() if scale is None else x.float() / scale[layer][:, None]
                largest = torch.finfo(E4M3).max
                x = x.clamp(-largest, largest)
            store[layer][step.pages, :, step.rows] = x.to(store.dtype)

    def append(self, sequences, k, v):
        """Add tokens to sequences in all layers: ``reserve`` and ``write`` in one.

        Args:
            sequences: handles, each once.
            k: (n_layers, batch, n_heads_kv, n_tokens, head_dim); a cache of one layer takes it without the first
                dimension too.
            v: likewise, with head_dim_v.

        Returns:
            A :class:`flashattn.paged.Step`.

        Raises:
            OutOfPages, TypeError, ValueError: as ``reserve`` and ``write``; nothing is changed.
        """
        k, v = (x[None] if self.n_layers == 1 and isinstance(x, torch.Tensor) and x.dim() == 4 else x for x in (k, v))
        _check_floating(k=k, v=v)
        for name, x, store in (("k", k, self.k_pages), ("v", v, self.v_pages)):
            self._check_device(name, x)
            wanted = (self.n_layers, len(sequences), store.shape[2], "n_tokens", store.shape[4])
            if x.dim() != 5 or (*x.shape[:3], x.shape[4]) != (*wanted[:3], wanted[4]):
                raise ValueError(f"`{name}` must be {_shape(wanted)}, got {_shape(x.shape)}")
        if k.shape[3] != v.shape[3]:
            raise ValueError(f"`v` must have {k.shape[3]} tokens like `k`, got {v.shape[3]}")
        step = self.reserve(sequences, k.shape[3])
        for layer in range(self.n_layers):
            self.write(step, k[layer], v[layer], layer)
        return step

    # ---- Reading.

    def attend(self, q, step, layer=0, **options):
        """Call ``flash_decode`` with the pages of a layer, and their scales; see there for q, the options and results.

        Args:
            q: (batch, heads, n_tokens, head_dim): the newest tokens of the step's sequences, 1 to 16.
            step: a :class:`flashattn.paged.Step`.
            layer: 0 to n_layers - 1.
            options: scale, window, softcap, return_lse.
        """
        self._check_layer(layer)
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            options |= {} if scale is None else {name: scale[layer]}
        return flash_decode(q, *self._layers[layer], step.page_table, step.seqlens, **options)

    def contents(self, sequence, layer=0):
        """Return copies of K and V of a sequence, (n_heads_kv, tokens, head_dim) and (…, head_dim_v); fp8 as fp32."""
        self._check_layer(layer)
        found = self._find(sequence)
        pages = torch.tensor(found.pages, dtype=torch.int64, device=self.device)
        results = []
        for store, scale in ((self.k_pages, self.k_scale), (self.v_pages, self.v_scale)):
            x = store[layer][pages].transpose(0, 1).flatten(1, 2)[:, : found.length]
            if store.dtype == E4M3:
                x = x.float() if scale is None else x.float() * scale[layer][:, None, None]
            results.append(x)
        return tuple(results)

    def usage(self):
        """Return a :class:`flashattn.paged.Usage`: what is reserved, allocated and used."""
        filled = {}  # page -> tokens in it, as many as the sequence has that has most there
        for sequence in self._sequences.values():
            for i, page in enumerate(sequence.pages):
                filled[page] = max(filled.get(page, 0), min(self.page_size, sequence.length - i * self.page_size))
        token_bytes = sum(x[:, 0, :, 0].numel() * x.element_size() for x in (self.k_pages, self.v_pages))
        page_bytes = token_bytes * self.page_size
        n_tokens = sum(sequence.length for sequence in self._sequences.values())
        return Usage(
            page_bytes * len(self._owners), page_bytes * len(filled), token_bytes * sum(filled.values()),
            token_bytes * n_tokens,
        )  # fmt: skip

    # ---- Inside.

    def _n_pages(self, n_tokens):
        return -(-n_tokens // self.page_size)

    def _find(self, sequence):
        if sequence not in self._sequences:
            raise KeyError(f"`sequence` must be what allocate or fork returned and not freed, got {sequence!r}")
        return self._sequences[sequence]

    def _add(self, sequence):
        self._sequences[self._next_handle] = sequence
        self._next_handle += 1
        return self._next_handle - 1

    def _take(self):
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _release(self, pages):
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def _slot(self):
        """Return a row of the table that nobody has; the table doubles where there is none."""
        if not self._slots:
            n = len(self._table)
            self._table = torch.nn.functional.pad(self._table, (0, 0, 0, max(8, n)), value=-1)
            self._slots = list(range(len(self._table) - 1, n - 1, -1))
        return self._slots.pop()

    def _enter(self, entries):
        """Write (slot, column, page) entries into the table, which gets wider where it must."""
        if not entries:
            return
        width = max(column for _, column, _ in entries) + 1
        if width > self._table.shape[1]:
            room = max(-(-width // WIDTHS) * WIDTHS, 2 * self._table.shape[1]) - self._table.shape[1]
            self._table = torch.nn.functional.pad(self._table, (0, room), value=-1)
        slots, columns, pages = self._upload(entries, 3)
        self._table[slots, columns] = pages.to(torch.int32)

    def _step(self, batch, counts, n_tokens):
        width = max((len(sequence.pages) for sequence in batch), default=0)
        width = max(1, -(-width // WIDTHS)) * WIDTHS
        rows = [(sequence.slot, sequence.length, n) for sequence, n in zip(batch, counts, strict=True)]
        slots, lengths, counts_there = self._upload(rows, 3)
        table = self._table[slots, :width]
        # Of each new token its sequence, and its position there.
        which = torch.repeat_interleave(counts_there, output_size=sum(counts))
        position = (lengths - counts_there.cumsum(0))[which] + torch.arange(sum(counts), device=self.device)
        pages = table[which, position // self.page_size].long()
        return Step(table, lengths.to(torch.int32), pages, position % self.page_size, n_tokens)

    def _upload(self, rows, n_columns):
        """Return the columns of a list of rows of integers as int64 on the device, which the host does not wait for."""
        table = torch.tensor(rows, dtype=torch.int64, pin_memory=self.device.type == "cuda").reshape(
            len(rows), n_columns
        )
        return table.T.contiguous().to(self.device, non_blocking=True).unbind(0)

    def _scales(self, name, scale):
        if scale is None:
            return None
        if self.k_pages.dtype != E4M3:
            raise ValueError(f"`{name}` must be None in a cache that is not float8_e4m3fn, got {type(scale).__name__}")
        scale = torch.as_tensor(scale, dtype=torch.float32, device=self.device)
        wanted = (self.n_layers, self.k_pages.shape[2])
        try:
            return scale.expand(wanted)
        except RuntimeError:
            raise ValueError(f"`{name}` must broadcast to {wanted}, got {tuple(scale.shape)}") from None

    def _check_length(self, sequence, n_tokens):
        if not isinstance(n_tokens, int) or isinstance(n_tokens, bool) or not 0 <= n_tokens <= sequence.length:
            raise ValueError(f"`n_tokens` must be 0 to {sequence.length}, the sequence's length, got {n_tokens!r}")
        return n_tokens

    def _check_layer(self, layer):
        if not isinstance(layer, int) or not 0 <= layer < self.n_layers:
            raise ValueError(f"`layer` must be 0 to {self.n_layers - 1}, got {layer!r}")

    def _check_device(self, name, x):
        if x.device != self.device:
            raise ValueError(f"`{name}` must be on {self.device} like the cache, got {x.device}")

    def _check_batch(self, sequences, n_tokens):
        """Return the sequences of handles, and the number of new tokens of each."""
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"`sequences` must name each sequence once, got {list(sequences)}")
        counts = [n_tokens] * len(sequences) if isinstance(n_tokens, int) else list(n_tokens)
        if len(counts) != len(sequences):
            raise ValueError(f"`n_tokens` must be an int or a list of {len(sequences)}, got {len(counts)} numbers")
        for n in counts:
            if not isinstance(n, int) or isinstance(n, bool) or n < 0:
                raise ValueError(f"`n_tokens` must be 0 or more, got {n!r}")
        return [self._find(sequence) for sequence in sequences], counts

    def _check_rows(self, name, x, store, step):
        """Return K or V of a step's tokens as (new tokens of all, n_heads_kv, head_dim)."""
        _check_floating(**{name: x})
        heads, head_dim = store.shape[2], store.shape[4]
        if isinstance(step.n_tokens, int):
            wanted = (len(step.seqlens), heads, step.n_tokens, head_dim)
        else:
            wanted = (len(step.rows), heads, head_dim)
        if x.shape != wanted:
            raise ValueError(f"`{name}` must be {_shape(wanted)} for this step, got {_shape(x.shape)}")
        self._check_device(name, x)
        return x.transpose(1, 2).flatten(0, 1) if x.dim() == 4 else x


class _Sequence:
    """What the host knows of a sequence: its pages in order, its length in tokens, its row in the table."""

    def __init__(self, pages, length, slot):
        self.pages, self.length, self.slot = pages, length, slot


def _check_count(name, x, most=None):
    if not isinstance(x, int) or isinstance(x, bool) or x < 1 or (most is not None and x > most):
        raise ValueError(f"`{name}` must be {'1 or more' if most is None else f'1 to {most}'}, got {x!r}")


def _check_floating(**tensors):
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            raise TypeError(f"`{name}` must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")


def _shape(sizes):
    return f"({', '.join(map(str, sizes))})"
