"""Measure attention side by side on a GPU: ``python -m flashattn.bench`` writes ``flashattn/data/<gpu>.csv``.

The recorded measurements ship with the package; ``load_rows`` reads them. ``peak_memory_bytes`` works on a CPU too.
"""

import argparse
import csv
import functools
import importlib.metadata
import json
import math
import os
import subprocess
import time
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .api import flash_attention
from .testing import Inputs, error_ratios

DATA = Path(__file__).parent / "data"
COLUMNS = (
    "gpu n_gpus date commit torch triton suite impl direction dtype batch heads heads_kv seqlen_q seqlen_k head_dim "
    "causal params metric unit p20 p50 p80"
).split()
_INTEGERS = {"n_gpus", "batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim"}


def load_rows(gpu, **wanted):
    """Return the recorded measurements of a GPU as dicts, one metric each.

    Args:
        gpu: the name of the file in ``flashattn/data``, such as "nvidia_h200".
        wanted: keep only rows whose columns equal these values, as in ``suite="memory", impl="eager"``.

    Returns:
        A list of dicts with the keys of COLUMNS, empty where nothing was recorded. Sizes are int, causal is bool,
        params is a dict; p20, p50 and p80 are float, in the row's ``unit`` (ms or bytes).
    """
    path = DATA / f"{gpu}.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = [_typed(row) for row in csv.DictReader(file)]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def load_targets(**wanted):
    """Return what the compiler allocates for each kernel on each target, as ``make targets`` recorded it.

    Args:
        wanted: keep only rows whose columns equal these values, as in ``target="sm_90", direction="forward"``.

    Returns:
        A list of dicts with the keys target, triton (the version that compiled it), direction, head_dim, dtype, causal,
        those of ``configs.BlockConfig``, shared_bytes of a block, registers of a thread, spill_stores_bytes of a
        thread, and tensor_cores (whether it uses them).
    """
    with open(DATA / "targets.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    booleans = {"True": True, "False": False}
    rows = [
        {name: int(value) if value.isdigit() else booleans.get(value, value) for name, value in row.items()}
        for row in rows
    ]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _typed(row):
    row = {name: int(value) if name in _INTEGERS else value for name, value in row.items()}
    numbers = {name: float(row[name]) for name in ("p20", "p50", "p80")}
    return row | numbers | {"causal": row["causal"] == "True", "params": json.loads(row["params"] or "{}")}


class _CpuPeak(TorchDispatchMode):
    """Count the bytes of the tensor storages that are born while the mode is on, and the most alive at once."""

    def __init__(self):
        super().__init__()
        self.live, self.peak_bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.live and storage._cdata not in given:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))
        return result


def peak_memory_bytes(function, device):
    """Return the most bytes of tensors that were alive at once during function(), beyond those alive before.

    On a GPU this is what PyTorch's caching allocator handed out, rounded up to 512 bytes a tensor, in the second of two
    calls (the first may create the workspaces of libraries); on a CPU the sizes of the results of PyTorch's operators,
    scratch space inside an operator left out.
    """
    if torch.device(device).type == "cuda":
        function()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _CpuPeak() as mode:
        function()
    return mode.peak_bytes


def naive_attention(q, k, v, *, causal=False):
    """Compute attention the way chapter 1 does, every matrix in memory; causal for seqlen_q = seqlen_k."""
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]))
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return torch.softmax(s, dim=-1) @ v


def _sdpa(backend, q, k, v, *, causal=False):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


IMPLEMENTATIONS = {
    "eager": naive_attention,
    "sdpa_flash": functools.partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa_cudnn": functools.partial(_sdpa, "CUDNN_ATTENTION"),
    "flashattn": flash_attention,
}
TOKENS, WIDTH = 16384, 2048


def core_shapes():
    """Yield (batch, heads, seqlen, head_dim, causal): 16k tokens of width 2048."""
    for head_dim in (64, 128):
        for seqlen in (1024, 4096, 16384):
            for causal in (False, True):
                yield TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim, causal


def _draw(batch, heads, seqlen, head_dim):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, heads, seqlen, head_dim)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_(i < 3)
        for i in range(4)
    ]


def _worst_ratio(implementation, shape):
    """Return the worst error over budget on a shape like this one with fewer batch entries, heads and tokens."""
    batch, heads, seqlen, head_dim, causal = shape
    q, k, v, do = _draw(min(batch, 2), min(heads, 4), min(seqlen, 1024), head_dim)
    q, k, v = (x.detach() for x in (q, k, v))

    def with_lse(q, k, v, *, causal):
        out = implementation(q, k, v, causal=causal)
        return out, out.float().sum(-1) * 0  # these peers return no lse: a zero with a zero gradient takes its place

    ratios = error_ratios(
        with_lse, Inputs(q, k, v, do, torch.zeros_like(q[..., 0], dtype=torch.float32)), causal=causal
    )
    return max(ratios[name] for name in ("out", "dq", "dk", "dv"))


def _percentiles_ms(function):
    from triton.testing import do_bench

    return do_bench(function, warmup=50, rep=200, quantiles=[0.2, 0.5, 0.8])


def measure_core():
    """Yield rows of suite core: time forward and backward of every implementation that is within the budget."""
    for shape in core_shapes():
        q, k, v, do = _draw(*shape[:4])
        for name, implementation in IMPLEMENTATIONS.items():
            try:
                ratio = _worst_ratio(implementation, shape)
                if not ratio <= 1:
                    print(f"{name} {shape}: over the error budget ({ratio:.2f}), not timed", flush=True)
                    continue
                call = functools.partial(implementation, q, k, v, causal=shape[4])
                yield _row("core", name, "forward", *shape, "time", "ms", _percentiles_ms(call))
                out = call()
                backward = functools.partial(torch.autograd.grad, out, (q, k, v), do, retain_graph=True)
                yield _row("core", name, "backward", *shape, "time", "ms", _percentiles_ms(backward))
            except torch.OutOfMemoryError:
                print(f"{name} {shape}: out of memory", flush=True)
            except RuntimeError as error:
                print(f"{name} {shape}: {str(error).splitlines()[0]}", flush=True)
            out = backward = call = None


def measure_memory():
    """Yield rows of suite memory: peak bytes beyond the inputs, forward alone and forward plus backward."""
    for seqlen in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        shape = (1, 16, seqlen, 64, False)
        for name in ("eager", "sdpa_flash", "flashattn"):
            q, k, v, do = _draw(*shape[:4])
            call = functools.partial(IMPLEMENTATIONS[name], q, k, v)

            def both(call=call, qkv=(q, k, v), do=do):
                torch.autograd.grad(call(), qkv, do)

            def forward(call=call):
                with torch.no_grad():
                    call()

            for direction, function in (("forward", forward), ("forward_backward", both)):
                try:
                    peak = peak_memory_bytes(function, "cuda")
                    yield _row("memory", name, direction, *shape, "peak_memory", "bytes", [peak] * 3)
                except torch.OutOfMemoryError:
                    print(f"{name} {direction} N={seqlen}: out of memory", flush=True)


SUITES = {"core": measure_core, "memory": measure_memory}


@functools.lru_cache
def _session():
    """Return the columns that are the same for every row of a run."""
    git = ["git", "-C", str(DATA), "rev-parse", "--short", "HEAD"]
    commit = os.environ.get("FLASHATTN_COMMIT") or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return dict(
        gpu=torch.cuda.get_device_name(), n_gpus=1, date=time.strftime("%Y-%m-%d"), commit=commit,
        torch=torch.__version__, triton=importlib.metadata.version("triton"),
    )  # fmt: skip


def _row(suite, impl, direction, batch, heads, seqlen, head_dim, causal, metric, unit, percentiles):
    sizes = dict(batch=batch, heads=heads, heads_kv=heads, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim)
    written = [f"{value:.6g}" if unit == "ms" else int(value) for value in percentiles]
    values = dict(zip(("p20", "p50", "p80"), written, strict=True))
    what = dict(suite=suite, impl=impl, direction=direction, dtype="bf16", causal=causal, params="{}")
    return _session() | what | sizes | dict(metric=metric, unit=unit) | values


def main(arguments=None):
    """Measure the suites and replace their rows in the CSV of this GPU."""
    parser = argparse.ArgumentParser(prog="python -m flashattn.bench", description=main.__doc__)
    parser.add_argument("--suite", choices=SUITES, action="append", help="one suite; may be repeated (default: all)")
    parser.add_argument("--out", type=Path, default=DATA, help="folder of the CSV (default: the package's own data)")
    options = parser.parse_args(arguments)
    suites = options.suite or list(SUITES)
    if not torch.cuda.is_available():
        raise SystemExit("flashattn.bench measures on a GPU, and there is none here")
    gpu = _session()["gpu"].lower().replace(" ", "_")
    path = options.out / f"{gpu}.csv"
    kept = []
    if path.exists():
        with open(path, newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["suite"] not in suites]
    rows = []
    for suite in suites:
        for row in SUITES[suite]():
            rows.append(row)
            print(
                *(row[x] for x in ("suite", "impl", "direction", "head_dim", "seqlen_q", "causal", "p50", "unit")),
                flush=True,
            )
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + rows)
    print(f"{len(rows)} rows written to {path}")


if __name__ == "__main__":
    main()
