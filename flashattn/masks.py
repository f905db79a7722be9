"""Masks that you write, one jit function each, and the lists of tiles that the kernels of sparse.py walk. Chapter 15.

A tile is a square of ``block`` queries by ``block`` keys. Under a mask it is full (every query sees every key), empty
(none sees any) or partial. Full tiles need no mask, empty ones are never read.
"""

import ast
import functools
import inspect
import itertools
import textwrap
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.jit import KernelInterface

from .primitives import INTERPRETED

BLOCKS = (64, 128)
SLOTS = 6  # tensors, and numbers, that a mask and a score function together may bring
TENSOR_SLOTS = [f"t{i}" for i in range(SLOTS)]
NUMBER_SLOTS = [f"x{i}" for i in range(SLOTS)]
EMPTY, PARTIAL, FULL = 0, 1, 2
# The first number of a step of a mask's program. A leaf calls a function; the others combine answers given before.
LEAF, AND, OR, NOT = 0, 1, 2, 3
STEP_LEAF, STEP_AND, STEP_OR = (tl.constexpr(step) for step in (LEAF, AND, OR))


class Rule(NamedTuple):
    """A jit function, and what it is given beside batch, head, query and key.

    at_position: whether it is given the query's position among the keys, its index + seqlen_k - seqlen_q. by_batch,
    by_head: whether its answer may differ from one batch entry, or head, to the next. sizes: the batch, n_heads,
    seqlen_q and seqlen_k that its tensors are made for, None for any.
    """

    fn: object
    tensors: tuple
    numbers: tuple
    at_position: bool
    by_batch: bool
    by_head: bool
    sizes: tuple = (None,) * 4


class TileMask:
    """Say which keys each query sees, by a jit function of one line; combine such masks with ``&``, ``|`` and ``~``.

    ::

        @triton.jit
        def visible(b, h, i, j, ids):
            return tl.load(ids + i) == tl.load(ids + j)

        same_document = TileMask(visible, tensors=(ids,))
        mask = same_document & causal()

    Args:
        fn: a function under ``triton.jit`` of (b, h, i, j, one argument for each of ``tensors``, one for each of
            ``numbers``): batch entry, head of q, query index and key index, of which i and j come as a column and a row
            (or a row and a column) that broadcast to a tile. It returns True where the query sees the key. Tensors
            arrive as pointers to their first element; a function that has some is asked only for queries and keys that
            exist. It must not depend on anything else: a tile may be asked for any number of times.
        tensors: dense tensors on the device of q, contiguous, bool as bytes. At most six, those of a score function
            included.
        numbers: ints and floats, at most six likewise. Another value is no reason to compile anew.
        at_position: give fn as i the query's position among the keys, ``index + seqlen_k - seqlen_q``, which aligns the
            last query with the last key as ``flash_attention`` does; it may be negative. Default False: its index.
        by_batch, by_head: whether the answer may differ between batch entries, between heads. Default None: it may if
            fn mentions its first argument, its second.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or fn takes another number of arguments.

    Chapter: 15.
    """

    def __init__(self, fn, tensors=(), numbers=(), *, at_position=False, by_batch=None, by_head=None):
        rule = make_rule("fn", fn, 4, tensors, numbers, at_position, by_batch, by_head)
        self._rules, self._steps = (rule,), ((LEAF, 0),)

    @classmethod
    def _ready(cls, fn, tensors=(), numbers=(), sizes=(None,) * 4, **options):
        """Make a mask whose tensors are for these (batch, n_heads, seqlen_q, seqlen_k)."""
        mask = cls(fn, tensors, numbers, **options)
        mask._rules = (mask._rules[0]._replace(sizes=sizes),)
        return mask

    @classmethod
    def _combine(cls, operation, *masks):
        """Put the programs of masks one behind the other, and one step that combines their answers."""
        combined = cls.__new__(cls)
        rules, steps, answers = [], [], []
        for mask in masks:
            place = {}
            for number, step in enumerate(mask._steps):
                if step[0] == LEAF:
                    rule = mask._rules[step[1]]
                    known = [i for i, other in enumerate(rules) if _same(rule, other)]
                    rules += [] if known else [rule]
                    step = (LEAF, known[0] if known else len(rules) - 1)
                else:
                    step = (step[0], *(place[i] for i in step[1:]))
                steps += [] if step in steps else [step]
                place[number] = steps.index(step)
            answers.append(place[len(mask._steps) - 1])
        steps.append((operation, *answers))
        combined._rules, combined._steps = tuple(rules), tuple(steps)
        check_slots([*combined.tensors], [*combined.numbers])
        return combined

    def __and__(self, other):
        return self._combine(AND, self, other) if isinstance(other, TileMask) else NotImplemented

    def __or__(self, other):
        return self._combine(OR, self, other) if isinstance(other, TileMask) else NotImplemented

    def __invert__(self):
        return self._combine(NOT, self)

    @property
    def tensors(self):
        """Return the tensors of all functions, in order."""
        return tuple(x for rule in self._rules for x in rule.tensors)

    @property
    def numbers(self):
        """Return the numbers of all functions, in order."""
        return tuple(x for rule in self._rules for x in rule.numbers)

    def program(self):
        """Return (functions, steps), what ``visible_tile`` runs.

        A leaf's step is (LEAF, its function, at_position, its slices of tensors and numbers, the function's
        fingerprint); another's (operation, the steps whose answers it combines).
        """
        slices, t, x = [], 0, 0
        for rule in self._rules:
            slices.append((t, t + len(rule.tensors), x, x + len(rule.numbers)))
            t, x = t + len(rule.tensors), x + len(rule.numbers)
        steps = [
            (LEAF, i, self._rules[i].at_position, *slices[i], fingerprint(self._rules[i].fn))
            if operation == LEAF
            else (operation, i, *others)
            for operation, i, *others in self._steps
        ]
        return tuple(rule.fn for rule in self._rules), tuple(steps)

    def tiles(self, batch, n_heads, seqlen_q, seqlen_k, *, device=None, block=128):
        """Look at every tile once and list the full and the partial ones; the lists serve for any number of calls.

        Of the mask itself no more than a tile for each running program is in memory. It waits for the GPU once. What
        the tensors hold is looked at here and, in partial tiles, in every call: whoever changes them makes new lists.

        Args:
            batch, n_heads, seqlen_q, seqlen_k: the sizes of the calls, ints; n_heads is that of q.
            device: where the lists go. Default: that of the mask's tensors, else of the GPU, else the CPU.
            block: queries and keys of a tile, 64 or 128.

        Returns:
            :class:`Tiles`.

        Raises:
            TypeError, ValueError: a size or block is not one; a tensor lies elsewhere.
            RuntimeError: on the CPU without Triton's interpreter.
        """
        sizes = dict(batch=batch, n_heads=n_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"`{name}` must be an int, got {size!r}")
            if size < 0 or size > 2**30:
                raise ValueError(f"`{name}` must be 0 to 2**30, got {size}")
        if block not in BLOCKS:
            raise ValueError(f"`block` must be 64 or 128, got {block!r}")
        for (name, size), wanted in itertools.product(sizes.items(), [rule.sizes for rule in self._rules]):
            wanted = dict(zip(sizes, wanted, strict=True))[name]
            if wanted not in (None, size):
                raise ValueError(f"`{name}` must be {wanted}, which is what the mask's tensors are for, got {size}")
        if device is None:
            default = "cuda" if torch.cuda.is_available() else "cpu"
            device = self.tensors[0].device if self.tensors else default
        device = torch.empty(0, device=device).device  # "cuda" alone names no GPU
        for x in self.tensors:
            if x.device != device:
                raise ValueError(f"`device` must be that of the mask's tensors, {x.device}, got {device}")
        n_batch = batch if any(rule.by_batch for rule in self._rules) else min(batch, 1)
        n_lists = n_heads if any(rule.by_head for rule in self._rules) else min(n_heads, 1)
        n_rows, n_columns = (-(-size // block) for size in (seqlen_q, seqlen_k))
        kinds = torch.empty(n_batch, n_lists, n_rows, n_columns, dtype=torch.int8, device=device)
        sees, seen = (kinds.new_zeros(n_batch, n_lists, size) for size in (seqlen_q, seqlen_k))
        if kinds.numel():
            _check_device(device)
            functions, steps = self.program()
            with torch.cuda.device_of(kinds):
                _classify_tiles_kernel[(kinds.numel(),)](
                    kinds, sees, seen, *slots(self.tensors), *slots(self.numbers), n_lists, seqlen_q, seqlen_k,
                    FUNCTIONS=functions, STEPS=steps, BLOCK=block, num_warps=8,
                )  # fmt: skip
        return Tiles(self, batch, n_heads, seqlen_q, seqlen_k, block, kinds, sees, seen)


class TileList(NamedTuple):
    """For each block of queries (or of keys) the tiles to compute, the full ones first, then the partial ones.

    index: (batch or 1, heads or 1, blocks, tiles + 1), int32; what stands behind the last tile to compute is a tile
    too, so that the kernels may read one ahead. counts: (…, blocks, 2), int32: full ones, and full and partial ones.
    """

    index: torch.Tensor
    counts: torch.Tensor


class Tiles:
    """The tiles of a mask at some sizes, made by ``TileMask.tiles``: what ``sparse_attention`` walks.

    Attributes:
        mask, batch, n_heads, seqlen_q, seqlen_k, block: as given to ``TileMask.tiles``.
        kinds: (batch or 1, heads or 1, query blocks, key blocks), int8: 0 for empty, 1 for partial, 2 for full. A tile
            that reaches past the last query or key is never full.
        sees: (batch or 1, heads or 1, seqlen_q), int8: 1 for each query that sees a key; None where all do.
        seen: (batch or 1, heads or 1, seqlen_k), likewise the keys that some query sees.
        has_partial: whether any tile is partial. Where none is, the kernels are compiled without the mask.
    """

    def __init__(self, mask, batch, n_heads, seqlen_q, seqlen_k, block, kinds, sees, seen):
        self.mask, self.batch, self.n_heads = mask, batch, n_heads
        self.seqlen_q, self.seqlen_k, self.block, self.kinds = seqlen_q, seqlen_k, block, kinds
        found = torch.stack([(sees != 0).all(), (seen != 0).all(), (kinds == PARTIAL).any()])
        all_see, all_seen, self.has_partial = found.tolist()  # waits for the GPU, once
        self.sees, self.seen = None if all_see else sees, None if all_seen else seen

    @functools.cached_property
    def program(self):
        """Return (functions, steps) as ``TileMask.program`` does, steps None where no tile is partial."""
        functions, steps = self.mask.program()
        return functions, steps if self.has_partial else None

    @functools.cached_property
    def by_query(self):
        """Return the :class:`TileList` of each query block: key blocks, for the forward pass and dQ."""
        return _list_tiles(self.kinds)

    @functools.cached_property
    def by_key(self):
        """Return the :class:`TileList` of each key block: query blocks, for dK and dV."""
        return _list_tiles(self.kinds.mT)

    @property
    def n_tiles(self):
        """Return how many tiles there are, of all kinds; where heads or batch entries are alike, those of one."""
        return self.kinds.numel()

    @property
    def n_full(self):
        """Return how many of them are full."""
        return int((self.kinds == FULL).sum())

    @property
    def n_partial(self):
        """Return how many of them are partial."""
        return int((self.kinds == PARTIAL).sum())

    @property
    def n_computed(self):
        """Return how many of them are computed, the full and the partial ones."""
        return self.n_full + self.n_partial

    @property
    def density(self):
        """Return the share of tiles that is computed, 0 to 1."""
        return self.n_computed / max(self.n_tiles, 1)

    def __repr__(self):
        sizes = f"{self.seqlen_q} queries by {self.seqlen_k} keys in tiles of {self.block}"
        return f"Tiles({sizes}: {self.n_full} full, {self.n_partial} partial of {self.n_tiles})"


def _list_tiles(kinds):
    order = torch.sort(kinds, dim=-1, descending=True, stable=True).indices
    counts = torch.stack([(kinds == FULL).sum(-1), (kinds != EMPTY).sum(-1)], dim=-1)
    return TileList(torch.nn.functional.pad(order, (0, 1)).int(), counts.int())


# ---- What the kernels call.


@triton.jit
def call_rule(
    FN: tl.constexpr, AT_POSITION: tl.constexpr, LOADS: tl.constexpr, before, given,
    b, h, offs_m, offs_n, seqlen_q, seqlen_k,
):  # fmt: skip
    """Call a function of a mask or of a score on a tile, between the tuples ``before`` and ``given``.

    With tensors (LOADS) it is asked for no query and no key that does not exist: it may load what belongs to them.
    """
    if LOADS:
        offs_m = tl.minimum(offs_m, seqlen_q - 1)
        offs_n = tl.minimum(offs_n, seqlen_k - 1)
    if AT_POSITION:
        offs_m += seqlen_k - seqlen_q
    return FN(*before, b, h, offs_m, offs_n, *given)


@triton.jit
def visible_tile(
    FUNCTIONS: tl.constexpr, STEPS: tl.constexpr, tensors, numbers, b, h, offs_m, offs_n, seqlen_q, seqlen_k
):  # fmt: skip
    """Return whether query offs_m sees key offs_n under a mask's program; the two broadcast to a tile."""
    answers = ()
    for n in tl.static_range(len(STEPS)):
        if STEPS[n][0] == STEP_LEAF:
            given = tensors[STEPS[n][3] : STEPS[n][4]] + numbers[STEPS[n][5] : STEPS[n][6]]
            answer = call_rule(
                FUNCTIONS[STEPS[n][1]], STEPS[n][2], STEPS[n][3] < STEPS[n][4], (), given,
                b, h, offs_m, offs_n, seqlen_q, seqlen_k,
            )  # fmt: skip
            answer = answer != 0  # a byte that was loaded counts as well
        elif STEPS[n][0] == STEP_AND:
            answer = answers[STEPS[n][1]] & answers[STEPS[n][2]]
        elif STEPS[n][0] == STEP_OR:
            answer = answers[STEPS[n][1]] | answers[STEPS[n][2]]
        else:
            answer = ~answers[STEPS[n][1]]
        answers = answers + (answer,)
    return answers[len(STEPS) - 1] & (offs_m < seqlen_q) & (offs_n < seqlen_k)


@triton.jit(do_not_specialize=["n_heads", "seqlen_q", "seqlen_k", *NUMBER_SLOTS])
def _classify_tiles_kernel(
    kinds_ptr, sees_ptr, seen_ptr, t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr, x0, x1, x2, x3, x4, x5,
    n_heads, seqlen_q, seqlen_k, FUNCTIONS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Say of one tile whether it is empty (0), partial (1) or full (2); mark its queries that see and its seen keys.

    Grid: one program for each tile.
    """
    pid = tl.program_id(0)
    n_columns = tl.cdiv(seqlen_k, BLOCK)
    n_rows = tl.cdiv(seqlen_q, BLOCK)
    this_list = (pid // n_columns // n_rows).to(tl.int64)
    batch, head = this_list // n_heads, this_list % n_heads
    offs_m = pid // n_columns % n_rows * BLOCK + tl.arange(0, BLOCK)
    offs_n = pid % n_columns * BLOCK + tl.arange(0, BLOCK)
    tensors, numbers = (t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr), (x0, x1, x2, x3, x4, x5)
    visible = visible_tile(
        FUNCTIONS, STEPS, tensors, numbers, batch, head, offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k
    ).to(tl.int32)
    n_visible = tl.sum(visible, axis=1)
    is_seen = tl.max(visible, axis=0)
    # What other tiles found stays: a mark is set by whoever comes, and never taken back.
    tl.store(sees_ptr + this_list * seqlen_q + offs_m, 1, mask=n_visible > 0)
    tl.store(seen_ptr + this_list * seqlen_k + offs_n, 1, mask=is_seen > 0)
    n_visible = tl.sum(n_visible, axis=0)
    kind = (n_visible > 0).to(tl.int8) + (n_visible == BLOCK * BLOCK).to(tl.int8)
    tl.store(kinds_ptr + pid, kind)


def slots(values):
    """Return values, bool tensors as bytes, and None for each slot that is left."""
    values = [x.view(torch.uint8) if getattr(x, "dtype", None) == torch.bool else x for x in values]
    return [*values, *[None] * (SLOTS - len(values))]


# ---- Ready masks. Where lengths differ, those that go by distance align the last query with the last key.


@triton.jit
def _causal(b, h, i, j):
    return j <= i


@triton.jit
def _sliding_window(b, h, i, j, left, right):
    return (j >= i - left) & (j <= i + right)


@triton.jit
def _prefix(b, h, i, j, n):
    return j < n


@triton.jit
def _prefix_of_each(b, h, i, j, lengths):
    return j < tl.load(lengths + b)


@triton.jit
def _dilated(b, h, i, j, step):
    return (i - j) % step == 0


@triton.jit
def _documents(b, h, i, j, ids_q, ids_k, stride_q, stride_k):
    document = tl.load(ids_q + b * stride_q + i)
    return (document == tl.load(ids_k + b * stride_k + j)) & (document >= 0)


@triton.jit
def _selected(b, h, i, j, chosen, stride_b, stride_h, n_rows, n_columns, block):
    row, column = i // block, j // block
    known = (row < n_rows) & (column < n_columns)
    return tl.load(chosen + b * stride_b + h * stride_h + row * n_columns + column, mask=known, other=0)


def causal():
    """Return the mask that hides the keys after each query's position, as ``flash_attention(causal=True)`` does."""
    return TileMask(_causal, at_position=True)


def sliding_window(left, right=0):
    """Return the mask that shows ``left`` keys before a query's position, its own and ``right`` after it.

    Args:
        left, right: ints of 0 or more: ``flash_attention(window=(left, right))``. right is 0 by default.
    """
    return TileMask(_sliding_window, numbers=(_size("left", left, 0), _size("right", right, 0)), at_position=True)


def prefix(length):
    """Return the mask that shows the first ``length`` keys to every query; ``causal() | prefix(n)`` is a prefix LM's.

    Args:
        length: an int of 0 or more, or (batch,) integers for a length of each batch entry.
    """
    if isinstance(length, torch.Tensor):
        _check_integers("length", length, (1,), "(batch,)")
        return TileMask._ready(_prefix_of_each, (length.contiguous(),), sizes=(len(length), None, None, None))
    return TileMask(_prefix, numbers=(_size("length", length, 0),))


def documents(ids, ids_k=None):
    """Return the mask that shows to each query the keys of its own document.

    Args:
        ids: (seqlen,) or (batch, seqlen) integers, the document of each query and key; below 0 for padding, which sees
            nothing and is seen by none.
        ids_k: those of the keys, where they are others. Default: ids.
    """
    ids_k = ids if ids_k is None else ids_k
    for name, x in (("ids", ids), ("ids_k", ids_k)):
        _check_integers(name, x, (1, 2), "(seqlen,) or (batch, seqlen)")
    strides = [x.shape[1] if x.dim() == 2 else 0 for x in (ids, ids_k)]
    batch = next((x.shape[0] for x in (ids, ids_k) if x.dim() == 2), None)
    if ids.dim() == ids_k.dim() == 2 and len(ids) != len(ids_k):
        raise ValueError(f"`ids_k` must have batch {len(ids)} like `ids`, got {len(ids_k)}")
    return TileMask._ready(
        _documents, (ids.contiguous(), ids_k.contiguous()), strides, (batch, None, ids.shape[-1], ids_k.shape[-1]),
        by_batch=batch is not None,
    )  # fmt: skip


def dilated(step):
    """Return the mask that shows every ``step``-th key, counted from a query's own position in both directions.

    Args:
        step: an int of 1 or more.
    """
    return TileMask(_dilated, numbers=(_size("step", step, 1),), at_position=True)


def selected_blocks(index, block, n_key_blocks=None):
    """Return the mask that shows to each block of queries the blocks of keys that were selected for it.

    Args:
        index: (n_query_blocks, k), or with a batch and a head dimension (of size 1 where all are alike) before them,
            integers: the k selected key blocks of each query block, in any order; below 0 for none.
        block: queries, and keys, of a block, an int of 1 or more. A multiple of the tiles' block leaves none partial.
        n_key_blocks: how many key blocks there are. Default: one more than the largest selected, which waits for the
            GPU.
    """
    _check_integers("index", index, (2, 4), "(n_query_blocks, k) or (batch or 1, heads or 1, n_query_blocks, k)")
    index = index.long()[(None,) * (4 - index.dim())]
    if n_key_blocks is None:
        n_key_blocks = max(int(index.max()) + 1 if index.numel() else 0, 1)
    block, n_key_blocks = _size("block", block, 1), _size("n_key_blocks", n_key_blocks, 1)
    chosen = index.new_zeros(*index.shape[:3], n_key_blocks + 1, dtype=torch.uint8)  # the last column: selected none
    chosen.scatter_(-1, torch.where(index < 0, n_key_blocks, index), 1)
    chosen = chosen[..., :-1].contiguous()
    by_batch, by_head = (size > 1 for size in chosen.shape[:2])
    strides = (chosen.stride(0) if by_batch else 0, chosen.stride(1) if by_head else 0)
    sizes = (len(chosen) if by_batch else None, chosen.shape[1] if by_head else None, None, None)
    numbers = (*strides, *chosen.shape[2:], block)
    return TileMask._ready(_selected, (chosen,), numbers, sizes, by_batch=by_batch, by_head=by_head)


# ---- Checks.


def _size(name, value, least):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, got {value!r}")
    if not least <= value <= 2**30:
        raise ValueError(f"`{name}` must be {least} to 2**30, got {value}")
    return value


def _check_integers(name, x, dims, layout):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`{name}` must be int32 or int64, got {str(x.dtype).removeprefix('torch.')}")
    if x.dim() not in dims:
        raise ValueError(f"`{name}` must be {layout}, got shape {tuple(x.shape)}")


def make_rule(name, fn, n_fixed, tensors, numbers, at_position, by_batch, by_head):
    """Return a Rule of checked arguments; fn takes n_fixed arguments, b, h, i and j the last of them, then tensors."""
    if not isinstance(fn, KernelInterface):
        raise TypeError(f"`{name}` must be a function under @triton.jit, got {type(fn).__name__}")
    for what, values, kinds, word in (
        ("tensors", tensors, torch.Tensor, "torch.Tensor"),
        ("numbers", numbers, (int, float), "int or float"),
    ):
        if not isinstance(values, tuple | list):
            raise TypeError(f"`{what}` must be a tuple, got {type(values).__name__}")
        for x in values:
            if isinstance(x, bool) or not isinstance(x, kinds):
                raise TypeError(f"`{what}` must hold only {word}, got {type(x).__name__}")
    for x in tensors:
        if not x.is_contiguous():
            raise ValueError(f"`tensors` must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")
    for x in numbers:
        if isinstance(x, int) and not -(2**63) <= x < 2**63:
            raise ValueError(f"`numbers` must fit into 64 bits, got {x}")
    if not isinstance(at_position, bool):
        raise TypeError(f"`at_position` must be True or False, got {at_position!r}")
    for what, flag in (("by_batch", by_batch), ("by_head", by_head)):
        if flag is not None and not isinstance(flag, bool):
            raise TypeError(f"`{what}` must be True, False or None, got {flag!r}")
    check_slots(tensors, numbers)
    parameters = list(inspect.signature(fn.fn).parameters)
    wanted = n_fixed + len(tensors) + len(numbers)
    if len(parameters) != wanted:
        fixed = ", ".join("sbhij"[-n_fixed:])
        raise ValueError(
            f"`{name}` must take {wanted} arguments: {fixed}, {len(tensors)} tensors and {len(numbers)} numbers; "
            f"{fn.fn.__name__} takes {len(parameters)}"
        )
    b, h = parameters[n_fixed - 4 : n_fixed - 2]
    used = {node.id for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(fn.fn)))) if _is_name(node)}
    return Rule(
        fn, tuple(tensors), tuple(numbers), at_position,
        b in used if by_batch is None else by_batch, h in used if by_head is None else by_head,
    )  # fmt: skip


def _is_name(node):
    return isinstance(node, ast.Name)


def check_slots(tensors, numbers):
    """Raise where a mask and a score function bring more than the kernels have arguments for."""
    for what, values in (("tensors", tensors), ("numbers", numbers)):
        if len(values) > SLOTS:
            raise ValueError(f"`{what}` must be at most {SLOTS} in a mask and its score together, got {len(values)}")


def fingerprint(fn):
    """Return an integer made of a jit function's source and of all that it calls; 0 in the interpreter.

    Triton keeps compiled kernels on disk under a name in which functions that come in a tuple count by their own names
    alone. Without this number an edited mask would run as what it was before.
    """
    return int(getattr(fn, "cache_key", "0")[:15], 16)


def _same(rule, other):
    """Say whether two rules are one: the same function with the very same tensors and the same numbers."""
    return (
        rule.fn is other.fn
        and rule._replace(fn=None, tensors=()) == other._replace(fn=None, tensors=())
        and len(rule.tensors) == len(other.tensors)
        and all(x is y for x, y in zip(rule.tensors, other.tensors, strict=True))
    )


def _check_device(device):
    if device.type != "cuda" and not INTERPRETED.value:
        raise RuntimeError(
            f"`device` must be a CUDA device, got {device}: on the CPU tiles are looked at in Triton's interpreter, "
            "so set TRITON_INTERPRET=1 in the environment before Triton is first imported"
        )
