"""Which kernels a call runs: those for Hopper, in Gluon, where they can and it pays, the portable ones otherwise.

The environment variable FLASHATTN_BACKEND fixes the choice: "portable", or "hopper", which then raises where it cannot.
It is read at every call.
"""

import functools
import os
import warnings

import torch

from .configs import target_of
from .forward import decide_forward
from .primitives import boxes_fit

VARIABLE = "FLASHATTN_BACKEND"
SCORES_WORTH_IT = 2**24  # in all heads together


@functools.cache
def _why_no_gluon():
    """Return None, or why the kernels in Gluon cannot be loaded, with one warning: its interface is experimental."""
    try:
        from . import hopper  # noqa: F401
    except Exception as error:
        reason = f"this Triton's Gluon is not one of those they were written for ({type(error).__name__}: {error})"
        warnings.warn(f"flashattn runs its portable kernels, not those for Hopper: {reason}", stacklevel=2)
        return reason


def why_not_hopper(tensors, softcap, window_left, window_right):
    """Return None if the kernels for Hopper can compute a call, or what keeps them from it.

    tensors: {name: tensor or None}, with q, k, v, bias and cu_seqlens_q, and with out and do where they are given.
    """
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    target = target_of(q.device)
    if target.name != "sm_90":
        return f"they need compute capability 9.0, and this is {target.name}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"they take float16 and bfloat16, and `q` is {q.dtype}"
    if max(q.shape[3], v.shape[3]) > 128:
        return f"they take head dimensions up to 128, and these are {q.shape[3]} and {v.shape[3]}"
    for name, given in (("mask", tensors["bias"]), ("cu_seqlens", tensors["cu_seqlens_q"]), ("softcap", softcap)):
        if given is not None:
            return f"they have no {name}"
    streamed = [tensors[name] for name in ("q", "k", "v", "out", "do") if name in tensors]
    if not boxes_fit(target, streamed, None, None, k.shape[2] - q.shape[2], window_left, window_right):
        return "tiles cannot be copied as boxes: rows are not regular, or there is a key that no query sees"
    return _why_no_gluon()


def why_not_worth_it(tensors):
    """Return None, or why the portable kernels are at least as fast."""
    q, k = tensors["q"], tensors["k"]
    if q[..., 0].numel() * k.shape[2] < SCORES_WORTH_IT:
        return f"a call of fewer than {SCORES_WORTH_IT:,} scores is faster with the portable kernels"
    return None


def _choices(direction, portable):
    """Return {value of the variable: function that decides how to launch one direction of a call}."""

    def hopper(tensors, scale, softcap, window_left, window_right):
        reason = why_not_hopper(tensors, softcap, window_left, window_right)
        if reason is not None:
            raise RuntimeError(f"{VARIABLE}=hopper, but its kernels cannot run this call: {reason}")
        from . import hopper

        return getattr(hopper, direction)(tensors, scale, window_left, window_right)

    def automatic(tensors, scale, softcap, window_left, window_right):
        reason = why_not_hopper(tensors, softcap, window_left, window_right) or why_not_worth_it(tensors)
        return (portable if reason else hopper)(tensors, scale, softcap, window_left, window_right)

    return {"": automatic, "portable": portable, "hopper": hopper}


FORWARD = _choices("decide_forward", decide_forward)


def chosen(choices):
    """Return the choice that the environment variable names."""
    name = os.environ.get(VARIABLE, "")
    if name not in choices:
        raise ValueError(f"{VARIABLE} must be portable, hopper or not set, got {name!r}")
    return choices[name]
