"""FlashAttention(nn.Module) against torch.nn.MultiheadAttention: outputs, gradients, weights both ways, and errors."""

import math

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn import FlashAttention, attention_reference, flash_attention
from flashattn.testing import DTYPES, max_error

kernels = pytest.mark.triton
parametrize = pytest.mark.parametrize
gpu = pytest.mark.gpu


def padding(kind, batch=2, seqlen=37):
    """Return a key_padding_mask, True for padding: a different number of tokens in each row."""
    mask = torch.zeros(batch, seqlen, dtype=torch.bool)
    if kind == "right":
        mask[0, seqlen - 9 :] = mask[1, 20:] = True
    elif kind == "left":
        mask[0, :9] = mask[1, :1] = True
    elif kind == "holes":
        mask[:, ::3] = mask[1, 5:17] = True
    elif kind == "a whole row":
        mask[0, 30:] = mask[1] = True
    else:
        assert kind == "none"
    return mask


def torchs(layer, inputs, is_padding, causal):
    """Call PyTorch's layer on inputs; where a row sees no key, which gives NaN there, give what 0 gives."""
    batch, seqlen_q, seqlen_k = *inputs[0].shape[:2], inputs[1].shape[1]
    hidden = is_padding[:, None, :].expand(batch, seqlen_q, seqlen_k)
    if causal:
        hidden = hidden | torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=hidden.device).triu(1)
    blind = hidden.all(-1)
    hidden = hidden & ~blind[..., None]
    with sdpa_kernel(SDPBackend.MATH):
        # PyTorch's layer averages all keys in a blind row; its output there is replaced below.
        mask = hidden.repeat_interleave(layer.num_heads, 0)
        out = layer(*inputs, attn_mask=mask, need_weights=False)[0]
    bias = layer.out_proj.bias
    nothing = out.new_zeros(()) if bias is None else bias
    return torch.where(blind[..., None], nothing, out)


def results(call, layer, inputs, do):
    """Return {"out": …, "d" + name: …} for the inputs and parameters of a layer."""
    leaves = [x.detach().requires_grad_() for x in dict.fromkeys(inputs)]
    repeated = dict(zip(dict.fromkeys(inputs), leaves, strict=True))
    out = call(layer, [repeated[x] for x in inputs])
    parameters = dict(layer.named_parameters())
    gradients = torch.autograd.grad(out, [*leaves, *parameters.values()], do.to(out.dtype))
    names = [*(f"d input {i}" for i in range(len(leaves))), *("d " + name for name in parameters)]
    return dict(out=out.detach()) | dict(zip(names, gradients, strict=True))


def assert_like_torch(make_layer, make_inputs, is_padding, dtype, device, causal=False, n_draws=3):
    """Hold outputs and all gradients to the budget; PyTorch's layer is the yardstick and, in fp64, the truth.

    The budget is that of flashattn.testing: twice PyTorch's own error (three times for gradients) plus one rounding.
    The output at a padded query is for nobody to read: no gradient arrives there, and it isn't compared.
    """
    torch.manual_seed(0)
    is_padding, is_self, budget = is_padding.to(device), None, {}
    for _ in range(n_draws):
        layer = make_layer().to(device, dtype)
        nn.init.normal_(layer.in_proj_bias, std=0.3)
        nn.init.normal_(layer.out_proj.bias, std=0.3)
        inputs = [x.to(device, dtype) for x in make_inputs()]
        if len(inputs) == 1:
            inputs, is_self = inputs * 3, True
        ignored = is_padding[..., None] if is_self else torch.zeros((), dtype=torch.bool, device=device)
        do = torch.randn(*inputs[0].shape[:2], layer.embed_dim).to(device, dtype).masked_fill(ignored, 0)

        def call(layer, inputs, ignored=ignored):
            return torchs(layer, inputs, is_padding, causal).masked_fill(ignored, 0)

        wide = make_layer().to(device, torch.float64)
        wide.load_state_dict(layer.state_dict())
        widened = {x: x.double() for x in inputs}
        truth = results(call, wide, [widened[x] for x in inputs], do)
        own = results(call, layer, inputs, do)
        for name, expected in truth.items():
            size = expected.abs().max().item()
            factor = 2 if name == "out" else 3
            allowed = factor * max_error(own[name], expected) + torch.finfo(dtype).eps * size
            budget[name] = max(budget.get(name, 0.0), allowed)
    flash = FlashAttention.from_torch(layer, causal=causal)
    actual = results(lambda f, xs: f(*xs, key_padding_mask=is_padding).masked_fill(ignored, 0), flash, inputs, do)
    assert actual.keys() == truth.keys()
    for name, expected in truth.items():
        assert actual[name].shape == expected.shape and actual[name].dtype == dtype, name
        assert max_error(actual[name], expected) <= budget[name], name
    if not is_padding.any():
        without = results(lambda f, xs: f(*xs), flash, inputs, do)
        for name, expected in truth.items():
            assert max_error(without[name], expected) <= budget[name], name


@kernels
@parametrize("causal", [False, True], ids=["full", "causal"])
@parametrize("kind", ["none", "right", "left", "holes", "a whole row"])
@parametrize("dtype", DTYPES)
def test_self_attention_matches_torch(dtype, kind, causal, device):
    assert_like_torch(
        lambda: nn.MultiheadAttention(48, 3, batch_first=True),
        lambda: [torch.randn(2, 37, 48)],
        padding(kind), DTYPES[dtype], device, causal,
    )  # fmt: skip


@kernels
@parametrize("kind", ["none", "right", "holes", "a whole row"])
@parametrize("dtype", DTYPES)
def test_cross_attention_matches_torch(dtype, kind, device):
    assert_like_torch(
        lambda: nn.MultiheadAttention(48, 3, kdim=40, vdim=24, batch_first=True),
        lambda: [torch.randn(2, 21, 48), torch.randn(2, 37, 40), torch.randn(2, 37, 24)],
        padding(kind), DTYPES[dtype], device,
    )  # fmt: skip


@kernels
def test_cross_attention_over_one_memory_matches_torch(device):
    memory = torch.randn(2, 37, 48)
    assert_like_torch(
        lambda: nn.MultiheadAttention(48, 3, batch_first=True),
        lambda: [torch.randn(2, 21, 48), memory, memory],
        padding("left"), torch.float32, device,
    )  # fmt: skip


@kernels
@parametrize("kind", ["none", "left"])
def test_batch_second(kind, device):
    """With batch_first=False, PyTorch's default, only the order of dimensions differs; the mask keeps its own."""
    layer = FlashAttention.from_torch(nn.MultiheadAttention(48, 3)).to(device)
    assert not layer.batch_first
    first = FlashAttention.from_torch(layer.to_torch(), batch_first=True)
    x, mask = torch.randn(2, 37, 48, device=device), padding(kind).to(device)
    # Close, not equal: a GPU multiplies the transposed inputs of the projections in another order.
    expected = first(x, key_padding_mask=mask).transpose(0, 1)
    torch.testing.assert_close(layer(x.transpose(0, 1), key_padding_mask=mask), expected)
    memory = torch.randn(2, 37, 48, device=device)
    torch.testing.assert_close(layer(x.transpose(0, 1), memory.transpose(0, 1)), first(x, memory).transpose(0, 1))


def composed(layer, x, rotate=lambda x: x):
    """Compute self-attention from the layer's weights and the reference, head by head."""
    q, k, v = (x @ layer.in_proj_weight.T + layer.in_proj_bias).split(layer.widths, -1)
    q, k, v = (x.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for x in (q, k, v))
    options = dict(causal=layer.causal, window=layer.window, softcap=layer.softcap, scale=layer.scale)
    out = attention_reference(rotate(q), rotate(k), v, **options)[0]
    return layer.out_proj(out.transpose(1, 2).flatten(2))


OPTIONS = {
    "grouped heads": dict(num_heads_kv=2),
    "head_dim": dict(head_dim=20),
    "causal window": dict(causal=True, window=(5, 0)),
    "window": dict(window=(5, 3)),
    "softcap": dict(softcap=0.5),
    "negative scale": dict(scale=-0.3),
    "all": dict(num_heads_kv=1, head_dim=24, causal=True, window=(9, None), softcap=2.0, scale=0.4),
}


@kernels
@parametrize("name", OPTIONS)
def test_settings_reach_the_kernel(name, device):
    layer = FlashAttention(48, 4, **OPTIONS[name], device=device)
    nn.init.normal_(layer.in_proj_bias)
    x = torch.randn(2, 37, 48, device=device)
    torch.testing.assert_close(layer(x), composed(layer, x), rtol=1e-5, atol=1e-5)
    plain = FlashAttention(48, 4, num_heads_kv=layer.num_heads_kv, head_dim=layer.head_dim, device=device)
    plain.load_state_dict(layer.state_dict())
    if name not in ("grouped heads", "head_dim"):
        assert (plain(x) - layer(x)).abs().max() > 1e-3  # the setting matters on these inputs


@kernels
@parametrize("kind", ["left", "right"])
@parametrize("options", [dict(causal=True), dict(window=(4, 4)), dict(causal=True, window=(4, 0), rope_base=100.0)])
def test_padding_is_as_if_it_were_not_there(kind, options, device):
    """Each row with its padding gives what its tokens alone give."""
    layer = FlashAttention(48, 4, num_heads_kv=2, **options, device=device)
    x, mask = torch.randn(2, 37, 48, device=device), padding(kind).to(device)
    out = layer(x, key_padding_mask=mask)
    for row, is_padded, alone in zip(out, mask, x, strict=True):
        torch.testing.assert_close(row[~is_padded], layer(alone[~is_padded][None])[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(row[is_padded], layer.out_proj.bias.expand(int(is_padded.sum()), -1))


@kernels
def test_padding_may_hold_anything(device):
    layer = FlashAttention(48, 4, device=device)
    mask = padding("holes").to(device)
    x = torch.randn(2, 37, 48, device=device)
    expected = layer(x, key_padding_mask=mask)
    assert torch.equal(layer(x.masked_fill(mask[..., None], math.nan), key_padding_mask=mask), expected)


def turned(x, base):
    """Rotate the channels as complex numbers, first half real and second half imaginary, in fp64."""
    *_, seqlen, head_dim = x.shape
    z = torch.complex(*x.double().chunk(2, -1))
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=x.device) / head_dim)
    angles = torch.arange(seqlen, device=x.device)[:, None] * frequencies
    z = z * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), -1).to(x.dtype)


@kernels
def test_rotary_embedding(device):
    layer = FlashAttention(48, 4, num_heads_kv=2, causal=True, rope_base=1000, device=device)
    x = torch.randn(2, 37, 48, device=device)
    torch.testing.assert_close(layer(x), composed(layer, x, rotate=lambda x: turned(x, 1000.0)), rtol=1e-5, atol=1e-5)
    # The last query has the position of the last key, so that the last rows alone give the last rows.
    torch.testing.assert_close(layer(x[:, -5:], x), layer(x)[:, -5:], rtol=1e-5, atol=1e-5)


def test_rotary_angles_are_fp32_whatever_the_default_dtype():
    layer = FlashAttention(32, 2, rope_base=10000)
    x = torch.randn(1, 300, 2, 16)
    expected = layer._rotate(x, 300)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(layer._rotate(x, 300), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@parametrize("sizes", [dict(), dict(kdim=40, vdim=24), dict(bias=False)], ids=["one", "three", "no bias"])
def test_weights_are_those_of_torch(sizes):
    """Names, shapes, initial values from one seed, and the state dict in both directions."""
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(48, 4, **sizes)
    torch.manual_seed(3)
    ours = FlashAttention(48, 4, **sizes)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(x, theirs.state_dict()[name]) for name, x in ours.state_dict().items())
    torch.manual_seed(4)
    ours.reset_parameters()
    assert not torch.equal(ours.out_proj.weight, theirs.out_proj.weight)
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(4)
    again = FlashAttention(48, 4, **sizes)
    again.load_state_dict(theirs.state_dict())
    assert all(torch.equal(x, ours.state_dict()[name]) for name, x in again.state_dict().items())


@parametrize("batch_first", [False, True])
def test_conversion_keeps_everything(batch_first):
    theirs = nn.MultiheadAttention(48, 4, kdim=40, bias=False, batch_first=batch_first, dtype=torch.bfloat16).eval()
    theirs.k_proj_weight.requires_grad_(False)
    ours = FlashAttention.from_torch(theirs, causal=True)
    back = ours.to_torch()
    assert (
        ours.causal and ours.batch_first == back.batch_first == batch_first and not ours.training and not back.training
    )
    for layer in (ours, back):
        for name, parameter in theirs.named_parameters():
            copy = layer.get_parameter(name)
            assert torch.equal(copy, parameter) and copy.dtype == parameter.dtype
            assert copy.requires_grad == parameter.requires_grad and copy.data_ptr() != parameter.data_ptr()
    assert (back.embed_dim, back.num_heads, back.kdim, back.vdim) == (48, 4, 40, 48)


def test_printed_settings():
    printed = repr(FlashAttention(48, 4, num_heads_kv=2, causal=True, rope_base=10000, bias=False))
    assert "48, num_heads=4, num_heads_kv=2, causal=True, rope_base=10000, bias=False" in printed
    assert "window" not in printed


@kernels
@parametrize("kind", [None, "right"])
def test_compiled_in_one_graph(kind, device):
    layer = FlashAttention(32, 2, causal=True, rope_base=100.0, device=device)
    x = torch.randn(2, 37, 32, device=device)
    mask = None if kind is None else padding(kind).to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, key_padding_mask=mask), layer(x, key_padding_mask=mask))


@kernels
@gpu
def test_padding_does_not_make_the_host_wait(device):
    layer = FlashAttention(64, 4, causal=True, rope_base=10000.0, device=device, dtype=torch.float16)
    cross = FlashAttention(64, 4, device=device, dtype=torch.float16)
    x = torch.randn(2, 37, 64, device=device, dtype=torch.float16, requires_grad=True)
    mask, memory = padding("left").to(device), torch.randn_like(x)

    def step():
        (layer(x, key_padding_mask=mask) + cross(x, memory, key_padding_mask=mask)).float().square().mean().backward()

    step()  # kernels are compiled and loaded here
    torch.cuda.synchronize()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # the deterministic index_copy of the tests sorts on the host's word
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(deterministic, warn_only=True)


BAD_SETTINGS = {
    "embed_dim": (dict(embed_dim=48.0), TypeError, r"`embed_dim` must be an int, got 48.0"),
    "no features": (dict(embed_dim=0), ValueError, r"`embed_dim` must be at least 1, got 0"),
    "num_heads": (dict(num_heads=True), TypeError, r"`num_heads` must be an int, got True"),
    "multiple": (dict(num_heads=5), ValueError, r"`embed_dim` must be a multiple of num_heads \(5\), got 48"),
    "groups": (dict(num_heads_kv=3), ValueError, r"`num_heads_kv` must be a divisor of num_heads \(4\), got 3"),
    "head_dim": (dict(head_dim=257), ValueError, r"`head_dim` must be at most 256, got 257"),
    "wide": (dict(embed_dim=1028), ValueError, r"`head_dim` must be at most 256, got embed_dim // num_heads = 257"),
    "kdim": (dict(kdim="48"), TypeError, r"`kdim` must be an int, got '48'"),
    "vdim": (dict(vdim=-1), ValueError, r"`vdim` must be at least 1, got -1"),
    "bias": (dict(bias=None), TypeError, r"`bias` must be True or False, got None"),
    "batch_first": (dict(batch_first=1), TypeError, r"`batch_first` must be True or False, got 1"),
    "dropout": (dict(dropout=0.1), NotImplementedError, r"`dropout` must be 0, got 0.1: the kernels have none; .* torch.nn.MultiheadAttention"),
    "causal": (dict(causal="yes"), TypeError, r"`causal` must be True or False, got 'yes'"),
    "window": (dict(window=(-1, 0)), ValueError, r"`window` must have sides of 0 or more"),
    "softcap": (dict(softcap=0.0), ValueError, r"`softcap` must be a positive fp32 number"),
    "scale": (dict(scale=math.nan), ValueError, r"`scale` must be a finite fp32 number"),
    "rope type": (dict(rope_base=True), TypeError, r"`rope_base` must be a number or None, got True"),
    "rope range": (dict(rope_base=1.0), ValueError, r"`rope_base` must be a finite number over 1, got 1.0"),
    "odd head_dim": (dict(rope_base=10, head_dim=9), ValueError, r"`head_dim` must be even with a rope_base, got 9"),
}  # fmt: skip


@parametrize("name", BAD_SETTINGS)
def test_bad_setting_is_named(name):
    changes, error, message = BAD_SETTINGS[name]
    settings = dict(embed_dim=48, num_heads=4) | changes
    with pytest.raises(error, match=message):
        FlashAttention(settings.pop("embed_dim"), settings.pop("num_heads"), **settings)


X, M = torch.zeros(2, 5, 48), torch.zeros(2, 5, dtype=torch.bool)
BAD_CALLS = {
    "no tensor": ({}, dict(query=[1.0]), TypeError, r"`query` must be a torch.Tensor, got list"),
    "rank": ({}, dict(query=X[0]), ValueError, r"`query` must be 3-D, \(batch, seqlen, features\), got shape \(5, 48\)"),
    "rank, batch second": (dict(batch_first=False), dict(query=X[0]), ValueError, r"`query` must be 3-D, \(seqlen, batch, features\)"),
    "features": ({}, dict(query=X, key=X[..., :40]), ValueError, r"`key` must have 48 features, got 40"),
    "features of value": (dict(vdim=24), dict(query=X), ValueError, r"`value` must have 24 features, got 48"),
    "batch": ({}, dict(query=X, key=X[:1]), ValueError, r"`key` must have batch 2 like `query`, got 1"),
    "batch, batch second": (dict(batch_first=False), dict(query=X, key=X[:, :1]), ValueError, r"`key` must have batch 5 like `query`, got 1"),
    "seqlen": ({}, dict(query=X, key=X, value=X[:, :4]), ValueError, r"`value` must have seqlen 5 like `key`, got 4"),
    "additive mask": ({}, dict(query=X, key_padding_mask=M.float()), TypeError, r"`key_padding_mask` must be a bool tensor, True for padding, got torch.float32"),
    "list for mask": ({}, dict(query=X, key_padding_mask=[True]), TypeError, r"`key_padding_mask` must be a bool tensor, True for padding, got list"),
    "shape of mask": ({}, dict(query=X, key_padding_mask=M.T), ValueError, r"`key_padding_mask` must be \(batch, seqlen_k\), \(2, 5\), got shape \(5, 2\)"),
    "device of mask": ({}, dict(query=X, key_padding_mask=M.to("meta")), ValueError, r"`key_padding_mask` must be on cpu like `key`, got meta"),
    "causal cross": (dict(causal=True), dict(query=X, key=X.clone(), key_padding_mask=M), NotImplementedError, r"`key_padding_mask` must be None where `key` is not `query`"),
    "window cross": (dict(window=(2, 2)), dict(query=X, key=X.clone(), key_padding_mask=M), NotImplementedError, r"`key_padding_mask` must be None where `key` is not `query`"),
}  # fmt: skip


@parametrize("name", BAD_CALLS)
def test_bad_call_is_named(name):
    settings, arguments, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        FlashAttention(48, 4, **settings)(**arguments)


def test_pytorchs_masks_are_no_arguments():
    for name in ("attn_mask", "need_weights", "is_causal"):
        with pytest.raises(TypeError, match=name):
            FlashAttention(48, 4)(X, X, X, **{name: None})


@parametrize(
    "change, message",
    [
        (dict(dropout=0.1), r"`layer` must have dropout 0, got 0.1: the kernels have none"),
        (dict(add_bias_kv=True), r"`layer` must have add_bias_kv=False, got True"),
        (dict(add_zero_attn=True), r"`layer` must have add_zero_attn=False, got True"),
    ],
    ids=["dropout", "add_bias_kv", "add_zero_attn"],
)
def test_what_has_no_counterpart_here_is_refused(change, message):
    with pytest.raises(NotImplementedError, match=message):
        FlashAttention.from_torch(nn.MultiheadAttention(48, 4, **change))


@parametrize(
    "setting",
    [
        dict(num_heads_kv=2),
        dict(head_dim=20),
        dict(window=(1, 1)),
        dict(softcap=1.0),
        dict(scale=0.5),
        dict(rope_base=10),
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_has_no_counterpart_in_torch_is_refused(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"`{name}` must be .* got {value}".replace("(", r"\(").replace(")", r"\)")):
        FlashAttention(48, 4, **setting).to_torch()


def test_only_torchs_layer_is_converted():
    with pytest.raises(TypeError, match=r"`layer` must be a torch.nn.MultiheadAttention, got Linear"):
        FlashAttention.from_torch(nn.Linear(4, 4))


@kernels
def test_is_the_kernel_between_two_projections(device):
    layer = FlashAttention(48, 4, causal=True, device=device)
    x = torch.randn(2, 37, 48, device=device)
    projected = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    out = flash_attention(*(y.unflatten(-1, (4, 12)).transpose(1, 2) for y in projected), causal=True)
    assert torch.equal(layer(x), layer.out_proj(out.transpose(1, 2).flatten(2)))
