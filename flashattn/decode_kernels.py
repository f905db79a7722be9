"""The kernels that decode: a few new tokens look at all keys of their sequence, which lie in pages. Chapter 13.

One kernel attends over a part of the keys, the other merges the parts. ``flashattn.decode`` checks what comes in here.
"""

import torch
import triton
import triton.language as tl

from .configs import INTERPRETER, BlockConfig, multiprocessors, target_of
from .primitives import (
    LOWEST,
    dot,
    natural_log,
    online_softmax_update,
    round_to,
    score_factors,
    score_mask,
    scores_from,
    tile_offsets,
)
from .splits import choose_splits

# Numbers that differ from call to call; see SIZES in primitives.py.
COUNTS = ["n_heads_kv", "group", "n_tokens", "n_splits", "n_parts", "n_row_blocks", "window_left"]
MOST_ROWS = 32  # of a tile of queries: 64 would go to Hopper's wgmma, and 16 or 32 rows of mma lose nothing here
MOST_AT_ONCE = 3  # programs of a multiprocessor: more are not needed to keep its share of the memory's bandwidth busy


@triton.jit
def load_page_ids(table_ptr, start_n, first_key, n_keys, stride_t, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of each key of the tile that begins at start_n, or one page where a page holds the whole tile.

    Entries of the table for keys outside first_key..n_keys-1 are not read: they may hold anything.
    """
    if PAGE_SIZE >= BLOCK_N:
        return tl.load(table_ptr + start_n // PAGE_SIZE * stride_t, mask=start_n < n_keys, other=0)
    else:
        offs_n = start_n + tl.arange(0, BLOCK_N)
        needed = (offs_n >= first_key) & (offs_n < n_keys)
        return tl.load(table_ptr + offs_n // PAGE_SIZE * stride_t, mask=needed, other=0)


@triton.jit
def load_paged_tile(
    ptr, pages, offs_n, needed, offs_d, stride_p, stride_n, stride_d,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Load the rows of keys offs_n, (BLOCK_N, BLOCK_D), from their pages; those not needed are 0, and not read."""
    starts = pages.to(tl.int64) * stride_p  # pages times stride can pass 2^31
    offsets = tile_offsets(offs_n % PAGE_SIZE, offs_d, stride_n, stride_d)
    offsets += starts[:, None] if len(starts.shape) else starts
    mask = needed[:, None]
    if HEAD_DIM != offs_d.shape[0]:
        mask = mask & (offs_d < HEAD_DIM)[None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0)


@triton.jit
def from_page(x, DTYPE: tl.constexpr):
    """Return a tile in DTYPE, which holds every number of fp8. By fp32: Triton 3.6 cannot go to bf16 before sm_90."""
    return x if x.dtype == DTYPE else x.to(tl.float32).to(DTYPE)


@triton.jit
def split_range(begin, end, split, n_splits, BLOCK_N: tl.constexpr):
    """Return (first, last + 1) of the keys begin..end-1 that one of n_splits takes: whole tiles, as even as they go."""
    n_tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    share, rest = n_tiles // n_splits, n_tiles % n_splits
    low = begin + (split * share + tl.minimum(split, rest)) * BLOCK_N
    high = begin + ((split + 1) * share + tl.minimum(split + 1, rest)) * BLOCK_N
    return low, tl.minimum(high, end)


@triton.jit(do_not_specialize=COUNTS)
def _decode_kernel(
    q_ptr, k_pages_ptr, v_pages_ptr, page_table_ptr, seqlens_ptr, k_scale_ptr, v_scale_ptr,
    out_ptr, lse_ptr, parts_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kp, stride_kh, stride_kn, stride_kd,
    stride_vp, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_tb, stride_tp, stride_ks, stride_vs,
    n_heads_kv, group, n_tokens, n_splits, n_parts, n_row_blocks, window_left, score_scale, cap_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Attend from the new tokens of one sequence, in all query heads of one key head, to one part of its keys.

    Grid: (batch * n_heads_kv * n_splits * n_row_blocks,). Row r of a program is token r % n_tokens of query head
    r // n_tokens of the group, so that K and V are read once for all of them; more than BLOCK_M rows take several
    programs. Token t stands at key seqlen - n_tokens + t and sees the keys up to there, and window_left back.

    With one split (parts_ptr is None) it writes out and lse. With more it writes the state of the online softmax in
    fp32, for ``_merge_kernel``: the acc of all n_parts parts, behind them their m, and then their l. A split without
    keys writes l = 0, and no acc.
    Source: Dao et al. 2023 (Flash-Decoding); Kwon et al. 2023 (PagedAttention), section 4.1.
    """
    # Which rows of which head, and which keys.
    pid = tl.program_id(0)
    row_block = pid % n_row_blocks
    split = pid // n_row_blocks % n_splits
    head_kv = (pid // n_row_blocks // n_splits % n_heads_kv).to(tl.int64)
    batch = (pid // n_row_blocks // n_splits // n_heads_kv).to(tl.int64)
    n_rows = group * n_tokens
    seqlen = tl.maximum(tl.load(seqlens_ptr + batch), 0)
    shift = seqlen - n_tokens
    first_key = 0
    full_begin = 0
    if window_left is not None:
        first_key = tl.maximum(shift - window_left, 0)
        full_begin = tl.maximum(seqlen - 1 - window_left, 0)
    low, high = split_range(first_key // BLOCK_N * BLOCK_N, seqlen, split, n_splits, BLOCK_N)

    offs_r = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_m = offs_r % n_tokens
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    heads = (head_kv * group + offs_r // n_tokens)[:, None]
    is_row = offs_r < n_rows

    q_ptrs = q_ptr + batch * stride_qb + heads * stride_qh + tile_offsets(offs_m, offs_d, stride_qm, stride_qd)
    q = tl.load(q_ptrs, mask=is_row[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)  # (BLOCK_M, BLOCK_D)
    k_pages_ptr += head_kv * stride_kh
    v_pages_ptr += head_kv * stride_vh
    page_table_ptr += batch * stride_tb
    k_scale, v_scale = 1.0, 1.0
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr + head_kv * stride_ks)
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + head_kv * stride_vs)
    m_i = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)

    # Invariant, over the keys seen so far: m_i = max s, l_i = sum 2^(s - m_i), acc = sum 2^(s - m_i) v.
    pages = load_page_ids(page_table_ptr, low, first_key, high, stride_tp, PAGE_SIZE, BLOCK_N)
    for start_n in tl.range(low, high, BLOCK_N):
        # A tile ahead: the addresses of K and V are known before they are needed.
        next_pages = load_page_ids(page_table_ptr, start_n + BLOCK_N, first_key, high, stride_tp, PAGE_SIZE, BLOCK_N)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        needed = (offs_n >= first_key) & (offs_n < high)
        k = load_paged_tile(  # (BLOCK_N, BLOCK_D)
            k_pages_ptr, pages, offs_n, needed, offs_d, stride_kp, stride_kn, stride_kd, PAGE_SIZE, HEAD_DIM
        )
        qk = dot(q, tl.trans(from_page(k, q.dtype)))  # (BLOCK_M, BLOCK_N)
        if k_scale_ptr is not None:
            qk *= k_scale
        s, factor, _ = scores_from(qk, score_scale, cap_log2)
        if (start_n < full_begin) | (start_n + BLOCK_N > shift + 1):
            visible = score_mask(offs_m[:, None], offs_n[None, :], high, shift, window_left, 0)
            s = tl.where(visible, s, float("-inf"))
        p, alpha, m_i, l_i = online_softmax_update(s, factor, m_i, l_i)
        v = load_paged_tile(  # (BLOCK_N, BLOCK_DV)
            v_pages_ptr, pages, offs_n, needed, offs_dv, stride_vp, stride_vn, stride_vd, PAGE_SIZE, HEAD_DIM_V
        )
        acc = dot(round_to(p, q.dtype), from_page(v, q.dtype), acc * alpha[:, None])
        pages = next_pages

    if v_scale_ptr is not None:
        acc *= v_scale
    row = (batch * n_heads_kv + head_kv) * n_rows + offs_r  # = (batch * n_heads + head) * n_tokens + token
    mask = is_row[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    if parts_ptr is None:
        # A token that stands before the first key has l_i = 0: its out is 0, its lse -inf.
        has_key = offs_m + shift >= 0
        l_i = tl.where(has_key, l_i, 1.0)
        out = tl.where(has_key[:, None], acc / l_i[:, None], 0.0)
        out_ptrs = out_ptr + batch * stride_ob + heads * stride_oh + tile_offsets(offs_m, offs_dv, stride_om, stride_od)
        tl.store(out_ptrs, round_to(out, out_ptr.dtype.element_ty), mask=mask)
        lse = tl.where(has_key, natural_log(m_i + tl.log2(l_i)), float("-inf"))
        tl.store(lse_ptr + row, lse, mask=is_row)
    else:
        part = row * n_splits + split
        m_ptr = parts_ptr + n_parts.to(tl.int64) * HEAD_DIM_V
        tl.store(m_ptr + part, m_i, mask=is_row)
        tl.store(m_ptr + n_parts + part, l_i, mask=is_row)
        if low < high:
            tl.store(parts_ptr + part[:, None] * HEAD_DIM_V + offs_dv[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["n_heads", "n_tokens", "n_splits", "n_parts"])
def _merge_kernel(
    seqlens_ptr, out_ptr, lse_ptr, parts_ptr,
    stride_ob, stride_oh, stride_om, stride_od, n_heads, n_tokens, n_splits, n_parts,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge what ``_decode_kernel`` found for one token in one head over each part of the keys.

    Grid: (batch * n_heads * n_tokens,). With m the largest m_s: out = sum 2^(m_s - m) acc_s / sum 2^(m_s - m) l_s.
    BLOCK_S, a power of two, is at least n_splits; acc is read BLOCK_PARTS parts at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    token = row % n_tokens
    head = row // n_tokens % n_heads
    batch = row // n_tokens // n_heads
    has_key = token.to(tl.int32) + tl.load(seqlens_ptr + batch) - n_tokens >= 0
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_DV)
    in_row = offs_d < HEAD_DIM_V
    m_ptr = parts_ptr + n_parts.to(tl.int64) * HEAD_DIM_V
    l_ptr = m_ptr + n_parts

    m_parts = tl.load(m_ptr + row * n_splits + offs_s, mask=offs_s < n_splits, other=LOWEST)
    l_parts = tl.load(l_ptr + row * n_splits + offs_s, mask=offs_s < n_splits, other=0.0)
    m = tl.max(m_parts, axis=0)
    length = tl.sum(l_parts * tl.exp2(m_parts - m), axis=0)
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    for start in tl.range(0, n_splits, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        where = row * n_splits + part
        m_s = tl.load(m_ptr + where, mask=part < n_splits, other=LOWEST)
        l_s = tl.load(l_ptr + where, mask=part < n_splits, other=0.0)
        acc_s = tl.load(
            parts_ptr + where[:, None] * HEAD_DIM_V + offs_d[None, :],
            mask=(part < n_splits)[:, None] & in_row[None, :], other=0.0,
        )  # fmt: skip
        # A part that saw no key has written nothing, and what lies there may be NaN. (To know that before the load
        # would cost the time of another one.)
        acc_s = tl.where((l_s != 0.0)[:, None], acc_s, 0.0)
        acc += tl.sum(acc_s * tl.exp2(m_s - m)[:, None], axis=0)

    length = tl.where(has_key, length, 1.0)
    out = tl.where(has_key, acc / length, 0.0)
    out_ptrs = out_ptr + batch * stride_ob + head * stride_oh + token * stride_om + offs_d.to(tl.int64) * stride_od
    tl.store(out_ptrs, round_to(out, out_ptr.dtype.element_ty), mask=in_row)
    lse = natural_log(m + tl.log2(length))
    tl.store(lse_ptr + row, tl.where(has_key, lse, float("-inf")))


def decode_config(n_rows, head_dim, head_dim_v, q_bytes, page_bytes, target):
    """Choose the launch: some 32 KiB of keys and values in use, and as much or twice as much on the way.

    Args:
        n_rows: query heads of a key head times tokens: what a block has block_m of.
        head_dim, head_dim_v: 1 to 256.
        q_bytes, page_bytes: bytes of a number in q and in the pages.
        target: a ``configs.Target``.
    """
    block_m = min(MOST_ROWS, max(16, triton.next_power_of_2(n_rows)))
    block_d, block_dv = (max(16, triton.next_power_of_2(size)) for size in (head_dim, head_dim_v))
    width = max(64, block_d, block_dv)
    if target == INTERPRETER:
        return BlockConfig(block_m, 64, block_d, block_dv, 4, 1)
    if q_bytes == 4 or target.matrix_units == "none":  # products on the ordinary cores: operands fill the registers
        return BlockConfig(16, 32 if width == 64 else 16, block_d, block_dv, 4, 2)
    block_n = min(128, 8192 // width)
    return BlockConfig(block_m, block_n, block_d, block_dv, 4, 3 if target.shared_bytes > 2**17 else 2)


def programs_at_once(cfg, page_bytes, device):
    """Return how many programs of ``_decode_kernel`` a device runs side by side, as far as shared memory allows.

    The interpreter stands for a small device: what is split on a large one is split there.
    """
    if device.type != "cuda":
        return 8
    tiles_bytes = (cfg.num_stages - 1) * cfg.block_n * (cfg.block_d + cfg.block_dv) * page_bytes
    fit = target_of(device).shared_bytes // (tiles_bytes + 8192)
    return max(1, min(MOST_AT_ONCE, fit)) * multiprocessors(device.index)


def attn_decode(*tensors, **options):
    """Plan a call on checked inputs and run it; return (out, lse). The arguments are those of :class:`Plan`."""
    return Plan(*tensors, **options)(*tensors)


class Plan:
    """All that calls of one kind have in common: what to allocate, what to launch, and how often to split.

    A step of decoding takes the device some 10 µs, so that the host has no time to decide anything twice. A plan made
    of some tensors serves all others of their shapes, strides, dtypes, device and alignment.

    Args:
        q, k_pages, v_pages, page_table, seqlens, k_scale, v_scale: as for ``flash_decode``.
        scale: over 0.
        softcap, window_left: a number or None.
        n_splits: default: chosen.
    """

    def __init__(
        self, q, k_pages, v_pages, page_table, seqlens, k_scale, v_scale, *, scale, softcap, window_left, n_splits=None
    ):  # fmt: skip
        batch, n_heads, n_tokens, head_dim = q.shape
        n_heads_kv, page_size, head_dim_v = v_pages.shape[1:]
        group, page_bytes, self.device = n_heads // n_heads_kv, k_pages.element_size(), q.device
        cfg = decode_config(group * n_tokens, head_dim, head_dim_v, q.element_size(), page_bytes, target_of(q.device))
        n_row_blocks = triton.cdiv(group * n_tokens, cfg.block_m)
        n_programs = batch * n_heads_kv * n_row_blocks
        if n_splits is None:
            n_keys = page_table.shape[1] * page_size
            if window_left is not None:
                n_keys = min(n_keys, window_left + n_tokens + cfg.block_n)
            at_once = programs_at_once(cfg, page_bytes, q.device)
            n_splits = choose_splits(n_programs, triton.cdiv(n_keys, cfg.block_n), at_once)

        self.out = torch.empty_like(q if head_dim_v == head_dim else q[..., :1].expand(*q.shape[:3], head_dim_v))
        self.out = (self.out.shape, self.out.stride(), q.dtype)  # of what to allocate
        self.lse_shape = q.shape[:3]
        n_parts = batch * n_heads * n_tokens * n_splits
        self.parts_size = n_parts * (head_dim_v + 2) if n_splits > 1 else 0
        strides_of_scales = (0 if x is None or x.dim() == 0 else x.stride(0) for x in (k_scale, v_scale))
        numbers = (
            *q.stride(), *k_pages.stride(), *v_pages.stride(), *self.out[1], *page_table.stride(), *strides_of_scales,
            n_heads_kv, group, n_tokens, n_splits, n_parts, n_row_blocks, window_left, *score_factors(scale, softcap),
        )  # fmt: skip
        constants = dict(HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=page_size) | cfg.launch()
        self.decode = Launch(_decode_kernel, n_programs * n_splits, numbers, constants)
        self.merge = None
        if n_splits > 1:
            constants = dict(HEAD_DIM_V=head_dim_v, BLOCK_DV=cfg.block_dv, BLOCK_S=triton.next_power_of_2(n_splits))
            constants |= dict(BLOCK_PARTS=max(1, 4096 // cfg.block_dv), num_warps=4, enable_fp_fusion=False)
            numbers = (*self.out[1], n_heads, n_tokens, n_splits, n_parts)
            self.merge = Launch(_merge_kernel, batch * n_heads * n_tokens, numbers, constants)

    def __call__(self, q, k_pages, v_pages, page_table, seqlens, k_scale, v_scale):
        """Attend; return (out, lse)."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self(q, k_pages, v_pages, page_table, seqlens, k_scale, v_scale)
        shape, strides, dtype = self.out
        out = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
        if not self.decode.grid:
            return out, lse
        parts = torch.empty(self.parts_size, dtype=torch.float32, device=self.device) if self.merge else None
        self.decode(q, k_pages, v_pages, page_table, seqlens, k_scale, v_scale, out, lse, parts)
        if self.merge:
            self.merge(seqlens, out, lse, parts)
        return out, lse


class Launch:
    """Launch one kernel, whose arguments are pointers, numbers and constexprs, in this order; see also launch.py."""

    def __init__(self, kernel, grid, numbers, constants):
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        names = kernel.arg_names
        self.tail = (*numbers, *(constants[name] for name in names if name.isupper()))
        self.compiled = None

    def __call__(self, *tensors):
        if self.compiled is None:
            compiled = self.kernel[(self.grid,)](*tensors, *self.numbers, **self.constants)  # None in the interpreter
            self.compiled = compiled and compiled[self.grid, 1, 1]
        else:  # plain addresses: what else there is to know about the tensors was known the first time
            self.compiled(*[None if x is None else x.data_ptr() for x in tensors], *self.tail)
