"""Between the public calls and the kernels: differentiation, and what torch.compile, export and torch.func see.

Everything passes through two functions, ``_forward`` and ``_backward``. Eager calls reach them through an
autograd.Function. Compiled, exported and transformed calls reach them through the custom operators flashattn::forward
and flashattn::backward, which take more time on the host. The results are the same to the bit.
"""

import importlib.util
import os

import torch

from .derivative import REFUSAL, first_derivative_only

# q, k and v are (batch, heads, seqlen, head_dim); with cu_seqlens, sequences packed into a batch of 1.
ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "float scale, float? softcap, int? window_left, int? window_right"
)
N_ARGUMENTS = 10


def attention(*arguments):
    """Run attention on checked arguments, those of ARGUMENTS, differentiably; return (out, lse). scale is over 0."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or not all(map(_is_plain, arguments)):
        out, lse, *_ = torch.ops.flashattn.forward(*arguments)
    elif torch._C._are_functorch_transforms_active():
        out, lse, *_ = _Transformed.apply(*arguments)
    else:
        out, lse, *_ = _Eager.apply(*(x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in arguments))
    return out, lse


def _is_plain(x):
    """Say whether x is an ordinary tensor or none; a subclass (a fake tensor, say) wants to see operators."""
    return not isinstance(x, torch.Tensor) or type(x) is torch.Tensor or type(x) is torch.nn.Parameter


def _is_transformed(*tensors):
    """Say whether torch.func stands between these tensors and memory."""
    return any(x is not None and torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors)


def has_e4m3(capability, hip):
    """Say whether a GPU of this compute capability has e4m3: NVIDIA's do from 8.9 on."""
    return not hip and capability >= (8, 9)


def check_can_launch(q):
    """Raise unless a kernel can run on the device of q: a GPU, or the CPU under Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            "flash_attention needs Triton, which is not installed (it exists for Linux; on macOS and Windows use "
            "flashattn.attention_tiled or flashattn.attention_reference). On Linux: pip install triton"
        )
    if q.is_cuda:
        if q.dtype == torch.bfloat16 and torch.version.cuda and torch.cuda.get_device_capability(q.device)[0] < 8:
            raise NotImplementedError("`q` must be float16 or float32 on this GPU, which has no bfloat16, got bfloat16")
        return
    if q.device.type != "cpu":
        raise ValueError(f"`q` must be on a CUDA device, or on the CPU under Triton's interpreter, got {q.device}")
    from .primitives import INTERPRETED

    if not INTERPRETED.value:
        hint = " (it is set now, but Triton was imported before)" if os.environ.get("TRITON_INTERPRET") == "1" else ""
        raise RuntimeError(
            "`q` must be on a CUDA device, got cpu. To run the kernels on the CPU, slowly, in Triton's interpreter, "
            f"set TRITON_INTERPRET=1 in the environment before Triton is first imported{hint}; importing "
            "flashattn.notebook first does that where there is no GPU"
        )


def _new_out(q, head_dim_v):
    """Allocate out, which keeps the order of q's dimensions in memory, without gaps."""
    return torch.empty_like(q if head_dim_v == q.shape[3] else q[..., :1].expand(*q.shape[:3], head_dim_v))


def _new_outputs(q, v, exact=False):
    """Allocate (out, lse, lse_log2, lse_low).

    lse_low, what lse_log2 lost in rounding, is empty where nobody would see that: in half precision, unless exact, as
    with a mask that is added. In the last two each head has room for a multiple of 4 rows, 16 bytes, as copies of boxes
    want it.
    """
    out = _new_out(q, v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    exact = exact or q.dtype == torch.float32
    lse_log2 = lse.new_empty((*q.shape[:2], (q.shape[2] + 3) // 4 * 4))
    return out, lse, lse_log2, torch.empty_like(lse_log2) if exact else lse.new_empty(0)


def _new_gradients(q, k, v):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _bytes(bias):
    """Return a boolean mask as the bytes it consists of, which is what a kernel can load; others as they are."""
    return bias.view(torch.uint8) if bias is not None and bias.dtype == torch.bool else bias


def _padded(dlse, lse_log2):
    """Return dlse laid out as lse_log2 is, or None."""
    if dlse is None:
        return None
    dlse, room = dlse.resolve_neg(), lse_log2.shape[2] - dlse.shape[2]
    return (torch.nn.functional.pad(dlse, (0, room)) if room else dlse).contiguous()


def _or_none(lse_low):
    return lse_low if lse_low.numel() else None


def _forward(q, k, v, bias, cu_seqlens_q, cu_seqlens_k, scale, softcap, window_left, window_right):
    check_can_launch(q)
    from .backends import forward_choice  # here, so that `import flashattn` needs no Triton
    from .forward import attn_forward

    outputs = _new_outputs(q, v, exact=bias is not None)
    options = dict(scale=scale, softcap=softcap, window_left=window_left, window_right=window_right)
    options |= dict(decide=forward_choice())
    with torch.cuda.device_of(q):
        attn_forward(q, k, v, _bytes(bias), *outputs[:3], _or_none(outputs[3]), cu_seqlens_q, cu_seqlens_k, **options)
        if q.shape[2] % 4:  # what no row fills is the same in every call all the same
            for x in outputs[2:]:
                x[..., q.shape[2] :].zero_()
    return outputs


def _backward(
    do, dlse, out, lse_log2, lse_low,
    q, k, v, bias, cu_seqlens_q, cu_seqlens_k, scale, softcap, window_left, window_right,
):  # fmt: skip
    from .backends import backward_choice
    from .backward import attn_backward

    gradients = _new_gradients(q, k, v)
    do = out.new_zeros(()).expand_as(out) if do is None else do.resolve_neg()
    dlse = _padded(dlse, lse_log2)
    options = dict(scale=scale, softcap=softcap, window_left=window_left, window_right=window_right)
    options |= dict(decide=backward_choice())
    with torch.cuda.device_of(q):
        attn_backward(
            q, k, v, _bytes(bias), out, lse_log2, _or_none(lse_low), do, dlse, *gradients, cu_seqlens_q, cu_seqlens_k,
            **options,
        )  # fmt: skip
    return gradients


def _setup_context(ctx, inputs, output):
    out, _, lse_log2, lse_low = output
    ctx.options = inputs[6:]
    ctx.save_for_backward(out, lse_log2, lse_low, *inputs[:6])
    ctx.mark_non_differentiable(lse_log2, lse_low)
    ctx.set_materialize_grads(False)


def _fold(x, dim, size):
    """Fold a dimension that torch.vmap added into the batch, or repeat x where it added none. None stays None."""
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _vmap_rule(call, n_options=4):
    def rule(info, in_dims, *arguments):
        """Make one call of a vmapped one: attention treats batch entries alike, so vmap's dimension joins them."""
        tensors, options = arguments[:-n_options], arguments[-n_options:]
        if any(x is not None for x in tensors[-2:]):
            raise NotImplementedError("torch.vmap over flash_attention_varlen: put the sequences into one packed call")
        dims = in_dims[: len(tensors)]
        folded = (_fold(x, dim, info.batch_size) for x, dim in zip(tensors, dims, strict=True))
        results = call(*folded, *options)
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in results), (0,) * len(results)

    return rule


class _Eager(torch.autograd.Function):
    """What an ordinary call differentiates through. Its forward takes ctx: setup_context would cost 20 µs a call."""

    @staticmethod
    def forward(ctx, *arguments):
        results = _forward(*arguments)
        _setup_context(ctx, arguments, results)
        return results

    @staticmethod
    @first_derivative_only
    def backward(ctx, do, dlse, *_):
        if do is None and dlse is None:
            return (None,) * N_ARGUMENTS
        tensors = (do, dlse, *ctx.saved_tensors)
        backward = torch.ops.flashattn.backward if _is_transformed(*tensors) else _backward
        return *backward(*tensors, *ctx.options), *(None,) * (N_ARGUMENTS - 3)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "flash_attention has no forward-mode derivative: use flashattn.attention_reference where one is needed"
        )


class _Transformed(_Eager):
    """The same under torch.func, which wants setup_context apart from forward, and an operator to see."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.flashattn.forward(*arguments)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap_rule(_Transformed.apply)(info, in_dims, *arguments)


torch.library.define("flashattn::forward", f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    "flashattn::backward",
    f"(Tensor? do, Tensor? dlse, Tensor out, Tensor lse_log2, Tensor lse_low, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("flashattn::forward", ("cpu", "cuda"), _forward)
torch.library.impl("flashattn::backward", ("cpu", "cuda"), _backward)


@torch.library.register_fake("flashattn::forward")
def _fake_forward(q, k, v, bias, *_):
    return _new_outputs(q, v, exact=bias is not None)


@torch.library.register_fake("flashattn::backward")
def _fake_backward(do, dlse, out, lse_log2, lse_low, q, k, v, *_):
    return _new_gradients(q, k, v)


def _differentiate_forward(ctx, do, dlse, *_):
    if do is None and dlse is None:
        return (None,) * N_ARGUMENTS
    gradients = torch.ops.flashattn.backward(do, dlse, *ctx.saved_tensors, *ctx.options)
    return *gradients, *(None,) * (N_ARGUMENTS - 3)


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(REFUSAL)


torch.library.register_autograd("flashattn::forward", _differentiate_forward, setup_context=_setup_context)
torch.library.register_autograd("flashattn::backward", _refuse_second_derivative)


torch.library.register_vmap("flashattn::forward", _vmap_rule(torch.ops.flashattn.forward))
torch.library.register_vmap("flashattn::backward", _vmap_rule(torch.ops.flashattn.backward))
