"""Which kernels a call runs: those for Hopper, in Gluon, where they can and it pays, the portable ones otherwise.

The environment variable FLASHATTN_BACKEND fixes the choice: "portable", or "hopper", which then raises where it cannot.
It is read at every call.
"""

import functools
import os
import warnings

import torch

from .backward import decide_backward
from .configs import target_of
from .forward import decide_forward
from .primitives import boxes_fit

VARIABLE = "FLASHATTN_BACKEND"
THEY = "the kernels for Hopper"
SCORES_WORTH_IT = 2**24  # in all heads together


@functools.cache
def _why_no_gluon():
    """Return None, or why the kernels in Gluon cannot be loaded, with one warning: its interface is experimental."""
    try:
        from . import hopper, hopper_backward  # noqa: F401
    except Exception as error:
        reason = f"{THEY} were not written for this Triton's Gluon ({type(error).__name__}: {error})"
        warnings.warn(f"flashattn runs its portable kernels: {reason}", stacklevel=2)
        return reason


def why_not_hopper(tensors, softcap, window_left, window_right):
    """Return None if the kernels for Hopper can compute a call, or what keeps them from it.

    tensors: {name: tensor or None}, with q, k, v, bias and cu_seqlens_q, and with out and do where they are given.
    """
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    target = target_of(q.device)
    if target.name != "sm_90":
        return f"{THEY} need compute capability 9.0, and this is {target.name}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{THEY} take float16 and bfloat16, and `q` is {q.dtype}"
    if max(q.shape[3], v.shape[3]) > 128:
        return f"{THEY} take head dimensions up to 128, and these are {q.shape[3]} and {v.shape[3]}"
    for name, given in (("mask", tensors["bias"]), ("cu_seqlens", tensors["cu_seqlens_q"]), ("softcap", softcap)):
        if given is not None:
            return f"{THEY} have no {name}"
    if "dq" in tensors and (q.shape[3] <= 64) != (v.shape[3] <= 64):
        return f"{THEY}, backward, take two head dimensions up to 64 or two over it, not {q.shape[3]} and {v.shape[3]}"
    if q[..., 0].numel() > 2**27:
        return f"{THEY} take up to {2**27:,} rows, and these are {q[..., 0].numel():,}"
    streamed = [tensors[name] for name in ("q", "k", "v", "out", "do", "dq", "dk", "dv") if name in tensors]
    if not boxes_fit(target, streamed, None, None, k.shape[2] - q.shape[2], window_left, window_right):
        return f"{THEY} copy tiles as boxes: rows must be regular, and there must be no key that no query sees"
    return _why_no_gluon()


def why_not_worth_it(tensors):
    """Return None, or why the portable kernels are at least as fast."""
    q, k = tensors["q"], tensors["k"]
    if q[..., 0].numel() * k.shape[2] < SCORES_WORTH_IT:
        return f"a call of fewer than {SCORES_WORTH_IT:,} scores is faster with the portable kernels"
    return None


def _choices(portable, decide_hopper):
    """Return {value of the variable: function that decides how to launch one direction of a call}."""

    def hopper(tensors, scale, softcap, window_left, window_right):
        reason = why_not_hopper(tensors, softcap, window_left, window_right)
        if reason is not None:
            raise RuntimeError(f"{VARIABLE}=hopper, but {reason}")
        return decide_hopper(tensors, scale, window_left, window_right)

    def automatic(tensors, scale, softcap, window_left, window_right):
        reason = why_not_hopper(tensors, softcap, window_left, window_right) or why_not_worth_it(tensors)
        return (portable if reason else hopper)(tensors, scale, softcap, window_left, window_right)

    return {"": automatic, "portable": portable, "hopper": hopper}


def _hopper_forward(*arguments):
    from .hopper import decide_forward

    return decide_forward(*arguments)


def _hopper_backward(*arguments):
    from .hopper_backward import decide_backward

    return decide_backward(*arguments)


def _refuse(*arguments):
    raise RuntimeError(
        f"{VARIABLE}=hopper, but {THEY} do not repeat dq to the bit, and PyTorch is told to be deterministic"
    )


_FORWARD = _choices(decide_forward, _hopper_forward)
_BACKWARD = _choices(decide_backward, _hopper_backward)
_REPEATABLE_BACKWARD = {"": decide_backward, "portable": decide_backward, "hopper": _refuse}


def _chosen(choices):
    """Return the choice that the environment variable names."""
    name = os.environ.get(VARIABLE, "")
    if name not in choices:
        raise ValueError(f"{VARIABLE} must be portable, hopper or not set, got {name!r}")
    return choices[name]


def forward_choice():
    """Return the function that decides how to launch a forward pass, as ``attn_forward`` takes it."""
    return _chosen(_FORWARD)


def backward_choice():
    """Return the function that decides how to launch a backward pass, as ``attn_backward`` takes it.

    Where PyTorch is told to be deterministic, the portable kernels run: they give the same bits every time.
    """
    return _chosen(_REPEATABLE_BACKWARD if torch.are_deterministic_algorithms_enabled() else _BACKWARD)


def explain(q, k, v, softcap, window_left, window_right):
    """Return (name, reason) of what the forward pass of a dense call would run; raise where it would raise."""
    wanted = os.environ.get(VARIABLE, "")
    _chosen(_FORWARD)
    if wanted == "portable":
        return "portable", f"{VARIABLE}=portable"
    tensors = dict(q=q, k=k, v=v, bias=None, cu_seqlens_q=None)
    reason = why_not_hopper(tensors, softcap, window_left, window_right)
    if wanted == "hopper" and reason is not None:
        raise RuntimeError(f"{VARIABLE}=hopper, but {reason}")
    reason = reason or (None if wanted else why_not_worth_it(tensors))
    return ("portable", reason) if reason else ("hopper", None)
