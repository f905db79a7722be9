"""The Triton kernels against the error budget: in the interpreter here, and in full on a GPU (`make test-gpu`)."""

import math

import pytest
import torch

from flashattn import attention_reference, flash_attention
from flashattn.testing import DTYPES, Case, assert_within_budget, error_ratios, make_inputs, run

pytestmark = pytest.mark.triton

SIZES = [(1, 1), (1, 127), (65, 65), (113, 203), (203, 113), (200, 200), (1024, 1000)]
HEAD_DIMS = [16, 40, 64, 80, 96, 128, 160, 192, 256]
HEADS = [(4, 4), (6, 2), (8, 1)]

GPU_CASES = [
    Case(n, m, d, dtype, causal, heads, heads_kv)
    for d in HEAD_DIMS
    for dtype in DTYPES
    for causal in (False, True)
    for heads, heads_kv in HEADS
    for n, m in SIZES
]
FAMILY_CASES = [
    Case(n, m, 64, dtype, causal, family="low")
    for dtype in DTYPES
    for causal in (False, True)
    for n, m in [(65, 127), (113, 1000), (65, 2000)]
]
# The interpreter is slow: every head dimension, size, head group and dtype at least once, not their product.
CPU_CASES = [
    Case(65, 65, 16, "fp16", True, 4, 4),
    Case(113, 203, 40, "bf16", True, 2, 1),
    Case(113, 203, 64, "fp32", False, 2, 1),
    Case(203, 113, 64, "fp16", True, 2, 1),
    Case(203, 113, 80, "fp32", True, 2, 2),
    Case(65, 65, 96, "bf16", False, 6, 2),
    Case(1, 127, 128, "fp16", True, 8, 1),
    Case(1, 1, 160, "bf16", False, 6, 2),
    Case(65, 127, 192, "fp16", False, 2, 1),
    Case(70, 70, 256, "bf16", True, 2, 1),
    Case(1, 1, 256, "fp32", True, 4, 4),
    Case(65, 127, 64, "fp16", False, 2, 1, family="low"),
    Case(65, 127, 64, "bf16", False, 2, 1, family="low"),
    Case(65, 127, 64, "fp32", True, 2, 1, family="low"),
]


def kernel(q, k, v, **kwargs):
    return flash_attention(q, k, v, return_lse=True, **kwargs)


def check(case, device, record_property):
    ratios = assert_within_budget(kernel, case, device)
    record_property("ratios", {name: round(ratio, 3) for name, ratio in ratios.items()})
    inputs = make_inputs(case, device)
    first, second = (run(kernel, inputs, causal=case.causal) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), f"{name} differs on a second run"


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.id)
def test_budget_and_repeatability(case, device, record_property):
    check(case, device, record_property)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES + FAMILY_CASES, ids=lambda case: case.id)
def test_budget_and_repeatability_in_full(case, device, record_property):
    check(case, device, record_property)


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0, 1e-30])
def test_any_finite_scale(scale, device):
    assert_within_budget(kernel, Case(33, 70, 16, "fp32", True, 2, 2, scale=scale), device)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_sequences(sizes, batch, device):
    q = torch.randn(batch, 4, sizes[0], 16, device=device, requires_grad=True)
    k, v = (torch.randn(batch, 2, sizes[1], 16, device=device, requires_grad=True) for _ in range(2))
    out, lse = kernel(q, k, v)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == q.shape[:3] and (lse == -math.inf).all()
    for gradient, x in ((dq, q), (dk, k), (dv, v)):
        assert gradient.shape == x.shape and (gradient == 0).all()


def test_rows_without_keys(device):
    q, k, v = (torch.randn(2, 2, n, 16, device=device, requires_grad=True) for n in (70, 3, 3))
    out, lse = kernel(q, k, v, causal=True)
    assert (out[:, :, :67] == 0).all() and (lse[:, :, :67] == -math.inf).all()
    assert (lse[:, :, 67:]).isfinite().all()
    dlse = torch.ones_like(lse)
    dlse[:, :, :67] = math.nan  # what a loss makes of -inf must not leak
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), dlse))
    assert (dq[:, :, :67] == 0).all()
    assert dq.isfinite().all() and dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize("through", ["out", "lse"])
def test_gradient_through_one_result_alone(through, device):
    q, k, v = (torch.randn(2, 2, 33, 16, device=device, requires_grad=True) for _ in range(3))
    loss = {"out": lambda out, lse: (out**2).sum(), "lse": lambda out, lse: (lse**2).sum()}[through]
    actual = torch.autograd.grad(loss(*kernel(q, k, v)), (q, k, v))
    expected = torch.autograd.grad(loss(*attention_reference(q, k, v)), (q, k, v), materialize_grads=True)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_broadcast_inputs_and_gradients(device):
    """Stride-0 q, k and v from expand(), and the stride-0 dO of out.sum()."""
    q, k, v = (torch.randn(1, 1, 33, 16, device=device) for _ in range(3))
    wide = [x.expand(2, 3, 33, 16).requires_grad_() for x in (q, k, v)]
    narrow = [x.expand(2, 3, 33, 16).clone().requires_grad_() for x in (q, k, v)]
    out, expected = flash_attention(*wide), flash_attention(*narrow)
    assert torch.equal(out, expected)
    for a, e in zip(torch.autograd.grad(out.sum(), wide), torch.autograd.grad(expected.sum(), narrow), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("name", ["q", "k", "v", "do", "dlse"])
def test_lazily_negated_views(name, device):
    """A view such as z.conj().imag keeps its sign as a flag beside the memory, where a kernel does not see it."""
    inputs = make_inputs(Case(20, 33, 16, "fp32", heads=2, heads_kv=2), device)
    x = getattr(inputs, name)
    view = torch._neg_view(-x)
    assert view.is_neg() and torch.equal(view, x)
    plain, negated = run(kernel, inputs), run(kernel, inputs._replace(**{name: view}))
    assert all(torch.equal(plain[key], negated[key]) for key in plain)


def test_output_has_the_layout_of_q(device):
    q, k, v = (torch.randn(2, 20, 4, 16, device=device).transpose(1, 2) for _ in range(3))
    assert flash_attention(q, k, v).stride() == q.stride()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_and_infinity_show(where, bad, device):
    tensors = {name: torch.randn(1, 1, 70, 16, device=device) for name in "qkv"}
    tensors[where][0, 0, 3, 5] = bad
    tensors["v" if where != "v" else "q"].abs_()
    out, lse = kernel(**tensors)
    expected, _ = attention_reference(**tensors)
    assert torch.equal(out.isfinite(), expected.isfinite()) or where == "k"
    assert not out.isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_row_whose_visible_scores_are_all_minus_infinity_is_nan(device):
    """The row has keys, so this is no masked row: hiding the infinity behind a 0 would be silent."""
    q, k, v = torch.ones(1, 1, 1, 16, device=device), torch.ones(1, 1, 3, 16, device=device), torch.ones(1, 1, 3, 16)
    k[..., 0] = -math.inf
    assert flash_attention(q, k, v.to(device)).isnan().all()


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(device):
    """One head whose rows lie so far apart that the element offset of the last passes 2^31."""
    seqlen, head_dim, row = 40000, 64, 60000
    buffer = torch.empty(seqlen * row, dtype=torch.bfloat16, device=device)
    k = buffer.as_strided((1, 1, seqlen, head_dim), (0, 0, row, 1))
    k.copy_(torch.randn(1, 1, seqlen, head_dim))
    q, v = (torch.randn(1, 1, n, head_dim, device=device, dtype=torch.bfloat16) for n in (128, seqlen))
    assert (seqlen - 1) * row > 2**31
    inputs = make_inputs(Case(128, seqlen, head_dim, "bf16", True, 1, 1, 1), device)
    ratios = error_ratios(kernel, inputs._replace(q=q, k=k, v=v), causal=True)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.gpu
def test_many_heads(device):
    """More batch entries times heads than a grid's second axis could hold."""
    q, k, v = (torch.randn(10923, 7, 5, 16, device=device, dtype=torch.float16) for _ in range(3))
    torch.testing.assert_close(flash_attention(q, k, v), attention_reference(q, k, v)[0], rtol=2e-3, atol=2e-3)
