"""What stands between a call and its kernel: compiled, exported, transformed, checkpointed, captured and autocast calls."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

from flashattn import flash_attention, flash_attention_varlen, ops, scaled_dot_product_attention
from flashattn.testing import Case, make_inputs, max_error, run

pytestmark = pytest.mark.triton

CASES = {
    "plain": (dict(), dict()),
    "causal": (dict(causal=True), dict(window_right=0)),
    "window and softcap": (dict(window=(9, 3), softcap=2.0), dict(window_left=9, window_right=3, softcap=2.0)),
}


def draw(device, seqlen_q=20, seqlen_k=33, dtype=torch.float16, heads=4):
    """Draw q, k, v in the memory layout that a projection leaves: (batch, seqlen, heads, head_dim)."""
    sizes = ((2, seqlen_q, heads, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 32))
    return [torch.randn(size, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for size in sizes]


def gradients(call, tensors, seed=0):
    """Return the results of a call and the gradients of its inputs, for gradients of the results drawn from a seed."""
    results = call(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(seed)
    arriving = [torch.randn(x.shape, generator=generator).to(x) for x in results]
    return *results, *torch.autograd.grad(results, tensors, arriving)


def assert_same_bits(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.stride() == e.stride() and torch.equal(a, e)


def arguments(device, kind):
    """Return the arguments of the operator flashattn::forward for one kind of call."""
    q, k, v = draw(device)
    bias = cu_seqlens = None
    sides = (None, 0)
    softcap = None
    if kind == "mask":
        bias, sides = torch.randn(1, 1, 20, 33, device=device).expand(2, 4, 20, 33), (None, None)
    if kind == "packed":
        q, k, v = (x.detach().flatten(0, 1)[None].requires_grad_() for x in draw(device, 20, 20, heads=2))
        q, k, v = q[:, :4], k, v
        cu_seqlens = torch.tensor([0, 5, 5, 17], dtype=torch.int32, device=device)
    if kind == "window and softcap":
        sides, softcap = (9, 3), 2.0
    return q, k, v, bias, cu_seqlens, cu_seqlens, 0.25, softcap, *sides


@pytest.mark.parametrize("kind", ["causal", "mask", "packed", "window and softcap"])
def test_opcheck(kind, device):
    """PyTorch's own check: schema, registration of the derivative, fake results like real ones, traced like eager."""
    given = arguments(device, kind)
    torch.library.opcheck(torch.ops.flashattn.forward, given)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    out, _, lse_log2, lse_low = torch.ops.flashattn.forward(*plain)
    do = torch.randn_like(out).mT.contiguous().mT
    torch.library.opcheck(torch.ops.flashattn.backward, (do, None, out, lse_log2, lse_low, *plain))


@pytest.mark.parametrize("kind", CASES)
def test_operator_and_eager_call_agree_to_the_bit(kind, device):
    options, raw = CASES[kind]
    tensors = draw(device)

    def operator(q, k, v):
        raw_options = [raw.get(name) for name in ("softcap", "window_left", "window_right")]
        return torch.ops.flashattn.forward(q, k, v, None, None, None, 0.25, *raw_options)[:2]

    expected = gradients(lambda *x: flash_attention(*x, return_lse=True, **options), tensors)
    assert_same_bits(gradients(operator, tensors), expected)


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


def compiled(call, backend, **options):
    torch._dynamo.reset()
    return torch.compile(call, backend=backend, fullgraph=True, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", CASES)
def test_compile(kind, backend, device):
    """Without a graph break, forward and backward, to the bit; and the gradients come out of the compiled graph."""

    def call(q, k, v):
        return flash_attention(q, k, v, return_lse=True, **CASES[kind][0])

    tensors = draw(device)
    assert_same_bits(gradients(compiled(call, backend), tensors), gradients(call, tensors))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_keeps_one_graph_for_many_lengths(backend, device):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    call = compiled(lambda q, k, v: flash_attention(q, k, v, causal=True), counter, dynamic=True)
    for seqlen in (20, 33, 47):
        tensors = draw(device, seqlen, seqlen + 3)
        assert_same_bits(gradients(call, tensors), gradients(lambda *x: flash_attention(*x, causal=True), tensors))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_packed_and_masked_calls(backend, device):
    offsets = torch.tensor([0, 5, 5, 17], dtype=torch.int32, device=device)
    packed = [torch.randn(20, 2, 16, device=device, requires_grad=True) for _ in range(3)]
    mask = torch.rand(1, 20, 33, device=device) > 0.3
    dense = [torch.randn(2, 2, n, 16, device=device, requires_grad=True) for n in (20, 33, 33)]
    for call, tensors in (
        (lambda q, k, v: flash_attention_varlen(q, k, v, offsets, offsets, causal=True), packed),
        (lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), dense),
        (lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), dense),
    ):
        assert_same_bits(gradients(compiled(call, backend), tensors), gradients(call, tensors))


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return flash_attention(q, k, v, causal=True)


def test_export(device):
    tensors = [x.detach() for x in draw(device)]
    lengths = {2: torch.export.Dim("seqlen_q", max=512)}
    program = torch.export.export(Attention(), tuple(tensors), dynamic_shapes=(lengths, None, None))
    assert "flashattn.forward" in str(program.graph)
    longer = [x.detach() for x in draw(device, seqlen_q=30)]
    assert torch.equal(program.module()(longer[0], *tensors[1:]), Attention()(longer[0], *tensors[1:]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant, device):
    call = Attention()
    tensors = draw(device)
    expected = gradients(call, tensors)
    out = checkpoint(call, *tensors, use_reentrant=use_reentrant)
    arriving = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    out.backward(arriving)
    assert_same_bits((out, *(x.grad for x in tensors)), expected)


def test_a_dispatch_mode_sees_the_operator(device):
    """Selective checkpointing, FLOP counters and tracers look at operators; a kernel launched past them would be lost."""
    seen = []

    class Listen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    tensors = draw(device)
    with Listen():
        out = flash_attention(*tensors)
    assert "flashattn.forward.default" in seen
    assert torch.equal(out, flash_attention(*tensors))


def test_fake_tensors_have_the_layout_of_real_ones(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = draw(device)
    real = gradients(lambda *x: flash_attention(*x, return_lse=True), tensors)
    with FakeTensorMode() as mode:
        fake_inputs = [mode.from_tensor(x) for x in tensors]
        results = flash_attention(*fake_inputs, return_lse=True)
        fake = *results, *torch.autograd.grad(results, fake_inputs, [torch.ones_like(x) for x in results])
    for f, r in zip(fake, real, strict=True):
        assert f.shape == r.shape and f.stride() == r.stride() and f.dtype == r.dtype


def test_vmap(device):
    q, k, v = (torch.randn(3, *x.shape, device=device) for x in draw(device))
    batched = torch.vmap(lambda q, k, v: flash_attention(q, k, v, causal=True))(q, k, v)
    one_by_one = torch.stack([flash_attention(*x, causal=True) for x in zip(q, k, v, strict=True)])
    assert torch.equal(batched, one_by_one)
    shared = torch.vmap(flash_attention, in_dims=(1, None, None), out_dims=1)(q.transpose(0, 1), k[0], v[0])
    assert torch.equal(shared.transpose(0, 1), torch.stack([flash_attention(x, k[0], v[0]) for x in q]))


def test_functional_gradients_and_their_vmap(device):
    q, k, v = (torch.randn(3, *x.shape, device=device) for x in draw(device))

    def loss(q, k, v):
        return (flash_attention(q, k, v, causal=True) ** 2).sum()

    per_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(3):
        leaves = [x[i].clone().requires_grad_() for x in (q, k, v)]
        for actual, expected in zip(per_sample, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            assert torch.equal(actual[i], expected)


def test_vmap_over_packed_sequences_is_refused(device):
    offsets = torch.tensor([0, 5], dtype=torch.int32, device=device)
    x = torch.randn(3, 5, 2, 16, device=device)
    with pytest.raises(
        NotImplementedError, match="vmap over flash_attention_varlen: put the sequences into one packed"
    ):
        torch.vmap(lambda x: flash_attention_varlen(x, x, x, offsets, offsets))(x)


def test_forward_mode_is_refused(device):
    q, k, v = draw(device)
    with pytest.raises(NotImplementedError, match="flash_attention has no forward-mode derivative"):
        with torch.autograd.forward_ad.dual_level():
            flash_attention(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    with pytest.raises((NotImplementedError, RuntimeError), match="flashattn|forward-mode|forward AD"):
        torch.func.jvp(lambda q: flash_attention(q, k, v), (q.detach(),), (torch.ones_like(q),))


@pytest.mark.parametrize("transform", ["operator", "functional"])
def test_second_derivatives_are_refused_through_the_operator_too(transform, device):
    q, k, v = draw(device)
    raw = (None, None, None, 0.25, None, None, None)
    if transform == "operator":
        out, *_ = torch.ops.flashattn.forward(q, k, v, *raw)
        (dq,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(dq.sum(), k)
    else:
        inner = torch.func.grad(lambda q: (flash_attention(q, k.detach(), v.detach()) ** 2).sum())
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.func.grad(lambda q: inner(q).sum())(q.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device):
    """As PyTorch's own attention does it: inputs of any of the three dtypes are cast, gradients come back in theirs."""
    tensors = [x.detach().float().requires_grad_() for x in draw(device)]
    cast = [x.detach().to(dtype).requires_grad_() for x in tensors]
    with torch.autocast(torch.device(device).type, dtype=dtype):
        out = flash_attention(*tensors)
        like_torch = torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)
        drop_in = scaled_dot_product_attention(*tensors, enable_gqa=True)
        offsets = torch.tensor([0, 20], dtype=torch.int32, device=device)
        packed = flash_attention_varlen(*(x[0].transpose(0, 1)[:20] for x in tensors), offsets, offsets)
    assert out.dtype == like_torch.dtype == drop_in.dtype == packed.dtype == dtype
    assert torch.equal(out, flash_attention(*cast)) and torch.equal(out, drop_in)
    grads = torch.autograd.grad(out.sum(), tensors)
    expected = torch.autograd.grad(flash_attention(*cast).sum(), cast)
    for actual, reference in zip(grads, expected, strict=True):
        assert actual.dtype == torch.float32 and torch.equal(actual, reference.float())


@pytest.mark.gpu
def test_cuda_graph():
    inputs = make_inputs(Case(200, 330, 64, "bf16", True), "cuda")

    def call(q, k, v):
        return flash_attention(q, k, v, causal=True, return_lse=True)

    expected = run(call, inputs)  # compiles; capturing could not
    static = inputs._replace(**{name: getattr(inputs, name).clone() for name in ("q", "k", "v")})
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(call, static)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = run(call, static)
    for x in static[:3]:
        x.zero_()
    graph.replay()
    zeros = {name: x.clone() for name, x in captured.items()}
    for name in ("q", "k", "v"):
        getattr(static, name).copy_(getattr(inputs, name))
    graph.replay()
    assert all(torch.equal(captured[name], expected[name]) for name in expected)
    assert (zeros["out"] == 0).all() and not torch.equal(zeros["lse"], expected["lse"])


@pytest.mark.gpu
def test_no_host_synchronisation():
    """Nothing on the way makes the host wait for the GPU, packed calls included: in error mode a wait raises."""
    offsets = torch.tensor([0, 50, 50, 170], dtype=torch.int32, device="cuda")
    packed = [torch.randn(200, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dense = [x.detach()[None].transpose(1, 2).requires_grad_() for x in packed]
    mask = torch.rand(200, 200, device="cuda") > 0.5

    def calls():
        yield flash_attention_varlen(*packed, offsets, offsets, causal=True), packed
        yield flash_attention(*dense, causal=True, softcap=5.0), dense
        yield scaled_dot_product_attention(*dense, mask), dense

    for out, tensors in calls():
        torch.autograd.grad(out.sum(), tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for out, tensors in calls():
            torch.autograd.grad(out.sum(), tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_output_keeps_the_order_of_dimensions_whatever_the_head_dimension_of_v(device):
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)):
        inverse = [order.index(i) for i in range(4)]
        sizes = (2, 4, 20, 16)
        q = torch.empty([sizes[i] for i in order], device=device).permute(inverse)
        out, *_ = ops._new_outputs(q, torch.empty(2, 2, 9, 32, device=device), None)
        assert out.shape == (2, 4, 20, 32)
        assert sorted(range(4), key=out.stride) == sorted(range(4), key=q.stride)
        assert out.permute(order).is_contiguous()


def test_lse_low_keeps_rows_exact_under_a_huge_bias(device):
    """A row whose every key has the lowest number: the bias swallows the scores, and the weights are all alike."""
    q, k, v = (torch.randn(1, 1, n, 16, device=device, requires_grad=True) for n in (3, 20, 20))
    mask = torch.full((3, 20), torch.finfo(torch.float32).min, device=device)
    out, dq, dk, dv = gradients(lambda *x: scaled_dot_product_attention(*x, mask), (q, k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        reference = gradients(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, mask), (q, k, v))
    for actual, expected in zip((out, dq, dk, dv), reference, strict=True):
        assert max_error(actual, expected) <= 4 * torch.finfo(torch.float32).eps * max(1, expected.abs().max().item())
