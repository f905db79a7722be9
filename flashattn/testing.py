"""Cases, inputs and the error budget: what "right" means for every implementation in this package.

The truth is attention in fp64. No fixed tolerance separates rounding from a bug (chapter 3 shows one that 1e-2 lets
through), so the yardstick is the error that plain PyTorch makes on the same inputs in the same dtype: an
implementation may err ``FACTOR`` times as much, plus one rounding of the largest value.
"""

import argparse
import math
import random
from typing import NamedTuple

import torch

from .reference import attention_reference

FACTOR = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Case(NamedTuple):
    """One set of inputs. family: "gaussian", or "low" for scores near -8, where an unmasked zero score stands out."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str = "fp16"
    causal: bool = False
    heads: int = 4
    heads_kv: int = 2
    batch: int = 2
    scale: float | None = None
    family: str = "gaussian"

    @property
    def id(self):
        """Name the case by its sizes and by what differs from the defaults."""
        parts = [self.dtype, f"D{self.head_dim}", f"{self.seqlen_q}x{self.seqlen_k}", f"h{self.heads}/{self.heads_kv}"]
        parts += ["causal"] if self.causal else []
        parts += [] if self.scale is None else [f"scale{self.scale:g}"]
        return "-".join(parts + ([] if self.family == "gaussian" else [self.family]))


class Inputs(NamedTuple):
    """Tensors of a case: do and dlse are the gradients that arrive at out and lse."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    dlse: torch.Tensor


def make_inputs(case, device="cpu", seed=0):
    """Draw the inputs of a case, the four large ones in four different memory layouts.

    q is (batch, seqlen, heads, head_dim) in memory, k has a wider row with NaN behind each row's end, v has its rows
    along the last axis, and do every second row of a buffer that holds NaN elsewhere.
    """
    generator = torch.Generator().manual_seed(seed)
    b, h, n, m, d = case.batch, case.heads, case.seqlen_q, case.seqlen_k, case.head_dim

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    def place(values, buffer_shape, view):
        buffer = torch.full(buffer_shape, math.nan, dtype=DTYPES[case.dtype], device=device)
        view = view(buffer)
        view.copy_(values)
        return view

    q, k, v = draw(b, h, n, d), draw(b, case.heads_kv, m, d), draw(b, case.heads_kv, m, d)
    if case.family == "low":
        # q near 1 and k near -1: scores near -sqrt(head_dim), made -8 whatever head_dim is.
        shift = math.sqrt(8 / math.sqrt(d))
        q, k = q * 0.5 + shift, k * 0.5 - shift
    q = place(q, (b, n, h, d), lambda x: x.transpose(1, 2))
    k = place(k, (b, case.heads_kv, m, d + 8), lambda x: x[..., :d])
    v = place(v, (b, case.heads_kv, d, m), lambda x: x.mT)
    do = place(draw(b, h, n, d), (b, h, 2 * n, d), lambda x: x[:, :, ::2])
    return Inputs(q, k, v, do, draw(b, h, n))


def run(attention, inputs, dtype=None, **kwargs):
    """Call an implementation and return a dict of out, lse, dq, dk, dv. dtype converts the inputs first."""
    # detach() keeps a tensor's strides; to() does not, and need not.
    q, k, v, do, dlse = (x if dtype is None else x.to(dtype) for x in inputs)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, **kwargs)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (do, dlse.to(lse.dtype)))
    return dict(out=out.detach(), lse=lse.detach(), dq=dq, dk=dk, dv=dv)


def max_error(actual, truth):
    """Return the largest absolute difference; infinite where one side is not finite and the other differs."""
    actual, truth = actual.double(), truth.double()
    same = (actual == truth) | (actual.isnan() & truth.isnan())
    difference = (actual - truth).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0)
    return difference.max().item() if difference.numel() else 0.0


def error_ratios(attention, inputs, **kwargs):
    """Measure an implementation against the budget.

    Args:
        attention: a function like ``attention_reference`` that returns (out, lse).
        inputs: :class:`Inputs`.
        kwargs: causal, scale, … for both sides.

    Returns:
        A dict from "out", "lse", "dq", "dk" and "dv" to the error as a multiple of the budget. At most 1 is within it;
        where the truth is finite and the result is not, it is infinite.
    """
    truth = run(attention_reference, inputs, torch.float64, **kwargs)
    eager = run(attention_reference, inputs, **kwargs)
    actual = run(attention, inputs, **kwargs)
    if not all(eager[name].isfinite().all() for name in eager if name != "lse"):
        wide = run(attention_reference, inputs, torch.float32, **kwargs)
        eager = {name: wide[name].to(eager[name].dtype) for name in eager}
    ratios = {}
    for name, expected in truth.items():
        if actual[name].shape != expected.shape or actual[name].dtype != eager[name].dtype:
            raise AssertionError(
                f"{name} is {tuple(actual[name].shape)} {actual[name].dtype}, "
                f"must be {tuple(expected.shape)} {eager[name].dtype}"
            )
        size = expected.masked_fill(expected.isinf(), 0).abs().max().item() if expected.numel() else 0.0
        budget = FACTOR[name] * max_error(eager[name], expected) + torch.finfo(actual[name].dtype).eps * size
        error = max_error(actual[name], expected)
        ratios[name] = error / budget if budget else (0.0 if error == 0 else math.inf)
    return ratios


def assert_within_budget(attention, case, device="cpu", seed=0, **kwargs):
    """Raise AssertionError unless every result of a case is within the budget; return the ratios."""
    inputs = make_inputs(case, device, seed)
    ratios = error_ratios(attention, inputs, causal=case.causal, scale=case.scale, **kwargs)
    over = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
    if over:
        raise AssertionError(f"{case.id}: error over budget, as a multiple of it: {over}")
    return ratios


def random_case(rng):
    """Draw a case. What is compiled into a kernel comes from a short menu, the sizes from anywhere."""
    heads_kv = rng.choice((1, 2, 3))
    return Case(
        seqlen_q=rng.randint(1, 300), seqlen_k=rng.randint(1, 300), head_dim=rng.choice((16, 40, 64, 128)),
        dtype=rng.choice(list(DTYPES)), causal=rng.random() < 0.5, heads=heads_kv * rng.choice((1, 2, 5)),
        heads_kv=heads_kv, scale=rng.choice((None, None, 0.3, -0.2)), family=rng.choice(("gaussian", "low")),
    )  # fmt: skip


def main(arguments=None):
    """Hold random cases to the error budget on this machine: the kernels on a GPU, or in the interpreter."""
    from .api import flash_attention

    parser = argparse.ArgumentParser(prog="python -m flashattn.testing", description=main.__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng, worst = random.Random(options.seed), 0.0
    for i in range(options.cases):
        case = random_case(rng)
        ratios = assert_within_budget(
            lambda q, k, v, **kwargs: flash_attention(q, k, v, return_lse=True, **kwargs), case, device, seed=i
        )
        worst = max(worst, *ratios.values())
        print(f"\r{i + 1} of {options.cases} within the budget, worst {worst:.2f} of it", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
