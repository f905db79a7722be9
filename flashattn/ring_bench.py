"""Measure ring attention on two GPUs beside one GPU: what each of the two processes of ``bench``'s suite ring does.

Rank 0 prints one JSON object a measurement, as soon as there is one. On a CPU, with gloo, the same runs at toy size.
"""

import contextlib
import datetime
import functools
import gc
import json
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from .api import flash_attention
from .bench import draw
from .memory import memory_at_most, peak_memory_bytes
from .models import quantiles
from .peers import Shape
from .reference import attention_reference
from .ring import ring_attention, ring_shard, ring_unshard
from .testing import Inputs, error_budget, max_error

REPEATS = 3
NAMES = ("out", "dq", "dk", "dv")
CAP = 0.75  # of what one GPU holds at its peak: the limit that the ring is held to, and the memory it must do with
WAIT_S = 60  # the longest that ranks wait for each other in one message


def reference_by_rows(q, k, v, *, causal=True, rows=1024):
    """Compute what ``attention_reference`` does for a sequence against itself, some rows of scores at a time.

    They are computed again in the backward pass, whose sums over all rows are at least fp32: so fp64 truth and its
    yardstick can be had for a sequence of which not even one head's scores fit into memory.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k_wide, v_wide = k.to(wide), v.to(wide)

    def attend(q, k, v):
        return attention_reference(q, k.to(q.dtype), v.to(q.dtype), causal=causal)

    results = []
    for begin in range(0, q.shape[2], rows):
        end = min(begin + rows, q.shape[2])
        keys = slice(0, end if causal else None)
        arguments = q[:, :, begin:end], k_wide[:, :, keys], v_wide[:, :, keys]
        results.append(checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=False))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


class Measured:
    """One rank: its device, and beside the group whose messages go between GPUs one that keeps the hosts in step."""

    def __init__(self, shape, device, hosts):
        self.shape, self.device, self.hosts = shape, device, hosts
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.on_gpu = device.type == "cuda"

    def tell(self, direction, metric, unit, values, n_gpus, **params):
        """Print a measurement: three percentiles of values."""
        record = dict(direction=direction, metric=metric, unit=unit, percentiles=quantiles(values), n_gpus=n_gpus)
        if self.rank == 0:
            print(json.dumps(record | dict(params=params)), flush=True)

    def largest(self, values):
        """Return the largest of all ranks' values, element by element."""
        values = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX, self.hosts)
        return values.tolist()

    def now(self):
        """Return the time in ms at which the device has done what it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() * 1e3

    def inputs(self, whole):
        """Return q, k, v, which require gradients, and do: this rank's shares, or the whole."""
        tensors = [x.detach() for x in draw(self.shape, self.device)]
        if not whole:
            tensors = [ring_shard(x, self.size, self.rank) for x in tensors]
        return [x.requires_grad_(i < 3) for i, x in enumerate(tensors)]

    def times(self, call, inputs, together):
        """Return the ms of forward, backward and both, REPEATS times each after one that warms up."""
        *qkv, do = inputs
        found = []
        for _ in range(REPEATS + 1):
            if together:
                dist.barrier(self.hosts)
            begin = self.now()
            out = call(*qkv)
            middle = self.now()
            torch.autograd.grad(out, qkv, do)
            end = self.now()
            found.append([middle - begin, end - middle, end - begin])
            out = None  # frees it, and what it keeps for the backward pass
        return found[1:]

    def peak(self, call, inputs):
        """Return the most bytes alive in PyTorch's allocator in forward and backward, with q, k, v and do."""
        *qkv, do = inputs
        beyond = peak_memory_bytes(lambda: torch.autograd.grad(call(*qkv), qkv, do), self.device)
        return beyond + sum(x.untyped_storage().nbytes() for x in inputs)

    def results(self, call, inputs):
        *qkv, do = inputs
        out = call(*qkv)
        return [out.detach(), *torch.autograd.grad(out, qkv, do)]

    def whole(self, x):
        """Return the whole of a tensor of shares on rank 0, None elsewhere."""
        x = x.contiguous()
        shares = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(shares, x)
        return ring_unshard(shares) if self.rank == 0 else None


def measure_calls(ranks, ring, one):
    """Time both and take their peaks: two GPUs on shares, then the first one alone on the whole."""
    for n_gpus, call in ((ranks.size, ring), (1, one)):
        if n_gpus > 1 or ranks.rank == 0:
            inputs = ranks.inputs(whole=n_gpus == 1)
            times, peak = ranks.times(call, inputs, n_gpus > 1), ranks.peak(call, inputs)
            inputs = None
        else:
            times, peak = [[0.0] * 3] * REPEATS, 0
        times = zip(*map(ranks.largest, times), strict=True)
        for direction, values in zip(("forward", "backward", "forward_backward"), times, strict=True):
            ranks.tell(direction, "time", "ms", values, n_gpus)
        ranks.tell("forward_backward", "peak_memory", "bytes", ranks.largest([peak]), n_gpus, inputs=True)
        yield int(ranks.largest([peak])[0])


def compare_results(ranks, ring, one):
    """Hold the last head of both to fp64, and every head of the ring to the one GPU, in budgets of the last head."""
    shape = ranks.shape
    shares = ranks.results(ring, ranks.inputs(whole=False))
    wholes, budget = None, None
    if ranks.rank == 0:
        inputs = ranks.inputs(whole=True)
        wholes = ranks.results(one, inputs)
        last = [x.detach()[-1:, -(x.shape[1] // shape.heads_kv) :] for x in inputs]
        truth, budget = error_budget(Inputs(*last, None), reference_by_rows, causal=shape.causal)
        inputs = last = None
    dist.barrier(ranks.hosts)  # the truth takes a while
    errors = dict.fromkeys(("ring", "one", "difference"), 0.0)
    for i, name in enumerate(NAMES):
        for batch in range(shape.batch):
            for head in range(shares[i].shape[1]):
                mine = ranks.whole(shares[i][batch : batch + 1, head : head + 1])
                if ranks.rank:
                    continue
                theirs = wholes[i][batch : batch + 1, head : head + 1]
                errors["difference"] = max(errors["difference"], max_error(mine, theirs) / budget[name])
                n_last = truth[name].shape[1]
                if batch == shape.batch - 1 and head >= shares[i].shape[1] - n_last:
                    expected = truth[name][:, head - shares[i].shape[1]][:, None]
                    errors["ring"] = max(errors["ring"], max_error(mine, expected) / budget[name])
                    errors["one"] = max(errors["one"], max_error(theirs, expected) / budget[name])
    ranks.tell("forward_backward", "rel_err", "budgets", [errors["ring"]], ranks.size)
    ranks.tell("forward_backward", "rel_err", "budgets", [errors["one"]], 1)
    ranks.tell("forward_backward", "difference_from_one_gpu", "budgets", [errors["difference"]], ranks.size)


def run_capped(ranks, ring, one, peak_bytes):
    """Give each process CAP of what one GPU holds at its peak, and see which of the two ways gets through."""
    cap = int(CAP * peak_bytes)
    for n_gpus, call in ((ranks.size, ring), (1, one)):
        done = float(n_gpus == 1 and ranks.rank > 0)  # a rank without a part does not fail at it
        if n_gpus > 1 or ranks.rank == 0:
            inputs = ranks.inputs(whole=n_gpus == 1)
            with memory_at_most(cap, ranks.device), contextlib.suppress(torch.OutOfMemoryError):
                ranks.results(call, inputs)
                torch.cuda.synchronize()
                done = 1.0
            inputs = None
        done = 1 - ranks.largest([1 - done])[0]
        ranks.tell("forward_backward", "completes", "1 or 0", [done], n_gpus, cap_bytes=cap)


def measure(shape, device):
    """Measure all there is, part by part; a part that fails is told on stderr, and the next one goes on."""
    hosts = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=2 * WAIT_S))
    ranks = Measured(shape, device, hosts)
    one, ring = (functools.partial(call, causal=shape.causal) for call in (flash_attention, ring_attention))
    peaks = []

    def calls():
        peaks.extend(measure_calls(ranks, ring, one))

    parts = [calls, functools.partial(compare_results, ranks, ring, one)]
    if ranks.on_gpu:
        parts.append(lambda: run_capped(ranks, ring, one, peaks[1]))
    failed = False
    for part in parts:
        try:
            part()
        except Exception as error:  # where ranks no longer agree, their messages time out
            failed = True
            print(f"rank {ranks.rank}: {type(error).__name__}: {error}"[:500], file=sys.stderr, flush=True)
        gc.collect()
        dist.barrier(hosts)
    return failed


def main(rank, n_ranks, meeting, device, shape):
    """Run one rank: ``python -m flashattn.ring_bench RANK N_RANKS MEETING_FILE DEVICE SHAPE``, shape as JSON."""
    shape, rank = Shape(*json.loads(shape)), int(rank)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        device, backend = f"cuda:{rank}", "nccl"
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=int(n_ranks),
        timeout=datetime.timedelta(seconds=WAIT_S),
    )  # fmt: skip
    failed = measure(shape, torch.device(device))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
