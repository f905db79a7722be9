"""What the public call refuses, and how; what importing costs; what happens without a GPU or without Triton."""

import math
import types

import pytest
import torch
from processes import python

import flashattn
from flashattn import api, flash_attention


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
    "head_dim of v": ({}, dict(v=(2, 4, 5, 8)), NotImplementedError, r"`v` must have head_dim 16 like `q` for now, got 8"),
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
    "window": (dict(window=(3, 0)), {}, NotImplementedError, r"`window` must be None for now, got \(3, 0\)"),
    "unknown window": (dict(window="local"), {}, TypeError, r"`window` must be None or \(left, right\).*, got 'local'"),
    "one-sided window": (dict(window=128), {}, TypeError, r"`window` must be None or \(left, right\).*, got 128"),
    "fractional window": (dict(window=(1.5, 0)), {}, TypeError, r"`window` must be .* int or None, got \(1.5, 0\)"),
    "softcap": (dict(softcap=50.0), {}, NotImplementedError, r"`softcap` must be None for now, got 50.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_named(name):
    changes, shapes, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        call(changes, shapes)


@pytest.mark.triton
def test_meta_tensors_are_refused():
    with pytest.raises(ValueError, match=r"`q` must be on a CUDA device, or on the CPU .*, got meta"):
        call({name: x.to("meta") for name, x in tensors().items()})


@pytest.mark.triton
def test_bf16_on_a_gpu_without_it_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    q = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    with pytest.raises(NotImplementedError, match=r"`q` must be float16 or float32 on this GPU.*, got bfloat16"):
        api._check_can_launch(q)
    api._check_can_launch(types.SimpleNamespace(is_cuda=True, dtype=torch.float16, device=q.device))


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
    assert flashattn.__all__ == ["attention_reference", "attention_tiled", "flash_attention"]
    for name in flashattn.__all__:
        doc = getattr(flashattn, name).__doc__
        assert "Args:" in doc or "Arguments" in doc
        assert "Source:" in doc and "Chapter" in doc
