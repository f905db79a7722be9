"""The Triton kernels against the error budget: in the interpreter here, and in full on a GPU (`make test-gpu`)."""

import gc
import math
import weakref
from importlib import import_module

import pytest
import torch

from flashattn import attention_reference, flash_attention, flash_attention_varlen
from flashattn.fuzz import N_YARDSTICKS
from flashattn.testing import (
    DTYPES,
    Case,
    assert_within_budget,
    budget_ratios,
    error_ratios,
    largest_budget,
    make_inputs,
    packed_reference,
    run,
)

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
# Windows, softcap, head dimensions that differ, packed sequences (some empty, some longer than a block).
QUERIES, KEYS = (5, 0, 130, 64, 1, 200), (70, 5, 0, 130, 65, 128)
FEATURES = {
    "left": dict(window=(37, None)),
    "both": dict(window=(100, 3)),
    "causal": dict(causal=True, window=(70, 0)),
    "softcap": dict(softcap=3.0),
    "all": dict(causal=True, window=(150, None), softcap=20.0, scale=-0.3),
}
GPU_FEATURE_CASES = (
    [
        Case(n, m, d, dtype, head_dim_v=d_v, **features)
        for d, d_v in [(64, 64), (128, 128), (192, 128), (40, 72), (64, 256)]
        for dtype in DTYPES
        for features in FEATURES.values()
        for n, m in [(203, 330), (330, 203), (QUERIES, KEYS)]
    ]
    + [
        Case(73, 265, d, dtype, heads=6, heads_kv=2, window=(10**9, 94), head_dim_v=d_v)  # narrow tiles
        for d, d_v in [(33, 7), (8, 16), (16, 8), (32, 24), (24, 200)]
        for dtype in DTYPES
    ]
    + [
        Case(QUERIES, KEYS, d, dtype, causal, heads, heads_kv)
        for d in HEAD_DIMS
        for dtype in DTYPES
        for causal in (False, True)
        for heads, heads_kv in HEADS
    ]
)
CPU_FEATURE_CASES = [
    Case(70, 150, 16, "fp16", heads=2, heads_kv=1, window=(37, None)),
    Case(150, 70, 16, "bf16", heads=2, heads_kv=1, window=(20, 3)),
    Case(130, 200, 16, "fp32", True, 2, 1, window=(70, 0)),
    Case(65, 70, 32, "fp32", heads=2, heads_kv=2, softcap=3.0),
    Case(40, 40, 80, "fp32", heads=6, heads_kv=2, family="low", softcap=1.37),  # negative and far past the cap
    Case(65, 130, 16, "bf16", True, 2, 1, window=(100, None), softcap=20.0, scale=-0.3),
    Case(65, 70, 24, "fp16", heads=2, heads_kv=1, head_dim_v=40),
    Case(65, 70, 80, "fp32", True, 2, 2, head_dim_v=16),
    Case((5, 0, 70, 1), (70, 5, 0, 65), 16, "fp32", heads=2, heads_kv=1),
    Case((5, 0, 70, 1), (70, 5, 0, 65), 16, "fp16", True, 2, 1, window=(9, None), softcap=3.0, head_dim_v=24),
]


def kernel(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, **kwargs):
    if cu_seqlens_q is not None:
        return flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **kwargs)
    return flash_attention(q, k, v, return_lse=True, **kwargs)


def check(case, device, record_property):
    options = case.options | case.offsets(device)
    # Between draws of one query in fp32 the budget itself differs by a factor of 2 and more.
    draws = [make_inputs(case, device, seed) for seed in range(N_YARDSTICKS if case.seqlen_q == 1 else 1)]
    inputs = draws[0]
    truth, budget = largest_budget(draws, packed_reference if case.packed else attention_reference, **options)
    first, second = (run(kernel, inputs, **options) for _ in range(2))
    ratios = budget_ratios(first, inputs, truth, budget)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
    record_property("ratios", {name: round(ratio, 3) for name, ratio in ratios.items()})
    with pytest.MonkeyPatch.context() as patch:  # small calls read rows; as boxes they are the same
        patch.setattr("flashattn.primitives.SCORES_WORTH_A_BOX", 0)
        patch.setattr("flashattn.launch.LAUNCHES", {})
        boxed = run(kernel, inputs, **options)
    for name in first:
        assert torch.equal(first[name], second[name]), f"{name} differs on a second run"
        assert torch.equal(first[name], boxed[name]), f"{name} differs where tiles come as boxes"


@pytest.mark.parametrize("case", CPU_CASES + CPU_FEATURE_CASES, ids=lambda case: case.id)
def test_budget_and_repeatability(case, device, record_property):
    check(case, device, record_property)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES + FAMILY_CASES + GPU_FEATURE_CASES, ids=lambda case: case.id)
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


def test_rows_without_keys_are_zero_whatever_keys_hold(device):
    """A block of such rows still visits one tile, and 0 times NaN is NaN."""
    q, k, v = (torch.randn(1, 1, n, 64, device=device, dtype=torch.float16) for n in (200, 3, 3))
    v[:, :, 0] = math.nan
    out, lse = kernel(q, k, v, causal=True)
    assert (out[:, :, :197] == 0).all() and (lse[:, :, :197] == -math.inf).all() and out[:, :, 197:].isnan().all()


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
def test_queries_past_the_end_do_not_meet_an_infinite_key(device):
    """A tile is padded with queries of 0, and 0 times infinity is NaN: no gradient may come from there."""
    q, k, v = (torch.rand(1, 1, n, 16, device=device) + 0.1 for n in (5, 6, 6))
    k[0, 0, 3, 7] = -math.inf  # a score of -inf for every query: the key has weight 0
    tensors = [x.requires_grad_() for x in (q, k, v)]
    actual = torch.autograd.grad(flash_attention(*tensors).sum(), tensors)
    expected = torch.autograd.grad(attention_reference(*tensors)[0].sum(), tensors)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.isfinite(), e.isfinite())
    assert actual[1].isfinite().all() and actual[2].isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_row_whose_visible_scores_are_all_minus_infinity_is_nan(device):
    """The row has keys, so this is no masked row: hiding the infinity behind a 0 would be silent."""
    q, k, v = torch.ones(1, 1, 1, 16, device=device), torch.ones(1, 1, 3, 16, device=device), torch.ones(1, 1, 3, 16)
    k[..., 0] = -math.inf
    assert flash_attention(q, k, v.to(device)).isnan().all()


LARGE = 2**31 + 2**20
LARGE_STRIDES = {"batch": 0, "heads": 1, "rows": 2, "columns": 3}


@pytest.mark.gpu
@pytest.mark.parametrize("axis", LARGE_STRIDES)
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_offsets_past_two_to_the_31(name, axis, device):
    """Each tensor in turn is a view whose last element along one axis lies past 2^31 elements, for a 16-bit dtype."""
    case = Case(130, 130, 64, "bf16", True, 4, 4)
    inputs = make_inputs(case, device)
    plain = getattr(inputs, name)
    strides = list(plain.contiguous().stride())
    strides[LARGE_STRIDES[axis]] = -(-LARGE // (plain.shape[LARGE_STRIDES[axis]] - 1))
    span = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, strides, strict=True))
    view = torch.empty(span, dtype=plain.dtype, device=device).as_strided(plain.shape, strides)
    view.copy_(plain)
    assert torch.equal(view, plain) and strides[LARGE_STRIDES[axis]] * (plain.shape[LARGE_STRIDES[axis]] - 1) > 2**31
    far, near = run(kernel, inputs._replace(**{name: view}), causal=True), run(kernel, inputs, causal=True)
    for key in near:
        assert torch.equal(far[key], near[key]), key


@pytest.mark.gpu
def test_results_past_two_to_the_31(device):
    """Results as large as that: out, lse and every gradient of the last heads, against a call on these alone."""
    batch, heads, seqlen, head_dim = 2, 9 * 2**10, 1024, 128
    q = torch.randn(batch, heads, seqlen, head_dim, dtype=torch.bfloat16, device=device).requires_grad_()
    assert q.numel() > 2**31
    k, v = (torch.randn(batch, heads, 16, head_dim, dtype=q.dtype, device=device).requires_grad_() for _ in range(2))
    out, lse = kernel(q, k, v)
    torch.autograd.backward((out, lse), (q.detach(), torch.ones_like(lse)))
    last = [x.detach()[-1:, -3:].clone().requires_grad_() for x in (q, k, v)]
    out_last, lse_last = kernel(*last)
    torch.autograd.backward((out_last, lse_last), (last[0].detach(), torch.ones_like(lse_last)))
    assert torch.equal(out[-1:, -3:], out_last) and torch.equal(lse[-1:, -3:], lse_last)
    for whole, part in zip((q, k, v), last, strict=True):
        assert torch.equal(whole.grad[-1:, -3:], part.grad)


@pytest.mark.gpu
def test_packed_rows_past_two_to_the_31(device):
    """The last of many packed sequences begins past element 2^31 of every tensor."""
    head_dim, heads, length = 128, 16, 2**20
    total = LARGE // (heads * head_dim) // length * length + 3 * length
    q = torch.empty(total, heads, head_dim, dtype=torch.bfloat16, device=device)
    q[-200:].normal_()
    assert (total - 200) * heads * head_dim > 2**31
    offsets = torch.tensor([0, 1, total - 200, total], dtype=torch.int32, device=device)
    only_last = torch.tensor([0, 0, 0, 200], dtype=torch.int32, device=device)
    empty = torch.tensor([0, 0, 0, 200], dtype=torch.int32, device=device)
    keys = torch.randn(2, 200, heads, head_dim, dtype=q.dtype, device=device)
    far = flash_attention_varlen(q, keys[0], keys[1], offsets, empty, causal=True)[-200:]
    near = flash_attention_varlen(q[-200:].clone(), keys[0], keys[1], only_last, empty, causal=True)
    assert torch.equal(far, near)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, heads", [(2**20, 1), (1, 2**20), (10923, 6)], ids=str)
def test_many_batch_entries_and_heads(batch, heads, device):
    """More than a grid's second axis could hold; every one is computed, forward and backward."""
    q, k, v, do = (torch.randn(batch, heads, 5, 16, device=device, dtype=torch.float16) for _ in range(4))
    inputs = make_inputs(Case(5, 5, 16, "fp16", True, heads, heads, 1), device)
    ratios = error_ratios(kernel, inputs._replace(q=q, k=k, v=v, do=do, dlse=None), causal=True)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("dtype, size", [("fp16", 65504.0), ("bf16", 1e15), ("fp32", 1e15)])
def test_scores_of_any_finite_size(dtype, size, device):
    """A score minus the largest, or minus an lse that it makes alone, must be exactly 0, however large the score is."""
    q = k = torch.full((2, 2, 70, 64), size, dtype=DTYPES[dtype], device=device)
    v = torch.randn(2, 2, 70, 64, device=device).to(q.dtype)
    expected = v.float().mean(dim=2, keepdim=True).expand_as(v)
    torch.testing.assert_close(
        flash_attention(q, k, v).float(), expected, rtol=0, atol=2e-2 if dtype == "bf16" else 2e-3
    )
    # Of keys that differ, one takes all the weight: dv is the sum of do there, 0 elsewhere, and nothing moves q or k.
    k = (k * torch.linspace(0.5, 1, 70, device=device)[:, None]).to(q.dtype).clone()
    k[:, :, 40] *= -1
    q = -q
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attention(*tensors)
    do = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, tensors, do)
    assert torch.equal(out, v[:, :, 40:41].expand_as(out))
    expected = torch.zeros_like(v, dtype=torch.float32)
    expected[:, :, 40] = do.float().sum(dim=2)
    torch.testing.assert_close(dv.float(), expected, rtol=2e-2 if dtype == "bf16" else 2e-3, atol=2e-2)
    assert not dq.any() and not dk.any()


# Launches that are remembered


def test_a_known_kind_of_call_decides_nothing_again(device, monkeypatch):
    monkeypatch.setattr("flashattn.launch.LAUNCHES", {})
    decided = []
    for module in map(import_module, ("flashattn.forward", "flashattn.backward")):
        choose = module.block_config
        monkeypatch.setattr(module, "block_config", lambda *a, choose=choose, **b: decided.append(a) or choose(*a, **b))
    first = make_inputs(Case(33, 70, 16, "fp16", True, 2, 2), device)
    other = make_inputs(Case(33, 70, 16, "fp16", True, 2, 2), device, seed=1)
    run(kernel, first, causal=True)
    assert len(decided) == 3
    for inputs in (other, first):  # what is remembered are decisions, not tensors
        assert max(error_ratios(kernel, inputs, causal=True).values()) <= 1
    assert len(decided) == 3
    run(kernel, first)
    assert len(decided) == 6


@pytest.mark.parametrize("change", ["strides", "alignment", "dtype", "length", "scale", "softcap", "window", "packed"])
def test_calls_of_another_kind_are_decided_anew(change, device, monkeypatch):
    """Whatever Triton or the launchers look at is part of the key: after another call each result is still its own."""
    monkeypatch.setattr("flashattn.launch.LAUNCHES", {})
    q, k, v = (torch.randn(1, 2, 48, 32, device=device, dtype=torch.float16) for _ in range(3))
    first, plain = (q, k, v), flash_attention(q, k, v, causal=True)
    options = dict(causal=True)
    if change == "strides":
        k = torch.empty(1, 48, 2, 40, device=device, dtype=k.dtype).transpose(1, 2)[..., :32].copy_(k)
    elif change == "alignment":
        k = torch.empty(k.numel() + 1, device=device, dtype=k.dtype)[1:].view_as(k).copy_(k)
    elif change == "dtype":
        q, k, v = q.float(), k.float(), v.float()
    elif change == "length":
        k, v = k[:, :, :47], v[:, :, :47]
    elif change in ("scale", "softcap", "window"):
        options[change] = {"scale": 0.5, "softcap": 3.0, "window": (5, 0)}[change]
    if change == "packed":
        offsets = torch.tensor([0, 20, 48], device=device, dtype=torch.int32)
        packed = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        out = flash_attention_varlen(*packed, offsets, offsets, causal=True).transpose(0, 1)[None]
        expected = torch.cat([attention_reference(*(x[:, :, rows].double() for x in (q, k, v)), causal=True)[0]
                              for rows in (slice(0, 20), slice(20, 48))], dim=2)  # fmt: skip
    else:
        out = flash_attention(q, k, v, **options)
        expected = attention_reference(q.double(), k.double(), v.double(), **options)[0]
    assert (out.double() - expected).abs().max() < 4e-3
    assert len(import_module("flashattn.launch").LAUNCHES) == 2
    assert torch.equal(plain, flash_attention(*first, causal=True))


def test_remembered_launches_keep_no_tensor_alive(device, monkeypatch):
    monkeypatch.setattr("flashattn.launch.LAUNCHES", {})
    q = torch.randn(1, 2, 48, 32, device=device, dtype=torch.float16)
    alive = weakref.ref(q)
    flash_attention(q, q, q)
    flash_attention(q, q, q)
    del q
    gc.collect()
    assert alive() is None


def test_there_is_an_end_to_what_is_remembered(device, monkeypatch):
    launch = import_module("flashattn.launch")
    monkeypatch.setattr(launch, "LAUNCHES", {})
    monkeypatch.setattr(launch, "MOST", 3)
    for n in range(1, 8):
        x = torch.randn(1, 1, n, 16, device=device)
        flash_attention(x, x, x)
        assert 1 <= len(launch.LAUNCHES) <= 3
