"""What attention costs, by counting: operations, device-memory bytes, on-chip bytes, and the time they need at least.

Pure Python, no PyTorch. Units stand in the names. Chapter 1 checks the memory formulas against measured peaks.
"""

from typing import NamedTuple

DTYPE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
FP32_BYTES = 4


class Gpu(NamedTuple):
    """A GPU by its datasheet: memory, bandwidth, dense 16-bit matrix rate, and shared memory one program may use."""

    memory_bytes: int
    bandwidth_bytes_per_s: float
    matmul_flops_per_s: float
    shared_bytes: int


# Vendor datasheets: T4 (2018), GeForce RTX 4090 (Ada white paper, 2022), A100 (2020, 40 and 80 GB SXM), H100 SXM
# (2022), H200 SXM (2023). Shared memory per block: CUDA C++ Programming Guide. GB are 10^9 bytes.
GPUS = {
    "T4 16 GB": Gpu(16 * 10**9, 320e9, 65e12, 65536),
    "RTX 4090 24 GB": Gpu(24 * 10**9, 1008e9, 165.2e12, 101376),
    "A100 40 GB": Gpu(40 * 10**9, 1555e9, 312e12, 166912),
    "A100 80 GB": Gpu(80 * 10**9, 2039e9, 312e12, 166912),
    "H100 80 GB": Gpu(80 * 10**9, 3350e9, 989e12, 232448),
    "H200 141 GB": Gpu(141 * 10**9, 4800e9, 989e12, 232448),
}

# Matrix products of size seqlen_q x seqlen_k x head_dim: S = QK^T and O = PV forward; S again, dP, dV, dK, dQ backward.
FORWARD_MATMULS = 2
BACKWARD_MATMULS = 5


def score_count(batch, heads, seqlen_q, seqlen_k):
    """Count the elements of S over all heads and batch entries; P has as many."""
    return batch * heads * seqlen_q * seqlen_k


def attention_flops(batch, heads, seqlen_q, seqlen_k, head_dim, *, matmuls=FORWARD_MATMULS, causal=False):
    """Count the floating-point operations of the matrix products, half of them when causal (the field's convention).

    A product of (m, k) by (k, n) is 2mkn operations. The softmax is left out: it is O(1/head_dim) of the rest.
    """
    flops = matmuls * 2 * score_count(batch, heads, seqlen_q, seqlen_k) * head_dim
    return flops // 2 if causal else flops


def qkvo_bytes(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype_bytes):
    """Count the bytes of q, k, v and out together, which no implementation avoids."""
    return dtype_bytes * batch * head_dim * 2 * (heads * seqlen_q + heads_kv * seqlen_k)


def standard_peak_bytes(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype_bytes, *, matrices):
    """Count the bytes that standard attention holds at its peak: q, k, v, out and the N x N matrices.

    Args:
        matrices: how many seqlen_q x seqlen_k matrices are alive at once. Chapter 1 finds 2 in the forward pass (S and
            P) and 3 in the backward pass (P, dP, dS) of the plainest implementation; 4 on a GPU, where PyTorch's
            softmax backward holds one more.
    """
    scores = score_count(batch, heads, seqlen_q, seqlen_k)
    return (
        qkvo_bytes(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype_bytes) + matrices * scores * dtype_bytes
    )


def flash_peak_bytes(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype_bytes, *, backward=False):
    """Count the bytes that FlashAttention holds at its peak: q, k, v, out and the fp32 lse of each row, in two bases.

    With backward: q, k, v, out, the base-2 lse, do, dq, dk, dv and the fp32 delta of each row.
    """
    tensors = qkvo_bytes(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype_bytes)
    row_statistics = FP32_BYTES * batch * heads * seqlen_q
    return tensors * (2 if backward else 1) + 2 * row_statistics


def ring_peak_bytes(
    batch, heads, heads_kv, seqlen, head_dim, dtype_bytes, *, n_ranks, turn_heads_kv, backward=False
):  # fmt: skip
    """Count the bytes that each rank of ``ring_attention`` holds at most: its share, and what one turn needs beside it.

    A turn takes turn_heads_kv key heads round the ring. It holds K and V that came, and with more than two ranks those
    that arrive. Forward: fp32 out, over all keys so far and over this step's. Backward: fp32 dK and dV that leave, that
    arrive and of this step; fp32 dQ, so far and of this step. The row statistics of a turn are left out.
    """
    rows = seqlen // n_ranks
    share = flash_peak_bytes(batch, heads, heads_kv, rows, rows, head_dim, dtype_bytes, backward=backward)
    if n_ranks == 1:
        return share
    keys = batch * turn_heads_kv * rows * head_dim
    queries = keys * (heads // heads_kv)
    travelling = min(n_ranks - 1, 2) * 2 * keys * dtype_bytes
    sums = 2 * queries + (3 * 2 * keys if backward else 0)
    return share + travelling + sums * FP32_BYTES


def standard_traffic_bytes(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype_bytes):
    """Count the bytes of the standard forward pass through device memory: q, k, v, out, and four trips for S and P.

    S is written by the first product and read by the softmax, P written by the softmax and read by the second product.
    """
    scores = score_count(batch, heads, seqlen_q, seqlen_k)
    return qkvo_bytes(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype_bytes) + 4 * scores * dtype_bytes


def flash_traffic_bytes(batch, heads, seqlen_q, seqlen_k, head_dim, dtype_bytes, *, block_m):
    """Count the bytes that the tiled forward pass requests: q and out once, all of k and v once per query block.

    Some of the repeated requests for k and v are served by the L2 cache, so device memory sees this many at most. One
    fp32 lse a row is counted; the kernel writes a second one, in base 2.
    """
    query_blocks = -(-seqlen_q // block_m)
    q_and_out = 2 * seqlen_q * head_dim * dtype_bytes
    k_and_v = 2 * seqlen_k * head_dim * dtype_bytes
    return batch * heads * (q_and_out + query_blocks * k_and_v + FP32_BYTES * seqlen_q)


def on_chip_tile_bytes(block_m, block_n, head_dim, dtype_bytes, *, stages=1):
    """Count the shared memory that the tiles of the forward kernel need: one of q, and ``stages`` of k and of v.

    Scores and accumulators live in registers. The compiler may allocate more, or less where tiles share space.

    Args:
        stages: how many tiles of k and of v are in flight at once.
    """
    return dtype_bytes * head_dim * (block_m + 2 * stages * block_n)


def roofline_s(flops, traffic_bytes, gpu):
    """Return the least time in seconds that these operations and bytes take on a :class:`Gpu`."""
    return max(flops / gpu.matmul_flops_per_s, traffic_bytes / gpu.bandwidth_bytes_per_s)


class Gpt(NamedTuple):
    """A GPT by its shape: feed-forward parts of inner width 4 * width, one matrix for input and output embedding."""

    layers: int
    width: int
    heads: int
    vocab: int = 50257


def gpt_weight_count(gpt):
    """Count the weights of the matrices; norms, biases and positions, about 1 % of a small model, are left out."""
    return 12 * gpt.layers * gpt.width**2 + gpt.vocab * gpt.width


def gpt_memory_bytes(gpt, batch, seqlen, *, standard, dtype_bytes=2, softmax_bytes=None, matrices=3):
    """Count what fills the memory of a GPT in training, {part: bytes}, as chapter 11 measures it.

    As under ``torch.autocast``: weights, gradients and AdamW's two moments in fp32, products in 16 bits, the sum of the
    layers' outputs in fp32. A layer keeps for the backward pass, per token and channel, the inputs of its two norms in
    fp32 and 14 numbers in 16 bits: both norms' results, q, k, v, the output of attention, and the inner tensor, 4
    channels wide, before and after its nonlinearity.

    Args:
        gpt: a :class:`Gpt`.
        batch, seqlen: the tokens are ``batch * seqlen``.
        standard: True for N x N matrices in memory, False for one fp32 number a row.
        dtype_bytes: bytes of a number in a product. Default 2; 4 without autocast.
        softmax_bytes: bytes of a number inside the softmax of standard attention. Default ``dtype_bytes``. On a GPU
            autocast has it work in 4, and then P is kept a second time, in 16 bits, for the product with V.
        matrices: how many N x N matrices besides P are alive while one layer's softmax is differentiated: 3 on a GPU,
            2 on a CPU (chapter 1).

    Returns:
        ``{name: bytes}`` of weights, optimizer, gradients, copies (of the weights, in 16 bits), activations, logits
        (with the gradients of the loss and the logits) and attention: what is kept, and what ``matrices`` need beyond
        the room that the logits have left by then. They do not all meet: see :func:`gpt_peak_bytes`.
    """
    softmax_bytes = softmax_bytes or dtype_bytes
    weights, tokens = gpt_weight_count(gpt), batch * seqlen
    sizes = {"weights": FP32_BYTES * weights, "optimizer": 2 * FP32_BYTES * weights, "gradients": FP32_BYTES * weights}
    sizes["copies"] = dtype_bytes * weights if dtype_bytes != FP32_BYTES else 0
    per_layer = 14 * dtype_bytes + 2 * FP32_BYTES
    sizes["activations"] = tokens * gpt.width * (gpt.layers * per_layer + FP32_BYTES + dtype_bytes)
    sizes["logits"] = 3 * FP32_BYTES * tokens * gpt.vocab
    if not standard:
        return sizes | {"attention": FP32_BYTES * gpt.layers * gpt.heads * tokens}
    kept = softmax_bytes + (dtype_bytes if softmax_bytes != dtype_bytes else 0)
    scores = score_count(batch, gpt.heads, seqlen, seqlen)
    beyond = max(matrices * softmax_bytes * scores - sizes["logits"], 0)
    return sizes | {"attention": gpt.layers * kept * scores + beyond}


def gpt_peak_bytes(sizes):
    """Return the peak of a training step from its parts: gradients come while what the forward pass made goes."""
    forward = sum(sizes[part] for part in ("copies", "activations", "logits", "attention"))
    return sizes["weights"] + sizes["optimizer"] + max(sizes["gradients"], forward)


def gpt_flops_per_token(gpt, seqlen, *, causal=True):
    """Count the operations of a token's products in training: forward, and twice as many for the gradients."""
    attention = attention_flops(1, gpt.heads, seqlen, seqlen, gpt.width // gpt.heads, causal=causal) // seqlen
    return 3 * (2 * gpt_weight_count(gpt) + gpt.layers * attention)
