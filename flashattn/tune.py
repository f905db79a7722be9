"""Search for faster blocks on this machine's GPU: ``python -m flashattn.tune`` prints new lines for ``configs.py``.

Nothing is tuned when ``flash_attention`` is called; this is where the tables of ``configs.py`` come from. Candidates
around the table's choice are compiled in parallel processes; those that spill registers or do not fit the shared memory
are dropped; the rest are timed, each kernel by itself; and the fastest that is within the error budget is proposed.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing
import os
import unittest.mock
from typing import NamedTuple

import torch

from .api import flash_attention
from .testing import DTYPES, Case, error_ratios, make_inputs

DIRECTIONS = ("forward", "dkdv", "dq")
FIELDS = ("block_m", "block_n", "num_warps", "num_stages")


class Job(NamedTuple):
    """One kernel to search blocks for."""

    direction: str
    head_dim: int
    dtype: str
    causal: bool


class Launcher:
    """Stand in for a kernel while ``flash_attention`` runs: only compile it, or launch it and keep the launch."""

    def __init__(self, kernel, compile_only):
        self.kernel, self.arg_names, self.compile_only = kernel, kernel.arg_names, compile_only

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *args, **kwargs):
        if self.compile_only:
            self.compiled = self.kernel.warmup(*args, grid=grid, **kwargs)
        else:
            self.again = functools.partial(self.kernel[grid], *args, **kwargs)
            self.again()


@contextlib.contextmanager
def replaced(direction, blocks=(), compile_only=False):
    """Give the kernel of a direction other blocks for a while (by default the table's), and yield its Launcher."""
    # Here, so that the command can say that there is no GPU where Triton is missing.
    from . import backward, forward, launch

    module, name = {
        "forward": (forward, "_attn_fwd_kernel"),
        "dkdv": (backward, "_attn_bwd_dkdv_kernel"),
        "dq": (backward, "_attn_bwd_dq_kernel"),
    }[direction]
    kernel, block_config = getattr(module, name), module.block_config
    launcher = Launcher(kernel, compile_only)

    def chosen(wanted, *args, **kwargs):
        config = block_config(wanted, *args, **kwargs)
        if wanted == direction:
            launcher.config = config = config._replace(**dict(zip(FIELDS, blocks, strict=False)))
        return config

    setattr(module, name, launcher)
    module.block_config = chosen
    launch.LAUNCHES.clear()  # what is remembered was decided by the table
    try:
        with unittest.mock.patch.dict(os.environ, FLASHATTN_BACKEND="portable"):  # whose blocks these are
            yield launcher
    finally:
        setattr(module, name, kernel)
        module.block_config = block_config
        launch.LAUNCHES.clear()


def call(job, seqlen=1024, batch=1):
    """Run forward and backward once, with heads of width 2048 together."""
    shape = (batch, max(1, 2048 // job.head_dim), seqlen, job.head_dim)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=DTYPES[job.dtype]).requires_grad_(i < 3) for i in range(4))
    torch.autograd.grad(flash_attention(q, k, v, causal=job.causal), (q, k, v), do)


def candidates(current):
    """Return blocks around the current ones, which come first; tiles have 32 to 128 rows.

    (Tiles of 16 rows Triton 3.6 sometimes reads or copies where Hopper cannot.)
    """
    block_m, block_n, num_warps, num_stages = current
    grid = itertools.product(
        [m for m in (block_m // 2, block_m, block_m * 2) if 32 <= m <= 128],
        [n for n in (block_n // 2, block_n, block_n * 2) if 32 <= n <= 128],
        sorted({4, 8, num_warps}),
        [stages for stages in (num_stages - 1, num_stages, num_stages + 1) if stages >= 1],
    )
    return list(dict.fromkeys([tuple(current), *grid]))


def compile_facts(job, blocks):
    """Compile one candidate without running it; return (bytes of shared memory, spills), or None if it does not fit."""
    try:
        with replaced(job.direction, blocks, compile_only=True) as launcher:
            call(job)
        launcher.compiled.run  # noqa: B018  loads it, which raises if it does not fit
        return launcher.compiled.metadata.shared, launcher.compiled.n_spills
    except Exception as error:  # of the compiler, in one of many ways
        print(f"  {blocks}: {error}".splitlines()[0], flush=True)
        return None


def time_ms(job, blocks, seqlen):
    """Return the median time of the kernel alone."""
    from triton.testing import do_bench

    with replaced(job.direction, blocks) as launcher:
        call(job, seqlen, batch=max(1, 16384 // seqlen))
    return do_bench(launcher.again, warmup=10, rep=50, return_mode="median")


def within_budget(job, blocks):
    """Say whether forward and backward with these blocks are within the error budget, at a length no block divides."""
    case = Case(1000, 1000, job.head_dim, job.dtype, job.causal, heads=2, heads_kv=2)
    inputs = make_inputs(case, "cuda", layouts=("rows",) * 4)
    with replaced(job.direction, blocks):
        ratios = error_ratios(functools.partial(flash_attention, return_lse=True), inputs, causal=job.causal)
    return all(ratio <= 1 for ratio in ratios.values())


def search(job, seqlen, pool):
    """Search blocks for one kernel, print the table of candidates, and return the line for configs.py."""
    with replaced(job.direction) as launcher:
        call(job)  # compiles the other kernels too, which the processes then find in Triton's cache
    current = tuple(getattr(launcher.config, name) for name in FIELDS)
    tried = candidates(current)
    title = f"{job.direction}, head_dim {job.head_dim}, {job.dtype}, {'causal' if job.causal else 'full'}"
    print(f"{title}: compiling {len(tried)} candidates", flush=True)
    facts = dict(zip(tried, pool.map(functools.partial(compile_facts, job), tried), strict=True))
    fits = [blocks for blocks, found in facts.items() if found and (found[1] == 0 or blocks == current)]
    print(f"{len(tried) - len(fits)} spill or do not fit; timing {len(fits)} at N={seqlen}", flush=True)
    times = {blocks: time_ms(job, blocks, seqlen) for blocks in fits}
    fits.sort(key=times.get)
    print(f"  {'m, n, warps, stages':22}{'shared':>8}{'spills':>8}{'ms':>9}")
    for blocks in fits:
        mark = "  in the table" if blocks == current else ""
        print("  {!s:22}{:8}{:8}{:9.4f}".format(blocks, *facts[blocks], times[blocks]) + mark)
    best = next((blocks for blocks in fits if blocks == current or within_budget(job, blocks)), current)
    width = max(64, launcher.config.block_d, launcher.config.block_dv)
    gain = "as it is" if best == current else f"{times[current] / times[best]:.3f} times as fast as {current}"
    return f'("{job.direction}", {width}): {best},  # {title}: {gain}'


def main(arguments=None):
    """Search for faster blocks on this machine's GPU."""
    parser = argparse.ArgumentParser(prog="python -m flashattn.tune", description=main.__doc__)
    parser.add_argument("--head-dim", type=int, default=128, help="1 to 256; the table has 64, 128 and 256")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true", help="only with a causal mask (default: both)")
    masks.add_argument("--full", action="store_true", help="only without one")
    parser.add_argument("--direction", choices=DIRECTIONS, nargs="+", default=DIRECTIONS, help="kernels (default: all)")
    parser.add_argument("--seqlen", type=int, default=4096, help="the length to time (default: 4096)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile (default: all cores)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("flashattn.tune times kernels on a GPU, and there is none here")
    masks = [causal for causal in (True, False) if not (options.full if causal else options.causal)]
    lines = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, context) as pool:
        for direction, causal in itertools.product(options.direction, masks):
            lines.append(search(Job(direction, options.head_dim, options.dtype, causal), options.seqlen, pool))
    print(f"\nFor the table that block_config takes on {torch.cuda.get_device_name()}, in flashattn/configs.py:")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
