"""Train a small GPT with each implementation of attention: ``python -m flashattn.train`` writes data/training.csv.

Same weights and batches for all, so that only rounding tells them apart. How far apart two runs may be was settled
before any was made, with PyTorch's own implementations as the yardstick: the curve of flashattn may be at most BAND
times as far from eager's as the farthest of theirs is. One more eager run, from another seed, shows how far apart
two good runs are that do differ.
"""

import argparse
import gc
import statistics
from pathlib import Path

import torch

from .bench import DATA, read_table, write_table
from .gpt import train
from .testing import machine_facts

RECORDED = dict(layers=6, width=384, heads=6, batch=8, seqlen=2048, steps=300)
LAPTOP = dict(layers=2, width=64, heads=1, batch=2, seqlen=64, steps=30, learning_rate=3e-3, warmup=5)
IMPLS = ("eager", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flashattn")
SEED, OTHER_SEED = 0, 1
TEST_EVERY = 50
MEAN_OF = 5  # steps, for each recorded loss
WARM_UP = 10  # steps that do not count for the speed: the first ones compile
BAND = 2.0
COLUMNS = (
    "gpu date commit torch triton layers width heads batch seqlen dtype impl seed step metric unit value"
).split()
_NUMBERS = {"layers", "width", "heads", "batch", "seqlen", "seed", "step"}


def load_training(**wanted):
    """Return the recorded training runs as dicts, one value each; empty where nothing was recorded.

    Args:
        wanted: keep only rows whose columns equal these values, as in ``metric="loss", impl="flashattn"``.

    Returns:
        A list of dicts with the keys of COLUMNS. step is how many steps were done. metric is "loss" (the mean of the
        last MEAN_OF steps) or "test_loss" (on text that is not trained on), both in nats a token, "peak_memory" in
        bytes, or "throughput" in tokens/s (the median step after the first WARM_UP).
    """
    rows = [
        row | {name: int(row[name]) for name in _NUMBERS} | dict(value=float(row["value"]))
        for row in read_table(DATA / "training.csv")
    ]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def loss_curves(rows, metric="loss"):
    """Return {(impl, seed): {step: loss}} of the rows of ``load_training``."""
    curves = {}
    for row in rows:
        if row["metric"] == metric:
            curves.setdefault((row["impl"], row["seed"]), {})[row["step"]] = row["value"]
    return curves


def mean_losses(losses, mean_of=MEAN_OF):
    """Return {steps done: the mean of the last few losses} of a list of losses, one a step."""
    ends = range(mean_of, len(losses) + 1, mean_of)
    return {end: statistics.fmean(losses[end - mean_of : end]) for end in ends}


def curve_distance(curve, other):
    """Return the largest difference of two curves {step: loss} over the steps of the first, in nats."""
    return max(abs(loss - other[step]) for step, loss in curve.items())


def check_band(curves):
    """Hold flashattn's curve to the band.

    Args:
        curves: as ``loss_curves`` returns them, with eager, one sdpa_* or more, and flashattn from SEED.

    Returns:
        ``(distance, limit)`` in nats: of flashattn's curve from eager's, and BAND times the farthest sdpa_* curve's.
    """
    far = {impl: curve_distance(curve, curves["eager", SEED]) for (impl, seed), curve in curves.items() if seed == SEED}
    return far["flashattn"], BAND * max(distance for impl, distance in far.items() if impl.startswith("sdpa"))


def training_rows(impl, seed, run, facts, sizes, dtype):
    """Return the rows of one ``gpt.Run``."""
    steps = len(run.losses)
    tokens = sizes["batch"] * sizes["seqlen"]
    values = [(step, "loss", "nats", loss) for step, loss in mean_losses(run.losses).items()]
    values += [(step, "test_loss", "nats", loss) for step, loss in run.test_losses.items()]
    values.append((steps, "peak_memory", "bytes", run.peak_bytes))
    values.append((steps, "throughput", "tokens/s", tokens / statistics.median(run.steps_s[WARM_UP:] or run.steps_s)))
    what = {name: facts[name] for name in ("gpu", "date", "torch", "triton")}
    what |= {name: sizes[name] for name in ("layers", "width", "heads", "batch", "seqlen")}
    what |= dict(commit=(facts["commit"] or "")[:12], dtype=dtype, impl=impl, seed=seed)
    return [
        what | dict(step=step, metric=metric, unit=unit, value=f"{value:.7g}") for step, metric, unit, value in values
    ]


def record(path, device, sizes, dtype=None, impls=IMPLS, test_every=TEST_EVERY):
    """Train with each implementation, and with eager from another seed, and write the rows to path after each run."""
    facts, rows = machine_facts(), []
    dtype_name = {None: "fp32", torch.bfloat16: "bf16"}[dtype]
    for impl, seed in [*((impl, SEED) for impl in impls), ("eager", OTHER_SEED)]:
        try:
            run = train(impl, seed=seed, device=device, dtype=dtype, test_every=test_every, **sizes)
        except Exception as error:  # one that fails must not end the others
            print(f"{impl}: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        rows += training_rows(impl, seed, run, facts, sizes, dtype_name)
        print(
            f"{impl} seed {seed}: {sum(run.steps_s):.0f} s, loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}, ", end=""
        )
        print(f"{rows[-1]['value']} tokens/s, {run.peak_bytes / 1e9:.2f} GB", flush=True)
        write_table(path, COLUMNS, rows)
        gc.collect()  # model and optimizer lie in a cycle, and would count in the next run's memory
    return rows


def main(arguments=None):
    """Train a small GPT on a book with each implementation of attention on this machine's GPU, and record the runs."""
    parser = argparse.ArgumentParser(prog="python -m flashattn.train", description=main.__doc__)
    parser.add_argument(
        "--out", type=Path, default=DATA, help="folder of training.csv (default: the package's own data)"
    )
    parser.add_argument("--steps", type=int, default=RECORDED["steps"], help="steps of each run (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("flashattn.train records runs on a GPU, and there is none here")
    path = options.out / "training.csv"
    record(path, "cuda", RECORDED | dict(steps=options.steps), torch.bfloat16)
    print(f"{path} written")


if __name__ == "__main__":
    main()
