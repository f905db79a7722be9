"""Measure attention side by side on a GPU: ``python -m flashattn.bench`` writes ``flashattn/data/<gpu>.csv``.

All implementations of one shape run one after the other in one process, each held to the error budget first. The
recorded measurements ship with the package; ``load_rows`` reads them. ``peak_memory_bytes`` works on a CPU too.

A row holds one metric of one implementation on one shape, as three percentiles in a unit:

- time, ms: of one call. Where params has "graph" it is the mean of many, made by the host one by one (false) or
  replayed as a CUDA graph (true).
- rel_err, budgets: the worst error over the error budget.
- peak_memory, bytes: the most bytes of tensors at once; in suite "memory" beyond q, k, v and do, in suite "model" all.
- first_call, s: from nothing compiled.
- quantize, ms: of rounding q, k and v to e4m3 with ``quantize_fp8``, before which q and k are rotated or not (params).
- throughput, tokens/s: of whole training steps.
- out_of_memory, bytes: the memory that was not enough, the GPU's or params["limit_bytes"] where PyTorch was held to it.

Suite "atomics" is suite core of two implementations, flashattn_portable and flashattn_atomic, whose backward pass adds
to dQ atomically (``flashattn.atomic``, of chapter 6).

Impl "flashattn" is what runs by default, on a Hopper GPU the kernels for it; "flashattn_portable" the Triton kernels.

Suite "decode": direction "forward" of one new token a sequence over seqlen_k keys, call by call and as a CUDA graph;
flashattn's keys lie in pages of 64 in random order, those of the others behind each other. Impl "read" reads the same
bytes and does nothing with them. params["way"] is the fastest of several ways to call: "kernel" (``streaming.read``) or
"sum" (``torch.sum``) of read; "grouped" (``enable_gqa``) or "folded" (a key head's query heads as queries) of SDPA.

Suite "fp8" is the forward pass alone. Inputs are those of suite core, in bf16 (column dtype); flashattn_fp8 and fa3_fp8
get them rounded to e4m3 with a scale per head, which is not timed with them. The error budget is not theirs: they are
held to twice the largest error of ``flashattn.fp8.attention_fp8_emulated``, the same roundings in PyTorch. At one shape
there are errors of flashattn and flashattn_fp8 too, metric rel_err in unit "relative" (over the size of the truth):
params inputs (gaussian; outliers in the same two channels of q and k; those rotated), scales (none, head or block) and
norm (rms or max).

Suite "model" measures whole models (``flashattn.models.MODELS``, named in params["model"]), bf16 and causal:

- direction "training_step" (gpt2, gpt2_bytes, gpt2_medium): fp32 weights, products in bf16 by autocast, AdamW, random
  tokens. Metrics peak_memory and throughput, or out_of_memory instead of both. params of all: layers, width,
  vocabulary, model. params["split"] of peak_memory adds up to it, in bytes: weights; optimizer; attention (what the
  calls of attention left in memory at the end of the forward pass, its outputs included, measured by the allocator
  before and after each call); logits (the same for the last product and the loss); activations (the rest that the
  forward pass kept); temporary (what came on top by the time of the peak: gradients, and what a step makes and drops).
  params["gradients"] has the bytes of all gradients; they are not alive together with all activations. params of
  throughput: steps (how many were timed) and first_loss (in nats, the same weights and tokens for all). params of
  out_of_memory: attention (bytes as above) and layers_done when memory ran out in the first step.
- direction "forward" (gpt_10b): weights in bf16, PyTorch held to params["limit_bytes"], once as inference
  (params["gradients"] false) and once keeping what a backward pass needs (true). Metrics and params as above, without
  optimizer and logits.
- without params["model"]: attention alone, 12 heads of 64, full and causal, direction "forward" (no gradients wanted)
  and "forward_backward", metric time with params["graph"].

Suite "sparse" times masks, each a ``flashattn.peers.Mask`` by the name in params["mask"], and dense attention as the
yardstick. params["density"] is the share of all tiles of 128 by 128 that a mask leaves to be computed; flashattn and
flex get their lists of tiles made beforehand.
"""

import argparse
import csv
import functools
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from . import models
from .fp8_bench import eight_bit_figures, error_figures
from .memory import peak_memory_bytes
from .peers import (
    EIGHT_BIT,
    FLEX_WAYS,
    FORWARD_ONLY,
    IMPLEMENTATIONS,
    PEERS,
    Mask,
    Shape,
    backend,
    fa3_module,
    flex,
    sparse_tiles,
)
from .testing import DTYPES, Inputs, error_budget, max_error

DATA = Path(__file__).parent / "data"
COLUMNS = (
    "gpu n_gpus date commit torch triton suite impl direction dtype batch heads heads_kv seqlen_q seqlen_k head_dim "
    "causal params metric unit p20 p50 p80"
).split()
_INTEGERS = {"n_gpus", "batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim"}


def load_rows(gpu, portable=False, **wanted):
    """Return the recorded measurements of a GPU as dicts, one metric each.

    Args:
        gpu: the name of the file in ``flashattn/data``, such as "nvidia_h200".
        portable: whether "flashattn" shall name the portable kernels where a suite was measured with both, and not what
            runs by default.
        wanted: keep only rows whose columns equal these values, as in ``suite="memory", impl="eager"``.

    Returns:
        A list of dicts with the keys of COLUMNS, empty where nothing was recorded. Sizes are int, causal is bool,
        params is a dict; p20, p50 and p80 are float, in the row's ``unit``. The top of flashattn/bench.py names the
        metrics.
    """
    rows = [_typed(row) for row in read_table(DATA / f"{gpu}.csv")]
    if portable:
        both = {row["suite"] for row in rows if row["impl"] == "flashattn_portable"}
        rows = [row for row in rows if row["suite"] not in both or row["impl"] != "flashattn"]
        rows = [row | dict(impl=row["impl"].removesuffix("_portable")) for row in rows]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def load_targets(table="targets", **wanted):
    """Return what the compiler allocates for each kernel on each target, as ``make targets`` recorded it.

    Args:
        table: "targets" for the package's own blocks, "blocks" for the forward kernel with many others.
        wanted: keep only rows whose columns equal these values, as in ``target="sm_90", direction="forward"``.

    Returns:
        A list of dicts with the keys target, triton (the version that compiled it), direction, head_dim, dtype, causal,
        those of ``configs.BlockConfig``, shared_bytes of a block, registers of a thread, spill_stores_bytes of a
        thread, tensor_cores (whether it uses them) and serialized (whether ptxas lets no wgmma overlap another).
    """
    booleans = {"True": True, "False": False}
    rows = [
        {name: int(value) if value.isdigit() else booleans.get(value, value) for name, value in row.items()}
        for row in read_table(DATA / f"{table}.csv")
    ]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def read_table(path):
    """Return the rows of a CSV as dicts of text, none where there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _typed(row):
    row = {name: int(value) if name in _INTEGERS else value for name, value in row.items()}
    numbers = {name: float(row[name]) for name in ("p20", "p50", "p80")}
    return row | numbers | {"causal": row["causal"] == "True", "params": json.loads(row["params"] or "{}")}


class Cell(NamedTuple):
    """One implementation on one shape in one suite: what is measured, recorded and resumed as a whole.

    model: a name in ``models.MODELS``, whose attention has that shape; empty for attention alone.
    """

    suite: str
    shape: Shape
    impl: str
    model: str = ""


# ---- The suites.

OURS = ("flashattn", "flashattn_portable")  # what runs by default, and the portable kernels
TOKENS, WIDTH = 16384, 2048
WINDOW = (1023, 0)


def _shape(seqlen, head_dim, causal, **rest):
    """Return the shape of 16k tokens of (nearly) width 2048."""
    heads = WIDTH // head_dim
    return Shape(TOKENS // seqlen, heads, heads, seqlen, head_dim, causal, **rest)


def _core():
    for head_dim, seqlen, causal in itertools.product((64, 128), (1024, 4096, 16384), (False, True)):
        yield _shape(seqlen, head_dim, causal), PEERS


def _atomics():
    for head_dim, seqlen, causal in itertools.product((64, 128), (1024, 4096, 16384), (False, True)):
        yield _shape(seqlen, head_dim, causal), ("flashattn_portable", "flashattn_atomic")


def _wide():
    for head_dim, causal in itertools.product((32, 96, 192, 256), (False, True)):
        yield _shape(4096, head_dim, causal), PEERS
    for causal in (False, True):
        yield _shape(4096, 128, causal, dtype="fp16"), PEERS
    yield Shape(4, 32, 8, 4096, 128, True), PEERS
    for head_dim, impls in ((64, OURS), (128, (*OURS, "flex"))):
        for window in (None, WINDOW):
            yield _shape(16384, head_dim, True, window=window), impls


def _short():
    for seqlen in (64, 128, 256, 512, 1024):
        yield Shape(1, 8, 8, seqlen, 64, True), (*OURS, "sdpa_flash", "sdpa_cudnn")


def _memory():
    for seqlen in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        yield Shape(1, 16, 16, seqlen, 64, False), ("eager", "sdpa_flash", *OURS)


def _compile():
    for head_dim in (64, 128):
        yield Shape(1, 16, 16, 4096, head_dim, True), (*OURS, "flex")


CROSSOVER = ("eager", "sdpa_flash", "flashattn")
WHOLE_MODEL = ("eager", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flashattn")


def _model():
    for seqlen in (256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 32768):
        yield _model_shape("gpt2", 1, seqlen), WHOLE_MODEL, "gpt2"
    yield _model_shape("gpt2_bytes", 2, 4096), CROSSOVER, "gpt2_bytes"
    for seqlen in (256, 1024, 4096):
        yield _model_shape("gpt2_medium", 1, seqlen), CROSSOVER, "gpt2_medium"
    yield _model_shape("gpt_10b", 1, 6144), CROSSOVER, "gpt_10b"
    for batch, causal in itertools.product((1, 4, 16), (False, True)):
        for seqlen in (64, 128, 256, 512, 1024, 2048, 4096):
            yield Shape(batch, 12, 12, seqlen, 64, causal), CROSSOVER


def _model_shape(name, batch, seqlen):
    model = models.MODELS[name]
    return Shape(batch, model.heads, model.heads, seqlen, model.width // model.heads, True)


def _sparse():
    densities = [f"blocks {density}" for density in (1.0, 0.5, 0.25, 0.1, 0.05)]
    for head_dim in (128, 64):
        dense = Shape(1, 16, 16, TOKENS, head_dim, False)
        yield dense, ("flashattn",)
        yield dense._replace(causal=True), ("flashattn",)
        for mask in ("window 1024", "documents", *densities):
            both = head_dim == 128 or mask not in densities
            yield dense._replace(mask=mask), ("flashattn", "flex") if both else ("flashattn",)


def _ring():
    yield Shape(1, 16, 16, 262144, 128, True), ("flashattn",)


PAGED = ("flashattn", "flex", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "read")


def _decode():
    for batch, seqlen in itertools.product((1, 8, 64), (1024, 8192, 65536)):
        yield Shape(batch, 32, 8, seqlen, 128, False, n_tokens=1), PAGED


def _fp8():
    for head_dim, seqlen, causal in itertools.product((64, 128), (4096, 16384), (False, True)):
        yield _shape(seqlen, head_dim, causal), ("flashattn", "flashattn_fp8", "sdpa_cudnn", "flex", "fa3", "fa3_fp8")


def suite_cells(suite, wanted=()):
    """Return the cells of a suite, all implementations of one shape behind one another.

    Args:
        suite: one of SUITES.
        wanted: only these implementations. Eager attention, which is slow, is measured in suites memory and model, and
            in another if it is wanted by name.
    """
    cells = []
    for shape, impls, *model in SUITES[suite][0]():
        if wanted:
            impls = [impl for impl in wanted if impl in impls or impl == "eager"]
        cells += [Cell(suite, shape, impl, *model) for impl in impls]
    return cells


# ---- How a cell is measured: each yields rows. build is the entry of IMPLEMENTATIONS.


def draw(shape, device):
    """Return q, k, v, which require gradients, and do, the same ones in every call."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (shape.heads, shape.heads_kv, shape.heads_kv, shape.heads)
    return [
        torch.randn(
            shape.batch, n_heads, shape.seqlen, shape.head_dim, device=device, dtype=DTYPES[shape.dtype],
            generator=generator,
        ).requires_grad_(i < 3)
        for i, n_heads in enumerate(heads)
    ]  # fmt: skip


def _last_head(x, shape):
    """Return the part of q, k, v, out or a gradient that belongs to the last key head of the last batch entry."""
    return x[-1:, -(x.shape[1] // shape.heads_kv) :]


@functools.lru_cache(maxsize=1)
def _truth_and_budget(shape, device):
    q, k, v, do = (_last_head(x.detach(), shape) for x in draw(shape, device))
    options = dict(causal=shape.causal, window=shape.window)
    if shape.mask:
        options = dict(visible=Mask(shape.mask, shape.seqlen, device).visible())
    return error_budget(Inputs(q, k, v, do, None), **options)


def worst_ratio(call, shape, inputs, backward=True):
    """Return the worst error over budget of a call on the very inputs that are timed, in the last head.

    Args:
        call: a function of (q, k, v) that returns out.
        shape: a Shape.
        inputs: what ``draw`` returned for it.
        backward: whether to look at the gradients too.
    """
    *qkv, do = inputs
    truth, budget = _truth_and_budget(shape, str(do.device))
    out = call(*qkv)
    results = dict(out=out.detach())
    if backward:
        results |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, qkv, do), strict=True)
    return max(max_error(_last_head(x, shape), truth[name]) / budget[name] for name, x in results.items())


def _percentiles_ms(function):
    from triton.testing import do_bench

    return do_bench(function, warmup=25, rep=100, quantiles=[0.2, 0.5, 0.8])


def time_rows(cell, build, device="cuda", percentiles=_percentiles_ms, *, backward=True, **params):
    """Time forward and backward of what is within the error budget. Of several ways to call, the fastest counts.

    backward: False to leave it out. params: what else the rows' params say.
    """
    *qkv, do = draw(cell.shape, device)
    backward = backward and cell.impl not in FORWARD_ONLY
    ratios, times = {}, {"forward": {}, "backward": {}}
    for way, call in build(cell.shape).items():
        try:
            ratios[way] = worst_ratio(call, cell.shape, (*qkv, do), backward)
            if not ratios[way] <= 1:
                raise ValueError(f"{ratios[way]:.3g} times the error budget, so not timed")
            times["forward"][way] = percentiles(functools.partial(call, *qkv))
            if backward:
                gradients = functools.partial(torch.autograd.grad, call(*qkv), qkv, do, retain_graph=True)
                times["backward"][way] = percentiles(gradients)
        except Exception as error:  # a way that fails must not end a run of many
            _report(cell, error, way)
        gradients = None  # frees the graph before the next way makes its own
    timed = [ratios[way] for way in times["forward"]] or list(ratios.values())
    if timed:
        direction = "forward_backward" if backward else "forward"
        yield _row(cell, direction, "rel_err", "budgets", [max(timed)] * 3, **params)
    for direction, found in times.items():
        if found:
            way = min(found, key=lambda way: found[way][1])
            compiled = dict(compile=way, compared=sorted(found)) if way else {}
            yield _row(cell, direction, "time", "ms", found[way], **compiled, **params)


def decode_rows(cell, build, device="cuda", percentiles=_percentiles_ms, graphs=(False, True)):
    """Time a step of decoding that is within the error budget, call by call and as a CUDA graph: the fastest way."""
    batch, heads, heads_kv, *lengths, head_dim = cell.shape.sizes()
    generator = torch.Generator(device).manual_seed(0)
    options = dict(device=device, dtype=DTYPES[cell.shape.dtype], generator=generator)
    sizes = zip((heads, heads_kv, heads_kv), (lengths[0], lengths[1], lengths[1]), strict=True)
    q, k, v = (torch.randn(batch, *size, head_dim, **options) for size in sizes)
    ratios, times = {}, {graph: {} for graph in graphs}
    for way, call in build(cell.shape).items():
        try:
            out = call(q, k, v)
            if cell.impl != "read":
                last = [_last_head(x, cell.shape) for x in (q, k, v)]
                truth, budget = error_budget(Inputs(*last, torch.zeros_like(last[0]), None), causal=True)
                ratios[way] = max_error(_last_head(out, cell.shape), truth["out"]) / budget["out"]
                if not ratios[way] <= 1:
                    raise ValueError(f"{ratios[way]:.3g} times the error budget, so not timed")
            step = functools.partial(call, q, k, v)
            for graph in graphs:
                times[graph][way] = percentiles(_in_graph(step) if graph else step)
        except Exception as error:  # a way that fails must not end a run of many
            _report(cell, error, way)
    if ratios:
        yield _row(cell, "forward", "rel_err", "budgets", [max(ratios.values())] * 3)
    for graph, found in times.items():
        if found:
            way = min(found, key=lambda way: found[way][1])
            yield _row(cell, "forward", "time", "ms", found[way], graph=graph, **(dict(way=way) if way else {}))


def sparse_rows(cell, build, device="cuda", percentiles=_percentiles_ms):
    """Time as ``time_rows`` does, and record the share of tiles that the mask leaves."""
    params = dict(density=sparse_tiles(cell.shape, device).density) if cell.shape.mask else {}
    yield from time_rows(cell, build, device, percentiles, **params)


def _wall_ms(function, calls=100, repeats=20):
    """Return percentiles of the time per call as a host sees it that waits only at the end of many calls."""
    times = []
    for i in range(repeats + 1):  # the first is the warm-up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
        times += [(time.perf_counter() - begin) * 1e3 / calls] if i else []
    return models.quantiles(times)


def _wall_ms_of_about(function, ms=10, repeats=5):
    """Return ``_wall_ms`` of as many calls as take about so many ms, 100 at most, repeated a few times."""
    function()  # compiles what it needs
    (once, *_) = _wall_ms(function, calls=1, repeats=3)
    return _wall_ms(function, calls=max(1, min(100, int(ms / once))), repeats=repeats)


def _in_graph(function):
    """Record a call as a CUDA graph and return what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def _budget_rows(cell, call, inputs):
    """Record the error of a call; raise ValueError where it is over the budget, for then it must not be timed."""
    ratio = worst_ratio(call, cell.shape, inputs)
    yield _row(cell, "forward_backward", "rel_err", "budgets", [ratio] * 3)
    if not ratio <= 1:
        raise ValueError(f"{ratio:.3g} times the error budget, so not timed")


def short_rows(cell, build):
    """Time forward plus backward of calls so short that the host matters: called one by one, and as a CUDA graph."""
    *qkv, do = draw(cell.shape, "cuda")
    (call,) = build(cell.shape).values()
    yield from _budget_rows(cell, call, (*qkv, do))

    def step():
        torch.autograd.grad(call(*qkv), qkv, do)

    yield _row(cell, "forward_backward", "time", "ms", _wall_ms(step), graph=False)
    yield _row(cell, "forward_backward", "time", "ms", _wall_ms(_in_graph(step)), graph=True)


def model_rows(cell, build, device="cuda", timed=None):
    """Measure a whole model, or for a cell without one attention alone. timed: as for ``crossover_rows``."""
    (call,) = build(cell.shape).values()
    if not cell.model:
        yield from crossover_rows(cell, call, device, timed)
        return
    measure = models.forward_figures if cell.model == "gpt_10b" else models.training_figures
    for *what, params in measure(models.MODELS[cell.model], call, cell.shape.batch, cell.shape.seqlen, device):
        yield _row(cell, *what, model=cell.model, **params)


def crossover_rows(cell, call, device="cuda", timed=None):
    """Time forward, and forward plus backward, of one call of attention, made by the host and in a CUDA graph.

    timed: {whether in a graph: a function that times a function, and returns three percentiles in ms}.
    """
    timed = timed or {False: _wall_ms_of_about, True: lambda function: _wall_ms_of_about(_in_graph(function))}
    *qkv, do = draw(cell.shape, device)
    yield from _budget_rows(cell, call, (*qkv, do))
    steps = {
        "forward": torch.no_grad()(lambda: call(*qkv)),
        "forward_backward": lambda: torch.autograd.grad(call(*qkv), qkv, do),
    }
    for (graph, timer), (direction, step) in itertools.product(timed.items(), steps.items()):
        yield _row(cell, direction, "time", "ms", timer(step), graph=graph)


def fp8_rows(cell, build, device="cuda", percentiles=_percentiles_ms, errors_at=(16384, 128, False)):
    """Time the forward pass, in 8 bits for those in EIGHT_BIT. errors_at: seqlen, head_dim and causal with errors."""
    shape = cell.shape
    if cell.impl in EIGHT_BIT:
        qkv = [x.detach() for x in draw(shape, device)[:3]]
        (call,) = build(shape).values()
        truth = _truth_and_budget(shape, device)[0]["out"]
        scale = shape.head_dim**-0.5
        for *what, params in eight_bit_figures(call, qkv, truth, scale, shape.causal, percentiles):
            if what[0] != "quantize" or cell.impl == "flashattn_fp8":
                yield _row(cell, "forward", *what, **params)
    else:
        yield from time_rows(cell, build, device, percentiles, backward=False)
    if cell.impl in ("flashattn", "flashattn_fp8") and (shape.seqlen, shape.head_dim, shape.causal) == errors_at:
        for *what, params in error_figures(cell.impl in EIGHT_BIT, shape.seqlen, shape.head_dim, device):
            yield _row(cell, "forward", *what, **params)


def memory_rows(cell, build):
    """Record peak bytes beyond q, k, v and do, of forward alone and of forward plus backward."""
    *qkv, do = draw(cell.shape, "cuda")
    (call,) = build(cell.shape).values()
    peak = peak_memory_bytes(torch.no_grad()(lambda: call(*qkv)), "cuda")
    yield _row(cell, "forward", "peak_memory", "bytes", [peak] * 3)
    peak = peak_memory_bytes(lambda: torch.autograd.grad(call(*qkv), qkv, do), "cuda")
    yield _row(cell, "forward_backward", "peak_memory", "bytes", [peak] * 3)


def first_call_rows(cell, build):
    """Record the seconds of the first forward and the first backward in a fresh process that finds nothing compiled."""
    code = f"from flashattn import bench; bench.print_first_call({cell.impl!r}, bench.{cell.shape!r})"
    with tempfile.TemporaryDirectory() as folder:
        caches = {f"{name}_CACHE_DIR": os.path.join(folder, name) for name in ("TRITON", "TORCHINDUCTOR")}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | caches)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    for direction, seconds in json.loads(done.stdout.splitlines()[-1]).items():
        params = dict(compile="default") if cell.impl == "flex" else {}
        yield _row(cell, direction, "first_call", "s", [seconds] * 3, **params)


def print_first_call(impl, shape):
    """Call for the first time in this process, and print the seconds it took as JSON, imports on the way included."""
    *qkv, do = draw(shape, "cuda")
    with backend(impl):
        ends = [time.perf_counter()]
        out = next(iter(IMPLEMENTATIONS[impl](shape).values()))(*qkv)
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
        torch.autograd.grad(out, qkv, do)
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
    print(json.dumps(dict(forward=ends[1] - ends[0], backward=ends[2] - ends[1])))


def ring_rows(cell, build, device="cuda", limit_s=180):
    """Record ``ring_attention`` on two GPUs beside one: what two processes of ``flashattn.ring_bench`` print.

    Rows tell the two apart by n_gpus. Unlike in suite memory, peak_memory has q, k, v and do in it, and is that of the
    GPU that holds most. What was printed before a process failed, or limit_s were over, is recorded.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [open(os.path.join(folder, name), "w+") for name in ("printed", "other", "errors")]
        command = [sys.executable, "-m", "flashattn.ring_bench"]
        what = ["2", os.path.join(folder, "meeting"), device, json.dumps(cell.shape)]
        environment = {"NCCL_NVLS_ENABLE": "0"} | os.environ  # NVLink multicast, of no use to a ring
        ranks = [
            subprocess.Popen([*command, str(rank), *what], stdout=logs[rank], stderr=logs[2], env=environment)
            for rank in range(2)
        ]
        end = time.monotonic() + limit_s
        while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
            time.sleep(0.1)
        late = [rank for rank in ranks if rank.poll() is None]
        for rank in late:
            rank.kill()
            rank.wait()
        for log in logs:
            log.seek(0)
        printed, _, errors = (log.read().splitlines() for log in logs)
        for log in logs:
            log.close()
    for line in printed:
        record = json.loads(line)
        params, n_gpus = record.pop("params"), record.pop("n_gpus")
        yield _row(cell, **record, **params) | dict(n_gpus=n_gpus)
    if late or any(rank.returncode for rank in ranks):
        found = [line for line in errors if line.startswith("rank ")] or errors[-1:]
        raise RuntimeError(f"not done after {limit_s} s" if late else "; ".join(found) or "a rank failed")


# suite -> (its shapes and their implementations, how a cell is measured)
SUITES = {
    "core": (_core, time_rows),
    "atomics": (_atomics, time_rows),
    "wide": (_wide, time_rows),
    "short": (_short, short_rows),
    "memory": (_memory, memory_rows),
    "compile": (_compile, first_call_rows),
    "model": (_model, model_rows),
    "ring": (_ring, ring_rows),
    "decode": (_decode, decode_rows),
    "fp8": (_fp8, fp8_rows),
    "sparse": (_sparse, sparse_rows),
}


# ---- Rows.


@functools.lru_cache
def _session():
    """Return the columns that are the same for every row of a run."""
    git = ["git", "-C", str(DATA), "rev-parse", "--short", "HEAD"]
    commit = os.environ.get("FLASHATTN_COMMIT") or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return dict(
        gpu=torch.cuda.get_device_name(), n_gpus=1, date=time.strftime("%Y-%m-%d"), commit=commit,
        torch=torch.__version__, triton=importlib.metadata.version("triton"),
    )  # fmt: skip


def _row(cell, direction, metric, unit, percentiles, **params):
    sizes = ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim")
    shape = cell.shape
    params |= dict(window=shape.window) if shape.window else {}
    params |= dict(mask=shape.mask) if shape.mask else {}
    what = dict(suite=cell.suite, impl=cell.impl, direction=direction, dtype=shape.dtype, causal=shape.causal)
    what |= dict(zip(sizes, shape.sizes(), strict=True)) | dict(params=json.dumps(params, sort_keys=True))
    written = [int(value) if unit == "bytes" else f"{value:.6g}" for value in percentiles]
    return _session() | what | dict(metric=metric, unit=unit) | dict(zip(("p20", "p50", "p80"), written, strict=True))


def shape_of(row):
    """Return the Shape of a row of ``load_rows``."""
    sizes = (row[name] for name in ("batch", "heads", "heads_kv", "seqlen_k", "head_dim"))
    window = row["params"].get("window")
    mask = row["params"].get("mask", "")
    n_tokens = row["seqlen_q"] if row["seqlen_q"] != row["seqlen_k"] else None
    return Shape(*sizes, row["causal"], row["dtype"], tuple(window) if window else None, n_tokens, mask)


def write_table(path, columns, rows):
    """Write all rows into a sibling and give it the name of the file: whoever stops this finds one or the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sibling = path.with_suffix(".writing")
    with open(sibling, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(sibling, path)


# ---- The command.


def _report(cell, error, way=""):
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    print(f"  {cell.impl} {way}: {first_line}"[:200], flush=True)


def measure(cells, path, implementations=IMPLEMENTATIONS, resume=False):
    """Measure cells and write their rows into a CSV, each cell as soon as it is measured.

    Rows of other suites and implementations stay. With resume so do those of this commit, torch and triton, and their
    cells are not measured again. Returns the cells that were measured.
    """
    replaced = {(cell.suite, cell.impl) for cell in cells}
    same = {name: str(_session()[name]) for name in ("gpu", "commit", "torch", "triton")}
    rows, recorded = [], set()
    for row in read_table(path):
        if (row["suite"], row["impl"]) not in replaced:
            rows.append(row)
        elif resume and all(row[name] == value for name, value in same.items()):
            rows.append(row)
            typed = _typed(row)
            recorded.add(Cell(row["suite"], shape_of(typed), row["impl"], typed["params"].get("model", "")))
    print(f"{len(recorded.intersection(cells))} of {len(cells)} cells are recorded already")
    cells = [cell for cell in cells if cell not in recorded]
    begin = time.monotonic()
    for i, cell in enumerate(cells):
        left = f", about {(time.monotonic() - begin) / i * (len(cells) - i):.0f} s left" if i else ""
        print(f"{i + 1} of {len(cells)}{left}: {cell.suite} {cell.impl} {cell.shape} {cell.model}", flush=True)
        try:
            with backend(cell.impl):
                for row in SUITES[cell.suite][1](cell, implementations[cell.impl]):
                    print("  {direction} {metric} {p50} {unit} {params}".format(**row), flush=True)
                    rows.append(row)
        except Exception as error:  # one that fails, or does not know the shape, must not end a run of many
            _report(cell, error)
        write_table(path, COLUMNS, rows)
    return cells


def main(arguments=None):
    """Measure suites on this machine's GPU and replace their rows in its CSV."""
    parser = argparse.ArgumentParser(prog="python -m flashattn.bench", description=main.__doc__)
    parser.add_argument("--suite", choices=SUITES, action="append", help="one suite; may be repeated (default: all)")
    parser.add_argument("--impl", choices=IMPLEMENTATIONS, action="append", help="one implementation; may be repeated")
    parser.add_argument("--out", type=Path, default=DATA, help="folder of the CSV (default: the package's own data)")
    parser.add_argument("--resume", action="store_true", help="skip what this commit, torch and triton have recorded")
    parser.add_argument("--no-autotune", action="store_true", help="leave out flex's max-autotune (minutes) compile")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("flashattn.bench measures on a GPU, and there is none here")
    cells = [cell for suite in options.suite or SUITES for cell in suite_cells(suite, options.impl)]
    if fa3_module() is None:
        print("fa3 is left out: pip install fa3-fwd")
        cells = [cell for cell in cells if cell.impl not in ("fa3", "fa3_fp8")]
    if torch.cuda.device_count() < 2:
        print("suite ring is left out: it needs two GPUs")
        cells = [cell for cell in cells if cell.suite != "ring"]
    implementations = dict(IMPLEMENTATIONS)
    if options.no_autotune:
        implementations["flex"] = functools.partial(flex, ways=FLEX_WAYS[:1])
    path = options.out / f"{_session()['gpu'].lower().replace(' ', '_')}.csv"
    measure(cells, path, implementations, options.resume)
    print(f"{path} written")


if __name__ == "__main__":
    main()
