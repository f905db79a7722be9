"""Attention on e4m3 tensors: the kernel against the same steps in PyTorch, and those against the truth."""

import json
import math
from pathlib import Path

import pytest
import torch
from processes import python

from flashattn import attention_reference, flash_attention_fp8, fp8, hadamard_rotate, quantize_fp8
from flashattn.configs import TARGETS, target_of
from flashattn.fp8 import E4M3, attention_fp8_emulated
from flashattn.testing import draw_outliers, max_error, place, relative_errors

pytestmark = pytest.mark.triton

E4M3_VALUES = torch.arange(256).to(torch.uint8).view(E4M3).float()
E4M3_VALUES = E4M3_VALUES[E4M3_VALUES.isfinite()].unique()


MIXED = ("heads", "wide", "rows")
PER_BLOCK = (128, 128, 128)


def scales_of(*scales):
    return dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))


def dequantize(x, scale):
    """Return in fp64 what an e4m3 tensor and its scale stand for."""
    if scale.dim() == 3:
        scale = scale.repeat_interleave(128, dim=2)[:, :, : x.shape[2], None]
    else:
        scale = scale[:, :, None, None]
    return x.double() * scale.double()


def emulate(pairs, block_n, *, causal=False, scale=None, window=None, softcap=None):
    """Call the emulation with the options of the public call; return (out, lse)."""
    left, right = window or (None, None)
    scales = [scale if scale.dim() == 3 else scale[:, :, None] for _, scale in pairs]
    return attention_fp8_emulated(
        *(x for x, _ in pairs), *scales, scale=1 / math.sqrt(pairs[0][0].shape[3]) if scale is None else scale,
        softcap=softcap, window_left=left, window_right=0 if causal else right, block_n=block_n,
    )  # fmt: skip


def attend(pairs, **options):
    options = dict(out_dtype=torch.float32, return_lse=True) | options
    return flash_attention_fp8(*(x for x, _ in pairs), **scales_of(*(scale for _, scale in pairs)), **options)


def draw_pairs(n, m, d, d_v=None, heads=4, heads_kv=2, blocks=(None, None, None), device="cpu", layouts=MIXED):
    """Draw q, k and v, quantise them and lay them out as ``place`` says; return [(x, scale), ...]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, n, d), (2, heads_kv, m, d), (2, heads_kv, m, d_v or d))
    pairs = [
        quantize_fp8(torch.randn(shape, generator=generator).to(device), block=block)
        for shape, block in zip(shapes, blocks, strict=True)
    ]
    return [(place(x.float(), layout, E4M3), scale) for (x, scale), layout in zip(pairs, layouts, strict=True)]


def keys_at_a_time(pairs, causal=False, window=None, **_):
    """Return the block_n that the kernel takes for a call: p is rounded against the maximum of the tiles so far."""
    from flashattn.fp8_kernel import boxes_fit_fp8, fp8_config, keys_last

    q, k, v = (x for x, _ in pairs)
    left, right = window or (None, None)
    target = target_of(torch.zeros(0, device=q.device).device)
    fit = boxes_fit_fp8(target, k, keys_last(v), k.shape[2] - q.shape[2], left, 0 if causal else right)
    return fp8_config(q.shape[3], v.shape[3], target, fit)[0].block_n


def assert_same(results, expected):
    """Raise unless the kernel's (out, lse) are the emulation's, but for what sums in another order change.

    A p next to a tie may fall on its other side, a step of 2^-4 off: on a CPU one in a hundred thousand, on a GPU, where
    sums of 8-bit products keep some 14 bits, one in a few hundred. Rounding p at all errs 2 to 3 times as much as this
    allows on a GPU, and a hundred times as much as on a CPU.
    """
    (out, lse), (expected, expected_lse) = results, expected
    assert out.shape == expected.shape and out.is_contiguous() and torch.equal(out.isfinite(), expected.isfinite())
    rms, largest = relative_errors(out, expected) if expected.any() else (out.abs().max().item(), 0.0)
    on_gpu = out.is_cuda
    assert rms <= (0.01 if on_gpu else 2e-4) and largest <= (0.04 if on_gpu else 4e-3)
    assert max_error(lse, expected_lse) <= (2e-3 if on_gpu else 1e-5)
    assert not out[expected_lse == -math.inf].any()


# (n, m, d, options of draw_pairs, options of the call)
CASES = {
    "plain": (70, 130, 64, {}, {}),
    "causal": (203, 330, 64, dict(heads_kv=1, blocks=PER_BLOCK), dict(causal=True)),
    "rows without keys": (330, 203, 40, dict(d_v=72, heads=2, blocks=(None, 128, None)), dict(causal=True)),
    "one query": (1, 300, 128, dict(blocks=(128, None, 128)), dict(causal=True)),
    "window": (200, 200, 16, dict(heads=2, blocks=PER_BLOCK), dict(window=(37, 20))),
    "keys nobody sees": (60, 300, 64, dict(heads=2, blocks=PER_BLOCK), dict(window=(10, 0))),
    "window past the end": (200, 128, 64, dict(heads=2, blocks=PER_BLOCK), dict(window=(0, 0))),
    "softcap": (65, 129, 64, dict(heads=2, blocks=PER_BLOCK), dict(softcap=2.0, causal=True)),
    "negative scale": (65, 129, 64, dict(heads=2), dict(scale=-0.3)),
    "no scale": (65, 129, 64, dict(heads=2), dict(scale=0.0)),
    "wide": (65, 70, 256, dict(heads=2, heads_kv=1), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_the_emulation(name, device):
    """Masks, grouped heads, both kinds of scales, head dimensions, lengths; q, k and v lie in memory in three ways."""
    n, m, d, drawn, options = CASES[name]
    pairs = draw_pairs(n, m, d, device=device, **drawn)
    expected = emulate(pairs, keys_at_a_time(pairs, **options), **options)
    assert_same(attend(pairs, **options), expected)
    assert name != "rows without keys" or (expected[1] == -math.inf).any()


@pytest.mark.parametrize("name", CASES)
def test_emulation_rounds_nothing_but_p(name):
    """Of the inputs as they are after quantising: the lse is exact, and out errs by what 4 digits of p allow."""
    n, m, d, drawn, options = CASES[name]
    pairs = draw_pairs(n, m, d, **drawn)
    out, lse = emulate(pairs, 128, **options)
    truth, true_lse = attention_reference(*(dequantize(*pair) for pair in pairs), **options)
    assert max_error(lse, true_lse) < 1e-4
    rms, largest = relative_errors(out, truth)
    assert rms < 0.03 and largest < 2.0**-4
    assert rms > 0 or n == 1 or name == "window past the end"


def test_rounding_in_the_kernel_is_nearest_even(device):
    """Every e4m3 number, every midpoint of two and its fp32 neighbours, 0 to 448."""
    from kernels_fp8 import store_rounded

    values = E4M3_VALUES.to(device)
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, *(torch.nextafter(middles, torch.tensor(s, device=device)) for s in (-1e9, 1e9))])
    x = torch.cat([x, torch.tensor([449.0, 1e30, -1e30, math.inf, math.nan], device=device)])
    x = torch.nn.functional.pad(x, (0, 1024 - len(x)))
    rounded = torch.zeros(1024, device=device).to(E4M3)
    store_rounded[(1,)](x, rounded, N=1024)
    rounded = rounded.float()
    distance = (x.clamp(-448, 448)[:, None] - values[None, :]).abs()
    nearest = distance.amin(dim=1, keepdim=True)
    is_nearest = (distance == nearest) & ((distance == nearest).sum(dim=1, keepdim=True) == 1)
    even = (values.to(E4M3).view(torch.uint8) & 1) == 0
    chosen = torch.where(is_nearest.any(dim=1, keepdim=True), is_nearest, (distance == nearest) & even)
    expected = torch.where(x.isnan(), math.nan, values[chosen.int().argmax(dim=1)])
    wrong = rounded.nan_to_num(-1000.0) != expected.nan_to_num(-1000.0)
    assert not wrong.any(), list(zip(x[wrong].tolist(), rounded[wrong].tolist(), expected[wrong].tolist(), strict=True))


def test_scores_of_any_size(device):
    """Scores near 10^9 leave one key a row; what a product with one rounding would leave of it is 2^100 or nothing."""
    (q, _), (k, _), v = draw_pairs(65, 130, 64, heads=2, device=device)
    ones = torch.ones(2, 2, device=device)
    pairs = [((q.float() / 200).round().to(E4M3), ones), ((k.float() / 200).round().to(E4M3), ones), v]
    out, lse = attend(pairs, scale=1e9)  # of small whole numbers, whose products and sums are exact everywhere
    expected, expected_lse = attention_reference(*(dequantize(*pair) for pair in pairs), scale=1e9)
    assert ((lse - expected_lse).abs() <= 1e-6 * expected_lse.abs()).all()
    # Keys of equal scores are summed, on Hopper with some 14 bits.
    limit = 1e-5 if device.type == "cpu" else 2**-14 * expected.abs().max().item()
    assert max_error(out, expected) < limit


def test_scales_whose_product_is_0(device):
    """Scales of 1e-30: every visible key weighs the same, and a hidden one, -inf times 0, is no NaN."""
    (q, _), (k, _), v = draw_pairs(65, 70, 64, heads=2, device=device)
    tiny = torch.full((2, 2), 1e-30, device=device)
    out, lse = attend([(q, tiny), (k, tiny), v], causal=True)
    expected, expected_lse = attention_reference(q.double() * 0, k.double() * 0, dequantize(*v), causal=True)
    assert max_error(lse, expected_lse) < 1e-5 and max_error(out, expected) < 0.01


def test_nan(device):
    """A visible NaN shows, in key, value and query; one in a key that no query sees does not."""
    q, k, v = (list(pair) for pair in draw_pairs(60, 300, 64, heads=2, device=device))
    clean, _ = attend([q, k, v], window=(10, 0))
    for x in (k[0], v[0]):
        x[:, :, :230] = math.nan  # the first query stands at 240 and sees from 230 on
    hidden, _ = attend([q, k, v], window=(10, 0))
    assert torch.equal(clean, hidden)
    v[0][0, 0, 299, 5] = math.nan
    q[0][1, 0, 7, 3] = math.nan
    out, _ = attend([q, k, v], window=(10, 0))
    assert out[0, 0, -1, 5].isnan() and out[1, 0, 7].isnan().all()
    assert out[1, 0, 8].isfinite().all()


def test_no_keys_no_queries(device):
    q, k, v = draw_pairs(5, 0, 64, heads=2, device=device, blocks=PER_BLOCK)
    out, lse = attend([q, k, v])
    assert not out.any() and (lse == -math.inf).all() and out.shape == (2, 2, 5, 64)
    q, k, v = draw_pairs(0, 5, 64, heads=2, device=device)
    out, lse = attend([q, k, v])
    assert out.shape == (2, 2, 0, 64) and lse.shape == (2, 2, 0)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_out_dtype(out_dtype, device):
    pairs = draw_pairs(33, 70, 64, heads=2, device=device)
    (wide, _), (out, _) = attend(pairs), attend(pairs, out_dtype=out_dtype)
    assert out.dtype == out_dtype and torch.equal(out, wide.to(out_dtype))
    assert torch.equal(attend(pairs, return_lse=False), wide)
    default = flash_attention_fp8(*(x for x, _ in pairs), **scales_of(*(s for _, s in pairs)))
    assert default.dtype == torch.bfloat16


def test_layout_of_v_does_not_matter(device):
    """Keys along the last axis, in any of memory's orders: to the bit the same."""
    q, k, (v, v_scale) = draw_pairs(65, 131, 64, heads=2, device=device)
    outs = [
        attend([q, k, (x, v_scale)])[0] for x in (v, v.contiguous(), v.mT.contiguous().mT, v[:, :1].expand(v.shape))
    ]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert torch.equal(outs[3][:, 0], outs[0][:, 0])


# ---- Quantising and rotating.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [None, 128])
def test_quantize(block, dtype, device):
    x = (torch.randn(2, 3, 300, 40, generator=torch.Generator().manual_seed(0)) * 3).to(device, dtype)
    x[1, 2, 128:256] = 0
    quantized, scale = quantize_fp8(x, block=block)
    assert quantized.shape == x.shape and quantized.dtype == E4M3 and quantized.is_contiguous()
    assert scale.shape == ((2, 3, 3) if block else (2, 3)) and scale.dtype == torch.float32
    rows = [x[:, :, n : n + 128] for n in (0, 128, 256)] if block else [x]
    largest = torch.stack([part.float().abs().amax(dim=(2, 3)) for part in rows], dim=2)
    torch.testing.assert_close(
        scale.view(largest.shape), torch.where(largest == 0, 1.0, largest / 448), rtol=1e-6, atol=0
    )
    values = dequantize(quantized, scale)
    floor = dequantize(torch.ones_like(quantized, dtype=torch.float64), scale) * 2.0**-10  # half a subnormal step
    assert ((values - x).abs() <= torch.maximum(x.double().abs() * 2.0**-4, floor) * (1 + 1e-6)).all()
    assert quantized.float().abs().max() == 448
    transposed, same = quantize_fp8(x, block=block, keys_last=True)
    assert torch.equal(transposed.float(), quantized.float()) and torch.equal(scale, same)
    assert transposed.stride()[2] == 1 and transposed.stride()[3] % 16 == 0 and transposed.shape == x.shape


def test_quantize_extremes(device):
    x = torch.ones(1, 5, 2, 16, device=device)
    x[0, 0] = 0
    x[0, 1] = 1e-44
    x[0, 2] = 3.4e38
    x[0, 3, 0, 0], x[0, 3, 0, 1] = math.nan, -math.inf
    quantized, scale = quantize_fp8(x)
    assert scale[0, 0] == 1 and not quantized[0, 0].float().any()
    assert quantized[0, :3].float().isfinite().all() and (scale > 0).all() and scale.isfinite().all()
    assert quantized[0, 3].float().isnan().sum() == 2 and (quantized[0, 3, 1].float() == 448).all()
    for shape in ((0, 2, 3, 16), (2, 2, 0, 16)):
        for block, blocks in ((None, ()), (128, (math.ceil(shape[2] / 128),))):
            quantized, scale = quantize_fp8(torch.zeros(shape, device=device), block=block, keys_last=True)
            assert quantized.shape == shape and scale.shape == (*shape[:2], *blocks)


@pytest.mark.parametrize("head_dim", [1, 2, 64, 256])
def test_rotation_is_orthogonal(head_dim, device):
    eye = torch.eye(head_dim, dtype=torch.float64, device=device)
    rotation = hadamard_rotate(eye, seed=3)
    torch.testing.assert_close(rotation @ rotation.mT, eye, rtol=0, atol=1e-14)
    torch.testing.assert_close(rotation.abs(), torch.full_like(eye, head_dim**-0.5), rtol=1e-14, atol=0)
    q, k, _ = (x.double() for x in draw_outliers(1, 2, 9, head_dim, device, n_channels=1))
    torch.testing.assert_close(hadamard_rotate(q) @ hadamard_rotate(k).mT, q @ k.mT, rtol=1e-12, atol=1e-12)


def test_rotation_spreads_an_outlier_and_is_drawn_from_the_seed():
    x = torch.zeros(64)
    x[5] = 8.0
    assert torch.equal(hadamard_rotate(x).abs(), torch.ones(64))
    rotations = [hadamard_rotate(torch.eye(64), seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(rotations[0], rotations[1]) and not torch.equal(rotations[0], rotations[2])
    assert hadamard_rotate(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    x = torch.ones(3, 8, requires_grad=True)
    hadamard_rotate(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())  # a rotation keeps lengths


# ---- The errors, in bands: rms of the error over rms of the truth.

# kind: (draw_outliers' n_channels, rotated, least and largest rms error per head, and per block)
BANDS = {
    "gaussian": (0, False, (0.045, 0.060), (0.045, 0.060)),
    "outliers": (2, False, (0.13, 0.20), (0.11, 0.18)),
    "rotated": (2, True, (0.040, 0.060), (0.040, 0.060)),
}


def measure(kind, block, attention, seed=0, seqlen=1024, device="cpu", causal=False):
    """Return (rms, max) of the relative error of an 8-bit attention on one of the three kinds of inputs."""
    n_channels, rotated, *_ = BANDS[kind]
    q, k, v = draw_outliers(1, 4, seqlen, 128, device, seed, n_channels)
    truth, _ = attention_reference(q.double(), k.double(), v.double(), causal=causal)
    if rotated:
        q, k = hadamard_rotate(q), hadamard_rotate(k)
    return relative_errors(attention([quantize_fp8(x, block=block) for x in (q, k, v)], causal=causal)[0], truth)


@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("kind", BANDS)
def test_errors_stay_in_their_bands(kind, block, record_property):
    """Gaussian inputs lose 5 %; outliers in the same channels of q and k three times that; rotated, 5 % again."""
    for seed in (0, 1):
        rms, largest = measure(kind, block, lambda pairs, **o: emulate(pairs, 128, **o), seed)
        record_property(f"rms_{seed}", rms)
        low, high = BANDS[kind][3 if block else 2]
        assert low < rms < high and largest < 8 * rms


def test_rotation_halves_the_error_of_outliers():
    for block in (None, 128):
        errors = {kind: measure(kind, block, lambda p, **o: emulate(p, 128, **o), seed=2)[0] for kind in BANDS}
        assert errors["rotated"] < errors["outliers"] / 2 and errors["rotated"] < 1.2 * errors["gaussian"]


def test_bf16_errs_much_less():
    q, k, v = draw_outliers(1, 4, 1024, 128, n_channels=0)
    truth, _ = attention_reference(q.double(), k.double(), v.double())
    rms, _ = relative_errors(attention_reference(q.bfloat16(), k.bfloat16(), v.bfloat16())[0], truth)
    assert 0.003 < rms < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("kind", BANDS)
def test_errors_on_a_gpu(kind, block, causal, record_property):
    """The kernel errs as much as the emulation, to a few percent, at a length that the interpreter has no time for."""
    found = measure(kind, block, attend, seqlen=4096, device="cuda", causal=causal)
    expected = measure(kind, block, lambda p, **o: emulate(p, 128, **o), seqlen=4096, device="cuda", causal=causal)
    record_property("rms", found[0])
    record_property("max", found[1])
    assert found[0] == pytest.approx(expected[0], rel=0.05) and found[1] < 1.5 * expected[1]


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", [("rows",) * 3, ("heads", "wide", "rows")], ids=["boxes", "rows"])
@pytest.mark.parametrize("d", [40, 64, 128, 256])
@pytest.mark.parametrize(
    "n, m, causal", [(1024, 1024, True), (1000, 1333, True), (1333, 1000, True), (777, 2048, False)]
)
def test_kernel_is_the_emulation_on_a_gpu(d, n, m, causal, layouts):
    for blocks in ((None,) * 3, PER_BLOCK):
        pairs = draw_pairs(n, m, d, device="cuda", blocks=blocks, layouts=layouts)
        out, lse = attend(pairs, causal=causal)
        assert_same((out, lse), emulate(pairs, keys_at_a_time(pairs, causal), causal=causal))
        assert torch.equal(out, attend(pairs, causal=causal)[0])


@pytest.mark.gpu
def test_sums_over_many_keys_keep_their_digits():
    """All p are 1 and v is not far from 1: the mean over 16k keys, of which a sum of some 14 bits would lose percents."""
    v = torch.randn(1, 1, 16384, 64, device="cuda") * 0.1 + 1.0
    pairs = [quantize_fp8(x) for x in (torch.zeros(1, 1, 64, 64, device="cuda"), torch.zeros_like(v), v)]
    out, _ = attend(pairs)
    assert max_error(out, dequantize(*pairs[2]).mean(dim=2, keepdim=True).expand(out.shape)) < 2e-3


@pytest.mark.gpu
def test_the_order_of_v_in_memory_on_a_gpu():
    q, k, (v, v_scale) = draw_pairs(300, 1000, 128, device="cuda")
    outs = [attend([q, k, (x, v_scale)])[0] for x in (v, quantize_fp8(v.float(), keys_last=True)[0], v[:, :, ::1])]
    assert torch.equal(outs[0], outs[2])


# ---- Where it runs, and what it refuses.

WITHOUT_INTERPRETER = """
import torch, flashattn
from flashattn import flash_attention_fp8, quantize_fp8
torch.manual_seed(0)
pairs = [quantize_fp8(torch.randn(1, 2, 50, 32)) for _ in range(3)]
scales = dict(zip(("q_scale", "k_scale", "v_scale"), (s for _, s in pairs)))
out = flash_attention_fp8(*(x for x, _ in pairs), **scales, causal=True, out_dtype=torch.float32)
expected, _ = flashattn.attention_reference(*(x.double() * s[:, :, None, None] for x, s in pairs), causal=True)
print((out - expected).abs().max().item() < 0.1 and (out - expected).abs().max().item() > 0)
"""


@pytest.mark.parametrize("without_triton", [False, True])
def test_cpu_without_the_interpreter(without_triton):
    assert python("-c", WITHOUT_INTERPRETER, without_triton=without_triton) == "True"


def good():
    x, scale = quantize_fp8(torch.ones(2, 4, 5, 16))
    return dict(q=x, k=x, v=x, q_scale=scale, k_scale=scale, v_scale=scale)


def fp8_zeros(*shape, **options):
    return torch.zeros(shape, **options).to(E4M3)


BAD_CALLS = {
    "no tensor": (dict(q=[1.0]), TypeError, r"`q` must be a torch.Tensor, got list"),
    "bf16": (dict(k=torch.zeros(2, 4, 5, 16).bfloat16()), TypeError, r"`k` must be float8_e4m3fn, got bfloat16"),
    "e5m2": (dict(v=torch.zeros(2, 4, 5, 16).to(torch.float8_e5m2)), TypeError, r"`v` must be float8_e4m3fn, got float8_e5m2"),
    "rank": (dict(q=fp8_zeros(4, 5, 16)), ValueError, r"`q` must be 4-D, \(batch, heads, seqlen, head_dim\), got .*\(4, 5, 16\)"),
    "head_dim": (dict(k=fp8_zeros(2, 4, 5, 32)), ValueError, r"`k` must have head_dim 16 like `q`, got 32"),
    "heads": (dict(k=fp8_zeros(2, 3, 5, 16), v=fp8_zeros(2, 3, 5, 16)), ValueError, r"`q` must have .* multiple of the 3 heads of `k`, got 4"),
    "batch": (dict(v=fp8_zeros(3, 4, 5, 16)), ValueError, r"`v` must have batch 2 like `q`, got 3"),
    "device": ({name: fp8_zeros(2, 4, 5, 16).to("meta") for name in "qkv"}, ValueError, r"`q` must be on a CUDA device or the CPU, got meta"),
    "scale type": (dict(q_scale=1.0), TypeError, r"`q_scale` must be a torch.Tensor, got float"),
    "scale dtype": (dict(k_scale=torch.ones(2, 4).half()), TypeError, r"`k_scale` must be float32, got float16"),
    "scale device": (dict(v_scale=torch.ones(2, 4, device="meta")), ValueError, r"`v_scale` must be on cpu like `q`, got meta"),
    "scale shape": (dict(v_scale=torch.ones(2, 1)), ValueError, r"`v_scale` must be \(2, 4\) or, per 128 rows, \(2, 4, 1\), got \(2, 1\)"),
    "scale blocks": (dict(q_scale=torch.ones(2, 4, 2)), ValueError, r"`q_scale` must be .* got \(2, 4, 2\)"),
    "grad of a scale": (dict(q_scale=torch.ones(2, 4, requires_grad=True)), NotImplementedError, r"`q_scale` must not require grad: .*forward only; detach it"),
    "grad": (dict(q=quantize_fp8(torch.ones(2, 4, 5, 16, requires_grad=True))[0]), NotImplementedError, r"`q` must not require grad: .*forward only; detach it"),
    "causal": (dict(causal=1), TypeError, r"`causal` must be True or False, got 1"),
    "return_lse": (dict(return_lse=1), TypeError, r"`return_lse` must be True or False, got 1"),
    "scale": (dict(scale="1"), TypeError, r"`scale` must be a number or None, got str"),
    "scale nan": (dict(scale=math.nan), ValueError, r"`scale` must be a finite fp32 number .*, got nan"),
    "window": (dict(window=128), TypeError, r"`window` must be None or \(left, right\).*, got 128"),
    "softcap": (dict(softcap=0), ValueError, r"`softcap` must be a positive fp32 number.*, got 0"),
    "out_dtype": (dict(out_dtype=torch.float64), TypeError, r"`out_dtype` must be torch.float16, .* got torch.float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_named(name):
    changes, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        flash_attention_fp8(**(good() | changes))


# What is promised: on wgmma both products are of 8-bit tiles, nothing spills where tiles come as boxes, and a product
# never waits for the one before.
COMPILED = [
    *(["sm_90", d, causal, []] for d in (64, 128, 256) for causal in (False, True)),
    *(["sm_90", d, True, ["blocks"]] for d in (64, 128)), ["sm_90", 128, True, ["rows"]],
    *(["sm_89", d, True, []] for d in (64, 128, 256)), ["sm_120", 128, True, []],
]  # fmt: skip


def test_compiles_for_gpus_that_are_not_here():
    script = str(Path(__file__).with_name("compile_fp8.py"))
    rows = [json.loads(line) for line in python(script, json.dumps(COMPILED)).splitlines()]
    assert len(rows) == len(COMPILED)
    for row in rows:
        assert row["spill_stores_bytes"] <= (64 if "rows" in row["extras"] else 0), row
        assert row["shared_bytes"] <= TARGETS[row["target"]].shared_bytes and not row["serialized"], row
        assert all("e4m3.e4m3" in product for product in row["products"]) and row["products"], row
        blocks = 232448 // (row["shared_bytes"] + 1024), 65536 // (row["registers"] * 32 * row["num_warps"])
        assert row["max_registers"] is None or min(blocks) >= 3, row


def test_no_grad_needs_no_detaching(device):
    x, scale = quantize_fp8(torch.ones(1, 1, 5, 16, device=device, requires_grad=True))
    with torch.no_grad():
        assert flash_attention_fp8(x, x, x, **scales_of(scale, scale, scale)).shape == (1, 1, 5, 16)


BAD_QUANTIZE = {
    "type": (dict(x=1.0), TypeError, r"`x` must be a torch.Tensor, got float"),
    "dtype": (dict(x=torch.zeros(1, 1, 2, 2).double()), TypeError, r"`x` must be float16, bfloat16 or float32, got float64"),
    "rank": (dict(x=torch.zeros(2, 2)), ValueError, r"`x` must be 4-D, \(batch, heads, seqlen, head_dim\), got shape \(2, 2\)"),
    "head_dim": (dict(x=torch.zeros(1, 1, 2, 257)), ValueError, r"`x` must have head_dim 1 to 256, got 257"),
    "block": (dict(block=64), ValueError, r"`block` must be None or 128, got 64"),
    "block true": (dict(block=True), ValueError, r"`block` must be None or 128, got True"),
    "keys_last": (dict(keys_last=1), TypeError, r"`keys_last` must be True or False, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_QUANTIZE)
def test_bad_quantizing_is_named(name):
    changes, error, message = BAD_QUANTIZE[name]
    with pytest.raises(error, match=message):
        quantize_fp8(**(dict(x=torch.zeros(1, 1, 2, 2)) | changes))


BAD_ROTATE = {
    "type": (dict(x=None), TypeError, r"`x` must be a torch.Tensor, got NoneType"),
    "dtype": (dict(x=torch.zeros(4).int()), TypeError, r"`x` must be float16, bfloat16, float32 or float64, got int32"),
    "head_dim": (dict(x=torch.zeros(2, 80)), ValueError, r"`x` must have a power of two for head_dim, got shape \(2, 80\)"),
    "head_dim 0": (dict(x=torch.zeros(2, 0)), ValueError, r"`x` must have a power of two for head_dim, got shape \(2, 0\)"),
    "scalar": (dict(x=torch.zeros(())), ValueError, r"`x` must have a power of two for head_dim, got shape \(\)"),
    "seed": (dict(seed=1.0), TypeError, r"`seed` must be an int, got 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROTATE)
def test_bad_rotating_is_named(name):
    changes, error, message = BAD_ROTATE[name]
    with pytest.raises(error, match=message):
        hadamard_rotate(**(dict(x=torch.zeros(2, 4)) | changes))


def test_gpus_without_e4m3_are_named():
    fp8._check_e4m3((8, 9), None)
    fp8._check_e4m3((12, 0), None)
    with pytest.raises(NotImplementedError, match=r"`q` must be on .* 8.9 or newer, .* got compute capability 8.0"):
        fp8._check_e4m3((8, 0), None)
    with pytest.raises(NotImplementedError, match=r"`q` must be on .* 8.9 or newer, .* got an AMD GPU"):
        fp8._check_e4m3((9, 4), "6.2")
