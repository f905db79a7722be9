"""Attention over the tiles that a mask leaves: the kernels of chapters 5 and 6 with a list where they have a range.

One walk over the full tiles, without a mask, then one over the partial ones, with it; empty tiles are never read. The
lists are made for tiles of 64 or 128, the kernels' own blocks are parts of those. Chapter 15.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .api import DENSE, _autocast, _check_options, _check_tensors
from .backward import _delta_of, _load_stat
from .configs import block_config, target_of
from .derivative import first_derivative_only
from .launch import Launch, launch
from .masks import (
    NUMBER_SLOTS,
    TENSOR_SLOTS,
    TileMask,
    Tiles,
    call_rule,
    check_slots,
    fingerprint,
    make_rule,
    slots,
    visible_tile,
)
from .ops import _new_gradients, _new_outputs, _or_none, _padded, check_can_launch
from .primitives import (
    LOG2E,
    LOWEST,
    SIZES,
    boxes_fit,
    boxes_pay,
    dot,
    grid_blocks,
    load_rows,
    load_tile,
    locate_block,
    natural_log,
    online_softmax_update,
    round_to,
    rows_are_regular,
    score_factors,
    scores_from,
    stats_row,
    store_tile,
)

VARYING = [*SIZES, "list_b", "list_h", *NUMBER_SLOTS]


class TileScore:
    """Change scores by where they stand, ALiBi for one, by a jit function.

    Args:
        fn: a function under ``triton.jit`` of (s, b, h, i, j, tensors, numbers) that returns the new score of a tile of
            scores s, which are scaled and capped already; the others as for :class:`flashattn.masks.TileMask`.
            Gradients flow to q, k and v, not to the tensors.
        slope: another of the same arguments that returns the derivative of fn by s. Default None: fn adds something to
            s, so that it is 1. If fn does anything else, gradients without it are wrong.
        tensors, numbers, at_position: as for :class:`flashattn.masks.TileMask`; slots are shared with the mask's.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or a function takes another number of arguments.

    Chapter: 15.
    """

    def __init__(self, fn, tensors=(), numbers=(), *, slope=None, at_position=False):
        self._rule = make_rule("fn", fn, 5, tensors, numbers, at_position, None, None)
        self._slope = None if slope is None else make_rule("slope", slope, 5, tensors, numbers, at_position, None, None)
        self.tensors, self.numbers = self._rule.tensors, self._rule.numbers

    def program(self, functions, t, x):
        """Return what the kernels take as FUNCTIONS and SCORE, behind a mask's functions, t tensors and x numbers.

        SCORE is (the function, its slope or -1, at_position, their slices of tensors and numbers, fingerprints).
        """
        own = [rule.fn for rule in (self._rule, self._slope) if rule]
        slices = (t, t + len(self.tensors), x, x + len(self.numbers))
        slope = -1 if self._slope is None else len(functions) + 1
        score = (len(functions), slope, self._rule.at_position, *slices, *map(fingerprint, own))
        return (*functions, *own), score


@triton.jit
def _alibi(s, b, h, i, j, slopes):
    return s - tl.load(slopes + h) * tl.abs(i - j).to(tl.float32)


def alibi(slopes):
    """Return the score function of ALiBi: minus a head's slope times the distance of query and key.

    Args:
        slopes: (heads,), fp32.

    Source: Press et al. 2022. Chapter: 15.
    """
    if not isinstance(slopes, torch.Tensor) or slopes.dtype != torch.float32 or slopes.dim() != 1:
        got = f"{slopes.dtype} of shape {tuple(slopes.shape)}" if isinstance(slopes, torch.Tensor) else repr(slopes)
        raise TypeError(f"`slopes` must be a float32 tensor (heads,), got {got}")
    return TileScore(_alibi, tensors=(slopes.contiguous(),), at_position=True)


# ---- The kernels.


@triton.jit
def _scores(
    qk, score_scale, cap, FUNCTIONS: tl.constexpr, SCORE: tl.constexpr, tensors, numbers,
    b, h, offs_m, offs_n, seqlen_q, seqlen_k,
):  # fmt: skip
    """Return (s, factor, slope) as ``scores_from`` does. With SCORE, score_scale and cap are not in base 2."""
    s, factor, slope = scores_from(qk, score_scale, cap)
    if SCORE is not None:
        given = tensors[SCORE[3] : SCORE[4]] + numbers[SCORE[5] : SCORE[6]]
        LOADS: tl.constexpr = SCORE[3] < SCORE[4]
        s = s * factor
        if SCORE[1] >= 0:
            slope *= call_rule(
                FUNCTIONS[SCORE[1]], SCORE[2], LOADS, (s,), given, b, h, offs_m, offs_n, seqlen_q, seqlen_k
            )
        s = LOG2E * call_rule(
            FUNCTIONS[SCORE[0]], SCORE[2], LOADS, (s,), given, b, h, offs_m, offs_n, seqlen_q, seqlen_k
        )
        factor = 1.0
    return s, factor, slope


@triton.jit
def _load_seen(
    desc, batch, head, start, ptr, seen_ptr, offs_r, offs_d, stride_r, stride_d, n_rows,
    HEAD_DIM: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Load a tile as ``load_rows`` does, with 0 in rows that nothing sees: 0 times what they hold may be NaN.

    seen_ptr is None if all rows are seen; in a full tile they are.
    """
    SOME_UNSEEN: tl.constexpr = PARTIAL and seen_ptr is not None
    if SOME_UNSEEN:
        seen = tl.load(seen_ptr + offs_r, mask=offs_r < n_rows, other=0) != 0
        return load_tile(ptr, tl.where(seen, offs_r, n_rows), offs_d, stride_r, stride_d, n_rows, HEAD_DIM)
    else:
        return load_rows(desc, batch, head, start, ptr, offs_r, offs_d, stride_r, stride_d, n_rows, HEAD_DIM)


@triton.jit
def _list_of(index_ptr, counts_ptr, this_list, start, n_rows, n_others, TILE: tl.constexpr):
    """Return where the tiles of the block at start are listed, how many are full, and how many are to be computed.

    The first full tile and the first partial one follow: read here, they are there when the loops begin.
    """
    row = this_list * tl.cdiv(n_rows, TILE) + start // TILE
    n_full = tl.load(counts_ptr + row * 2)
    n_computed = tl.load(counts_ptr + row * 2 + 1)
    index_ptr += row * (tl.cdiv(n_others, TILE) + 1)
    return index_ptr, n_full, n_computed, tl.load(index_ptr), tl.load(index_ptr + n_full)


@triton.jit
def _next_start(tile, index_ptr, step, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return where the block of this step begins, and the tile of the next: read one ahead, it is there in time."""
    STEPS: tl.constexpr = TILE // BLOCK
    return tile * TILE + step % STEPS * BLOCK, tl.load(index_ptr + (step + 1) // STEPS)


@triton.jit(do_not_specialize=VARYING)
def _sparse_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, lse_log2_ptr, lse_low_ptr, index_ptr, counts_ptr,
    sees_ptr, seen_ptr, t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr, k_desc, v_desc,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    n_heads, group, seqlen_q, seqlen_k, list_b, list_h, score_scale, cap, x0, x1, x2, x3, x4, x5,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, TILE: tl.constexpr, FUNCTIONS: tl.constexpr,
    STEPS: tl.constexpr, SCORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of the output and their log-sum-exp, as ``_attn_fwd_kernel`` does, over a list of tiles.

    Grid: (batch * n_heads * ceil(seqlen_q / BLOCK_M),). index and counts are a :class:`TileList` of which the list of
    batch entry b and head h is number b * list_b + h * list_h. sees_ptr and seen_ptr say which queries see a key and
    which keys are seen, list by list; None where all are.
    """
    batch, head, _, _, _, start_m = locate_block(None, None, seqlen_q, n_heads, BLOCK_M, LAST_FIRST=True)
    head_kv = head // group
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head_kv * stride_kh
    v_ptr += batch * stride_vb + head_kv * stride_vh
    out_ptr += batch * stride_ob + head * stride_oh
    lse_ptr += (batch * n_heads + head) * seqlen_q
    this_list = batch * list_b + head * list_h
    index_ptr, n_full, n_computed, first_full, first_partial = _list_of(
        index_ptr, counts_ptr, this_list, start_m, seqlen_q, seqlen_k, TILE
    )
    if seen_ptr is not None:
        seen_ptr += this_list * seqlen_k
    tensors, numbers = (t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr), (x0, x1, x2, x3, x4, x5)

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    q = load_tile(q_ptr, offs_m, offs_d, stride_qm, stride_qd, seqlen_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    m_i = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)

    # Invariant, over the tiles seen so far: m_i = max s, l_i = sum 2^(s - m_i), acc = sum 2^(s - m_i) v.
    for PARTIAL in tl.static_range(1 if STEPS is None else 2):  # two loops: over the full tiles, then the partial ones
        tile, begin, end = first_full, 0, n_full
        if PARTIAL:
            tile, begin, end = first_partial, n_full, n_computed
        for step in tl.range(begin * (TILE // BLOCK_N), end * (TILE // BLOCK_N)):
            start_n, tile = _next_start(tile, index_ptr, step, TILE, BLOCK_N)
            offs_n = start_n + tl.arange(0, BLOCK_N)
            k = load_rows(  # (BLOCK_N, BLOCK_D)
                k_desc, batch, head_kv, start_n, k_ptr, offs_n, offs_d, stride_kn, stride_kd, seqlen_k, HEAD_DIM
            )
            if PARTIAL:  # before the product: what the mask loads may come while k does
                visible = visible_tile(
                    FUNCTIONS, STEPS, tensors, numbers, batch, head, offs_m[:, None], offs_n[None, :],
                    seqlen_q, seqlen_k,
                )  # fmt: skip
            s, factor, _slope = _scores(  # (BLOCK_M, BLOCK_N)
                dot(q, tl.trans(k)), score_scale, cap, FUNCTIONS, SCORE, tensors, numbers,
                batch, head, offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k,
            )  # fmt: skip
            if PARTIAL:
                s = tl.where(visible, s, float("-inf"))
            p, alpha, m_i, l_i = online_softmax_update(s, factor, m_i, l_i)
            v = _load_seen(  # (BLOCK_N, BLOCK_DV)
                v_desc, batch, head_kv, start_n, v_ptr, seen_ptr, offs_n, offs_dv, stride_vn, stride_vd, seqlen_k,
                HEAD_DIM_V, PARTIAL,
            )  # fmt: skip
            acc = dot(round_to(p, v.dtype), v, acc * alpha[:, None])

    has_key = offs_m < seqlen_q
    if sees_ptr is not None:
        has_key = tl.load(sees_ptr + this_list * seqlen_q + offs_m, mask=has_key, other=0) != 0
    if SCORE is not None:
        has_key &= l_i != 0.0  # a score function may give -inf
    l_i = tl.where(has_key, l_i, 1.0)
    out = tl.where(has_key[:, None], acc / l_i[:, None], 0.0)
    store_tile(out_ptr, out, offs_m, offs_dv, stride_om, stride_od, seqlen_q, HEAD_DIM_V)
    lse_log2 = m_i + tl.log2(l_i)
    mask_m = offs_m < seqlen_q
    tl.store(lse_ptr + offs_m, tl.where(has_key, natural_log(lse_log2), float("-inf")), mask=mask_m)
    # With infinity in its place the backward pass makes p = 0 of a row without keys.
    offs_stats = stats_row(batch, head, n_heads, seqlen_q) + offs_m
    tl.store(lse_log2_ptr + offs_stats, tl.where(has_key, lse_log2, float("inf")), mask=mask_m)
    if lse_low_ptr is not None:
        lse_low = tl.where(has_key, tl.log2(l_i) - (lse_log2 - m_i), 0.0)
        tl.store(lse_low_ptr + offs_stats, lse_low, mask=mask_m)


@triton.jit
def _recompute_tile(
    a, b, da, db, lse_log2, lse_low, delta, dlse, batch, head, offs_m, offs_n, tensors, numbers,
    seqlen_q, seqlen_k, score_scale, cap, FUNCTIONS: tl.constexpr, STEPS: tl.constexpr, SCORE: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """Return a tile of P and of dS, as ``_recompute_p_ds`` in backward.py does."""
    s, factor, slope = _scores(
        dot(a, tl.trans(b)), score_scale, cap, FUNCTIONS, SCORE, tensors, numbers,
        batch, head, offs_m, offs_n, seqlen_q, seqlen_k,
    )  # fmt: skip
    p = tl.exp2(s * factor - lse_log2 - lse_low)
    ds = p * (dot(da, tl.trans(db)) - delta + dlse) * slope
    if PARTIAL:
        visible = visible_tile(FUNCTIONS, STEPS, tensors, numbers, batch, head, offs_m, offs_n, seqlen_q, seqlen_k)
        p = tl.where(visible, p, 0.0)
        ds = tl.where(visible, ds, 0.0)
    return p, ds


@triton.jit(do_not_specialize=VARYING)
def _sparse_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, lse_log2_ptr, lse_low_ptr, dlse_ptr, dq_ptr, delta_ptr,
    index_ptr, counts_ptr, seen_ptr, t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr, k_desc, v_desc,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    n_heads, group, seqlen_q, seqlen_k, list_b, list_h, scale, score_scale, cap, x0, x1, x2, x3, x4, x5,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, TILE: tl.constexpr, FUNCTIONS: tl.constexpr,
    STEPS: tl.constexpr, SCORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of dQ and of delta, as ``_attn_bwd_dq_kernel`` does, over the tiles of the forward pass.

    Grid: that of the forward kernel.
    """
    batch, head, _, _, _, start_m = locate_block(None, None, seqlen_q, n_heads, BLOCK_M, LAST_FIRST=True)
    head_kv = head // group
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head_kv * stride_kh
    v_ptr += batch * stride_vb + head_kv * stride_vh
    out_ptr += batch * stride_ob + head * stride_oh
    do_ptr += batch * stride_dob + head * stride_doh
    dq_ptr += batch * stride_dqb + head * stride_dqh
    this_list = batch * list_b + head * list_h
    index_ptr, n_full, n_computed, first_full, first_partial = _list_of(
        index_ptr, counts_ptr, this_list, start_m, seqlen_q, seqlen_k, TILE
    )
    if seen_ptr is not None:
        seen_ptr += this_list * seqlen_k
    tensors, numbers = (t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr), (x0, x1, x2, x3, x4, x5)

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    q = load_tile(q_ptr, offs_m, offs_d, stride_qm, stride_qd, seqlen_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    do = load_tile(do_ptr, offs_m, offs_dv, stride_dom, stride_dod, seqlen_q, HEAD_DIM_V)  # (BLOCK_M, BLOCK_DV)
    out = load_tile(out_ptr, offs_m, offs_dv, stride_om, stride_od, seqlen_q, HEAD_DIM_V)  # (BLOCK_M, BLOCK_DV)
    delta = _delta_of(out, do)
    stats = stats_row(batch, head, n_heads, seqlen_q)
    tl.store(delta_ptr + stats + offs_m, delta, mask=offs_m < seqlen_q)
    lse_log2 = _load_stat(None, batch, head, start_m, lse_log2_ptr, stats, offs_m, seqlen_q, float("inf"))
    lse_low = _load_stat(None, batch, head, start_m, lse_low_ptr, stats, offs_m, seqlen_q, 0.0)
    dlse = _load_stat(None, batch, head, start_m, dlse_ptr, stats, offs_m, seqlen_q, -0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    # Invariant, over the tiles seen so far: dq = dS K (without the scale).
    for PARTIAL in tl.static_range(1 if STEPS is None else 2):
        tile, begin, end = first_full, 0, n_full
        if PARTIAL:
            tile, begin, end = first_partial, n_full, n_computed
        for step in tl.range(begin * (TILE // BLOCK_N), end * (TILE // BLOCK_N)):
            start_n, tile = _next_start(tile, index_ptr, step, TILE, BLOCK_N)
            offs_n = start_n + tl.arange(0, BLOCK_N)
            k = _load_seen(  # (BLOCK_N, BLOCK_D)
                k_desc, batch, head_kv, start_n, k_ptr, seen_ptr, offs_n, offs_d, stride_kn, stride_kd, seqlen_k,
                HEAD_DIM, PARTIAL,
            )  # fmt: skip
            v = load_rows(  # (BLOCK_N, BLOCK_DV)
                v_desc, batch, head_kv, start_n, v_ptr, offs_n, offs_dv, stride_vn, stride_vd, seqlen_k, HEAD_DIM_V
            )
            _p, ds = _recompute_tile(  # (BLOCK_M, BLOCK_N)
                q, k, do, v, lse_log2[:, None], lse_low[:, None], delta[:, None], dlse[:, None],
                batch, head, offs_m[:, None], offs_n[None, :], tensors, numbers,
                seqlen_q, seqlen_k, score_scale, cap, FUNCTIONS, STEPS, SCORE, PARTIAL,
            )  # fmt: skip
            dq = dot(round_to(ds, k.dtype), k, dq)
    store_tile(dq_ptr, dq * scale, offs_m, offs_d, stride_dqm, stride_dqd, seqlen_q, HEAD_DIM)


@triton.jit(do_not_specialize=VARYING)
def _sparse_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, lse_low_ptr, delta_ptr, dlse_ptr, dk_ptr, dv_ptr,
    index_ptr, counts_ptr, sees_ptr, t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr,
    q_desc, do_desc, lse_log2_desc, delta_desc,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, group, seqlen_q, seqlen_k, list_b, list_h, scale, score_scale, cap, x0, x1, x2, x3, x4, x5,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, TILE: tl.constexpr, FUNCTIONS: tl.constexpr,
    STEPS: tl.constexpr, SCORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of dK and dV, as ``_attn_bwd_dkdv_kernel`` does, over the tiles of each key block.

    Grid: (batch * n_heads_kv * ceil(seqlen_k / BLOCK_N),). Each query head of the group has its own list, or all share
    one.
    """
    batch, head_kv, _, _, _, start_n = locate_block(None, None, seqlen_k, n_heads // group, BLOCK_N, LAST_FIRST=False)
    q_ptr += batch * stride_qb
    k_ptr += batch * stride_kb + head_kv * stride_kh
    v_ptr += batch * stride_vb + head_kv * stride_vh
    do_ptr += batch * stride_dob
    dk_ptr += batch * stride_dkb + head_kv * stride_dkh
    dv_ptr += batch * stride_dvb + head_kv * stride_dvh
    tensors, numbers = (t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr), (x0, x1, x2, x3, x4, x5)

    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    k = load_tile(k_ptr, offs_n, offs_d, stride_kn, stride_kd, seqlen_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
    v = load_tile(v_ptr, offs_n, offs_dv, stride_vn, stride_vd, seqlen_k, HEAD_DIM_V)  # (BLOCK_N, BLOCK_DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)

    # Invariant, over the tiles seen so far: dv = P^T dO, dk = dS^T Q (without the scale).
    for i in tl.range(group):
        head = head_kv * group + i
        this_list = batch * list_b + head * list_h
        head_index_ptr, n_full, n_computed, first_full, first_partial = _list_of(
            index_ptr, counts_ptr, this_list, start_n, seqlen_k, seqlen_q, TILE
        )
        head_sees_ptr = sees_ptr
        if sees_ptr is not None:
            head_sees_ptr += this_list * seqlen_q
        stats = stats_row(batch, head, n_heads, seqlen_q)
        for PARTIAL in tl.static_range(1 if STEPS is None else 2):
            tile, begin, end = first_full, 0, n_full
            if PARTIAL:
                tile, begin, end = first_partial, n_full, n_computed
            for step in tl.range(begin * (TILE // BLOCK_M), end * (TILE // BLOCK_M)):
                start_m, tile = _next_start(tile, head_index_ptr, step, TILE, BLOCK_M)
                offs_m = start_m + tl.arange(0, BLOCK_M)
                q = _load_seen(  # (BLOCK_M, BLOCK_D)
                    q_desc, batch, head, start_m, q_ptr + head * stride_qh, head_sees_ptr, offs_m, offs_d,
                    stride_qm, stride_qd, seqlen_q, HEAD_DIM, PARTIAL,
                )  # fmt: skip
                do = _load_seen(  # (BLOCK_M, BLOCK_DV)
                    do_desc, batch, head, start_m, do_ptr + head * stride_doh, head_sees_ptr, offs_m, offs_dv,
                    stride_dom, stride_dod, seqlen_q, HEAD_DIM_V, PARTIAL,
                )  # fmt: skip
                lse_log2 = _load_stat(
                    lse_log2_desc, batch, head, start_m, lse_log2_ptr, stats, offs_m, seqlen_q, float("inf")
                )
                lse_low = _load_stat(None, batch, head, start_m, lse_low_ptr, stats, offs_m, seqlen_q, 0.0)
                delta = _load_stat(delta_desc, batch, head, start_m, delta_ptr, stats, offs_m, seqlen_q, 0.0)
                dlse = _load_stat(None, batch, head, start_m, dlse_ptr, stats, offs_m, seqlen_q, -0.0)
                p_t, ds_t = _recompute_tile(  # (BLOCK_N, BLOCK_M)
                    k, q, v, do, lse_log2[None, :], lse_low[None, :], delta[None, :], dlse[None, :],
                    batch, head, offs_m[None, :], offs_n[:, None], tensors, numbers,
                    seqlen_q, seqlen_k, score_scale, cap, FUNCTIONS, STEPS, SCORE, PARTIAL,
                )  # fmt: skip
                dv = dot(round_to(p_t, do.dtype), do, dv)
                dk = dot(round_to(ds_t, q.dtype), q, dk)
    store_tile(dk_ptr, dk * scale, offs_n, offs_d, stride_dkn, stride_dkd, seqlen_k, HEAD_DIM)
    store_tile(dv_ptr, dv, offs_n, offs_dv, stride_dvn, stride_dvd, seqlen_k, HEAD_DIM_V)


# ---- Launching.


class Options(NamedTuple):
    """What a launch depends on besides its tensors, hashable: ``launch`` keeps its decisions under it."""

    scale: float
    softcap: float | None
    block: int
    functions: tuple
    steps: tuple | None
    score: tuple | None
    numbers: tuple
    types: tuple  # of the numbers: 1 and 1.0 are one key, but not one kernel

    def factors(self):
        """Return (score_scale, cap) for the kernels: in base 2, unless a score function is to see them first."""
        if self.score is None:
            return score_factors(self.scale, self.softcap)
        return (self.scale, None) if self.softcap is None else (self.scale / self.softcap, self.softcap)


def kernel_blocks(*sizes, tile, partial, regular=True):
    """Choose the blocks of a kernel, parts of a tile of the lists; sizes and regular are those of ``block_config``.

    With partial tiles they are those for a causal mask, the smaller ones, which leave registers for the mask.
    """
    cfg = block_config(*sizes, causal=partial, regular=regular)
    return cfg._replace(block_m=min(cfg.block_m, tile), block_n=min(cfg.block_n, tile))


def _blocks(direction, q, v, options, *others):
    """Choose the blocks of a launch; others: what it reads besides q and v."""
    sizes = (direction, q.shape[3], v.shape[3], q.dtype, target_of(q.device))
    lists = dict(tile=options.block, partial=options.steps is not None)
    return kernel_blocks(*sizes, **lists, regular=rows_are_regular(q, v, *others))


def _list_strides(index):
    """Return how many lists lie between two batch entries and between two heads."""
    n_batch, n_heads = index.shape[:2]
    return (n_heads if n_batch > 1 else 0), (1 if n_heads > 1 else 0)


def _constants(q, v, cfg, options):
    sizes = dict(HEAD_DIM=q.shape[3], HEAD_DIM_V=v.shape[3], TILE=options.block)
    return sizes | dict(FUNCTIONS=options.functions, STEPS=options.steps, SCORE=options.score) | cfg.launch()


def _decide_forward(tensors, *options):
    """Return the one launch of a forward pass, in a list."""
    options = Options(*options)
    q, k, v, out, index = (tensors[name] for name in ("q", "k", "v", "out", "index"))
    batch, n_heads, seqlen_q, _ = q.shape
    if out.numel() == 0:
        return []
    cfg = _blocks("forward", q, v, options, k)
    fit = boxes_pay(q, k) and boxes_fit(target_of(q.device), (k, v), None, None, 0, None, None)
    return [
        Launch(
            _sparse_fwd_kernel,
            grid=grid_blocks(batch, n_heads, seqlen_q, cfg.block_m),
            boxes=dict(k=(1, 1, cfg.block_n, cfg.block_d), v=(1, 1, cfg.block_n, cfg.block_dv)) if fit else {},
            numbers=(
                *q.stride(), *k.stride(), *v.stride(), *out.stride(),
                n_heads, n_heads // k.shape[1], seqlen_q, k.shape[2], *_list_strides(index),
                *options.factors(), *slots(options.numbers),
            ),
            constants=_constants(q, v, cfg, options),
        )
    ]  # fmt: skip


def _decide_backward(tensors, which, *options):
    """Return the launch of one backward kernel, "dq" or "dkdv", in a list."""
    options = Options(*options)
    q, k, v, do, out, index = (tensors[name] for name in ("q", "k", "v", "do", "out", "index"))
    batch, n_heads, seqlen_q, _ = q.shape
    n_heads_kv, seqlen_k = k.shape[1:3]
    cfg = _blocks(which, q, v, options, k, do, out)
    streamed = (k, v) if which == "dq" else (q, do)
    fit = boxes_pay(q, k) and boxes_fit(target_of(q.device), streamed, None, None, 0, None, None)
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    sizes = (n_heads, n_heads // n_heads_kv, seqlen_q, seqlen_k, *_list_strides(index))
    rest = (*sizes, options.scale, *options.factors(), *slots(options.numbers))
    if which == "dq":
        kernel, grid = _sparse_dq_kernel, grid_blocks(batch, n_heads, seqlen_q, cfg.block_m)
        boxes = dict(k=(1, 1, cfg.block_n, cfg.block_d), v=(1, 1, cfg.block_n, cfg.block_dv))
        strides += (*out.stride(), *tensors["dq"].stride())
    else:
        kernel, grid = _sparse_dkdv_kernel, grid_blocks(batch, n_heads_kv, seqlen_k, cfg.block_n)
        box = (1, 1, cfg.block_m)
        boxes = dict(q=(*box, cfg.block_d), do=(*box, cfg.block_dv), lse_log2=box, delta=box)
        fit = fit and cfg.block_m >= 32  # as in backward.py
        strides += (*tensors["dk"].stride(), *tensors["dv"].stride())
    constants = _constants(q, v, cfg, options)
    return [Launch(kernel, grid, boxes if fit else {}, (*strides, *rest), constants)]


class _Sparse(torch.autograd.Function):
    """Differentiate through the kernels."""

    @staticmethod
    def forward(ctx, q, k, v, tiles, slot_tensors, options):
        out, lse, lse_log2, lse_low = _new_outputs(q, v, exact=options.score is not None)
        lse_low = _or_none(lse_low)
        tensors = dict(q=q, k=k, v=v, out=out, lse=lse, lse_log2=lse_log2, lse_low=lse_low)
        lists = dict(index=tiles.by_query.index, counts=tiles.by_query.counts, sees=tiles.sees, seen=tiles.seen)
        with torch.cuda.device_of(q):
            launch(_decide_forward, tensors | lists | slot_tensors, *options)
        ctx.save_for_backward(q, k, v, out, lse_log2, lse_low)
        ctx.tiles, ctx.slot_tensors, ctx.options = tiles, slot_tensors, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx, do, dlse):
        if do is None and dlse is None:
            return (None,) * 6
        q, k, v, out, lse_log2, lse_low = ctx.saved_tensors
        dq, dk, dv = _new_gradients(q, k, v)
        do = out.new_zeros(()).expand_as(out) if do is None else do.resolve_neg()
        delta, dlse = torch.empty_like(lse_log2), _padded(dlse, lse_log2)
        tensors = dict(q=q, k=k, v=v, do=do, out=out, lse_log2=lse_log2, lse_low=lse_low, delta=delta, dlse=dlse)
        tensors |= dict(dq=dq, dk=dk, dv=dv, sees=ctx.tiles.sees, seen=ctx.tiles.seen) | ctx.slot_tensors
        with torch.cuda.device_of(q):
            for which, written, lists in (("dq", dq, ctx.tiles.by_query), ("dkdv", dk, ctx.tiles.by_key)):
                if written.numel():
                    launch(_decide_backward, tensors | lists._asdict(), which, *ctx.options)
        return dq, dk, dv, None, None, None


# ---- The public call.


@torch._disable_dynamo  # as in ring.py
def sparse_attention(q, k, v, mask, *, score=None, scale=None, softcap=None, return_lse=False):
    """Compute attention where a mask lets queries see keys, and spend nothing on tiles where it lets none.

    Partial tiles alone pay for the mask, full ones are computed as ``flash_attention`` computes them. A query that sees
    no key gives out 0, lse ``-inf`` and zero gradients.

    A tile that is not computed is not read. What stands in keys that no query of a head sees, and in queries that see
    no key, reaches nothing, be it NaN. A key that some queries see should be finite: in a partial tile it has weight 0
    for the others, and 0 times NaN is NaN.

    Args:
        q: (batch, heads, seqlen_q, head_dim), fp16, bf16 or fp32, any strides, head_dim 1 to 256.
        k: (batch, heads_kv, seqlen_k, head_dim); ``heads`` must be a multiple of ``heads_kv``.
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        mask: a :class:`flashattn.masks.TileMask`, of which the tiles are listed in this call, or the
            :class:`flashattn.masks.Tiles` that ``mask.tiles(…)`` made before for these sizes.
        score: a :class:`flashattn.sparse.TileScore` that changes the scores by where they stand. Default None.
        scale: factor on the scores, any finite number. Default ``1 / sqrt(head_dim)``.
        softcap: bound the scores smoothly, after ``scale`` and before ``score``. A number > 0. Default None.
        return_lse: return the log-sum-exp too. Default False.

    Returns:
        out (batch, heads, seqlen_q, head_dim_v), or ``(out, lse)``, as ``flash_attention``. Gradients of q, k and v
        flow through both. Results are the same to the bit on every call. ``torch.compile`` leaves the call as it is and
        compiles what stands around it.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``flash_attention``; ``mask`` or ``score`` is not
            one, or the tiles are for other sizes or another device.

    Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2, over lists of tiles as in Dao et al. 2022, section 3.3.
    Chapter: 15.
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors({"q": q, "k": k, "v": v}, DENSE)
    q, (scale, softcap, _, _) = _check_options(q, False, scale, None, softcap, return_lse)
    if score is not None and not isinstance(score, TileScore):
        raise TypeError(f"`score` must be a TileScore or None, got {type(score).__name__}")
    sizes = dict(batch=q.shape[0], n_heads=q.shape[1], seqlen_q=q.shape[2], seqlen_k=k.shape[2])
    if isinstance(mask, TileMask):
        check_can_launch(q)
        tiles = mask.tiles(**sizes, device=q.device)
    elif isinstance(mask, Tiles):
        tiles = mask
    else:
        raise TypeError(f"`mask` must be a TileMask or the Tiles of one, got {type(mask).__name__}")
    for name, size in sizes.items():
        if getattr(tiles, name) != size:
            raise ValueError(
                f"`mask` must be tiles for {name} {size} like q and k, got tiles for {getattr(tiles, name)}"
            )
    tensors, numbers = list(tiles.mask.tensors), list(tiles.mask.numbers)
    functions, steps = tiles.program
    score_program = None
    if score is not None:
        functions, score_program = score.program(functions, len(tensors), len(numbers))
        tensors, numbers = [*tensors, *score.tensors], [*numbers, *score.numbers]
    check_slots(tensors, numbers)
    for name, x in (("mask", tiles.kinds), *(("score", x) for x in tensors)):
        if x.device != q.device:
            raise ValueError(f"`{name}` must have its tensors on {q.device} like `q`, got {x.device}")
    check_can_launch(q)
    types = tuple(map(type, numbers))
    options = Options(scale, softcap, tiles.block, functions, steps, score_program, tuple(numbers), types)
    slot_tensors = dict(zip(TENSOR_SLOTS, slots(tensors), strict=True))
    out, lse = _Sparse.apply(*(x.resolve_neg() for x in (q, k, v)), tiles, slot_tensors, options)
    return (out, lse) if return_lse else out
