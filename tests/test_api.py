"""What the public call refuses, and how; what importing costs; what happens without a GPU or without Triton."""

import math

import pytest
import torch
from processes import python

import flashattn
from flashattn import flash_attention, flash_attention_varlen, reference, scaled_dot_product_attention


def tensors(**shapes):
    return {name: torch.zeros(shapes.get(name, (2, 4, 5, 16))) for name in "qkv"}


def call(changes=(), shapes=None, **options):
    arguments = tensors(**(shapes or {})) | dict(changes) | options
    return flash_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


BAD_CALLS = {
    "no tensor": (dict(q=[1.0]), {}, TypeError, r"`q` must be a torch.Tensor, got list"),
    "rank": ({}, dict(k=(4, 5, 16)), ValueError, r"`k` must be 4-D, \(batch, heads, seqlen, head_dim\), got .*\(4, 5, 16\)"),
    "integers": (dict(v=torch.zeros(2, 4, 5, 16, dtype=torch.int32)), {}, TypeError, r"`v` must be float16.* got int32"),
    "fp64": (dict(q=torch.zeros(2, 4, 5, 16).double()), {}, TypeError, r"`q` must be float16.* got float64"),
    "sparse": (dict(k=torch.zeros(2, 4, 5, 16).to_sparse()), {}, TypeError, r"`k` must be a dense .* got .*sparse"),
    "mixed dtypes": (dict(k=torch.zeros(2, 4, 5, 16).half()), {}, ValueError, r"`k` must have dtype float32 like `q`, got float16"),
    "mixed devices": (dict(v=torch.zeros(2, 4, 5, 16, device="meta")), {}, ValueError, r"`v` must be on cpu like `q`, got meta"),
    "batch": ({}, dict(v=(3, 4, 5, 16)), ValueError, r"`v` must have batch 2 like `q`, got 3"),
    "head_dim 0": ({}, dict(q=(2, 4, 5, 0)), ValueError, r"`q` must have head_dim 1 to 256, got 0"),
    "head_dim 257": ({}, dict.fromkeys("qkv", (2, 4, 5, 257)), ValueError, r"`q` must have head_dim 1 to 256, got 257"),
    "head_dim of k": ({}, dict(q=(2, 4, 5, 64), k=(2, 4, 5, 80)), ValueError, r"`k` must have head_dim 64 like `q`, got 80"),
    "head_dim of v": ({}, dict(v=(2, 4, 5, 257)), ValueError, r"`v` must have head_dim 1 to 256, got 257"),
    "rows": (dict(q=torch.zeros(1).expand(2, 4, 2**30 + 1, 16)), {}, ValueError, r"`q` must have at most 2\*\*30 rows a head, got 1073741825"),
    "heads of v": ({}, dict(v=(2, 2, 5, 16)), ValueError, r"`v` must have 4 heads like `k`, got 2"),
    "seqlen of v": ({}, dict(v=(2, 4, 6, 16)), ValueError, r"`v` must have seqlen 5 like `k`, got 6"),
    "heads do not divide": ({}, dict(k=(2, 3, 5, 16), v=(2, 3, 5, 16)), ValueError, r"`q` must .* multiple of the 3 heads of `k`, got 4"),
    "no heads": ({}, dict.fromkeys("qkv", (2, 0, 5, 16)), ValueError, r"`q` must .* multiple of the 0 heads of `k`, got 0"),
    "seqlen and heads swapped": ({}, dict(k=(2, 5, 4, 16), v=(2, 5, 4, 16)), ValueError, r"layout is \(batch, heads, seqlen, head_dim\)"),
    "causal": (dict(causal=1), {}, TypeError, r"`causal` must be True or False, got 1"),
    "return_lse": (dict(return_lse="yes"), {}, TypeError, r"`return_lse` must be True or False, got 'yes'"),
    "scale type": (dict(scale="0.1"), {}, TypeError, r"`scale` must be a number or None, got str"),
    "scale tensor": (dict(scale=torch.tensor(0.1)), {}, TypeError, r"`scale` must be a number or None, got Tensor"),
    "scale nan": (dict(scale=math.nan), {}, ValueError, r"`scale` must be a finite fp32 number .*, got nan"),
    "scale inf": (dict(scale=-math.inf), {}, ValueError, r"`scale` must be a finite fp32 number .*, got -inf"),
    "unknown window": (dict(window="local"), {}, TypeError, r"`window` must be None or \(left, right\).*, got 'local'"),
    "one-sided window": (dict(window=128), {}, TypeError, r"`window` must be None or \(left, right\).*, got 128"),
    "fractional window": (dict(window=(1.5, 0)), {}, TypeError, r"`window` must be .* int or None, got \(1.5, 0\)"),
    "boolean window": (dict(window=(True, 0)), {}, TypeError, r"`window` must be .* int or None, got \(True, 0\)"),
    "-1 for no bound": (dict(window=(-1, 0)), {}, ValueError, r"`window` must have sides of 0 or more, and None \(not -1\).*, got \(-1, 0\)"),
    "softcap type": (dict(softcap="50"), {}, TypeError, r"`softcap` must be a number or None, got str"),
    "softcap 0": (dict(softcap=0), {}, ValueError, r"`softcap` must be a positive fp32 number.*, got 0"),
    "softcap nan": (dict(softcap=math.nan), {}, ValueError, r"`softcap` must be a positive fp32 number.*, got nan"),
    "softcap tiny": (dict(softcap=1e-40, scale=1.0), {}, ValueError, r"`softcap` .*\(and scale / softcap another\), got 1e-40"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_named(name):
    changes, shapes, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        call(changes, shapes)


OFFSETS = torch.tensor([0, 5])
BAD_PACKED_CALLS = {
    "rank": (dict(q=torch.zeros(1, 4, 5, 16)), ValueError, r"`q` must be 3-D, \(total, heads, head_dim\), got .*\(1, 4, 5, 16\)"),
    "heads of v": (dict(v=torch.zeros(5, 2, 16)), ValueError, r"`v` must have 4 heads like `k`, got 2"),
    "rows of v": (dict(v=torch.zeros(6, 4, 16)), ValueError, r"`v` must have seqlen 5 like `k`, got 6"),
    "heads do not divide": (dict(q=torch.zeros(4, 5, 16)), ValueError, r"`q` must .* multiple of the 4 heads of `k`, got 5 \(the layout is \(total, heads, head_dim\)\)"),
    "list of offsets": (dict(cu_seqlens_q=[0, 5]), TypeError, r"`cu_seqlens_q` must be a torch.Tensor, got list"),
    "dtype of offsets": (dict(cu_seqlens_k=OFFSETS.float()), TypeError, r"`cu_seqlens_k` must be int32 or int64, got float32"),
    "rank of offsets": (dict(cu_seqlens_q=OFFSETS[None]), ValueError, r"`cu_seqlens_q` must be 1-D, \(n_sequences \+ 1,\), got shape \(1, 2\)"),
    "no offsets": (dict(cu_seqlens_q=OFFSETS[:0]), ValueError, r"`cu_seqlens_q` must be 1-D.*, got shape \(0,\)"),
    "device of offsets": (dict(cu_seqlens_k=OFFSETS.to("meta")), ValueError, r"`cu_seqlens_k` must be on cpu like `q`, got meta"),
    "number of sequences": (dict(cu_seqlens_k=torch.tensor([0, 2, 5])), ValueError, r"`cu_seqlens_k` must have length 2 like `cu_seqlens_q`, got 3"),
    "max_seqlen": (dict(max_seqlen_q=5.0), TypeError, r"`max_seqlen_q` must be an int or None, got 5.0"),
    "causal": (dict(causal=None), TypeError, r"`causal` must be True or False, got None"),
    "window": (dict(window=(0, -1)), ValueError, r"`window` must have sides of 0 or more.*, got \(0, -1\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PACKED_CALLS)
def test_bad_packed_input_is_named(name):
    changes, error, message = BAD_PACKED_CALLS[name]
    good = dict.fromkeys("qkv", torch.zeros(5, 4, 16)) | dict(cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS)
    with pytest.raises(error, match=message):
        flash_attention_varlen(**(good | changes))


BAD_SDPA_CALLS = {
    "no tensor": (dict(query=None), TypeError, r"`query` must be a torch.Tensor, got NoneType"),
    "rank": (dict(key=torch.zeros(16)), ValueError, r"`key` must be at least 2-D, got shape \(16,\)"),
    "rank with groups": (dict(key=torch.zeros(5, 16), enable_gqa=True), ValueError, r"`key` must be at least 3-D, got shape \(5, 16\)"),
    "dtype": (dict(value=torch.zeros(2, 4, 5, 16).double()), TypeError, r"`value` must be float16, bfloat16 or float32, got float64"),
    "mixed dtypes": (dict(key=torch.zeros(2, 4, 5, 16).half()), ValueError, r"`key` must have dtype float32 like `query`, got float16"),
    "head_dim": (dict(key=torch.zeros(2, 4, 5, 8)), ValueError, r"`key` must have head_dim 16 like `query`, got 8"),
    "batch": (dict(key=torch.zeros(3, 4, 5, 16)), ValueError, r"must broadcast in their leading dimensions, got query \(2, 4, 5, 16\), key \(3,"),
    "heads": (dict(key=torch.zeros(2, 2, 5, 16)), ValueError, r"must broadcast in their leading dimensions"),
    "groups": (dict(key=torch.zeros(2, 3, 5, 16), value=torch.zeros(2, 3, 5, 16), enable_gqa=True), ValueError, r"`query` must .* multiple of the 3 heads of `key`, got 4"),
    "dropout": (dict(dropout_p=0.1), NotImplementedError, r"`dropout_p` must be 0, got 0.1: for dropout use torch.nn.functional"),
    "dropout range": (dict(dropout_p=1.5), ValueError, r"`dropout_p` must be a number from 0 to 1, got 1.5"),
    "is_causal": (dict(is_causal=1), TypeError, r"`is_causal` must be True or False, got 1"),
    "enable_gqa": (dict(enable_gqa=None), TypeError, r"`enable_gqa` must be True or False, got None"),
    "scale": (dict(scale=math.inf), ValueError, r"`scale` must be a finite fp32 number .*, got inf"),
    "mask type": (dict(attn_mask=[True]), TypeError, r"`attn_mask` must be a torch.Tensor or None, got list"),
    "mask and is_causal": (dict(attn_mask=torch.zeros(5, 5), is_causal=True), ValueError, r"`attn_mask` must be None with is_causal=True"),
    "mask dtype": (dict(attn_mask=torch.zeros(5, 5).int()), TypeError, r"`attn_mask` must be bool, float16, bfloat16 or float32, got int32"),
    "mask shape": (dict(attn_mask=torch.zeros(5, 6)), ValueError, r"`attn_mask` must broadcast to \(2, 4, 5, 5\), got \(5, 6\)"),
    "mask device": (dict(attn_mask=torch.zeros(5, 5, device="meta")), ValueError, r"`attn_mask` must be on cpu like `query`, got meta"),
    "mask requires grad": (dict(attn_mask=torch.zeros(5, 5, requires_grad=True)), NotImplementedError, r"`attn_mask` must not require grad: for a learned bias use FlexAttention"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SDPA_CALLS)
def test_bad_sdpa_input_is_named(name):
    changes, error, message = BAD_SDPA_CALLS[name]
    good = dict.fromkeys(("query", "key", "value"), torch.zeros(2, 4, 5, 16))
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**(good | changes))


@pytest.mark.triton
def test_meta_tensors_are_refused():
    with pytest.raises(ValueError, match=r"`q` must be on a CUDA device, or on the CPU .*, got meta"):
        call({name: x.to("meta") for name, x in tensors().items()})


@pytest.mark.triton
@pytest.mark.parametrize("attention", [flash_attention, lambda *qkv: flashattn.attention_tiled(*qkv)[0]])
@pytest.mark.parametrize("loss", [torch.sum, lambda out: (out**2).sum()], ids=["dO a constant", "dO a function of q"])
def test_double_backward_is_refused(loss, attention, device):
    q, k, v = (torch.randn(1, 1, 4, 16, device=device, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(loss(attention(q, k, v)), q, create_graph=True)
    assert dq.requires_grad  # not silently cut off
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(dq.sum(), k)


CPU_CALL = """
import torch, flashattn
try:
    flashattn.flash_attention(*torch.zeros(3, 1, 1, 4, 16))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.triton
def test_cpu_without_the_interpreter_says_what_to_set():
    printed = python("-c", CPU_CALL)
    assert printed.startswith("RuntimeError `q` must be on a CUDA device, got cpu")
    assert "set TRITON_INTERPRET=1" in printed and "before Triton is first imported" in printed


@pytest.mark.triton
def test_interpreter_switched_on_too_late_is_told():
    printed = python("-c", "import os, triton; os.environ['TRITON_INTERPRET'] = '1'" + CPU_CALL)
    assert "it is set now, but Triton was imported before" in printed


def test_without_triton_the_rest_works():
    both = """
q, k, v = torch.randn(3, 1, 2, 9, 4)
a, b = flashattn.attention_reference(q, k, v)[0], flashattn.attention_tiled(q, k, v)[0]
print(torch.allclose(a, b, atol=1e-5))
"""
    printed = python("-c", CPU_CALL + both, without_triton=True).splitlines()
    assert printed[0].startswith("ImportError flash_attention needs Triton, which is not installed")
    assert printed[1] == "True"


def test_import_is_light():
    """At most 0.3 s on top of torch; no driver touched, no environment changed, nothing heavy loaded."""
    code = """
import os, sys, time
import torch
before, start = dict(os.environ), time.perf_counter()
import flashattn
seconds = time.perf_counter() - start
assert dict(os.environ) == before
assert not torch.cuda.is_initialized()
heavy = [name for name in ("triton", "matplotlib", "IPython", "ipywidgets") if name in sys.modules]
print(seconds, heavy)
"""
    seconds, heavy = min((python("-c", code).split(" ", 1) for _ in range(3)), key=lambda printed: float(printed[0]))
    assert float(seconds) <= 0.3
    assert "matplotlib" not in heavy and "IPython" not in heavy and "ipywidgets" not in heavy


def test_public_surface():
    assert flashattn.__all__ == [
        "FlashAttention",
        "PagedKVCache",
        "attention_reference",
        "attention_tiled",
        "backend",
        "flash_attention",
        "flash_attention_fp8",
        "flash_attention_varlen",
        "flash_decode",
        "hadamard_rotate",
        "quantize_fp8",
        "scaled_dot_product_attention",
    ]
    for name in flashattn.__all__:
        doc = getattr(flashattn, name).__doc__
        assert "Args:" in doc or "Arguments" in doc
        assert "Source:" in doc and "Chapter" in doc


def test_the_drawn_masks_are_the_masks():
    """The picture in help(flash_attention) for (2, 5) and (5, 2), column by column, against the definition."""
    lines = flash_attention.__doc__.split("::")[1].split("``window=")[0].strip("\n").split("\n")[2:]
    masks = {"causal": dict(causal=True), "(1,0)": dict(window=(1, 0)), "(0,1)": dict(window=(0, 1))}
    for sizes, columns in (((2, 5), (14, 26, 37)), ((5, 2), (54, 65, 76))):
        for column, mask in zip(columns, masks.values(), strict=True):
            seqlen_q, seqlen_k = sizes
            visible = reference.visible_keys(
                torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None], seqlen_k - seqlen_q, **mask
            )
            expected = [" ".join("x" if x else "." for x in row) for row in visible.tolist()]
            drawn = [line[column : column + 2 * seqlen_k - 1] for line in lines[:seqlen_q]]
            assert drawn == expected, (sizes, mask)
