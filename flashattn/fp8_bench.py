"""What suite "fp8" of ``flashattn.bench`` measures of attention on 8-bit numbers: speed, and errors of three inputs."""

import functools

import torch

from .api import flash_attention
from .fp8 import attention_fp8_emulated, flash_attention_fp8, hadamard_rotate, quantize_fp8
from .reference import attention_reference
from .testing import draw_outliers, max_error, relative_errors

EMULATED = 2.0  # a kernel may err so many times as much as the same steps in PyTorch
# inputs -> (channels of q and k with outliers, whether q and k are rotated before they are quantised)
INPUTS = {"gaussian": (0, False), "outliers": (2, False), "rotated": (2, True)}


def quantize_all(q, k, v, block=None):
    """Return the arguments of ``flash_attention_fp8`` for q, k and v as a dict."""
    named = {}
    for name, x in dict(q=q, k=k, v=v).items():
        named[name], named[f"{name}_scale"] = quantize_fp8(x, block=block, keys_last=name == "v")
    return named


def error_over_budget(out, head, truth, scale, causal):
    """Return the error of one head's output over EMULATED times that of the emulation, rounded to the dtype of out.

    Args:
        out: (1, heads, seqlen, head_dim), of the heads that ``head`` describes.
        head: what ``quantize_all`` returned, of those heads.
        truth: their output in fp64, of the inputs before they were quantised.
        scale, causal: as the call had them.
    """
    scales = (head[name][:, :, None] for name in ("q_scale", "k_scale", "v_scale"))
    right = 0 if causal else None
    emulated, _ = attention_fp8_emulated(head["q"], head["k"], head["v"], *scales, scale=scale, window_right=right)
    return max_error(out, truth) / (EMULATED * max_error(emulated.to(out.dtype), truth))


def eight_bit_figures(call, qkv, truth, scale, causal, percentiles):
    """Yield (metric, unit, percentiles, params): error over budget, times of the call, of quantising, and of rotating.

    Args:
        call: a function of the dict that ``quantize_all`` returns, which returns out.
        qkv: bf16 tensors, (batch, heads, seqlen, head_dim).
        truth: as for ``error_over_budget``, of the last head of the last batch entry.
        scale, causal: as call has them.
        percentiles: a function that times a function and returns three percentiles in ms.
    """
    quantised = quantize_all(*qkv)
    head = {name: x[-1:, -1:] for name, x in quantised.items()}
    ratio = error_over_budget(call(quantised)[-1:, -1:], head, truth, scale, causal)
    yield "rel_err", "budgets", [ratio] * 3, {}
    if not ratio <= 1:
        raise ValueError(f"{ratio:.3g} times its error budget, so not timed")
    yield "time", "ms", percentiles(functools.partial(call, quantised)), {}

    def rotate_and_quantize():
        q, k, v = qkv
        return quantize_all(hadamard_rotate(q), hadamard_rotate(k), v)

    yield "quantize", "ms", percentiles(functools.partial(quantize_all, *qkv)), dict(rotated=False)
    yield "quantize", "ms", percentiles(rotate_and_quantize), dict(rotated=True)


def error_figures(eight_bit, seqlen, head_dim, device):
    """Yield (metric, unit, percentiles, params) of the errors relative to the truth, for each of INPUTS, on one head.

    eight_bit: whether to measure ``flash_attention_fp8``, with scales per head and per block, or bf16.
    """
    for inputs, (n_channels, rotated) in INPUTS.items():
        q, k, v = draw_outliers(1, 1, seqlen, head_dim, device, n_channels=n_channels)
        truth, _ = attention_reference(q.double(), k.double(), v.double())
        if rotated:
            q, k = hadamard_rotate(q), hadamard_rotate(k)
        if eight_bit:
            outs = {
                scales: flash_attention_fp8(**quantize_all(q, k, v, block), out_dtype=torch.float32)
                for scales, block in (("head", None), ("block", 128))
            }
        else:
            outs = {"none": flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())}
        for scales, out in outs.items():
            for norm, error in zip(("rms", "max"), relative_errors(out, truth), strict=True):
                yield "rel_err", "relative", [error] * 3, dict(inputs=inputs, scales=scales, norm=norm)
