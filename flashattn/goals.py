"""What the kernels are meant to reach beside the others, held to the measurements that ``flashattn.bench`` recorded."""

import functools
import math
from typing import NamedTuple

from . import cost
from .bench import load_rows, shape_of


class Goal(NamedTuple):
    """One target and how far the recorded rows are: at least or at most ``limit``, in the worst of ``n_cells`` cells.

    measured is None where nothing was recorded; where names the worst cell.
    """

    rule: str
    limit: float
    at_least: bool
    measured: float | None
    where: str
    n_cells: int

    @property
    def reached(self):
        """Say whether it is reached, None where nothing was measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def _goal(rule, limit, values, *, at_least, mean=False):
    """Make a Goal of {shape: value}; with mean their geometric mean counts, and not the worst."""
    worst = (min if at_least else max)(values, key=values.get, default=None)
    measured = values.get(worst)
    if mean and values:
        measured = math.prod(values.values()) ** (1 / len(values))
    return Goal(rule, limit, at_least, measured, str(worst or ""), len(values))


def check_goals(gpu):
    """Hold the recorded rows of a GPU to what the kernels are meant to reach there.

    A speed is the time of the other implementation over that of flashattn; in a cell that only the other has it is 0.

    Args:
        gpu: as for :func:`flashattn.bench.load_rows`.

    Returns:
        A list of ``Goal``, each with rule, limit, at_least, measured, where, n_cells and reached.
    """
    rows = load_rows(gpu)
    values, speeds = functools.partial(_values, rows), functools.partial(_speeds, rows)
    goals = []
    for direction, flex_limit in (("forward", 1.05), ("backward", 1.10)):
        for peer, limit in (("flex", flex_limit), ("sdpa_flash", 1.3)):
            rule = f"core, {direction}: at least {limit:.2f} times as fast as {peer} in every cell"
            goals.append(_goal(rule, limit, speeds("core", direction, peer), at_least=True))
        rule = f"core, {direction}: at least 0.90 times as fast as sdpa_cudnn, geometric mean"
        goals.append(_goal(rule, 0.9, speeds("core", direction, "sdpa_cudnn"), at_least=True, mean=True))
    goals += _hopper_goals(speeds)
    for direction in ("forward", "backward"):
        rule = f"wide, {direction}: no cell slower than sdpa_flash"
        goals.append(_goal(rule, 1.0, speeds("wide", direction, "sdpa_flash"), at_least=True))
        times = values("wide", direction, "time")
        full = {shape: times.get(shape._replace(window=None)) for shape in times if shape.window}
        gains = {shape: time / times[shape] for shape, time in full.items() if time}
        rule = f"wide, {direction}: window 1024 at N = 16k at least 4 times as fast as full causal"
        goals.append(_goal(rule, 4.0, gains, at_least=True))
    for direction in ("forward", "forward_backward"):
        peaks = values("memory", direction, "peak_memory")
        off = {shape: abs(peak / _results_bytes(shape, direction) - 1) for shape, peak in peaks.items()}
        rule = f"memory, {direction}: within 0.02 of `cost.flash_peak_bytes` less the inputs"
        goals.append(_goal(rule, 0.02, off, at_least=False))
    for graph, limit in ((False, 1.5), (True, 1.0)):
        ratios = speeds("short", "forward_backward", "sdpa_flash", graph)
        times = {shape: 1 / ratio if ratio else math.inf for shape, ratio in ratios.items() if shape.seqlen == 128}
        where = "under a CUDA graph" if graph else "call by call"
        rule = f"short, N = 128, {where}: at most {limit:.1f} times the time of sdpa_flash"
        goals.append(_goal(rule, limit, times, at_least=False))
    for direction, limit in (("forward", 3.0), ("backward", 6.0)):
        rule = f"compile: first {direction} within {limit:.0f} s"
        goals.append(_goal(rule, limit, values("compile", direction, "first_call"), at_least=False))
    for metric, limit in (("time", 0.6), ("peak_memory", 0.75)):
        rule = f"ring, forward and backward: {metric} on 2 GPUs at most {limit} of that on 1"
        one, two = (values("ring", "forward_backward", metric, n_gpus=n) for n in (1, 2))
        shares = {shape: two[shape] / one[shape] for shape in one.keys() & two}
        goals.append(_goal(rule, limit, shares, at_least=False))
    goals += _decode_goals(speeds)
    times, plain = values("fp8", "forward", "time", "flashattn_fp8"), values("fp8", "forward", "time")
    gains = {
        shape: plain[shape] / time
        for shape, time in times.items()
        if shape in plain and (shape.seqlen, shape.head_dim) == (16384, 128)
    }
    rule = "fp8, forward: at least 1.25 times as fast as our bf16 at D = 128, N = 16k"
    goals.append(_goal(rule, 1.25, gains, at_least=True))
    goals += _errors_in_8_bits([row for row in rows if (row["suite"], row["metric"]) == ("fp8", "rel_err")])
    goals += _sparse_goals(rows)
    errors = values("decode", "forward", "rel_err")
    for suite, n_gpus in (("core", 1), ("wide", 1), ("short", 1), ("ring", 2), ("sparse", 1)):
        errors |= values(suite, "forward_backward", "rel_err", n_gpus=n_gpus)
    return [*goals, _goal("error within the budget in every timed cell", 1.0, errors, at_least=False)]


def _hopper_goals(speeds):
    """Return the goals of the kernels for Hopper, which by default run there."""
    goals = []
    for direction in ("forward", "backward"):
        found = speeds("core", direction, "sdpa_cudnn")
        rule = f"core, {direction}, on Hopper: at least 1.00 times as fast as sdpa_cudnn in every cell"
        goals.append(_goal(rule, 1.0, found, at_least=True))
    rule = "core, forward, on Hopper: at least 1.05 times as fast as sdpa_cudnn, geometric mean"
    goals.append(_goal(rule, 1.05, speeds("core", "forward", "sdpa_cudnn"), at_least=True, mean=True))
    found = {
        shape: speed
        for shape, speed in speeds("core", "forward", "fa3").items()
        if shape.head_dim == 128 and shape.seqlen >= 4096
    }
    rule = "core, forward, on Hopper: at least 0.95 times as fast as fa3 at D = 128, N >= 4k"
    goals.append(_goal(rule, 0.95, found, at_least=True))
    rule = "core, backward, repeatable (portable kernels): at least 0.90 times as fast as sdpa_cudnn in every cell"
    found = speeds("core", "backward", "sdpa_cudnn", ours="flashattn_portable")
    goals.append(_goal(rule, 0.9, found, at_least=True))
    for direction in ("forward", "backward"):
        rule = f"wide, {direction}: D = 96, 192, 256 and grouped heads at least 1.00 times as fast as sdpa_cudnn"
        found = {
            shape: speed
            for shape, speed in speeds("wide", direction, "sdpa_cudnn").items()
            if shape.head_dim in (96, 192, 256) or shape.heads != shape.heads_kv
        }
        goals.append(_goal(rule, 1.0, found, at_least=True))
    for graph, how in ((False, "call by call"), (True, "as a CUDA graph")):
        found = speeds("short", "forward_backward", "flashattn_portable", graph)
        goals.append(_goal(f"short, {how}: no cell slower than the portable kernels", 1.0, found, at_least=True))
    return goals


DECODE_PEERS = ("flex", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")


def _decode_goals(speeds):
    """Return the goals of suite decode, call by call, with the host's time where it shows, and as a CUDA graph."""
    goals = []
    for graph, how in ((False, "call by call"), (True, "as a CUDA graph")):
        shares = speeds("decode", "forward", "read", graph)
        for batch, seqlen, limit in ((64, 8192, 0.8), (1, 65536, 0.6)):
            rule = (
                f"decode, batch {batch}, {seqlen} keys, {how}: at least {limit} of the speed of a plain read of K and V"
            )
            found = {shape: x for shape, x in shares.items() if (shape.batch, shape.seqlen) == (batch, seqlen)}
            goals.append(_goal(rule, limit, found, at_least=True))
        fastest = {}
        for peer in DECODE_PEERS:
            for shape, speed in speeds("decode", "forward", peer, graph).items():
                fastest[shape] = min(speed, fastest.get(shape, math.inf))
        times = {shape: 1 / speed if speed else math.inf for shape, speed in fastest.items()}
        rule = f"decode, {how}: at most 1.05 times the time of the fastest other in every cell"
        goals.append(_goal(rule, 1.05, times, at_least=False))
    return goals


def _errors_in_8_bits(rows):
    """Return two goals: the error within that suite's own budget, and stated for three kinds of inputs."""
    rows = [row for row in rows if row["impl"] == "flashattn_fp8"]
    ratios = {shape_of(row): row["p50"] for row in rows if row["unit"] == "budgets"}
    rule = "fp8, forward: error at most twice that of the same roundings in PyTorch, in every timed cell"
    kinds = {row["params"]["inputs"] for row in rows if row["unit"] == "relative"}
    stated = Goal(
        "fp8, forward: error relative to the truth stated for 3 kinds of inputs", 3.0, True,
        float(len(kinds)) if rows else None, ", ".join(sorted(kinds)), len(kinds),
    )  # fmt: skip
    return [_goal(rule, 1.0, ratios, at_least=False), stated]


def _sparse_goals(rows):
    """Return what suite "sparse" is held to: FlexAttention under the same mask, and dense attention by tiles."""
    goals = []
    density = {shape_of(row): row["params"].get("density") for row in rows if row["suite"] == "sparse"}
    for direction in ("forward", "backward"):
        speeds = _speeds(rows, "sparse", direction, "flex")
        rule = f"sparse, {direction}: window and documents at least 1.00 times as fast as flex with the same block mask"
        goals.append(_goal(rule, 1.0, {s: x for s, x in speeds.items() if "blocks" not in s.mask}, at_least=True))
        times = _values(rows, "sparse", direction, "time")
        shares = {
            shape: time / (density[shape] * times[shape._replace(mask="")])
            for shape, time in times.items()
            if shape.mask and shape._replace(mask="") in times
        }
        rule = f"sparse, {direction}: at most 1.15 times the dense time, full, by the share of tiles computed"
        goals.append(_goal(rule, 1.15, shares, at_least=False))
    return goals


def _values(rows, suite, direction, metric, impl="flashattn", graph=None, n_gpus=1):
    """Return the medians of one metric, {shape: p50}."""
    wanted = dict(suite=suite, direction=direction, metric=metric, impl=impl, n_gpus=n_gpus)
    found = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return {shape_of(row): row["p50"] for row in found if row["params"].get("graph") == graph}


def _speeds(rows, suite, direction, peer, graph=None, ours="flashattn"):
    ours = _values(rows, suite, direction, "time", ours, graph)
    theirs = _values(rows, suite, direction, "time", peer, graph)
    return {shape: theirs[shape] / ours.get(shape, math.inf) for shape in theirs} if ours else {}


def _results_bytes(shape, direction):
    """Return the peak bytes beyond q, k, v and (with a backward pass) do, by ``cost.flash_peak_bytes``."""
    dtype_bytes = cost.DTYPE_BYTES[shape.dtype]
    backward = direction == "forward_backward"
    q_bytes, k_bytes = (
        dtype_bytes * shape.batch * heads * shape.seqlen * shape.head_dim for heads in (shape.heads, shape.heads_kv)
    )
    inputs = q_bytes * (2 if backward else 1) + 2 * k_bytes
    return cost.flash_peak_bytes(*shape.sizes(), dtype_bytes, backward=backward) - inputs
