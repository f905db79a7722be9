"""Attention over a sequence that is spread over many processes: K and V travel round a ring of them.

The result over some keys and the result over others merge by their lse (chapter 2), wherever the two were computed.
So each process, a rank, keeps its share of the queries, sees every rank's keys once, and never holds them all.
Chapter 12 derives it.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from .api import DENSE, _autocast, _check_options, _check_tensors
from .derivative import first_derivative_only
from .ops import _new_outputs, _or_none, attention, check_can_launch

# A turn takes as many key heads round the ring as give this many rows of queries: 2048 blocks of 64, enough for a large
# GPU. All that travels, and every fp32 sum, is as large as one turn. (A power of two, so that halves are whole blocks.)
ROWS_PER_TURN = 2**17


@torch._disable_dynamo  # torch.compiler.disable would import dynamo, and with it Triton, here
def ring_attention(q, k, v, group=None, *, causal=False, scale=None, return_lse=False):
    """Compute attention over a sequence whose rows are spread over the ranks of a process group, differentiably.

    Each rank passes its share of the sequence and gets its share of the result, as if ``flash_attention`` had run on
    the whole. K and V travel from rank to rank, and so do their gradients in the backward pass, while the kernels work
    on what came before. With ``causal=True`` the shares are those of :func:`ring_shard` ("zigzag"): of 2 R chunks rank
    ``r`` holds ``r`` and ``2 R - 1 - r``, which gives every rank the same work in every step. With R = 3 and x for
    what a query chunk sees::

                     keys of   rank 0   rank 1   rank 2
                       chunk    0   5    1   4    2   3
          rank 0   query  0     x   .    .   .    .   .
                   query  5     x   x    x   x    x   x
          rank 1   query  1     x   .    x   .    .   .
                   query  4     x   .    x   x    x   x
          rank 2   query  2     x   .    x   .    x   .
                   query  3     x   .    x   .    x   x

    A rank holds its shares of the tensors and of the gradients, and beside them, for one turn of a few heads at a time,
    two shares of K and V, two of their fp32 gradients and the fp32 sums of out or dq. Nothing is gathered.

    Every rank of the group must make the same calls in the same order, forward and backward, with the same shapes,
    dtype and options, and with a gradient arriving at the same results. That is a contract, not checked: ranks that
    disagree may wait for each other until the group's timeout.

    Args:
        q: (batch, heads, seqlen_q / R, head_dim): this rank's rows of a sequence of seqlen_q. Dtypes, devices, strides
            and head dimensions as for :func:`flashattn.flash_attention`.
        k: (batch, heads_kv, seqlen_k / R, head_dim).
        v: (batch, heads_kv, seqlen_k / R, head_dim_v).
        group: a ``torch.distributed`` process group with a backend for the device of ``q`` (NCCL for GPUs, gloo for
            CPUs), of any number of ranks R. Default None: the group of all processes.
        causal: hide the keys after each query's own position. Shares must then be those of :func:`ring_shard`, so that
            seqlen_q = seqlen_k is a multiple of 2 R. Without it any equal shares will do. Default False.
        scale: factor on the scores, any finite number. Default ``1 / sqrt(head_dim)``.
        return_lse: return the log-sum-exp too. Default False.

    Returns:
        out (batch, heads, seqlen_q / R, head_dim_v), this rank's rows, in the dtype of ``q``; with ``return_lse=True``
        ``(out, lse)``, lse (batch, heads, seqlen_q / R), fp32. Gradients of q, k and v flow through both. Partial
        results are fp32 until the last is merged, and results are the same to the bit on every call. ``torch.compile``
        leaves the call as it is and compiles what stands around it.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError, ImportError: as :func:`flashattn.flash_attention`.
        TypeError: ``group`` is no process group.
        ValueError: this process is not in ``group``; ``causal=True`` with q and k of different or odd lengths.
        RuntimeError: ``group`` is None and ``torch.distributed`` was not initialised.

    Source: Liu et al. 2023 (Ring Attention); Dao 2023 (FlashAttention-2), algorithms 1 and 2. Chapter: 12.
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors({"q": q, "k": k, "v": v}, DENSE)
    q, (scale, *_) = _check_options(q, causal, scale, None, None, return_lse)
    ring = _check_group(group)
    if causal:
        if k.shape[2] != q.shape[2]:
            raise ValueError(f"`k` must have seqlen {q.shape[2]} like `q` with causal=True, got {k.shape[2]}")
        if q.shape[2] % 2:
            raise ValueError(
                f"`q` must have an even seqlen with causal=True, two chunks as ring_shard gives them, got {q.shape[2]}"
            )
    if ring.size == 1 or q.numel() == 0 or k.numel() == 0:  # nothing travels
        out, lse = attention(q, k, v, None, None, None, scale, None, None, 0 if causal else None)
    else:
        out, lse, *_ = _RingAttention.apply(*(x.resolve_neg() for x in (q, k, v)), ring, causal, scale)
    return (out, lse) if return_lse else out


def ring_positions(seqlen, n_ranks, rank, device=None):
    """Return the positions in the whole sequence of the rows that a rank holds: chunks ``rank`` and ``2 R - 1 - rank``.

    Args:
        seqlen: rows of the whole sequence, a multiple of ``2 * n_ranks``.
        n_ranks: R, an int > 0.
        rank: 0 to R - 1.
        device: where the result goes. Default: PyTorch's default device.

    Returns:
        (seqlen / R,) int64, ascending; what a rotary embedding needs, for one.

    Raises:
        ValueError: an argument is out of range, or ``seqlen`` is no multiple of ``2 * n_ranks``.
    """
    if not n_ranks >= 1:
        raise ValueError(f"`n_ranks` must be at least 1, got {n_ranks}")
    if not 0 <= rank < n_ranks:
        raise ValueError(f"`rank` must be 0 to {n_ranks - 1}, got {rank}")
    if seqlen % (2 * n_ranks):
        raise ValueError(
            f"`seqlen` must be a multiple of {2 * n_ranks}, two chunks for each of {n_ranks} ranks, got {seqlen}: "
            "pad the end of the sequence, which under a causal mask changes no row before it"
        )
    chunk = seqlen // (2 * n_ranks)
    offs = torch.arange(chunk, device=device)
    return torch.cat([offs + rank * chunk, offs + (2 * n_ranks - 1 - rank) * chunk])


def ring_shard(x, n_ranks, rank, dim=2):
    """Return a rank's share of a whole tensor: its rows at ``ring_positions``, copied. Differentiable.

    Args:
        x: any tensor with the sequence along ``dim``.
        n_ranks, rank: as for :func:`ring_positions`.
        dim: the sequence's dimension. Default 2, as in (batch, heads, seqlen, head_dim).

    Returns:
        ``x`` with ``seqlen / n_ranks`` rows along ``dim``.

    Raises:
        ValueError: as :func:`ring_positions`.
    """
    return x.index_select(dim, ring_positions(x.shape[dim], n_ranks, rank, x.device))


def ring_unshard(shards, dim=2):
    """Put the shares of all ranks together again: the inverse of :func:`ring_shard`. Differentiable.

    Args:
        shards: the shares in the order of the ranks.
        dim: the sequence's dimension. Default 2.

    Returns:
        The whole tensor.

    Raises:
        ValueError: shards do not have two chunks each.
    """
    whole = torch.cat(list(shards), dim)
    n_ranks = len(shards)
    order = [ring_positions(whole.shape[dim], n_ranks, rank, whole.device) for rank in range(n_ranks)]
    return whole.index_select(dim, torch.cat(order).argsort())


class Ring(NamedTuple):
    """A process group as a ring: each rank sends to the next and receives from the one before."""

    group: object
    size: int
    rank: int

    def pass_on(self, tensors):
        """Begin to send tensors to the next rank and to receive as many like them; return a :class:`Passing`."""
        to, source = (dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1))
        arriving = [torch.empty_like(x) for x in tensors]
        messages = [dist.P2POp(dist.isend, x, to, self.group) for x in tensors]
        messages += [dist.P2POp(dist.irecv, x, source, self.group) for x in arriving]
        return Passing(dist.batch_isend_irecv(messages), tensors, arriving)


class Passing:
    """Tensors on their way. What is sent must live until it has been, and not longer: it is most of the memory."""

    def __init__(self, works, leaving, arriving):
        self.works, self.leaving, self.arriving = works, leaving, arriving

    def wait(self):
        """Wait for both directions (on a GPU it is the stream that waits) and return the tensors received."""
        for work in self.works:
            work.wait()
        arrived = self.arriving
        self.works = self.leaving = self.arriving = None
        return arrived


def _check_group(group):
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "`group` must be a process group, or None after torch.distributed.init_process_group(), got None before"
            )
        group = dist.group.WORLD
    if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:  # new_group() on a rank that is not in it
        raise ValueError("`group` must have this process for a member, got one that has not")
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"`group` must be a torch.distributed process group or None, got {type(group).__name__}")
    return Ring(group, dist.get_world_size(group), dist.get_rank(group))


def visible_part(rank, source, half, causal):
    """Say what a rank's queries see of the keys that rank ``source`` held at first: half a square, in either case.

    Args:
        rank, source: two ranks of a ring.
        half: rows of a chunk; a rank holds two.
        causal: whether there is a mask.

    Returns:
        ``(rows, keys, diagonal)``: slices of the rank's queries and of the keys, all of which see all of which, but
        with diagonal=True under a causal mask between them.
    """
    everything = slice(0, None)
    if not causal:
        return everything, everything, False
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(0, half), False
    return slice(half, None), everything, False


def merge_(out, lse_log2, part, part_lse_log2):
    """Merge the result over more keys into the one over the keys before, both in place, by the lse of each.

    Args:
        out: (..., rows, head_dim_v) fp32, the output over the keys seen so far.
        lse_log2: (..., rows) fp64, their log-sum-exp in base 2.
        part, part_lse_log2: the same over the other keys; part is overwritten.
    """
    total = torch.logaddexp2(lse_log2, part_lse_log2)
    out.mul_(torch.exp2(lse_log2 - total).to(out.dtype)[..., None])
    out.add_(part.mul_(torch.exp2(part_lse_log2 - total).to(out.dtype)[..., None]))
    lse_log2.copy_(total)


def heads_per_turn(batch, heads, heads_kv, rows):
    """Return how many key heads go round the ring at a time, with the query heads that read them."""
    return min(heads_kv, max(1, ROWS_PER_TURN // (batch * rows * (heads // heads_kv))))


def _turns(q, k):
    """Yield (query heads, key heads), slices, of one turn after the other."""
    group = q.shape[1] // k.shape[1]
    step = heads_per_turn(q.shape[0], q.shape[1], k.shape[1], q.shape[2])
    for begin in range(0, k.shape[1], step):
        end = min(begin + step, k.shape[1])
        yield slice(begin * group, end * group), slice(begin, end)


def _options(scale, diagonal):
    return dict(scale=scale, softcap=None, window_left=None, window_right=0 if diagonal else None)


def _attend(q, k, v, diagonal, scale):
    """Return (out, lse_log2) over some keys, out in fp32 and lse_log2 in fp64."""
    from .forward import attn_forward

    stats = _new_outputs(q, v)[1:]
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.float32)
    attn_forward(q, k, v, None, out, *stats[:2], _or_none(stats[2]), None, None, **_options(scale, diagonal))
    lse_log2 = sum(x[..., : q.shape[2]].double() for x in stats[1:] if x.numel())
    return out, lse_log2


def _forward_turn(q, k, v, ring, causal, scale):
    """Take some heads round the ring; return out in fp32 and the lse in base 2 in fp64."""
    held, half = [k.contiguous(), v.contiguous()], q.shape[2] // 2
    for step in range(ring.size):
        last = step == ring.size - 1
        passing = None if last else ring.pass_on(held)  # before the kernel, beside which it runs
        rows, keys, diagonal = visible_part(ring.rank, (ring.rank - step) % ring.size, half, causal)
        part = _attend(q[:, :, rows], *(x[:, :, keys] for x in held), diagonal, scale)
        if step == 0:
            out, lse_log2 = part
        else:
            merge_(out[:, :, rows], lse_log2[:, :, rows], *part)
        held = None if last else passing.wait()
    return out, lse_log2


def _forward(q, k, v, ring, causal, scale):
    """Return (out, lse, lse_log2, lse_low) as ``flashattn.ops`` has them, of this rank's queries over all keys."""
    check_can_launch(q)
    out, lse, lse_log2, lse_low = results = _new_outputs(q, v)
    n_rows = q.shape[2]
    with torch.cuda.device_of(q):
        for x in (lse_log2, lse_low):
            x[..., n_rows:].zero_()
        for heads, heads_kv in _turns(q, k):
            out[:, heads], exact = _forward_turn(q[:, heads], k[:, heads_kv], v[:, heads_kv], ring, causal, scale)
            lse[:, heads] = exact * math.log(2)
            lse_log2[:, heads, :n_rows] = exact
            if lse_low.numel():
                lse_low[:, heads, :n_rows] = exact - lse_log2[:, heads, :n_rows].double()
    return results


def _rows_of(stats, rows):
    """Return these rows of a row statistic as the kernels read it: without gaps, a multiple of 4 rows a head."""
    if stats is None:
        return None
    stats = stats[..., rows]
    return torch.nn.functional.pad(stats, (0, -stats.shape[-1] % 4)).contiguous()


def _attend_backward(q, k, v, out, stats, do, rows, keys, diagonal, scale):
    """Return dq, dk and dv in fp32 of some queries over some keys, by the lse and delta of all keys."""
    from .backward import attn_backward

    q, out, do = (x[:, :, rows] for x in (q, out, do))
    k, v = k[:, :, keys], v[:, :, keys]
    lse_log2, lse_low, dlse = (_rows_of(x, rows) for x in stats)
    gradients = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
    attn_backward(
        q, k, v, None, out, lse_log2, lse_low, do, dlse, *gradients, None, None, **_options(scale, diagonal)
    )  # fmt: skip
    return gradients


def _backward_turn(q, k, v, out, stats, do, ring, causal, scale):
    """Take some heads round the ring; return their dq, dk and dv in fp32.

    K and V are one step ahead of their gradients, which a rank sends on when it has added its part. After the last step
    they go on once more, to the rank whose keys they belong to.
    """
    held, half, gradients_passing = [k.contiguous(), v.contiguous()], q.shape[2] // 2, None
    for step in range(ring.size):
        last = step == ring.size - 1
        passing = None if last else ring.pass_on(held)
        rows, keys, diagonal = visible_part(ring.rank, (ring.rank - step) % ring.size, half, causal)
        dq_part, *parts = _attend_backward(q, *held, out, stats, do, rows, keys, diagonal, scale)
        if step == 0:
            dq, travelling = dq_part, parts
        else:
            dq[:, :, rows] += dq_part
            travelling = gradients_passing.wait()
            for x, part in zip(travelling, parts, strict=True):
                x[:, :, keys] += part
        gradients_passing = ring.pass_on(travelling)
        dq_part = parts = travelling = part = x = None  # frees them before the next step makes its own
        held = None if last else passing.wait()
    return dq, *gradients_passing.wait()


def _backward(do, dlse, out, lse_log2, lse_low, q, k, v, ring, causal, scale):
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    do = out.new_zeros(()).expand_as(out) if do is None else do.resolve_neg()
    n_rows = q.shape[2]
    with torch.cuda.device_of(q):
        for heads, heads_kv in _turns(q, k):
            stats = [
                None if x is None else x[:, heads, :n_rows]
                for x in (lse_log2, _or_none(lse_low), None if dlse is None else dlse.resolve_neg())
            ]
            mine = (x[:, part] for x, part in ((q, heads), (k, heads_kv), (v, heads_kv), (out, heads)))
            found = _backward_turn(*mine, stats, do[:, heads], ring, causal, scale)
            for gradient, part, x in zip(gradients, (heads, heads_kv, heads_kv), found, strict=True):
                gradient[:, part] = x
            found = x = None
    return gradients


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring, causal, scale):
        out, lse, lse_log2, lse_low = _forward(q, k, v, ring, causal, scale)
        ctx.options = (ring, causal, scale)
        ctx.save_for_backward(out, lse_log2, lse_low, q, k, v)
        ctx.mark_non_differentiable(lse_log2, lse_low)
        ctx.set_materialize_grads(False)
        return out, lse, lse_log2, lse_low

    @staticmethod
    @first_derivative_only
    def backward(ctx, do, dlse, *_):
        if do is None and dlse is None:
            return (None,) * 6
        return *_backward(do, dlse, *ctx.saved_tensors, *ctx.options), None, None, None
