"""The jit helpers that the kernels share: loading and storing a tile, the product, the mask, the softmax.

Everything here works on one tile in registers. Chapters 4 and 5 introduce the helpers one at a time.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # log2(e): exp(x) = exp2(x * LOG2E), and exp2 is what the hardware has
LN2 = tl.constexpr(0.6931471805599453)
LN2_LOW = tl.constexpr(LN2.value - 0.693147182464599609375)  # what LN2 loses when it is rounded to fp32
# The interpreter multiplies the bit patterns of bf16 operands (Triton 3.7 to 3.9) and truncates fp32 to bf16 where a
# GPU rounds: dot() and round_to() make up for that there.
INTERPRETED = tl.constexpr(not isinstance(tl.sum, triton.JITFunction))


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round fp32 numbers to the nearest ones of DTYPE, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def tile_offsets(offs_r, offs_d, stride_r, stride_d):
    """Return the (rows, columns) tile of element offsets, in 64 bits: a row index times a stride can pass 2^31."""
    return offs_r.to(tl.int64)[:, None] * stride_r + offs_d.to(tl.int64)[None, :] * stride_d


@triton.jit
def load_tile(ptr, offs_r, offs_d, stride_r, stride_d, n_rows, HEAD_DIM: tl.constexpr, MASK_ROWS: tl.constexpr):
    """Load a tile; columns from HEAD_DIM on, and rows from n_rows on if MASK_ROWS, are 0 and are not read."""
    ptrs = ptr + tile_offsets(offs_r, offs_d, stride_r, stride_d)
    mask_d = (offs_d < HEAD_DIM)[None, :]
    if MASK_ROWS:
        return tl.load(ptrs, mask=(offs_r < n_rows)[:, None] & mask_d, other=0.0)
    elif HEAD_DIM != offs_d.shape[0]:
        return tl.load(ptrs, mask=mask_d, other=0.0)
    else:
        return tl.load(ptrs)


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
        c = tl.sum(tl.dot(a_chunks, b_chunks, input_precision="ieee"), axis=0)
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
def score_mask(offs_m, offs_n, seqlen_k, shift, IS_CAUSAL: tl.constexpr):
    """Return whether query offs_m sees key offs_n (``visible_keys`` in reference.py); the two broadcast to a tile."""
    visible = offs_n < seqlen_k
    if IS_CAUSAL:
        visible = visible & (offs_n <= offs_m + shift)
    return visible


@triton.jit
def row_has_key(offs_m, seqlen_k, shift, IS_CAUSAL: tl.constexpr):
    """Return, for each query, whether it sees any key at all."""
    first_hidden = seqlen_k
    if IS_CAUSAL:
        first_hidden = tl.minimum(offs_m + shift + 1, seqlen_k)
    return first_hidden > tl.zeros_like(offs_m)


@triton.jit
def key_loop_bounds(start_m, seqlen_k, shift, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (full_end, end) for the queries start_m..start_m+BLOCK_M-1.

    Every one of these queries sees every key below full_end, a multiple of BLOCK_N; none sees a key from end on.
    """
    end = seqlen_k
    full_end = seqlen_k
    if IS_CAUSAL:
        end = tl.maximum(tl.minimum(start_m + BLOCK_M + shift, seqlen_k), 0)
        full_end = tl.maximum(tl.minimum(start_m + shift + 1, seqlen_k), 0)
    return full_end // BLOCK_N * BLOCK_N, end


@triton.jit
def online_softmax_update(s_log2, m_i, l_i):
    """Take one tile of base-2 scores into the running row maximum and sum; see the function of this name in tiled.py.

    Returns (p, alpha, m_i, l_i). A row that has seen no key keeps m_i = -inf; 0 stands in for it in the
    exponents, because -inf - -inf would be NaN.
    """
    m_new = tl.maximum(m_i, tl.max(s_log2, axis=1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s_log2 - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, axis=1)
