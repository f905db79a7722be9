"""The jit helpers that the kernels share: loading and storing a tile, the product, the mask, the softmax.

Everything here works on one tile in registers. Chapters 4 and 5 introduce the helpers one at a time.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # log2(e): exp(x) = exp2(x * LOG2E), and exp2 is what the hardware has
LN2 = tl.constexpr(0.6931471805599453)
LN2_LOW = tl.constexpr(LN2.value - 0.693147182464599609375)  # what LN2 loses when it is rounded to fp32
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite fp32 number
# The interpreter multiplies the bit patterns of bf16 operands (Triton 3.7 to 3.9) and truncates fp32 to bf16 where a
# GPU rounds: dot() and round_to() make up for that there.
INTERPRETED = tl.constexpr(not isinstance(tl.sum, triton.JITFunction))
# Numbers that differ from call to call: a kernel compiled for one serves all. Strides are not among them: that the last
# one is 1, and that the others are multiples of 16, is what lets a tile be read in wide pieces.
SIZES = ["n_heads", "group", "n_sequences", "seqlen_q", "seqlen_k", "window_left", "window_right"]
NO_STRIDES = (0, 0, 0, 0)
SCORES_WORTH_A_BOX = 2**24  # in all heads together; see boxes_pay


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round fp32 numbers to the nearest ones of DTYPE, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def tile_offsets(offs_r, offs_d, stride_r, stride_d):
    """Return the (rows, columns) tile of element offsets, in 64 bits: a row index times a stride can pass 2^31."""
    return offs_r.to(tl.int64)[:, None] * stride_r + offs_d.to(tl.int64)[None, :] * stride_d


@triton.jit
def load_tile(ptr, offs_r, offs_d, stride_r, stride_d, n_rows, HEAD_DIM: tl.constexpr):
    """Load a tile; rows from n_rows on and columns from HEAD_DIM on are 0 and are not read."""
    ptrs = ptr + tile_offsets(offs_r, offs_d, stride_r, stride_d)
    mask = (offs_r < n_rows)[:, None]
    if HEAD_DIM != offs_d.shape[0]:
        mask = mask & (offs_d < HEAD_DIM)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def load_rows(
    desc, batch, head, start, ptr, offs_r, offs_d, stride_r, stride_d, n_rows, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Load the tile of one head that begins at row start, as a box where there is a descriptor, else row by row.

    A box is copied by the memory system (TMA) at the word of one thread: no addresses fill the registers of the others.
    """
    if desc is not None:
        box = desc.load([batch.to(tl.int32), head.to(tl.int32), start, 0])
        return tl.reshape(box, (offs_r.shape[0], offs_d.shape[0]))
    else:
        return load_tile(ptr, offs_r, offs_d, stride_r, stride_d, n_rows, HEAD_DIM)


def rows_are_regular(*tensors):
    """Say whether in these (batch, heads, seqlen, head_dim) tensors rows have no gaps and begin at 16-byte steps.

    Between rows, between heads and between batch entries there must be a multiple of 16 bytes, and not 0.
    """
    return all(
        x.stride(3) == 1 and x.data_ptr() % 16 == 0
        and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
        for x in tensors
    )  # fmt: skip


def boxes_fit(target, tensors, bias, n_sequences, shift, window_left, window_right):
    """Say whether all tiles of these (batch, heads, seqlen, head_dim) tensors can be loaded as boxes.

    The hardware wants regular rows. A box ends only where the tensor ends: packed sequences, and keys that no query
    sees, need the rows picked one by one.
    """
    every_key_is_seen = (window_left is None or window_left >= shift) and (window_right is None or window_right >= 0)
    if not target.has_boxes or bias is not None or n_sequences is not None or not every_key_is_seen:
        return False
    return rows_are_regular(*tensors) and all(x.element_size() == 2 and x.numel() > 0 for x in tensors)


def boxes_pay(q, k):
    """Say whether a call is long enough for boxes. The results are the same to the bit either way.

    To describe a tensor takes the host some 8 µs, and a kernel over few scores is done before its launch is.
    """
    return INTERPRETED.value or q[..., 0].numel() * k.shape[2] >= SCORES_WORTH_A_BOX


@triton.jit
def store_tile(ptr, tile, offs_r, offs_d, stride_r, stride_d, n_rows, HEAD_DIM: tl.constexpr):
    """Store a tile, rounded to the dtype behind ptr, leaving out rows from n_rows and columns from HEAD_DIM on."""
    ptrs = ptr + tile_offsets(offs_r, offs_d, stride_r, stride_d)
    mask = (offs_r < n_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(ptrs, round_to(tile, ptr.dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b, acc=None):
    """Multiply two tiles of one dtype, (M, K) by (K, N), and add acc; the result is fp32.

    fp16 and bf16 operands go to the tensor cores, whose products are exact and whose sums are fp32. fp32 operands are
    multiplied in full, not as TF32, and summed in chunks of 32: one running sum over K = 256 would lose two more bits.
    """
    if a.dtype == tl.float32 and not INTERPRETED:
        CHUNK: tl.constexpr = 32 if a.shape[1] > 32 else a.shape[1]
        N_CHUNKS: tl.constexpr = a.shape[1] // CHUNK
        a_chunks = tl.permute(tl.reshape(a, (a.shape[0], N_CHUNKS, CHUNK)), (1, 0, 2))
        b_chunks = tl.reshape(b, (N_CHUNKS, CHUNK, b.shape[1]))
        c = tl.dot(a_chunks, b_chunks, input_precision="ieee")
        for _ in tl.static_range(N_CHUNKS.bit_length() - 1):  # in pairs, so that the bits do not depend on the layout
            c = tl.sum(tl.reshape(c, (c.shape[0] // 2, 2, a.shape[0], b.shape[1])), axis=1)
        c = tl.reshape(c, (a.shape[0], b.shape[1]))
        if acc is not None:
            c += acc
    else:
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        c = tl.dot(a, b, acc, input_precision="ieee")
    tl.static_assert(c.dtype == tl.float32)
    return c


@triton.jit
def natural_log(x_log2):
    """Return ln(2^x_log2) = x_log2 * ln(2). LN2 is split in two, so that the product rounds only once."""
    finite = tl.where(x_log2 == float("-inf"), 0.0, x_log2)
    return tl.where(x_log2 == float("-inf"), x_log2, tl.fma(finite, LN2, finite * LN2_LOW))


@triton.jit
def sequence_rows(cu_seqlens_ptr, sequence, n_sequences, seqlen):
    """Return (first row, number of rows) of a sequence; cu_seqlens_ptr is None where every sequence has seqlen rows.

    Packed sequences lie behind each other, sequence i from row cu_seqlens[i] on. Number n_sequences, one past the last,
    has no rows.
    """
    offset = 0
    length = seqlen
    if cu_seqlens_ptr is not None:
        offset = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
        end = tl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < n_sequences, other=0).to(tl.int64)
        length = tl.maximum(end - offset, 0).to(tl.int32)
    return offset, length


@triton.jit
def locate_block(cu_seqlens_ptr, n_sequences, seqlen, n_heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Say which rows this program owns: (batch, head, sequence, its first row, its number of rows, start of the block).

    Grid: ``grid_blocks`` in this file. The blocks of one head lie next to each other, the last first with LAST_FIRST:
    under a causal mask the last queries have most to do, and what is long should not start late.

    Packed sequences have no length that the host knows. Sequence i gets the programs from cu_seqlens[i] // BLOCK + i
    on, which are enough and at most one too many; halving finds the last i whose programs begin at or before this one.
    What stands behind the last sequence counts as one more sequence, without a partner, as does a program too many.
    """
    pid = tl.program_id(0)
    if cu_seqlens_ptr is None:
        n_blocks = tl.cdiv(seqlen, BLOCK)
        block = pid % n_blocks
        batch = (pid // n_blocks // n_heads).to(tl.int64)
        head = (pid // n_blocks % n_heads).to(tl.int64)
        sequence = batch
        offset = 0
        length = seqlen
    else:
        n_programs = seqlen // BLOCK + n_sequences + 1
        batch = 0
        head = (pid // n_programs).to(tl.int64)
        slot = pid % n_programs
        sequence = 0
        above = n_sequences + 1
        while above - sequence > 1:
            middle = (sequence + above) // 2
            is_above = (tl.load(cu_seqlens_ptr + middle) // BLOCK).to(tl.int32) + middle > slot
            above = tl.where(is_above, middle, above)
            sequence = tl.where(is_above, sequence, middle)
        offset, length = sequence_rows(cu_seqlens_ptr, sequence, n_sequences, seqlen)
        length = tl.where(sequence == n_sequences, seqlen - offset.to(tl.int32), length)
        n_blocks = tl.cdiv(length, BLOCK)
        block = slot - (offset // BLOCK).to(tl.int32) - sequence
        sequence = tl.where(block < n_blocks, sequence, n_sequences)
    if LAST_FIRST:
        block = tl.where(block < n_blocks, n_blocks - 1 - block, block)  # a program too many keeps its empty block
    return batch, head, sequence, offset, length, block * BLOCK


def score_factors(scale, softcap):
    """Return (scale, cap_log2) as ``scores_from`` takes them."""
    if softcap is None:
        return scale * LOG2E.value, None
    return scale / softcap, softcap * LOG2E.value


def grid_blocks(batch, n_heads, seqlen, block, n_sequences=None):
    """Return the number of programs that ``locate_block`` expects; seqlen is the number of all rows if packed."""
    n_blocks = triton.cdiv(seqlen, block) if n_sequences is None else seqlen // block + n_sequences + 1
    return batch * n_heads * n_blocks


@triton.jit
def tanh(x):
    """Return tanh(x) to about 2 units in the last place of fp32; it saturates, where a ratio of exponentials overflows.

    Near 0 the difference below would cancel; there a polynomial stands in, fitted to tanh(x) / x on |x| < 0.7 for the
    least relative error (1.5e-8).
    """
    z = x * x
    poly = -0.005138661857814946 * z + 0.02009196965988727
    poly = (poly * z - 0.05355886113061146) * z + 0.13329110734966054
    near = x + x * z * (poly * z - 0.3333318989990105)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.7, near, tl.where(x < 0, -far, far))


@triton.jit
def scores_from(qk, scale, cap_log2):
    """Return (s, factor, slope) for products q k: the base-2 scores are s * factor, slope is their derivative's share.

    Without a softcap (cap_log2 is None) s is qk, scale is ``scale * log2(e)`` and the factor: the maximum of a row is
    found first and multiplied once. With one, scale is ``scale / softcap``, cap_log2 is ``softcap * log2(e)``: the
    scores are softcap * tanh(scale * qk / softcap), their slope by the argument of tanh 1 - tanh^2.
    """
    if cap_log2 is None:
        return qk, scale, 1.0
    else:
        t = tanh(qk * scale)
        return cap_log2 * t, 1.0, (1.0 - t) * (1.0 + t)


@triton.jit
def add_bias(s_log2, bias_ptr, offs_m, offs_n, stride_m, stride_n, seqlen_q, seqlen_k):
    """Add the tile of an additive mask to base-2 scores, in fp32; a boolean one (uint8 here) hides where it is 0.

    A finite bias stays finite in base 2: a row of which every key has the lowest fp32 number is not a row without keys.
    """
    ptrs = bias_ptr + offs_m.to(tl.int64) * stride_m + offs_n.to(tl.int64) * stride_n
    bias = tl.load(ptrs, mask=(offs_m < seqlen_q) & (offs_n < seqlen_k), other=0)
    if bias_ptr.dtype.element_ty == tl.uint8:
        return tl.where(bias != 0, s_log2, float("-inf"))
    bias_log2 = bias.to(tl.float32) * LOG2E
    overflowed = (bias_log2 == float("-inf")) & (bias.to(tl.float32) != float("-inf"))
    return s_log2 + tl.where(overflowed, LOWEST, bias_log2)


@triton.jit
def score_mask(offs_m, offs_n, seqlen_k, shift, window_left, window_right):
    """Return whether query offs_m sees key offs_n (``visible_keys`` in reference.py); the two broadcast to a tile.

    A causal mask is window_right = 0. A side that is None has no bound.
    """
    visible = offs_n < seqlen_k
    if window_left is not None:
        visible = visible & (offs_n >= offs_m + shift - window_left)
    if window_right is not None:
        visible = visible & (offs_n <= offs_m + shift + window_right)
    return visible


@triton.jit
def stats_row(batch, head, n_heads, seqlen_q):
    """Return where the statistics of a head begin: a head has room for a multiple of 4 rows, 16 bytes."""
    return (batch * n_heads + head) * (tl.cdiv(seqlen_q, 4) * 4)


@triton.jit
def row_has_key(offs_m, seqlen_k, shift, window_left, window_right):
    """Return, for each query, whether it sees any key at all."""
    first = offs_m * 0
    end = first + seqlen_k
    if window_left is not None:
        first = tl.maximum(first, offs_m + shift - window_left)
    if window_right is not None:
        end = tl.minimum(end, offs_m + shift + window_right + 1)
    return first < end


@triton.jit
def rows_to_load(offs_n, start_m, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M: tl.constexpr):
    """Return offs_n, with seqlen_k, which is not read, for keys that none of the queries from start_m on sees.

    Such a key has weight 0, but what it holds may be NaN, and 0 times NaN is NaN.
    """
    shift = seqlen_k - seqlen_q
    if window_left is not None:
        offs_n = tl.where(offs_n < start_m + shift - window_left, seqlen_k, offs_n)
    if window_right is not None:
        last_m = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1
        offs_n = tl.where(offs_n > last_m + shift + window_right, seqlen_k, offs_n)
    return offs_n


@triton.jit
def loop_bounds(start, n_others, shift, before, after, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Return (begin, full_begin, full_end, end): what the rows start..start+BLOCK-1 see of n_others others.

    Row i sees the others from i + shift - before to i + shift + after. None of these rows sees one outside
    begin..end-1; all see all of full_begin..full_end-1, so that there, STEP others at a time, no mask is needed.
    Queries look at keys so; keys look at queries with shift negated and the two sides swapped.
    """
    begin = 0
    full_begin = 0
    full_end = n_others
    end = n_others
    if before is not None:
        begin = tl.minimum(tl.maximum(start + shift - before, 0), n_others) // STEP * STEP
        full_begin = tl.minimum(tl.maximum(start + BLOCK - 1 + shift - before, 0), n_others)
        full_begin = tl.cdiv(full_begin, STEP) * STEP
    if after is not None:
        full_end = tl.minimum(tl.maximum(start + shift + after + 1, 0), n_others)
        end = tl.minimum(tl.maximum(start + BLOCK + shift + after, 0), n_others)
    full_end = tl.maximum(full_end // STEP * STEP, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def online_softmax_update(s, factor, m_i, l_i):
    """Take one tile of base-2 scores, s * factor with factor > 0, into the running row maximum and sum.

    Returns (p, alpha, m_i, l_i), as the function of this name in tiled.py does. A row that has seen no key has the
    lowest finite number for a maximum: a hidden key's -inf minus that is -inf, where -inf minus -inf would be NaN.
    """
    m_new = tl.maximum(m_i, tl.max(s, axis=1) * factor)
    p = tl.exp2(s * factor - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, axis=1)
