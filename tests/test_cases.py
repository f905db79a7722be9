"""Cases from public bug reports, each under its id of cases.py: small ones everywhere, large ones on a GPU.

A test is for the kind, not only for the input that was reported. Results are held to the error budget of
flashattn.testing, to equality of all bits, or to an exact property.
"""

import ast
import json
import math
import os
import re
import subprocess
import types
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from launches import KERNELS, record_launches
from processes import python
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn
from flashattn import (
    PagedKVCache,
    attention_reference,
    flash_attention,
    flash_attention_varlen,
    flash_decode,
    ops,
    scaled_dot_product_attention,
)
from flashattn.bench import load_targets
from flashattn.configs import TARGETS, Target, block_config, target_of
from flashattn.testing import DTYPES, FACTOR, Case, Inputs, error_ratios, make_inputs, max_error, run

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, in the interpreter
param, parametrize = pytest.param, pytest.mark.parametrize
gpu, two_gpus = pytest.mark.gpu, pytest.mark.two_gpus

ROOT = Path(__file__).parents[1]
PACKAGE = Path(flashattn.__file__).parent


def case(*ids):
    """Put the ids of cases into the id of a test that has no parameters of its own."""
    return parametrize("case_id", ["-".join(ids)], indirect=True)


@pytest.fixture(autouse=True)
def case_id():
    """Take what ``case`` gives; afterwards, give the GPU's memory back to the tests that run beside this one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def most_memory(tmp_path_factory):
    """Let one test at a time have most of a GPU's memory, in however many processes pytest-xdist runs."""
    import fcntl

    with open(tmp_path_factory.getbasetemp().parent / "most_memory.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kernel(q, k, v, **options):
    return flash_attention(q, k, v, return_lse=True, **options)


def draw(device, seqlen_q, seqlen_k, head_dim, dtype="fp16", *, head_dim_v=None, heads=2, heads_kv=1, batch=1, **more):
    """Draw inputs in four memory layouts, as testing.make_inputs does, v and do with a head dimension of their own."""
    sizes = dict(dtype=dtype, heads=heads, heads_kv=heads_kv, batch=batch, **more)
    inputs = make_inputs(Case(seqlen_q, seqlen_k, head_dim, **sizes), device)
    if head_dim_v is not None:
        other = make_inputs(Case(seqlen_q, seqlen_k, head_dim_v, **sizes), device, seed=1)
        inputs = inputs._replace(v=other.v, do=other.do)
    return inputs


def plain(inputs):
    """Return the same numbers, each tensor contiguous."""
    return Inputs(*(x.clone(memory_format=torch.contiguous_format) for x in inputs))


def assert_within(inputs, attention=kernel, **options):
    ratios = error_ratios(attention, inputs, **options)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios


def assert_results_within(actual, eager, truth):
    """Hold results to the budget where the reference is not attention_reference; each argument maps names to tensors."""
    for name, expected in truth.items():
        size = expected.masked_fill(~expected.isfinite(), 0).abs().max().item()
        eps = torch.finfo(actual[name].dtype).eps
        budget = FACTOR[name] * max_error(eager[name], expected) + eps * size
        assert actual[name].shape == expected.shape
        assert max_error(actual[name], expected) <= budget, f"{name} is over the budget of {budget}"


def assert_same(first, second):
    """Demand equal bits; NaN is equal to nothing."""
    for name in first:
        assert torch.equal(first[name], second[name]), name


def differentiate(attention, q, k, v, do):
    """Return out, dq, dk and dv of an attention that returns its output alone."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), do.to(out.dtype))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def torch_attention(q, k, v, **options):
    """PyTorch's own attention, its plain implementation: a reference that shares no code with this package."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


def eager_attention(q, k, v, mask):
    """Attention with a mask in the dtype of the inputs, the softmax and the sum with the mask in fp32."""
    s = (q @ k.mT / math.sqrt(q.shape[-1])).float()
    s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.float()
    empty = s.isneginf().all(-1, keepdim=True)
    return s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0).to(v.dtype) @ v


def assert_within_with_mask(q, k, v, do, mask):
    """Hold scaled_dot_product_attention with a mask to the budget, and return its results."""
    wide = mask if mask.dtype == torch.bool else mask.double()
    doubles = (x.double() for x in (q, k, v, do))
    truth = differentiate(lambda q, k, v: torch_attention(q, k, v, attn_mask=wide), *doubles)
    eager = differentiate(lambda q, k, v: eager_attention(q, k, v, mask), q, k, v, do)
    actual = differentiate(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), q, k, v, do)
    assert_results_within(actual, eager, truth)
    return actual


def assert_large(inputs, **options):
    """Run large inputs; hold the first and the last head to the budget alone, and to their bits within the whole."""
    whole = run(kernel, inputs, **options)
    for name, x in whole.items():
        assert x.isfinite().all(), name
    batch, heads_kv = inputs.k.shape[:2]
    group = inputs.q.shape[1] // heads_kv
    for b, h in ((0, 0), (batch - 1, heads_kv - 1)):
        of_q, of_k = (slice(b, b + 1), slice(h * group, (h + 1) * group)), (slice(b, b + 1), slice(h, h + 1))
        part = Inputs(inputs.q[of_q], inputs.k[of_k], inputs.v[of_k], inputs.do[of_q], inputs.dlse[of_q])
        assert_within(part, **options)
        places = dict(out=of_q, lse=of_q, dq=of_q, dk=of_k, dv=of_k)
        assert_same(run(kernel, part, **options), {name: x[places[name]] for name, x in whole.items()})


def random(device, *shape, dtype=torch.bfloat16):
    """Draw on the device itself: where the numbers are many, the CPU is slow."""
    return torch.randn(shape, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))


def large_inputs(device, batch, heads, seqlen, head_dim, dtype=torch.bfloat16):
    """Draw inputs in little more memory than one of them: q, k, v and do are neighbours among 3 heads more."""
    x = random(device, batch, seqlen, heads + 3, head_dim, dtype=dtype).transpose(1, 2)
    return Inputs(*(x[:, i : i + heads] for i in range(4)), torch.ones(batch, heads, seqlen, device=device))


def seen(attention, seqlen_q, seqlen_k, device):
    """Show which keys each query sees, x for visible: all scores are equal, and the values one-hot."""
    q, k = torch.zeros(1, 1, seqlen_q, 16, device=device), torch.zeros(1, 1, seqlen_k, 16, device=device)
    out = attention(q, k, torch.eye(seqlen_k, device=device)[None, None])
    return ["".join("x" if weight > 0 else "." for weight in row) for row in out[0, 0].tolist()]


def names_in_package():
    """Return all names, attributes and keywords in the source of what a call runs, and all calls of ``tl.dot``."""
    names, dots = set(), []
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / f"{name}.py" for name in ("atomic", "bench", "peers", "tune")}:
        for node in ast.walk(ast.parse(path.read_text())):
            names |= {getattr(node, field, None) or "" for field in ("id", "attr", "arg")}
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot":
                dots.append(node)
    assert {"exp2", "num_warps", "_attn_fwd_kernel"} <= names  # it reads the kernels
    return names, dots


def with_blocks(monkeypatch, **blocks):
    """Have kernels run with these (block_m, block_n), by direction, instead of what configs.py chooses."""

    def choose(direction, *arguments, **options):
        chosen = block_config(direction, *arguments, **options)
        if direction not in blocks:
            return chosen
        return chosen._replace(block_m=blocks[direction][0], block_n=blocks[direction][1])

    monkeypatch.setattr("flashattn.launch.LAUNCHES", {})
    monkeypatch.setattr("flashattn.forward.block_config", choose)
    monkeypatch.setattr("flashattn.backward.block_config", choose)


def with_results_in(monkeypatch, place):
    """Have the kernels write to place(x) instead of to the tensors x that are allocated for their results."""
    new_outputs, new_gradients = ops._new_outputs, ops._new_gradients
    monkeypatch.setattr(
        ops, "_new_outputs", lambda *inputs, **options: tuple(map(place, new_outputs(*inputs, **options)))
    )
    monkeypatch.setattr(ops, "_new_gradients", lambda *inputs: tuple(map(place, new_gradients(*inputs))))


# Head dimension


@parametrize(
    "head_dim, dtype, seqlens",
    [
        param(1, "fp16", (40, 50), id="B9-D1"),
        param(8, "bf16", (40, 50), id="B9-D8"),
        param(40, "fp16", (128, 117), id="B4-B6-D40"),
        param(48, "bf16", (40, 50), id="B6-D48"),
        param(63, "fp16", (41, 51), id="B3-D63"),
        param(72, "fp16", (40, 50), id="B4-D72"),
        param(80, "fp32", (40, 50), id="B4-D80"),
        param(96, "bf16", (40, 50), id="B4-B6-D96"),
        param(128, "fp16", (40, 50), id="B1-D128"),
        param(192, "fp16", (40, 50), id="B9-D192"),
        param(255, "bf16", (40, 50), id="B9-D255"),
        param(256, "fp32", (40, 50), id="B9-D256"),
    ],
)
def test_head_dimensions(head_dim, dtype, seqlens, device):
    assert_within(draw(device, *seqlens, head_dim, dtype))


@parametrize("head_dim", [param(257, id="B1-D257"), param(512, id="B9-D512")])
def test_head_dimension_that_is_not_offered(head_dim):
    x = torch.zeros(1, 1, 4, head_dim)
    with pytest.raises(ValueError, match=f"`q` must have head_dim 1 to 256, got {head_dim}"):
        flash_attention(x, x, x)
    with pytest.raises(ValueError, match=f"`v` must have head_dim 1 to 256, got {head_dim}"):
        flash_attention(x[..., :16], x[..., :16], x)


@gpu
@parametrize(
    "shape, head_dim",
    [param((3, 2, 2048), 128, id="B1-full"), param((2, 32, 4096), 63, id="B3-full")],
)
def test_head_dimensions_in_full(shape, head_dim, device):
    assert_large(large_inputs(device, *shape, head_dim, torch.float16))


@parametrize(
    "seqlens, head_dim",
    [
        param((33, 70), 72, id="B2-D72"),
        param((33, 70), 1, id="B2-D1"),
        *(param((1, m), 16, id=f"B14-1x{m}") for m in (129, 192, 227)),
        param((40, 129), 16, id="B14-40x129"),
        param((512, 512), 72, id="B2-full", marks=gpu),
        *(param((1, m), 64, id=f"B14-full-1x{m}", marks=gpu) for m in range(129, 228)),
    ],
)
def test_nothing_around_the_inputs_is_read(seqlens, head_dim, device):
    """NaN lies on every side of every tensor; poisoned_memory (conftest.py) fills all else that the kernels get."""

    def surround(x):
        buffer = x.new_full([size + 2 for size in x.shape], math.nan)
        view = buffer[tuple(slice(1, -1) for _ in x.shape)]
        view.copy_(x)
        return view

    inputs = plain(draw(device, *seqlens, head_dim))
    surrounded = Inputs(*map(surround, inputs))
    first = run(kernel, surrounded)
    assert_same(first, run(kernel, inputs))
    assert_same(first, run(kernel, surrounded))


@gpu
@parametrize("calls", [param(4, id="B2-calls")])
def test_identical_calls(calls, device):
    x = random(device, 1, 512, 16, 72, dtype=torch.float16).transpose(1, 2)
    first = flash_attention(x, x.flip(2), x)
    assert first.isfinite().all()
    assert all(torch.equal(first, flash_attention(x, x.flip(2), x)) for _ in range(calls - 1))


@parametrize("head_dim", [param(48, id="B6-D48-bias"), param(96, id="B6-D96-bias")])
def test_bias_matrix(head_dim, device):
    q, k, v, do, _ = draw(device, 70, 61, head_dim)
    assert_within_with_mask(q, k, v, do, random(device, 1, 2, 70, 61, dtype=torch.float32))


@gpu
@parametrize(
    "head_dim, has_bias",
    [param(40, False, id="B6-D40-race"), param(48, True, id="B6-D48-race"), param(96, True, id="B6-D96-race")],
)
def test_a_thousand_identical_calls(head_dim, has_bias, device):
    q, k, v, do, _ = draw(device, 128, 117, head_dim)
    bias = random(device, 1, 2, 128, 117, dtype=torch.float16) if has_bias else None

    def attention(q, k, v):
        return scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)

    first = differentiate(attention, q, k, v, do)
    for _ in range(1000):
        assert_same(first, differentiate(attention, q, k, v, do))


# Sequence length


@parametrize(
    "seqlens, causal",
    [
        param((1, 20), False, id="B10-1x20"),
        param((1, 20), True, id="B10-1x20-causal"),
        param((17, 70), False, id="B11-17x70"),
        param((17, 70), True, id="B11-17x70-causal"),
        param((70, 17), True, id="B11-70x17-causal"),
        param((1, 1), False, id="B12-1"),
        param((7, 7), True, id="B12-7-causal"),
        param((15, 15), False, id="B12-15"),
        param((130, 130), False, id="B12-130"),
        param((130, 130), True, id="B12-130-causal"),
    ],
)
def test_lengths(seqlens, causal, device):
    assert_within(draw(device, *seqlens, 16, heads=1, family="low"), causal=causal)


@gpu
@parametrize("causal", [False, True], ids=["full", "causal"])
@parametrize("shape, seqlen_q", [param((4, 32, 20, 128), 1, id="B10"), param((1, 2, 4250, 64), 4250, id="B12-4250")])
def test_lengths_in_full(shape, seqlen_q, causal, device):
    q, k, v, do, dlse = large_inputs(device, *shape)
    assert_large(Inputs(q[:, :, :seqlen_q], k, v, do[:, :, :seqlen_q], dlse[:, :, :seqlen_q]), causal=causal)


@parametrize("seqlen", [param(129, id="B15-129"), param(1025, id="B15-1025", marks=gpu)])
def test_bias_and_mask_together(seqlen, device):
    q, k, v, do, _ = draw(device, seqlen, seqlen, 64, "bf16", heads=1)
    distance = torch.arange(seqlen, device=device)[:, None] - torch.arange(seqlen, device=device)
    bias = (-0.1 * distance).to(torch.bfloat16).masked_fill(distance < 0, -math.inf)
    grads = assert_within_with_mask(q, k, v, do, bias)
    assert all(x.isfinite().all() for x in grads.values())


@parametrize("options", [dict(causal=True), dict(window=(20, 7))], ids=["causal", "window"])
@parametrize(
    "blocks",
    [
        param(dict(forward=(16, 64)), id="B18-16x64"),
        param(dict(forward=(32, 128)), id="B18-32x128"),
        param(dict(forward=(64, 16)), id="B18-64x16"),
        param(dict(dkdv=(64, 16), dq=(16, 64)), id="B19-dkdv64x16-dq16x64"),
        param(dict(dkdv=(16, 64), dq=(64, 16)), id="B19-dkdv16x64-dq64x16"),
        param(dict(dkdv=(32, 16), dq=(64, 32)), id="B19-dkdv32x16-dq64x32"),
    ],
)
def test_unequal_blocks(blocks, options, device, monkeypatch):
    with_blocks(monkeypatch, **blocks)
    assert_within(draw(device, 50, 70, 16, heads=1), **options)


# Alignment, windows, rows without keys


@parametrize(
    "seqlens, dtype, expected",
    [
        param((2, 5), "fp16", ["xxxx.", "xxxxx"], id="B20-2x5"),
        param((5, 2), "fp16", ["..", "..", "..", "x.", "xx"], id="B20-5x2"),
        param((5, 2), "bf16", ["..", "..", "..", "x.", "xx"], id="B20-5x2-bf16"),
    ],
)
def test_causal_is_bottom_right(seqlens, dtype, expected, device):
    assert seen(lambda q, k, v: flash_attention(q, k, v, causal=True), *seqlens, device) == expected
    inputs = draw(device, *seqlens, 16, dtype)
    results = run(kernel, inputs, causal=True)
    empty = torch.tensor(["x" not in row for row in expected])
    assert (results["out"][:, :, empty] == 0).all() and (results["dq"][:, :, empty] == 0).all()
    assert (results["lse"][:, :, empty] == -math.inf).all() and results["lse"][:, :, ~empty].isfinite().all()
    assert_within(inputs, causal=True)


@parametrize("seqlens", [param((1, 8), id="B21-1x8"), param((3, 8), id="B21-3x8"), param((8, 3), id="B21-8x3")])
def test_the_stand_in_is_top_left(seqlens, device):
    visible = seen(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), *seqlens, device)
    assert visible == seen(lambda q, k, v: torch_attention(q, k, v, is_causal=True), *seqlens, device)
    assert visible[0] == "x" + "." * (seqlens[1] - 1)
    n_hidden = sum(
        row.count(".") for row in seen(lambda q, k, v: flash_attention(q, k, v, causal=True), *seqlens, device)
    )
    assert n_hidden == sum(max(0, min(seqlens[1], seqlens[0] - 1 - i)) for i in range(seqlens[0]))


@case("B22")
def test_the_reference_is_right(device):
    """Loops over Python's own numbers, written from the definition, against the reference and the kernel."""
    q, k, v, do, _ = draw(device, 3, 128, 128, "fp32", heads=1)
    queries, keys, values = (x[0, 0].double().tolist() for x in (q, k, v))
    rows = []
    for i, query in enumerate(queries):
        scores = [math.fsum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(128) for key in keys[: 126 + i]]
        weights = [math.exp(score - max(scores)) for score in scores]
        sums = (math.fsum(w * value[j] for w, value in zip(weights, values, strict=False)) for j in range(128))
        rows.append([total / math.fsum(weights) for total in sums])
    truth = dict(out=torch.tensor(rows, dtype=torch.float64, device=device)[None, None])
    mask = torch.tensor([[j < 126 + i for j in range(128)] for i in range(3)], device=device)
    for attention in (attention_reference, kernel):
        actual, eager = attention(q, k, v, causal=True)[0], torch_attention(q, k, v, attn_mask=mask)
        assert_results_within(dict(out=actual), dict(out=eager), truth)
    wide = differentiate(lambda *qkv: attention_reference(*qkv, causal=True)[0], *(x.double() for x in (q, k, v, do)))
    other = differentiate(lambda *qkv: torch_attention(*qkv, attn_mask=mask), *(x.double() for x in (q, k, v, do)))
    assert_results_within({name: x.float() for name, x in wide.items()}, other, other)


@case("B23")
def test_window_of_one_query_is_the_end_of_the_keys(device):
    assert seen(lambda *qkv: flash_attention(*qkv, window=(127, 0)), 1, 256, device) == ["." * 128 + "x" * 128]
    assert_within(draw(device, 1, 256, 64), window=(127, 0))


@parametrize(
    "options, n_keys",
    [
        param(dict(window=(4, 0)), 5, id="B24-left4"),
        param(dict(window=(3, 0)), 4, id="B24-left3"),
        param(dict(window=(3, None), causal=True), 4, id="B24-left3-causal"),
        param(dict(window=(2, 1)), 4, id="B24-both"),
        param(dict(window=(0, 0)), 1, id="B24-own"),
        param(dict(window=(None, 0)), 16, id="B24-no-bound"),
    ],
)
def test_window_keeps_as_many_keys_as_it_says(options, n_keys, device):
    rows = seen(lambda *qkv: flash_attention(*qkv, **options), 16, 16, device)
    right = 0 if options.get("causal") else options["window"][1]
    left = n_keys - 1 - right
    assert rows == ["".join("x" if i - left <= j <= i + right else "." for j in range(16)) for i in range(16)]
    assert max(row.count("x") for row in rows) == n_keys


@parametrize("left", [param(69, id="B25-all"), param(70, id="B25-more"), param(2**40, id="B25-any")])
def test_window_as_long_as_the_sequence_is_causal(left, device):
    def windowed(q, k, v, causal):
        return kernel(q, k, v, window=(left, 0))

    assert_within(draw(device, 70, 70, 16), windowed, causal=True)
    rows = seen(lambda *qkv: flash_attention(*qkv, window=(left, 0)), 70, 70, device)
    assert rows == ["x" * (i + 1) + "." * (69 - i) for i in range(70)]


@gpu
@case("B25-full")
def test_window_as_long_as_a_long_sequence(device, most_memory):
    assert_large(large_inputs(device, 1, 8, 16384, 128), window=(16383, 0))


@parametrize(
    "seqlens, options, hidden",
    [
        param((1, 2), dict(window=(0, 0)), slice(0, 1), id="B27-1x2"),
        param((1, 256), dict(window=(31, 0)), slice(0, 224), id="B27-1x256"),
        param((3, 200), dict(window=(64, 0)), slice(0, 133), id="B27-3x200"),
        param((70, 200), dict(window=(40, 0)), slice(0, 90), id="B27-70x200"),
    ],
)
def test_what_no_query_sees_may_be_nan(seqlens, options, hidden, device):
    inputs = draw(device, *seqlens, 16)
    poisoned = inputs._replace(k=inputs.k.clone(), v=inputs.v.clone())
    poisoned.k[:, :, hidden] = poisoned.v[:, :, hidden] = math.nan
    clean, actual = run(kernel, inputs, **options), run(kernel, poisoned, **options)
    assert_same(clean, actual)
    assert (actual["dk"][:, :, hidden] == 0).all() and (actual["dv"][:, :, hidden] == 0).all()


@case("B27-top-left")
def test_keys_after_the_last_query_may_be_nan(device):
    q, k, v, do, _ = draw(device, 3, 40, 16, heads_kv=2)
    poisoned = k.clone(), v.clone()
    poisoned[0][:, :, 3:] = poisoned[1][:, :, 3:] = math.nan

    def attention(*qkv):
        return scaled_dot_product_attention(*qkv, is_causal=True)

    assert_same(differentiate(attention, q, k, v, do), differentiate(attention, q, *poisoned, do))


def packed(device, lengths_q, lengths_k, head_dim, dtype="fp16", heads=2, heads_kv=1, unowned=0):
    """Draw packed inputs, (total, heads, head_dim), and both cu_seqlens; unowned tokens stand behind the last one."""
    inputs = draw(
        device, sum(lengths_q) + unowned, sum(lengths_k) + unowned, head_dim, dtype, heads=heads, heads_kv=heads_kv
    )
    q, k, v, do = (x[0].transpose(0, 1) for x in inputs[:4])
    offsets = [torch.tensor([0, *n], device=device).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k)]
    return Inputs(q, k, v, do, inputs.dlse[0]), offsets


def run_packed(inputs, offsets, **options):
    return run(lambda q, k, v: flash_attention_varlen(q, k, v, *offsets, return_lse=True, **options), inputs)


def assert_packed_within(inputs, offsets, **options):
    """Hold each packed sequence to the budget of attention over it alone."""
    results = run_packed(inputs, offsets, **options)
    options = {name: value for name, value in options.items() if not name.startswith("max_seqlen")}
    (rows_q, rows_k) = ([slice(*pair) for pair in x.unfold(0, 2, 1).tolist()] for x in offsets)
    for of_q, of_k in zip(rows_q, rows_k, strict=True):
        q, k, v, do = (x[rows].transpose(0, 1)[None] for x, rows in zip(inputs, (of_q, of_k, of_k, of_q), strict=False))
        part = Inputs(q, k, v, do, inputs.dlse[None, :, of_q])
        places = dict(out=of_q, dq=of_q, dk=of_k, dv=of_k)
        actual = {name: results[name][rows].transpose(0, 1)[None] for name, rows in places.items()}
        actual["lse"] = results["lse"][None, :, of_q]
        eager = run(attention_reference, part, **options)
        truth = run(attention_reference, part, torch.float64, **options)
        truth = {name: x for name, x in truth.items() if x.numel()}
        assert_results_within(actual, eager, truth)
    return results


@parametrize("options", [{}, dict(causal=True)], ids=["B27-packed", "B27-packed-causal"])
def test_neighbours_in_a_pack_may_be_nan(options, device):
    inputs, offsets = packed(device, [5, 20, 3], [30, 9, 6], 16, unowned=7)
    poisoned = Inputs(*(x.clone() for x in inputs))
    for x, cu_seqlens in zip(poisoned, (offsets[0], offsets[1], offsets[1], offsets[0]), strict=False):
        first, second, end = cu_seqlens[1:].tolist()
        x[:first] = x[second:end] = x[end:] = math.nan
    poisoned.dlse[:, offsets[0][-1] :] = math.nan
    clean, actual = run_packed(inputs, offsets, **options), run_packed(poisoned, offsets, **options)
    for name, rows in (("out", 0), ("dq", 0), ("dk", 1), ("dv", 1)):
        first, second, end = offsets[rows][1:].tolist()
        assert torch.equal(clean[name][first:second], actual[name][first:second]), name
        assert (actual[name][end:] == 0).all(), name
    assert (actual["lse"][:, offsets[0][-1] :] == -math.inf).all()


@parametrize(
    "mask",
    [
        param(lambda i, j: i != 2, id="B28-row-of-false"),
        param(lambda i, j: j >= 66, id="B28-first-tile-hidden"),
        param(lambda i, j: (i % 3 == 1) & (j < 64), id="B28-last-tile-hidden"),
        param(lambda i, j: i + j < 0, id="B28-nothing-visible"),
    ],
)
@parametrize("additive", [False, True], ids=["bool", "additive"])
def test_rows_that_a_mask_hides(mask, additive, device):
    q, k, v, do, _ = draw(device, 5, 100, 16, heads_kv=2)
    mask = (
        mask(torch.arange(5, device=device)[:, None], torch.arange(100, device=device))
        & torch.ones(5, 100, device=device).bool()
    )
    hidden_rows, hidden_keys = ~mask.any(1), ~mask.any(0)
    if additive:
        mask = torch.zeros(5, 100, device=device, dtype=q.dtype).masked_fill(~mask, -math.inf)
    results = assert_within_with_mask(q, k, v, do, mask)
    assert (results["out"][:, :, hidden_rows] == 0).all() and (results["dq"][:, :, hidden_rows] == 0).all()
    assert (results["dk"][:, :, hidden_keys] == 0).all() and (results["dv"][:, :, hidden_keys] == 0).all()


@parametrize(
    "seqlens, dtype, options, rows",
    [
        param((5, 2), "fp16", dict(causal=True), slice(0, 3), id="B28-5x2-causal"),
        param((70, 3), "fp16", dict(causal=True), slice(0, 67), id="B28-70x3-causal"),
        param((70, 3), "bf16", dict(window=(1, 1)), slice(0, 66), id="B28-70x3-window"),
    ],
)
def test_rows_without_keys(seqlens, dtype, options, rows, device):
    inputs = draw(device, *seqlens, 16, dtype)
    inputs.dlse[:, :, rows] = math.nan  # what a loss makes of -inf must not leak
    results = run(kernel, inputs, **options)
    assert (results["out"][:, :, rows] == 0).all() and (results["dq"][:, :, rows] == 0).all()
    assert (results["lse"][:, :, rows] == -math.inf).all() and results["lse"][:, :, rows.stop :].isfinite().all()
    assert all(results[name].isfinite().all() for name in ("dq", "dk", "dv"))
    inputs.dlse[:, :, rows] = 0
    assert_within(inputs, **options)


# Large values


@parametrize("dtype", [param(name, id=f"B30-{name}") for name in DTYPES])
@parametrize("size", [70.0, 1e3], ids=["score-4900-a-channel", "score-1e6-a-channel"])
def test_softcap_saturates(size, dtype, device):
    inputs = draw(device, 20, 33, 16, dtype)
    signs = inputs._replace(q=torch.full_like(inputs.q, size), k=inputs.k.sign() * size)
    assert (signs.q @ signs.k.mT).float().abs().max() > 4400
    assert_within(signs, softcap=50.0, scale=1.0)
    towards = run(kernel, signs._replace(k=torch.full_like(inputs.k, size)), softcap=50.0, scale=1.0)
    assert (towards["dq"] == 0).all() and (towards["dk"] == 0).all()  # flat: the cap is reached


@case("B31")
def test_large_and_equal_inputs(device):
    do = draw(device, 50, 50, 256, "fp32", heads=4, heads_kv=4).do
    x = torch.full_like(do, 1000.0)
    inputs = Inputs(x, x, x, do, torch.ones(1, 4, 50, device=device))
    results = run(kernel, inputs)
    assert all(y.isfinite().all() for y in results.values())
    assert_within(inputs)


@parametrize("case_id", ["B31-softmax-of-one"], indirect=True)
@parametrize("dtype", DTYPES)
def test_large_scores(case_id, dtype, device):
    inputs = draw(device, 33, 40, 16, dtype)
    assert_within(inputs._replace(q=inputs.q * 100, k=inputs.k * 100))


@case("B33")
def test_mask_of_the_lowest_bf16_number(device):
    lowest = torch.finfo(torch.bfloat16).min
    q, k, v, do, _ = draw(device, 20, 70, 16, "bf16", heads_kv=2)
    mask = torch.zeros(1, 1, 20, 70, device=device, dtype=torch.bfloat16)
    mask[..., 40:] = lowest
    mask[:, :, 3] = lowest  # this row's keys are all equal, not all hidden
    mask[:, :, 5, :64] = -math.inf  # the lowest is higher than hidden
    mask[:, :, 7] = torch.linspace(-3, 3, 70, device=device)
    mask[:, :, 9] = 96  # in bf16 this would leave two bits of a score
    results = assert_within_with_mask(q, k, v, do, mask)
    mean = v.double().mean(2, keepdim=True)
    assert_results_within(dict(out=results["out"][:, :, 3:4]), dict(out=mean.to(v.dtype)), dict(out=mean))


# Offsets and grids

WIDE = 2**30 + 64  # elements from one index to the next: index 2 lies past 2^31


@pytest.fixture
def wide_memory(device, tmp_path, request):
    """Return so much memory that an offset that wraps around still lies in it: on the CPU, a file that is a hole."""
    size = 2**31 + 2 * WIDE + 2**16
    if device.type == "cuda":
        request.getfixturevalue("most_memory")
        yield torch.full((size,), math.nan, dtype=torch.float16, device=device)
    else:
        yield torch.from_file(str(tmp_path / "wide"), shared=True, size=size, dtype=torch.float16)
        os.remove(tmp_path / "wide")


@parametrize("axis", [param(0, id="B34-B35-batch"), param(1, id="B34-heads"), param(2, id="B34-B39-rows")])
def test_strides_past_two_to_the_31(axis, wide_memory, device, monkeypatch):
    """Inputs, outputs and gradients all have elements more than 2^31 apart."""
    batch, heads, seqlen = (3 if i == axis else 1 for i in range(3))
    starts = iter(range(2**31, 2**31 + 2**16, 4096))

    def spread(x):
        if x.dtype != torch.float16:  # lse and its kin are as small as ever
            return x
        strides = [*x.contiguous().stride()]
        strides[axis] = WIDE
        view = wide_memory.as_strided(x.shape, strides, next(starts))
        view.copy_(x)
        return view

    inputs = draw(device, seqlen, seqlen, 16, heads=heads, heads_kv=heads, batch=batch)
    expected = run(kernel, inputs)
    with_results_in(monkeypatch, spread)
    assert_same(expected, run(kernel, Inputs(*map(spread, inputs))))


@case("B34-mask")
def test_mask_past_two_to_the_31(wide_memory, device):
    q, k, v, _, _ = draw(device, 3, 3, 16, heads_kv=2)
    mask = random(device, 3, 3, dtype=torch.float16)
    view = wide_memory.as_strided((3, 3), (WIDE, 1), 2**31)
    view.copy_(mask)
    expected = scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(expected, scaled_dot_product_attention(q, k, v, view))


@gpu
@case("B34-full")
def test_more_than_two_to_the_31_elements(device, most_memory):
    inputs = large_inputs(device, 32769, 16, 64, 64)
    assert inputs.q.numel() > 2**31
    assert_large(inputs)


@gpu
@case("B35")
def test_batch_of_fifteen_thousand(device, most_memory):
    assert_large(large_inputs(device, 15000, 4, 16, 128))


@gpu
@case("B35-rows")
def test_more_than_two_to_the_31_rows(device, most_memory):
    """Offsets of rows pass 2^31 in lse and delta too. All sequences are one, so that all results must be equal."""
    q, k, v, do = (random(device, 1, 1, 64, 1, dtype=torch.float16).roll(i, 2) for i in range(4))
    assert_within(Inputs(q, k, v, do, torch.zeros(1, 1, 64, device=device)))
    one = differentiate(flash_attention, q, k, v, do)
    many = differentiate(flash_attention, *(x.expand(2**25 + 1, 1, 64, 1) for x in (q, k, v, do)))
    for name in one:
        assert (many[name] == one[name]).all(), name


@gpu
@parametrize(
    "shape, expanded",
    [
        param((1, 32, 512 * 512 + 8, 256), False, id="B39-tokens"),
        param((43, 16, 12288, 256), True, id="B39-expanded-keys"),
    ],
)
def test_tokens_times_heads_times_head_dim(shape, expanded, device, most_memory):
    """A window keeps it quick, and lets the last rows of the last head be compared alone."""
    n, window = 300, 127
    inputs = large_inputs(device, *shape)
    assert inputs.q.numel() > 2**31
    if expanded:  # as if one key head had been copied for each query head
        k, v = (x[:, -1:].repeat_interleave(shape[1], 1) for x in (inputs.k, inputs.v))
        inputs = inputs._replace(k=k, v=v)
    results = run(kernel, inputs, window=(window, 0))
    del results["lse"]
    assert all(x.isfinite().all() for x in results.values())
    tail = Inputs(*(x[-1:, -1:, -n:].clone() for x in inputs))
    truth = run(attention_reference, tail, torch.float64, window=(window, 0))
    eager = run(attention_reference, tail, window=(window, 0))
    complete = slice(window, n)  # these rows see none of the keys before the tail
    for name, x in results.items():
        actual, *others = (y[-1:, -1:, -n:][:, :, complete] for y in (x, eager[name], truth[name]))
        assert_results_within({name: actual}, *({name: y} for y in others))


@case("B39-page-ids")
def test_page_ids_times_page_stride(wide_memory, device):
    """Pages past 2^31 elements: the id of a page, and its stride, are both numbers of 32 bits."""
    page_stride, page_size = 2**17, 16
    n_pages = wide_memory.numel() // page_stride
    ids = [n_pages - 1, 3, 2**14 + 7, n_pages - 2]  # 2^14 pages are 2^31 elements
    q = random(device, 1, 4, 1, 16, dtype=torch.float16)
    k, v = random(device, 2, len(ids), 2, page_size, 16, dtype=torch.float16)
    stores = []
    for offset, rows in ((0, k), (2**16, v)):
        sizes, strides = (n_pages, 2, page_size, 16), (page_stride, page_size * 16, 16, 1)
        store = wide_memory[offset:].as_strided(sizes, strides)
        store[ids] = rows
        stores.append(store)
    table = torch.tensor([[*ids, 2**31 - 1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([page_size * len(ids) - 1], dtype=torch.int32, device=device)
    small = torch.tensor([[*range(len(ids)), -1]], dtype=torch.int32, device=device)
    expected = flash_decode(q, k, v, small, lengths)
    assert expected.isfinite().all()
    assert torch.equal(expected, flash_decode(q, *stores, table, lengths))


@case("B40")
def test_grids_have_one_axis(device, monkeypatch):
    launches = record_launches(monkeypatch)
    run(kernel, draw(device, 5, 7, 16, heads=6, heads_kv=3, batch=2))
    assert [grid for grid, _ in launches] == [(12, 1, 1), (12, 1, 1), (6, 1, 1)]  # forward, dQ, dK and dV


@gpu
@parametrize(
    "shape",
    [
        param((10923, 6, 5, 16), id="B40-full"),
        param((65536, 1, 5, 16), id="B41-batch"),
        param((1, 65536, 5, 16), id="B41-heads"),
        param((1, 71280, 3, 128), id="B42-full"),
    ],
)
def test_many_heads(shape, device, most_memory):
    assert_large(large_inputs(device, *shape))


@gpu
@case("B41-limit")
def test_more_programs_than_a_grid_holds(device, most_memory):
    x = torch.zeros(1, 1, 1, 1, device=device, dtype=torch.float16).expand(2**31, 1, 1, 1)
    with pytest.raises((OverflowError, RuntimeError, ValueError)):
        flash_attention(x, x, x)
        torch.cuda.synchronize()


@parametrize("name", [param(name, id=f"B41-{name.rsplit('.')[-1]}") for name in KERNELS])
def test_failed_launch_raises(name, device, monkeypatch):
    class Fails:
        arg_names = getattr(import_module(name.rsplit(".", 1)[0]), name.rsplit(".", 1)[1]).arg_names

        def __getitem__(self, grid):
            raise RuntimeError("Triton Error [CUDA]: invalid argument")

    inputs = draw(device, 5, 7, 16)
    run(kernel, inputs)
    monkeypatch.setattr("flashattn.launch.LAUNCHES", {})
    monkeypatch.setattr(name, Fails())
    with pytest.raises(RuntimeError, match="invalid argument"):
        run(kernel, inputs)


@parametrize("shape_k", [param((1, 9, 3, 16), id="B42-seqlens-differ"), param((1, 5, 3, 16), id="B42-query-shorter")])
def test_heads_and_rows_swapped(shape_k):
    q, k = torch.zeros(1, 7, 3, 16), torch.zeros(shape_k)
    with pytest.raises(ValueError, match=r"the layout is \(batch, heads, seqlen, head_dim\)"):
        flash_attention(q, k, k)


# Strides


@parametrize("shape", [param((1, 4, 4, 128), id="B43-small"), param((2, 32, 4, 128), id="B43-full", marks=gpu)])
def test_gradient_that_is_a_transposed_view(shape, device):
    inputs = plain(draw(device, shape[2], shape[2], shape[3], heads=shape[1], heads_kv=1, batch=shape[0]))
    view = inputs.do.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.is_contiguous()
    assert_same(run(kernel, inputs), run(kernel, inputs._replace(do=view)))
    assert_within(inputs._replace(do=view))


@parametrize("way", [param("sum", id="B44-sum"), param("cat", id="B44-cat"), param("expand", id="B44-expand")])
def test_gradient_as_autograd_hands_it_over(way, device):
    q, k, v, do, _ = draw(device, 20, 33, 16)
    other = random(device, 1, 2, 20, 5, dtype=torch.float16)
    weights = random(device, 1, 2, 20, 21, dtype=torch.float16)
    row = random(device, 16, dtype=torch.float16)
    results, arrived = [], []
    for through_copy in (False, True):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attention(*leaves)
        out.register_hook(lambda grad, copy=through_copy: grad.contiguous() if copy else arrived.append(grad.stride()))
        if way == "sum":
            out.sum().backward()
        elif way == "cat":
            (torch.cat([out, other], -1) * weights).sum().backward()
        else:
            out.backward(row.expand_as(out))
        results.append({name: x.grad for name, x in zip("qkv", leaves, strict=True)})
    assert_same(*results)
    assert arrived[0] == {"sum": (0, 0, 0, 0), "cat": (840, 420, 21, 1), "expand": (0, 0, 0, 1)}[way]


LAYOUTS = (
    lambda x: x.contiguous(),
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # (batch, seqlen, heads, head_dim) in memory
    lambda x: torch.stack([x, torch.full_like(x, math.nan)], 3).flatten(2, 3)[:, :, ::2],  # every second row
    lambda x: x.mT.contiguous().mT,  # columns behind each other
    lambda x: torch.cat([x, torch.full_like(x[..., :3], math.nan)], -1)[..., : x.shape[-1]],  # a wide row
)


@parametrize("head_dim", [16, 32, 64, 128, 256], ids=lambda head_dim: f"D{head_dim}")
@parametrize("rotation", [param(i, id=f"B47-{i}") for i in range(len(LAYOUTS))])
def test_four_layouts(rotation, head_dim, device):
    """In five rotations each tensor has each layout, and never two tensors the same."""
    inputs = plain(draw(device, 20, 33, head_dim, heads=4, heads_kv=2))
    turned = LAYOUTS[rotation:] + LAYOUTS[:rotation]
    views = Inputs(*(place(x) for place, x in zip(turned, inputs[:4], strict=False)), inputs.dlse)
    assert len({x.stride() for x in views[:4]}) == 4
    assert_same(run(kernel, inputs), run(kernel, views))


@gpu
@parametrize("head_dim", [32, 64, 128, 256], ids=lambda head_dim: f"D{head_dim}")
@parametrize("layout", [param(i, id=f"B47-k{i}") for i in range(len(LAYOUTS))])
def test_pairs_of_layouts(layout, head_dim, device):
    """k in one layout and v in each. How tiles lie in shared memory depends on both, and compilers err in few pairs."""
    inputs = plain(draw(device, 20, 33, head_dim, heads=4, heads_kv=2))
    expected, k = run(kernel, inputs), LAYOUTS[layout](inputs.k)
    for place in LAYOUTS:
        assert_same(expected, run(kernel, inputs._replace(k=k, v=place(inputs.v))))


@parametrize("compiled", [False, True], ids=["eager", "compiled"])
@parametrize(
    "shape, cut", [param((1, 2, 100, 16), 36, id="B49-small"), param((1, 16, 4096, 64), 128, id="B49-full", marks=gpu)]
)
def test_slices_of_longer_keys(shape, cut, compiled, device):
    q, k, v, do, _ = large_inputs(device, *shape)
    k, v = k[:, :, :-cut], v[:, :, :-cut]
    attention = torch.compile(flash_attention, fullgraph=True, backend="aot_eager") if compiled else flash_attention
    assert_same(differentiate(attention, q, k, v, do), differentiate(flash_attention, q, k.clone(), v.clone(), do))


# Head groups, packed and empty sequences


@parametrize(
    "heads, heads_kv, head_dim_v",
    [param(8, 2, None, id="B50-8/2"), param(4, 2, 40, id="B50-4/2-DV40"), param(3, 1, 8, id="B50-3/1-DV8")],
)
def test_shared_keys_are_expanded_keys(heads, heads_kv, head_dim_v, device):
    inputs = draw(device, 20, 33, 16, heads=heads, heads_kv=heads_kv, head_dim_v=head_dim_v)
    assert_within(inputs, causal=True)
    group = heads // heads_kv
    wide = inputs._replace(k=inputs.k.repeat_interleave(group, 1), v=inputs.v.repeat_interleave(group, 1))
    shared, expanded = run(kernel, inputs, causal=True), run(kernel, wide, causal=True)
    assert_same(*({name: x[name] for name in ("out", "lse", "dq")} for x in (shared, expanded)))
    truth = run(attention_reference, inputs, torch.float64, causal=True)
    summed = {name: expanded[name].unflatten(1, (heads_kv, group)).sum(2) for name in ("dk", "dv")}
    assert_results_within(*({name: x[name] for name in summed} for x in (shared, summed, truth)))


@parametrize(
    "heads, heads_kv, seqlen, dtype",
    [
        param(9, 3, 5, "bf16", id="B51-9/3"),
        param(32, 1, 5, "fp16", id="B51-32/1"),
        param(34, 2, 5, "bf16", id="B51-34/2", marks=gpu),
        param(5, 5, 5, "fp16", id="B51-5/5"),
    ],
)
def test_group_sizes(heads, heads_kv, seqlen, dtype, device):
    assert_within(draw(device, seqlen, seqlen + 2, 16, dtype, heads=heads, heads_kv=heads_kv), causal=True)


@parametrize(
    "lengths_q, lengths_k, heads, causal",
    [
        param([1, 0, 1], [3, 0, 5], (9, 3), False, id="B52-decode"),
        param([1, 0, 1], [3, 0, 5], (3, 1), True, id="B52-decode-causal"),
        param([0, 4, 0, 0], [0, 70, 2, 0], (3, 1), False, id="B52-empty-at-both-ends"),
        param([0, 4, 0, 0], [0, 70, 2, 0], (3, 1), True, id="B52-empty-at-both-ends-causal"),
        param([3, 2], [0, 4], (3, 1), True, id="B52-no-keys"),
        param([0, 0], [0, 0], (3, 1), False, id="B52-nothing"),
    ],
)
def test_packed_sequences(lengths_q, lengths_k, heads, causal, device):
    inputs, offsets = packed(device, lengths_q, lengths_k, 64, heads=heads[0], heads_kv=heads[1])
    options = dict(max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k))
    assert_packed_within(inputs, offsets, causal=causal, **options)


@case("B52")
def test_packed_equals_dense(device):
    """One query each, as in decoding: a dense batch and the same one packed give the same bits."""
    inputs = draw(device, 1, 20, 16, heads=3, batch=3)
    dense = flash_attention(*inputs[:3], causal=True)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in inputs[:3])
    offsets = (torch.arange(4, dtype=torch.int32, device=device) * n for n in (1, 20))
    out = flash_attention_varlen(q, k, v, *offsets, causal=True, max_seqlen_q=1)
    assert torch.equal(out, dense.transpose(1, 2).flatten(0, 1))


# Device, dtype, precision


@case("B55-guard")
def test_launches_under_a_device_guard(device, monkeypatch):
    guards, launched = [], []

    class Guard:
        def __init__(self, x):
            self.device = x.device

        def __enter__(self):
            guards.append(self.device)

        def __exit__(self, *_):
            guards.pop()

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    for name in ("flashattn.forward.attn_forward", "flashattn.backward.attn_backward"):
        launch = getattr(import_module(name.rsplit(".", 1)[0]), name.rsplit(".", 1)[1])

        def spy(*arguments, launch=launch, **options):
            launched.append(guards == [arguments[0].device])
            return launch(*arguments, **options)

        monkeypatch.setattr(name, spy)
    run(kernel, draw(device, 5, 7, 16))
    assert launched == [True, True]


@two_gpus
@parametrize("is_packed", [param(False, id="B55-dense"), param(True, id="B55-packed")])
def test_tensors_on_another_gpu_than_the_current_one(is_packed):
    assert torch.cuda.current_device() == 0
    second = torch.device("cuda", 1)
    if is_packed:
        inputs, offsets = packed(second, [3, 0, 70], [5, 2, 100], 64, "bf16")
        results = assert_packed_within(inputs, offsets, causal=True)
        here = run_packed(Inputs(*(x.to("cuda:0") for x in inputs)), [x.to("cuda:0") for x in offsets], causal=True)
    else:
        inputs = draw(second, 113, 203, 64, "bf16")
        assert_within(inputs, causal=True)
        results, here = run(kernel, inputs, causal=True), run(kernel, [x.to("cuda:0") for x in inputs], causal=True)
    assert all(x.device == second for x in results.values())
    assert_same({name: x.to("cuda:0") for name, x in results.items()}, here)
    assert torch.cuda.current_device() == 0


@parametrize("heads, head_dim", [param(1, 32, id="B56-D32"), param(1, 64, id="B57-D64")])
def test_fp32_is_multiplied_in_full(heads, head_dim, device):
    assert_within(draw(device, 128, 128, head_dim, "fp32", heads=heads), causal=True)


@case("B56")
def test_every_product_names_its_precision():
    _, dots = names_in_package()
    assert dots
    for dot in dots:
        given = {word.arg: ast.literal_eval(word.value) for word in dot.keywords}
        assert given["input_precision"] == "ieee", ast.unparse(dot)


@case("B57-switch")
def test_precision_switch_of_pytorch_changes_nothing(device):
    inputs, before = draw(device, 40, 40, 64, "fp32"), torch.get_float32_matmul_precision()
    results = []
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            results.append(run(kernel, inputs))
    finally:
        torch.set_float32_matmul_precision(before)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@case("B58")
def test_bf16_on_a_gpu_without_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    q = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    with pytest.raises(NotImplementedError, match=r"`q` must be float16 or float32 on this GPU.*, got bfloat16"):
        ops.check_can_launch(q)
    q.dtype = torch.float16
    ops.check_can_launch(q)


@case("B59")
def test_nothing_needs_flash_attn():
    text = (ROOT / "pyproject.toml").read_text() + (ROOT / "requirements.txt").read_text()
    assert "flash-attn" not in text and "flash_attn" not in text
    assert "flash_attn" not in names_in_package()[0]
    assert not [
        path for path in PACKAGE.rglob("*.py") if re.search(r"^\s*(import|from) flash_attn", path.read_text(), re.M)
    ]


@parametrize("dtype", [param("float16", id="B59-fp16"), param("float32", id="B59-fp32")])
def test_kernels_compile_for_a_t4(dtype):
    assert {row["direction"] for row in load_targets(target="sm_75", dtype=dtype)} == {"forward", "dq", "dkdv"}
    assert not load_targets(target="sm_75", dtype="bfloat16")


# Shared memory, tuning, repeatability, hangs


@parametrize("target", [param(name, id=f"B61-{name}") for name in TARGETS])
def test_blocks_fit_shared_memory(target):
    rows = load_targets(target=target)
    assert {row["direction"] for row in rows} == {"forward", "dq", "dkdv"}
    assert {row["head_dim"] for row in rows} >= {64, 128, 256}
    for row in rows:
        assert row["shared_bytes"] <= TARGETS[target].shared_bytes, row


@case("B61-unknown-gpu")
def test_unknown_gpu_with_little_shared_memory():
    unknown = Target("sm_99", "mma", 49152)
    for direction, head_dim in product(("forward", "dq", "dkdv"), (64, 128, 256)):
        chosen = [
            block_config(direction, head_dim, head_dim, torch.float16, target, causal=True)
            for target in (unknown, TARGETS["sm_75"])
        ]
        assert chosen[0][:2] == chosen[1][:2]


@gpu
@case("B61-this-gpu")
def test_shared_memory_of_this_gpu(device):
    properties = torch.cuda.get_device_properties(device)
    assert target_of(torch.empty(0, device=device).device).shared_bytes == properties.shared_memory_per_block_optin


@parametrize("direction", [param("dkdv", id="B7-dkdv"), param("dq", id="B7-dq")])
def test_backward_at_head_dim_128_fits_99_kib(direction):
    rows = load_targets(target="sm_86", head_dim=128, direction=direction)
    assert {row["dtype"] for row in rows} == {"float16", "bfloat16", "float32"}
    assert all(row["shared_bytes"] <= 101376 for row in rows)


@case("B7", "B74")
def test_compiles_here_and_now():
    entries = [("dkdv", 128, "bfloat16", True, "sm_86"), ("forward", 64, "bfloat16", True, "sm_90")]
    printed = python(str(ROOT / "tests" / "compile_kernels.py"), json.dumps(entries))
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["target"] for row in rows] == [entry[4] for entry in entries]
    assert all(row["shared_bytes"] <= TARGETS[row["target"]].shared_bytes for row in rows), rows


@case("B62")
def test_nothing_is_tuned_or_accumulated():
    names, _ = names_in_package()
    assert not [name for name in names if "autotune" in name.lower() or name.startswith("atomic")]


@case("B62-again")
def test_launching_again_changes_nothing(device, monkeypatch):
    """A tuner launches a kernel many times; results that are added up would show it."""
    inputs = draw(device, 40, 70, 16)
    once = run(kernel, inputs, causal=True)
    launches = record_launches(monkeypatch, times=3)
    assert_same(once, run(kernel, inputs, causal=True))
    assert len(launches) == 3


@case("B62-first")
def test_first_call_is_right(device):
    """Nothing else here has this head dimension, so that on a GPU these kernels are compiled now."""
    inputs = draw(device, 40, 50, 28)
    first = run(kernel, inputs)
    assert_same(first, run(kernel, inputs))
    assert_within(inputs)


@parametrize("value", [param(1e3, id="B63-1000"), param(math.nan, id="B63-nan"), param(math.inf, id="B63-inf")])
def test_what_results_held_before_does_not_matter(value, device, monkeypatch):
    inputs = draw(device, 40, 50, 16)
    expected = run(kernel, inputs, causal=True)
    with_results_in(monkeypatch, lambda x: x.fill_(value))
    assert_same(expected, run(kernel, inputs, causal=True))


@parametrize("head_dim", [40, 128, 256], ids=lambda head_dim: f"D{head_dim}")
@parametrize(
    "target, causal",
    [
        param("sm_75", True, id="B63-small"),
        param("sm_86", True, id="B63-portable"),
        param("sm_90", True, id="B63-hopper-causal"),
        param("sm_90", False, id="B63-hopper-full"),
        param("sm_90 rows", False, id="B63-hopper-rows"),
        param("sm_100", True, id="B63-blackwell"),
    ],
)
def test_each_configuration_alone(target, causal, head_dim, device, monkeypatch):
    """The blocks of every table in configs.py on this machine, however fast. Results hold NaN before (conftest.py)."""
    target, _, rows = target.partition(" ")
    monkeypatch.setattr("flashattn.launch.LAUNCHES", {})
    for module in ("forward", "backward"):
        monkeypatch.setattr(f"flashattn.{module}.target_of", lambda device: TARGETS[target])
        if rows:
            monkeypatch.setattr(f"flashattn.{module}.boxes_fit", lambda *_: False)
    seqlens = (300, 410) if device.type == "cuda" else (20, 40)
    assert_within(draw(device, *seqlens, head_dim, heads=1, family="low"), causal=causal)


@case("B64")
def test_order_of_programs_does_not_matter(device, monkeypatch):
    """The interpreter takes programs from the last to the first; a GPU in any order, again and again."""
    inputs = draw(device, 70, 130, 16)
    expected = run(kernel, inputs, causal=True)
    if device.type == "cpu":
        builder = import_module("triton.runtime.interpreter").interpreter_builder
        set_grid_idx = builder.set_grid_idx
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_grid_idx(builder.grid_dim[0] - 1 - x, y, z))
    for _ in range(1 if device.type == "cpu" else 50):
        assert_same(expected, run(kernel, inputs, causal=True))


@gpu
@parametrize(
    "shape, seqlen_k, calls",
    [param((32, 32, 1024, 128), 1024, 2, id="B64-long"), param((2, 4, 2048, 64), 128, 50, id="B64-x50")],
)
def test_gradients_again_and_again(shape, seqlen_k, calls, device, most_memory):
    q, k, v, do, dlse = large_inputs(device, *shape)
    inputs = Inputs(q, k[:, :, :seqlen_k], v[:, :, :seqlen_k], do, dlse)
    first = run(kernel, inputs, causal=True)
    for _ in range(calls - 1):
        assert_same(first, run(kernel, inputs, causal=True))


@case("B65")
def test_every_test_has_a_time_limit(request):
    assert request.config.pluginmanager.hasplugin("timeout")
    assert 0 < float(request.config.getini("timeout")) <= 1800


@gpu
@pytest.mark.timeout(120)
@parametrize("head_dim", [param(64, id="B65-D64"), param(128, id="B65-D128"), param(256, id="B65-D256")])
def test_finishes_within_a_limit(head_dim, device):
    results = run(kernel, large_inputs(device, 2, 16, 8192, head_dim), causal=True)
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.timeout(120)
@parametrize("n_sequences", [param(1, id="B65-packed-1"), param(7, id="B65-packed-7"), param(40, id="B65-packed-40")])
def test_search_for_a_sequence_ends(n_sequences, device):
    """The one loop without a fixed end halves an interval, also where almost every sequence is empty."""
    lengths = [3 if i == n_sequences // 2 else 0 for i in range(n_sequences)]
    inputs, offsets = packed(device, lengths, lengths, 16, heads=1, unowned=2)
    assert flash_attention_varlen(*inputs[:3], *offsets).isfinite().all()


# Inside PyTorch


@parametrize("backend", [param("aot_eager", id="B66-aot_eager"), param("inductor", id="B66-inductor", marks=gpu)])
def test_compiles_in_one_graph(backend, device):
    q, k, v, do, _ = draw(device, 9, 9, 16, heads_kv=2)
    assert q.stride() != q.contiguous().stride()

    def attention(q, k, v):
        return flash_attention(q * 1, k, v, causal=True) * 1

    expected = flash_attention(q, k, v, causal=True)
    compiled = torch.compile(flash_attention, fullgraph=True, backend=backend)
    assert compiled(q, k, v, causal=True).stride() == expected.stride() == q.stride()
    actual = differentiate(torch.compile(attention, fullgraph=True, backend=backend), q, k, v, do)
    assert_same(actual, differentiate(attention, q, k, v, do))


@parametrize("name", [param("forward", id="B66-forward"), param("backward", id="B66-backward")])
def test_operators_pass_opcheck(name, device):
    q, k, v, do, dlse = draw(device, 9, 9, 16, "fp32", heads_kv=2)
    options = (None, None, None, 0.25, None, None, 0)
    arguments = (q, k, v)
    if name == "backward":
        out, _, lse_log2, lse_low = torch.ops.flashattn.forward(q, k, v, *options)
        arguments = (do, dlse, out, lse_log2, lse_low, q, k, v)
    else:
        arguments = tuple(x.detach().requires_grad_() for x in arguments)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.flashattn, name).default, (*arguments, *options), test_utils=checks)


@parametrize("loss", [torch.sum, lambda out: (out**2).sum()], ids=["B68-sum", "B68-square"])
@parametrize("way", ["eager", "operator"])
def test_second_derivative_raises(way, loss, device):
    leaves = [x.detach().requires_grad_() for x in draw(device, 4, 4, 16, "fp32", heads_kv=2)[:3]]
    if way == "eager":
        out = flash_attention(*leaves)
    else:
        out = torch.ops.flashattn.forward(*leaves, None, None, None, 0.25, None, None, None)[0]
    (dq,) = torch.autograd.grad(loss(out), leaves[0], create_graph=True)
    assert dq.requires_grad
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(dq.sum(), leaves[1])


@case("B71")
def test_there_is_no_dropout(device):
    x = torch.zeros(1, 1, 4, 16, device=device)
    with pytest.raises(
        NotImplementedError,
        match=r"`dropout_p` must be 0, got 0.48: .* torch.nn.functional.scaled_dot_product_attention",
    ):
        scaled_dot_product_attention(x, x, x, dropout_p=0.48)
    for attention in (flash_attention, flash_attention_varlen):
        with pytest.raises(TypeError, match="dropout_p"):
            attention(x, x, x, dropout_p=0.48)


@case("B73")
def test_one_gradient_for_each_argument(device):
    q, k, v, do, dlse = draw(device, 4, 4, 16, "fp32", heads_kv=2)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v)  # kept alive: with it the node would lose what it saved
    node = out.grad_fn
    while "_Eager" not in type(node).__name__:
        node = node.next_functions[0][0]
    n_arguments = len(torch.ops.flashattn.forward.default._schema.arguments)
    ctx = types.SimpleNamespace(saved_tensors=node.saved_tensors, options=node.options)
    for arrived in ((do, dlse, None), (None, None, None)):
        for gradients in (ops._Eager.backward(ctx, *arrived), ops._differentiate_forward(ctx, *arrived)):
            assert len(gradients) == n_arguments == 3 + 3 + len(node.options)
            assert all(x is None for x in gradients[3:])


@case("B74")
def test_no_warp_specialisation():
    asked = [
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "warp_specialize"  # as in tl.range(..., warp_specialize=True)
    ]
    assert not asked
    directions = {"forward", "dq", "dkdv"}
    for dtype, head_dim in product(("float16", "bfloat16"), (64, 128, 256)):
        rows = load_targets(target="sm_90", dtype=dtype, head_dim=head_dim)
        assert {row["direction"] for row in rows} == directions, (dtype, head_dim)


# Platforms and versions

CALL = """
import flashattn, torch
try:
    flashattn.flash_attention(*torch.zeros(3, 1, 1, 4, 16))
except Exception as error:
    print(type(error).__name__, error)
"""


@case("B75-no-triton")
def test_without_triton():
    assert python("-c", CALL, without_triton=True).startswith(
        "ImportError flash_attention needs Triton, which is not installed"
    )


@case("B75-no-gpu")
def test_without_a_gpu():
    printed = python("-c", CALL)
    assert printed.startswith("RuntimeError `q` must be on a CUDA device, got cpu") and "TRITON_INTERPRET=1" in printed


@case("B75-shadowed")
def test_a_file_named_triton(tmp_path):
    """It stands before the package on the path: importing still works, and the call's error names it."""
    (tmp_path / "triton.py").write_text("")
    (tmp_path / "script.py").write_text(CALL)
    printed = python(str(tmp_path / "script.py"))
    assert printed.startswith(("ImportError", "ModuleNotFoundError")) and "'triton' is not a package" in printed


@case("B76")
def test_no_block_pointers():
    assert not names_in_package()[0] & {"make_block_ptr", "advance"}


@parametrize("seqlen", [param(16, id="B77-16x16"), param(1, id="B77-one-key")])
def test_bf16_products(seqlen, device):
    inputs = draw(device, seqlen, seqlen, 16, "bf16", heads=1)
    assert_within(inputs)
    if seqlen == 1:
        assert torch.equal(flash_attention(*inputs[:3]), inputs.v)


@case("B78")
def test_a_gpu_run_is_on_record():
    results = json.loads((ROOT / "tests" / "results" / "kernels.json").read_text())
    assert results["gpu"] and results["triton"] and results["counts"]["failed"] == 0
    held = [test for test in results["tests"] if "ratios" in test]
    assert {test["test"].split("[")[1].split("-")[0] for test in held} == set(DTYPES)
    assert all(ratio <= 1 for test in held for ratio in test["ratios"].values())


@parametrize("where", [param("q", id="B78-nan-in-q"), param("k", id="B78-nan-in-k")])
def test_nan_shows_where_it_is_seen(where, device):
    tensors = dict(zip("qkv", draw(device, 70, 70, 16, "fp32", heads=1)[:3], strict=True))
    tensors[where][0, 0, 5, 3] = math.nan
    has_nan = flash_attention(**tensors, causal=True).isnan()[0, 0]
    rows = torch.arange(70, device=device)
    assert torch.equal(has_nan.all(1), rows == 5 if where == "q" else rows >= 5)
    assert torch.equal(has_nan.any(1), has_nan.all(1))


@case("B78-alias")
def test_one_tensor_for_all_inputs(device):
    x = plain(draw(device, 40, 40, 16, heads_kv=2)).q
    dlse = torch.ones(1, 2, 40, device=device)
    assert_same(run(kernel, Inputs(x, x, x, x, dlse)), run(kernel, Inputs(*(x.clone() for _ in range(4)), dlse)))


@case("B79-pins")
def test_versions_are_pinned():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"[\w.-]+==[\w.]+( *;.*)?$", line) for line in lines)
    assert {"torch", "triton", "nbval"} <= {line.split("==")[0] for line in lines}


@case("B79-notebooks")
def test_every_notebook_is_run():
    commands = subprocess.run(
        ["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"MAKEFLAGS": ""}
    ).stdout
    assert re.search(r"pytest --nbval-lax notebooks\b", commands), commands
    notebooks = {str(path.relative_to(ROOT).with_suffix("")) for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert notebooks and notebooks <= set(re.findall(r"file: (\S+)", (ROOT / "_toc.yml").read_text()))


@case("B79-blocks")
def test_blocks_are_powers_of_two():
    for target, direction, causal in product(TARGETS.values(), ("forward", "dq", "dkdv"), (False, True)):
        for dtype, head_dim in product((torch.float16, torch.float32), (1, 16, 17, 72, 128, 200, 256)):
            config = block_config(direction, head_dim, head_dim, dtype, target, causal=causal)
            assert all(size >= 16 and size & (size - 1) == 0 for size in config[:4]), config


@case("B80")
def test_more_than_one_version_of_triton():
    """The oldest that the package claims, the one of the GPU runs, and the newest."""
    rows = load_targets()
    versions = {row["triton"] for row in rows}
    assert len(versions) >= 3
    for version in versions:
        assert {row["direction"] for row in load_targets(triton=version)} == {"forward", "dq", "dkdv"}


# Paged decoding


@case("B83")
def test_page_size(device):
    """Those that are offered work; others are refused by name, and nothing else is tried instead."""
    q = random(device, 1, 2, 1, 16)
    lengths = torch.tensor([15], dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for page_size in (1, 8, 16, 24, 32, 48, 64, 128, 256, 512):
        k, v = random(device, 2, 1, 2, page_size, 16)
        if page_size in (16, 32, 64, 128, 256):
            expected, _ = attention_reference(q.double(), k[:, :, :15].double(), v[:, :, :15].double())
            torch.testing.assert_close(flash_decode(q, k, v, table, lengths).double(), expected, rtol=0.02, atol=0.02)
            PagedKVCache(1, 2, 16, page_size=page_size, device=device)
        else:
            with pytest.raises(ValueError, match=f"`k_pages` must have page_size 16, .* or 256, got {page_size}"):
                flash_decode(q, k, v, table, lengths)
            with pytest.raises(ValueError, match=f"`page_size` must be 16, .* or 256, got {page_size}"):
                PagedKVCache(1, 2, 16, page_size=page_size, device=device)
