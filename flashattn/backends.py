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


def why_portable(wanted, tensors, softcap, window_left, window_right):
    """Return why a call runs the portable kernels, None if it runs those for Hopper. wanted: the variable's value."""
    if wanted == "portable":
        return f"{VARIABLE}=portable"
    reason = why_not_hopper(tensors, softcap, window_left, window_right)
    if wanted == "hopper":
        if reason is not None:
            raise RuntimeError(f"{VARIABLE}=hopper, but {reason}")
        return None
    return reason or why_not_worth_it(tensors)


def _hopper_forward(*arguments):
    from .hopper import decide_forward

    return decide_forward(*arguments)


def _hopper_backward(*arguments):
    from .hopper_backward import decide_backward

    return decide_backward(*arguments)


def _decide(wanted, portable, hopper, tensors, scale, softcap, window_left, window_right):
    """Return the launches of one direction of a call, by whichever of the two functions runs it."""
    if why_portable(wanted, tensors, softcap, window_left, window_right) is None:
        return hopper(tensors, scale, window_left, window_right)
    return portable(tensors, scale, softcap, window_left, window_right)


# For each value of the variable, how to decide. Made once: launches are remembered by what decided them.
_WANTED = ("", "portable", "hopper")
_FORWARD = {name: functools.partial(_decide, name, decide_forward, _hopper_forward) for name in _WANTED}
_BACKWARD = {name: functools.partial(_decide, name, decide_backward, _hopper_backward) for name in _WANTED}


def _wanted():
    """Return the value of the environment variable, checked."""
    name = os.environ.get(VARIABLE, "")
    if name not in _WANTED:
        raise ValueError(f"{VARIABLE} must be portable, hopper or not set, got {name!r}")
    return name


def forward_choice():
    """Return the function that decides how to launch a forward pass, as ``attn_forward`` takes it."""
    return _FORWARD[_wanted()]


def backward_choice():
    """Return the function that decides how to launch a backward pass, as ``attn_backward`` takes it.

    Where PyTorch is told to be deterministic, the portable kernels run: they give the same bits every time.
    """
    wanted = _wanted()
    if torch.are_deterministic_algorithms_enabled():
        if wanted == "hopper":
            raise RuntimeError(
                f"{VARIABLE}=hopper, but {THEY} do not repeat dq to the bit, and PyTorch is told to be deterministic"
            )
        wanted = "portable"
    return _BACKWARD[wanted]


def explain(q, k, v, softcap, window_left, window_right):
    """Return (name, reason) of what the forward pass of a dense call would run; raise where it would raise."""
    tensors = dict(q=q, k=k, v=v, bias=None, cu_seqlens_q=None)
    reason = why_portable(_wanted(), tensors, softcap, window_left, window_right)
    return ("hopper" if reason is None else "portable"), reason
