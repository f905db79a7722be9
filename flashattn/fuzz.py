"""Draw cases at random from everything the public calls accept, and hold the kernels to the error budget on each.

``python -m flashattn.fuzz --cases 2000`` runs on a GPU, or without one in Triton's interpreter on short sequences. What
is compiled into the kernels comes from a fixed menu, since compiling is what takes time; the rest is drawn freely.
"""

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import random
import sys
import time
import warnings
from typing import NamedTuple

import torch

from .api import flash_attention, flash_attention_varlen
from .reference import attention_reference
from .testing import (
    MIXED,
    Case,
    budget_ratios,
    largest_budget,
    machine_facts,
    make_inputs,
    packed_reference,
    run,
)

RESULTS = ("out", "lse", "dq", "dk", "dv")
LAYOUTS = {"rows": ("rows",) * 4, "heads": ("heads",) * 4, "unaligned": ("unaligned",) * 4, "mixed": MIXED}
ROW_MULTIPLE = 16  # see ``place`` in testing.py
SCORES = {"gaussian": 1, "low": 8, "large": 100}  # about how large each family's scores are at the default scale
FAR = 10**9
N_YARDSTICKS = 4  # draws of a case that the budget is the largest of


class Variant(NamedTuple):
    """What the kernels of a case are compiled for.

    sides: the bounds of the window that exist: "", "left", "right" (a causal mask is one) or "both".
    packed: "" for a batch, or the dtype of the offsets of packed sequences.
    through: the results that gradients arrive at: "both", "out" or "lse".
    layout: of the inputs in memory, a key of LAYOUTS.
    """

    head_dim: int
    head_dim_v: int
    dtype: str
    layout: str
    sides: str = ""
    softcap: bool = False
    packed: str = ""
    through: str = "both"


# Where a head_dim is no multiple of 16, the heads lie next to each other and their number is even: then the strides of
# the results, which the kernels' callers choose, fall into few classes too.
MENU = (
    Variant(64, 64, "fp16", "rows"),
    Variant(64, 64, "bf16", "heads", "right"),
    Variant(64, 64, "fp32", "mixed"),
    Variant(64, 64, "fp16", "heads", "right", packed="int32"),
    Variant(64, 64, "bf16", "mixed", "both", softcap=True),
    Variant(64, 64, "fp32", "heads", "right", packed="int64"),
    Variant(64, 64, "fp16", "unaligned", "right", through="out"),
    Variant(128, 128, "bf16", "heads", through="out"),
    Variant(128, 128, "fp16", "mixed", "right"),
    Variant(128, 128, "bf16", "rows", "left", softcap=True),
    Variant(128, 128, "fp16", "heads", "both", softcap=True, packed="int32"),
    Variant(128, 128, "fp32", "rows", "right", through="out"),
    Variant(128, 128, "bf16", "unaligned", packed="int32"),
    Variant(16, 16, "fp16", "mixed", "right"),
    Variant(16, 16, "fp32", "heads", "both", softcap=True, packed="int64"),
    Variant(40, 40, "bf16", "heads", "right"),
    Variant(40, 40, "fp16", "heads", packed="int64", through="out"),
    Variant(80, 80, "fp16", "mixed", "left"),
    Variant(80, 80, "fp32", "heads", softcap=True),
    Variant(96, 96, "bf16", "rows", "both", through="lse"),
    Variant(96, 96, "fp16", "mixed", "right", softcap=True, packed="int32"),
    Variant(192, 128, "bf16", "heads", "right"),
    Variant(192, 128, "fp16", "mixed", packed="int32"),
    Variant(192, 128, "fp32", "rows", "left"),
    Variant(64, 256, "bf16", "rows", "right"),
    Variant(256, 256, "bf16", "rows", packed="int32"),
    Variant(256, 256, "fp16", "mixed", "right", softcap=True),
    Variant(256, 256, "fp32", "heads", "both", through="out"),
    Variant(33, 7, "fp16", "heads", "both"),
    Variant(1, 3, "fp32", "heads", "left"),
)


def draw_length(rng, longest):
    """Draw a length: often 0, 1, or the edge of a block and its neighbours."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice((0, 1, 1))
    if kind < 0.5:
        block = rng.choice((16, 32, 64, 128))
        return min(longest, block * rng.randint(1, max(1, longest // block)) + rng.choice((-1, 0, 1)))
    return rng.randint(2, rng.choice((longest, max(2, longest // 8))))


def draw_lengths(rng, longest):
    """Draw (seqlen_q, seqlen_k)."""
    seqlen_q = draw_length(rng, longest)
    return seqlen_q, seqlen_q if rng.random() < 0.25 else draw_length(rng, longest)


def draw_case(seed, index, longest):
    """Draw case number index of a seed: what is compiled from the menu in turn, everything else at random."""
    variant, rng = MENU[index % len(MENU)], random.Random(f"{seed}/{index}")
    if variant.packed:
        pairs = [draw_lengths(rng, longest // 2) for _ in range(rng.randint(1, 5))]
        seqlen_q, seqlen_k = zip(*pairs, strict=True)
    else:
        seqlen_q, seqlen_k = draw_lengths(rng, longest)
    only_even = variant.head_dim % 16 or variant.head_dim_v % 16
    heads_kv = rng.choice((2, 4) if only_even else (1, 2, 3))

    def draw_side():
        return rng.choice((0, 1, rng.randint(0, longest), rng.randint(0, max(1, longest // 8)), FAR))

    left = draw_side() if variant.sides in ("left", "both") else None
    right = draw_side() if variant.sides in ("right", "both") else None
    causal = right is not None and rng.random() < 0.5  # causal hides what stands right of the query, whatever right is
    if causal and rng.random() < 0.5:
        right = None
    factor = rng.choice((None, None, None, 0.0, rng.uniform(-2, 2)))
    family = rng.choice(tuple(SCORES))
    # A cap far below the scores leaves of their gradient what fp32 loses in 1 - tanh^2, in eager attention too.
    cap = SCORES[family] * max(1, abs(factor or 1)) * math.exp(rng.uniform(-0.5, 3))
    return variant, Case(
        seqlen_q, seqlen_k, variant.head_dim, variant.dtype, causal,
        heads=heads_kv * rng.choice((1, 1, 2, 3)), heads_kv=heads_kv, batch=rng.randint(1, 3),
        scale=None if factor is None else factor / math.sqrt(variant.head_dim), family=family,
        window=None if left is None and right is None else (left, right),
        softcap=cap if variant.softcap else None, head_dim_v=variant.head_dim_v,
    )  # fmt: skip


def kernels(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, **options):
    """Call what fits: flash_attention, or flash_attention_varlen where there are offsets."""
    if cu_seqlens_q is None:
        return flash_attention(q, k, v, return_lse=True, **options)
    return flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **options)


def draw_inputs(variant, case, seed, device):
    """Draw the inputs of a case; the gradient of a result that none arrives at is None."""
    inputs = make_inputs(case, device, seed, LAYOUTS[variant.layout], ROW_MULTIPLE)
    left_out = dict(out="dlse", lse="do").get(variant.through)
    return inputs if left_out is None else inputs._replace(**{left_out: None})


def check(variant, case, index, device):
    """Run one case on the device; return its ratios and the list of what is wrong, empty if nothing is."""
    options = case.options | (case.offsets(device, getattr(torch, variant.packed)) if case.packed else {})
    reference = packed_reference if case.packed else attention_reference
    inputs = draw_inputs(variant, case, index, device)
    others = (draw_inputs(variant, case, index + i * FAR, device) for i in range(1, N_YARDSTICKS))
    truth, budget = largest_budget((inputs, *others), reference, **options)
    results = run(kernels, inputs, **options)
    ratios = budget_ratios(results, inputs, truth, budget)
    wrong = [f"{name} is off by {ratio:.3g} times its budget" for name, ratio in ratios.items() if not ratio <= 1]
    if device.type == "cuda":  # the interpreter runs one program after the other: it would repeat any race
        again = run(kernels, inputs, **options)
        wrong += [f"{name} differs on a second run" for name, x in results.items() if not torch.equal(x, again[name])]
    return ratios, wrong


def check_all(seed, indices, longest):
    """Check cases that have their place on the menu in common, in a process of its own; return what there is to say."""
    device = set_up()
    start, worst, failures = time.perf_counter(), dict.fromkeys(RESULTS, 0.0), []
    for index in indices:
        variant, case = draw_case(seed, index, longest)
        try:
            ratios, wrong = check(variant, case, index, device)
        except Exception as error:
            # After a fault on the GPU nothing in this process would run: name the case and let everything stop.
            raise RuntimeError(f"{describe(seed, index, longest)}: {type(error).__name__}: {error}") from error
        worst = {name: max(worst[name], float(f"{ratio:.3g}")) for name, ratio in ratios.items()}
        failures += [f"{describe(seed, index, longest)}: {', '.join(wrong)}"] if wrong else []
    return dict(cases=len(indices), seconds=round(time.perf_counter() - start, 1), worst=worst, failures=failures)


def describe(seed, index, longest):
    """Name a case and say how to run it again."""
    variant, case = draw_case(seed, index, longest)
    rest = f"batch {case.batch}, layout {variant.layout}, gradient through {variant.through}"
    return f"{case.id} ({rest}; --seed {seed} --longest {longest} --case {index})"


def set_up():
    """Fill memory that is handed out with NaN, keep NumPy quiet in the interpreter, and return the device."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parse(arguments):
    """Read the command line."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m flashattn.fuzz", description=main.__doc__)
    parser.add_argument("--cases", type=int, default=200, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (%(default)s)")
    parser.add_argument("--longest", type=int, default=600 if gpu else 100, help="longest sequence (%(default)s)")
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--jobs", type=int, default=min(n_cores, 8 if gpu else 2), help="processes (%(default)s)")
    parser.add_argument("--case", type=int, metavar="INDEX", help="run this one case of the seed alone")
    parser.add_argument("--out", metavar="FILE", help="write what was found as JSON")
    return parser.parse_args(arguments)


def runs_here(variant):
    """Say whether this machine has the dtype: a GPU before compute capability 8.0 has no bf16."""
    old = torch.cuda.is_available() and torch.version.cuda and torch.cuda.get_device_capability()[0] < 8
    return variant.dtype != "bf16" or not old


def fuzz(seed, n_cases, longest, jobs):
    """Check n_cases cases, those of one place on the menu in one process; return the facts about the run."""
    start = time.perf_counter()
    places = [place for place in range(min(n_cases, len(MENU))) if runs_here(MENU[place])]
    places.sort(key=lambda place: MENU[place].head_dim + MENU[place].head_dim_v, reverse=True)  # long ones begin first
    menu, failures, n_done = {}, [], 0
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(check_all, seed, range(place, n_cases, len(MENU)), longest): place for place in places}
        try:
            for future in concurrent.futures.as_completed(futures):
                place, found = futures[future], future.result()
                menu[place] = MENU[place]._asdict() | found
                failures += found["failures"]
                n_done += found["cases"]
                print(
                    f"{n_done} of {n_cases} cases, {len(failures)} failed", *found["failures"], sep="\n  ", flush=True
                )
        except Exception as error:
            pool.shutdown(wait=False, cancel_futures=True)
            failures.append(str(error))
            print(f"Stopped: {error}", flush=True)
    worst = {}
    for entry in menu.values():
        of_dtype = worst.setdefault(entry["dtype"], dict.fromkeys(RESULTS, 0.0))
        of_dtype.update((name, max(of_dtype[name], ratio)) for name, ratio in entry["worst"].items())
    return dict(
        cases=n_done, seed=seed, longest=longest, jobs=jobs, seconds=round(time.perf_counter() - start, 1),
        failures=failures, worst=dict(sorted(worst.items())), menu=[menu[place] for place in sorted(menu)],
    )  # fmt: skip


def main(arguments=None):
    """Hold the kernels to the error budget on cases drawn at random; the exit status is 1 if one of them is not."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from . import notebook  # noqa: F401  here: it says what kernels run on, and sets what all the processes inherit

    options = parse(arguments)
    if options.case is not None:
        ratios, wrong = check(*draw_case(options.seed, options.case, options.longest), options.case, set_up())
        print(describe(options.seed, options.case, options.longest), ratios, *wrong, sep="\n  ")
        return bool(wrong)
    found = fuzz(options.seed, options.cases, options.longest, options.jobs)
    print(
        f"{found['cases']} cases in {found['seconds']} s, {len(found['failures'])} failed. Worst share of the budget:"
    )
    for dtype, worst in found["worst"].items():
        print(f"  {dtype}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in worst.items()))
    if options.out:
        with open(options.out, "w") as file:
            file.write(json.dumps(machine_facts() | found, indent=1) + "\n")
    return bool(found["failures"])


if __name__ == "__main__":
    sys.exit(main())
