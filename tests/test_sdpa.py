"""scaled_dot_product_attention against PyTorch's own: shapes, masks and empty inputs, forward and backward."""

import inspect
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn import scaled_dot_product_attention
from flashattn.testing import FACTOR, max_error

pytestmark = pytest.mark.triton

SHAPES = {
    "2-D": ((20, 16), (33, 16), (33, 16)),
    "3-D": ((3, 20, 16), (3, 33, 16), (3, 33, 16)),
    "4-D": ((2, 3, 65, 16), (2, 3, 70, 16), (2, 3, 70, 16)),
    "5-D": ((2, 2, 3, 20, 16), (2, 2, 3, 33, 16), (2, 2, 3, 33, 16)),
    "more queries than keys": ((2, 2, 70, 16), (2, 2, 33, 16), (2, 2, 33, 16)),
    "one query": ((2, 2, 1, 16), (2, 2, 33, 16), (2, 2, 33, 16)),
    "batch broadcasts": ((2, 1, 3, 20, 16), (1, 2, 1, 33, 16), (3, 33, 16)),
    "heads broadcast": ((2, 4, 20, 16), (2, 1, 33, 16), (1, 4, 33, 16)),
    "head_dim of value": ((2, 2, 20, 16), (2, 2, 33, 16), (2, 2, 33, 40)),
    "no batch": ((0, 2, 20, 16), (0, 2, 33, 16), (0, 2, 33, 16)),
    "no heads": ((2, 0, 20, 16), (2, 0, 33, 16), (2, 0, 33, 24)),
    "no queries": ((2, 2, 0, 16), (2, 2, 33, 16), (2, 2, 33, 16)),
    "no keys": ((2, 2, 20, 16), (2, 2, 0, 16), (2, 2, 0, 24)),
}
GROUPS = {
    "3-D": ((4, 20, 16), (2, 33, 16), (2, 33, 16)),
    "4-D": ((2, 6, 20, 16), (2, 2, 33, 16), (2, 2, 33, 16)),
    "5-D": ((2, 2, 6, 20, 16), (1, 2, 3, 33, 16), (2, 1, 3, 33, 16)),
}


def torchs_own(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)


def results(attention, tensors, do, **options):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves, **options)
    gradients = torch.autograd.grad(out, leaves, do.to(out.dtype)) if out.requires_grad else ()
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def assert_like_torch(shapes, device, dtype=torch.float32, **options):
    """Hold out and the gradients to the error budget, with PyTorch's math backend as both yardstick and, in fp64, truth.

    On one query or a few keys the error of one draw is a matter of luck: the yardstick is the largest of four draws.
    """
    torch.manual_seed(0)
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in options.items()}
    budget = {}
    for _ in range(4):
        tensors = [torch.randn(shape).to(device, dtype) for shape in shapes]
        do = torch.randn(torchs_own(*tensors, **options).shape).to(device, dtype)
        truth = results(torchs_own, [x.double() for x in tensors], do, **wide)
        own = results(torchs_own, tensors, do, **options)
        for name, expected in truth.items():
            size = expected.abs().max().item() if expected.numel() else 0.0
            allowed = FACTOR[name] * max_error(own[name], expected) + torch.finfo(dtype).eps * size
            budget[name] = max(budget.get(name, 0.0), allowed)
    actual = results(scaled_dot_product_attention, tensors, do, **options)
    for name, expected in truth.items():
        assert actual[name].shape == expected.shape and actual[name].dtype == dtype
        assert max_error(actual[name], expected) <= budget[name], name


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, is_causal, device):
    assert_like_torch(SHAPES[shape], device, is_causal=is_causal)


@pytest.mark.parametrize("shape", GROUPS)
def test_groups(shape, device):
    assert_like_torch(GROUPS[shape], device, enable_gqa=True, is_causal=True)


MASK_SHAPES = {
    "whole": (2, 4, 65, 70),
    "per head": (4, 65, 70),
    "per batch": (2, 1, 65, 70),
    "one for all": (65, 70),
    "keys only": (2, 1, 1, 70),
    "queries only": (65, 1),
}


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_masks(shape, kind, device):
    mask = torch.rand(MASK_SHAPES[shape], device=device) > 0.4
    mask.view(-1, mask.shape[-1])[0] = False  # a row, or some, without a key
    if kind == "additive":
        mask = torch.randn(mask.shape, device=device).masked_fill(~mask, -math.inf)
    assert_like_torch(((2, 4, 65, 32), (2, 4, 70, 32), (2, 4, 70, 32)), device, attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, "boolean", "additive"])
def test_half_precision(dtype, mask, device):
    options = {}
    if mask is not None:
        options["attn_mask"] = torch.randn(2, 1, 65, 70, device=device).to(dtype)
        if mask == "boolean":
            options["attn_mask"] = options["attn_mask"] > 0
    assert_like_torch(((2, 4, 65, 32), (2, 4, 70, 32), (2, 4, 70, 32)), device, dtype, **options)


@pytest.mark.parametrize("scale", [0.0, 0.7, -0.3])
def test_scale(scale, device):
    assert_like_torch(SHAPES["4-D"], device, scale=scale, is_causal=True)


def test_transposed_and_sliced_masks(device):
    mask = torch.randn(2, 4, 140, 65, device=device).mT[:, :, :, ::2]
    assert not mask.is_contiguous() and mask.stride(-1) != 1
    assert_like_torch(((2, 4, 65, 32), (2, 4, 70, 32), (2, 4, 70, 32)), device, attn_mask=mask)


def test_mask_of_5_d_inputs_and_of_groups(device):
    mask = torch.rand(2, 1, 1, 20, 33, device=device) > 0.4
    assert_like_torch(SHAPES["5-D"], device, attn_mask=mask)
    assert_like_torch(GROUPS["4-D"], device, attn_mask=mask[0], enable_gqa=True)


def test_top_left_causal_is_not_bottom_right(device):
    """One query and many keys: here, as in PyTorch, it sees the first key only."""
    q, k, v = (torch.randn(1, 1, n, 16, device=device) for n in (1, 8, 8))
    assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=True), v[:, :, :1])


def test_signature_is_that_of_torch():
    """PyTorch's is a builtin without one to inspect; its documented parameters, in order."""
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert list(inspect.signature(scaled_dot_product_attention).parameters) == names
    documented = torch.nn.functional.scaled_dot_product_attention.__doc__.split("(", 1)[1].split("->")[0]
    positions = [documented.index(name) for name in names]
    assert positions == sorted(positions)
    tensors = torch.zeros(3, 1, 1, 2, 16)
    torch.nn.functional.scaled_dot_product_attention(*tensors, None, 0.0, True, scale=None, enable_gqa=False)
    with pytest.raises(TypeError):
        torch.nn.functional.scaled_dot_product_attention(*tensors, None, 0.0, True, None)
    with pytest.raises(TypeError):
        scaled_dot_product_attention(*tensors, None, 0.0, True, None)
