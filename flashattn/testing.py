"""Cases, inputs and the error budget: what "right" means for every implementation in this package.

The truth is attention in fp64. No fixed tolerance separates rounding from a bug (chapter 3 shows one that 1e-2 lets
through), so the yardstick is the error that plain PyTorch makes on the same inputs in the same dtype: an
implementation may err ``FACTOR`` times as much, plus one rounding of the largest value. ``flashattn.fuzz`` draws cases.
"""

import importlib.metadata
import importlib.util
import itertools
import math
import os
import platform
import subprocess
import time
from typing import NamedTuple

import torch

from .reference import attention_reference

FACTOR = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
UNUSED_ROWS = 5  # rows of NaN behind the last packed sequence
# How q, k, v and do lie in memory, by the names of ``place``.
MIXED = ("heads", "wide", "columns", "every second")


class Case(NamedTuple):
    """One set of inputs, and the options of the call.

    seqlen_q, seqlen_k: a length, or a tuple with the length of each sequence: those are packed, and batch is not used.
    family: "gaussian"; "low" for scores near -8, where an unmasked zero score stands out; "large" for scores near 100,
    whose exponentials overflow where the maximum is not subtracted.
    head_dim_v: None for head_dim.
    """

    seqlen_q: int | tuple[int, ...]
    seqlen_k: int | tuple[int, ...]
    head_dim: int
    dtype: str = "fp16"
    causal: bool = False
    heads: int = 4
    heads_kv: int = 2
    batch: int = 2
    scale: float | None = None
    family: str = "gaussian"
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    head_dim_v: int | None = None

    @property
    def id(self):
        """Name the case by its sizes and by what differs from the defaults."""
        sizes = ("+".join(map(str, x)) if self.packed else x for x in (self.seqlen_q, self.seqlen_k))
        head_dims = dict.fromkeys((self.head_dim, self.head_dim_v or self.head_dim))
        parts = [self.dtype, "D" + "/".join(map(str, head_dims)), "{}x{}".format(*sizes)]
        parts += [f"h{self.heads}/{self.heads_kv}"]
        parts += ["packed"] if self.packed else []
        parts += ["causal"] if self.causal else []
        parts += ["window{}:{}".format(*("" if x is None else x for x in self.window))] if self.window else []
        parts += [] if self.scale is None else [f"scale{self.scale:g}"]
        parts += [] if self.softcap is None else [f"softcap{self.softcap:g}"]
        return "-".join(parts + ([] if self.family == "gaussian" else [self.family]))

    @property
    def packed(self):
        """Say whether the case is one of packed sequences, for flash_attention_varlen and ``packed_reference``."""
        return isinstance(self.seqlen_q, tuple)

    @property
    def options(self):
        """Return the keyword arguments of the call; window and softcap only where there are any."""
        rest = {name: value for name in ("window", "softcap") if (value := getattr(self, name)) is not None}
        return dict(causal=self.causal, scale=self.scale) | rest

    def offsets(self, device="cpu", dtype=torch.int32):
        """Return the keyword arguments cu_seqlens_q and cu_seqlens_k of a packed case, none of another."""
        if not self.packed:
            return {}
        lengths = dict(cu_seqlens_q=self.seqlen_q, cu_seqlens_k=self.seqlen_k)
        return {
            name: torch.tensor([0, *itertools.accumulate(x)], dtype=dtype, device=device) for name, x in lengths.items()
        }


class Inputs(NamedTuple):
    """Tensors of a case: do and dlse are the gradients that arrive at out and lse, one of them None for none."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor | None
    dlse: torch.Tensor | None


def place(values, layout, dtype, row_multiple=1):
    """Copy values, (batch, heads, rows, columns), into a new buffer that holds NaN elsewhere; return that view of it.

    "rows" is the order of the values; in "heads" the heads of one row lie next to each other; "wide" has 8 more columns
    behind each row's end; in "columns" the rows lie along the last axis; "every second" leaves every second row out;
    "unaligned" begins one element into the buffer. The buffer has room for a multiple of row_multiple rows: with 16 no
    stride's divisibility by 16, for which kernels are compiled anew, depends on the number of rows.
    """
    b, h, n, d = values.shape
    room = n if row_multiple == 1 else max(1, math.ceil(n / row_multiple)) * row_multiple
    shape, view = {
        "rows": ((b, h, room, d), lambda x: x),
        "heads": ((b, room, h, d), lambda x: x.transpose(1, 2)),
        "wide": ((b, h, room, d + 8), lambda x: x[..., :d]),
        "columns": ((b, h, d, room), lambda x: x.mT),
        "every second": ((b, h, 2 * room, d), lambda x: x[:, :, ::2]),
        "unaligned": ((b * h * room * d + 1,), lambda x: x[1:].view(b, h, room, d)),
    }[layout]
    placed = view(torch.full(shape, math.nan, dtype=dtype, device=values.device))[:, :, :n]
    placed.copy_(values)
    return placed


def make_inputs(case, device="cpu", seed=0, layouts=MIXED, row_multiple=1):
    """Draw the inputs of a case, the four large ones in four different memory layouts.

    Packed sequences lie behind each other in tensors (rows, heads, head_dim), with UNUSED_ROWS rows of NaN behind them.

    Args:
        case: a :class:`Case`.
        device, seed: where the inputs go, and what they are drawn from (on the CPU, the same on every machine).
        layouts: of q, k, v and do; see ``place`` in flashattn/testing.py.
        row_multiple: likewise.

    Returns:
        :class:`Inputs`.
    """
    generator = torch.Generator().manual_seed(seed)
    b, h, n, m = case.batch, case.heads, case.seqlen_q, case.seqlen_k
    d, d_v = case.head_dim, case.head_dim_v or case.head_dim
    if case.packed:
        b, n, m = 1, sum(n) + UNUSED_ROWS, sum(m) + UNUSED_ROWS

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    q, k, v = draw(b, h, n, d), draw(b, case.heads_kv, m, d), draw(b, case.heads_kv, m, d_v)
    do, dlse = draw(b, h, n, d_v), draw(b, h, n)
    if case.family == "low":
        # q near 1 and k near -1: scores near -sqrt(head_dim), made -8 whatever head_dim is.
        shift = math.sqrt(8 / math.sqrt(d))
        q, k = q * 0.5 + shift, k * 0.5 - shift
    elif case.family == "large":
        shift = math.sqrt(100 / math.sqrt(d))
        q, k = q * 0.5 + shift, k * 0.5 + shift
    if case.packed:
        for x in (q, k, v, do, dlse):
            x[:, :, -UNUSED_ROWS:] = math.nan
    large = [
        place(x, layout, DTYPES[case.dtype], row_multiple) for x, layout in zip((q, k, v, do), layouts, strict=True)
    ]
    if case.packed:
        return Inputs(*(x[0].transpose(0, 1) for x in large), dlse[0])
    return Inputs(*large, dlse)


def packed_reference(q, k, v, *, cu_seqlens_q, cu_seqlens_k, **kwargs):
    """Apply the reference to each packed sequence on its own. Arguments and results: ``flash_attention_varlen``."""
    outs, lses = [], []
    offsets = (itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
    for (begin_q, end_q), (begin_k, end_k) in zip(*offsets, strict=True):
        rows = (q[begin_q:end_q], k[begin_k:end_k], v[begin_k:end_k])
        out, lse = attention_reference(*(x.transpose(0, 1)[None] for x in rows), **kwargs)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    unused = len(q) - int(cu_seqlens_q[-1])
    outs.append(v.new_zeros(unused, q.shape[1], v.shape[2]))
    lses.append(torch.full_like(outs[-1][..., 0].T, -math.inf, dtype=torch.promote_types(q.dtype, torch.float32)))
    return torch.cat(outs), torch.cat(lses, dim=1)


def run(attention, inputs, dtype=None, **kwargs):
    """Call an implementation and return a dict of out, lse, dq, dk, dv. dtype converts the inputs first."""
    # detach() keeps a tensor's strides; to() does not, and need not.
    q, k, v, do, dlse = (x if x is None or dtype is None else x.to(dtype) for x in inputs)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, **kwargs)
    arriving = [(x, gradient.to(x.dtype)) for x, gradient in ((out, do), (lse, dlse)) if gradient is not None]
    results, gradients = zip(*arriving, strict=True)
    dq, dk, dv = torch.autograd.grad(results, (q, k, v), gradients, materialize_grads=True)
    return dict(out=out.detach(), lse=lse.detach(), dq=dq, dk=dk, dv=dv)


def max_error(actual, truth):
    """Return the largest absolute difference; infinite where one side is not finite and the other differs."""
    actual, truth = actual.double(), truth.double()
    same = (actual == truth) | (actual.isnan() & truth.isnan())
    difference = (actual - truth).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0)
    return difference.max().item() if difference.numel() else 0.0


def error_budget(inputs, reference=attention_reference, **kwargs):
    """Return what a call should give and how far off it may be.

    Args:
        inputs: :class:`Inputs`.
        reference: ``attention_reference``, ``packed_reference``, or something made of one of them.
        kwargs: causal, scale, …, passed to it.

    Returns:
        ``(truth, budget)``, dicts from "out", "lse", "dq", "dk" and "dv": the results in fp64, and the largest absolute
        error allowed, which is ``FACTOR`` times that of the reference in the dtype of the inputs, plus eps times the
        largest result. Where the reference in that dtype is not finite, it counts in fp32, rounded to the dtype.
    """
    truth = run(reference, inputs, torch.float64, **kwargs)
    eager = run(reference, inputs, **kwargs)
    if not all(eager[name].isfinite().all() for name in eager if name != "lse"):
        wide = run(reference, inputs, torch.float32, **kwargs)
        eager = {name: wide[name].to(eager[name].dtype) for name in eager}
    budget = {}
    for name, expected in truth.items():
        size = expected.masked_fill(expected.isinf(), 0).abs().max().item() if expected.numel() else 0.0
        eps = torch.finfo(eager[name].dtype).eps
        budget[name] = FACTOR[name] * max_error(eager[name], expected) + eps * size
    return truth, budget


def largest_budget(draws, reference=attention_reference, **kwargs):
    """Return (truth, budget) as ``error_budget`` does: the truth of the first draw, the largest budget of all.

    On two rows and three keys eager's error in one draw is a matter of luck: between draws it varies by 2 and more.
    """
    first, *others = draws
    truth, budget = error_budget(first, reference, **kwargs)
    for inputs in others:
        _, other = error_budget(inputs, reference, **kwargs)
        budget = {name: max(budget[name], other[name]) for name in budget}
    return truth, budget


def budget_ratios(results, inputs, truth, budget):
    """Return each result's error as a multiple of its budget; at most 1 is within it.

    It is infinite where the truth is finite and the result is not, and where something other than 0 stands in the row
    of a query that sees no key or of a key that no query sees.

    Args:
        results: what ``run`` returned for the implementation.
        inputs: what it was run on.
        truth, budget: what ``error_budget`` returned for them.
    """
    q = inputs.q
    dtypes = dict(out=q.dtype, lse=torch.promote_types(q.dtype, torch.float32), dq=q.dtype, dk=q.dtype, dv=q.dtype)
    empty = {name: (truth[name] == 0).all(dim=-1) for name in ("out", "dq", "dk", "dv")}
    empty |= dict.fromkeys(("out", "dq"), empty["out"] & empty["dq"])
    empty |= dict.fromkeys(("dk", "dv"), empty["dk"] & empty["dv"])
    ratios = {}
    for name, expected in truth.items():
        actual = results[name]
        if actual.shape != expected.shape or actual.dtype != dtypes[name]:
            raise AssertionError(
                f"{name} is {tuple(actual.shape)} {actual.dtype}, must be {tuple(expected.shape)} {dtypes[name]}"
            )
        error = max_error(actual, expected)
        ratios[name] = error / budget[name] if budget[name] else (0.0 if error == 0 else math.inf)
        if name in empty and actual[empty[name]].count_nonzero():
            ratios[name] = math.inf
    return ratios


def error_ratios(attention, inputs, reference=attention_reference, **kwargs):
    """Measure an implementation against the budget.

    Args:
        attention: a function like ``attention_reference`` that returns (out, lse).
        inputs: :class:`Inputs`.
        reference: what it is held to.
        kwargs: causal, scale, … for both sides.

    Returns:
        A dict from "out", "lse", "dq", "dk" and "dv" to the error as a multiple of the budget. At most 1 is within it;
        where the truth is finite and the result is not, it is infinite, and so it is where something other than 0
        stands in the row of a query that sees no key or of a key that no query sees.
    """
    truth, budget = error_budget(inputs, reference, **kwargs)
    return budget_ratios(run(attention, inputs, **kwargs), inputs, truth, budget)


def assert_within_budget(attention, case, device="cpu", seed=0, n_yardsticks=1, **kwargs):
    """Raise AssertionError unless every result of a case is within the budget; return the ratios.

    attention is called with the options of the case, and if it is packed with cu_seqlens_q and cu_seqlens_k too. The
    budget is the largest that n_yardsticks draws of the case give.
    """
    reference = packed_reference if case.packed else attention_reference
    options = case.options | case.offsets(device) | kwargs
    inputs = make_inputs(case, device, seed)
    others = (make_inputs(case, device, seed + i) for i in range(1, n_yardsticks))
    truth, budget = largest_budget((inputs, *others), reference, **options)
    ratios = budget_ratios(run(attention, inputs, **options), inputs, truth, budget)
    over = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
    if over:
        raise AssertionError(f"{case.id}: error over budget, as a multiple of it: {over}")
    return ratios


def machine_facts():
    """Return where and with what the tests ran."""
    gpu = torch.cuda.is_available()
    return dict(
        date=time.strftime("%Y-%m-%d"),
        commit=os.environ.get("FLASHATTN_COMMIT") or _first_line("git", "rev-parse", "HEAD"),
        gpu=torch.cuda.get_device_name() if gpu else None,
        driver=_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        processor=platform.machine(),
    )


def _first_line(*command):
    try:
        printed = subprocess.run(command, capture_output=True, text=True, cwd=os.path.dirname(__file__)).stdout
    except OSError:  # no such program
        return None
    return printed.strip().split("\n")[0] or None


def draw_outliers(batch, heads, seqlen, head_dim, device="cpu", seed=0, n_channels=2, factor=6.0):
    """Draw fp32 q, k and v, (batch, heads, seqlen, head_dim), as 8-bit attention is tried on.

    All are Gaussian, but in each head n_channels of the head_dim channels are factor times as large in q and in k: the
    same ones in both, as in language models, where the largest scores are made of them. 0 channels: plain Gaussian.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, seqlen, head_dim, generator=generator) for _ in range(3))
    for head in range(heads):
        channels = torch.randperm(head_dim, generator=generator)[:n_channels]
        for x in (q, k):
            x[:, head, :, channels] *= factor
    return q.to(device), k.to(device), v.to(device)


def relative_errors(actual, truth):
    """Return (rms, max): the error's root mean square and its largest size, each over that of the truth."""
    actual, truth = actual.double(), truth.double()
    error = actual - truth
    rms = (error.square().mean() / truth.square().mean()).sqrt().item()
    return rms, (error.abs().max() / truth.abs().max()).item()
